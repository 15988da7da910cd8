"""Tokenizing: the same tokens inline and aside, and the streams go on meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.router.model import INLINE_CHARACTERS, load_tokenizer
from shared.errors import ModelError, RequestError
from tests.tiny_model import BOS, byte_level, served_model


@pytest.mark.parametrize("length", [1, INLINE_CHARACTERS, INLINE_CHARACTERS + 1, 20 * INLINE_CHARACTERS])
async def test_short_and_long_texts_give_the_tokenizers_tokens(length: int) -> None:
    text = ("naïve café 🙂 " * length)[:length]
    model = served_model()
    assert await model.encode(text, add_special_tokens=False) == byte_level().encode(text, add_special_tokens=False).ids


async def test_special_tokens_are_added_only_where_asked() -> None:
    model = served_model()
    plain = await model.encode("hi", add_special_tokens=False)
    assert await model.encode("hi", add_special_tokens=True) == [BOS, *plain]


async def test_the_event_loop_runs_while_a_long_text_is_tokenized() -> None:
    text = "the quick brown fox jumps over the lazy dog " * 20_000
    turns = 0
    task = asyncio.create_task(served_model().encode(text, add_special_tokens=False))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert len(await task) > 20_000
    assert turns > 100


def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    from msgspec.structs import replace

    with pytest.raises(RequestError, match="no chat template"):
        replace(served_model(), template=None).chat_prompt([], None)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    for content in (None, "{"):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = byte_level().from_str(byte_level().to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox jumps over the lazy dog"
    assert load_tokenizer(tmp_path).encode(text).ids == byte_level().encode(text).ids
