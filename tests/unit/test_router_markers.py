"""Models whose markers are special tokens: they have text where they are to be read, and stand in grammars as tokens."""

from __future__ import annotations

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from services.router.detokenize import Vocabulary
from services.router.model import ServedModel
from services.router.openai_types import ChatRequest
from services.router.speech import Message, Speech
from services.router.talk import Talk
from services.router.validate import decode
from shared.grammar import Compiler
from shared.grammar import Vocabulary as Words
from shared.messages import Grammar
from tests.chat_templates import ALWAYS_THINKING, QWEN, speaking
from tests.tiny_model import END, byte_fallback, byte_level

MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def special(tokenizer: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_special_tokens([AddedToken(text, special=True) for text in MARKERS])
    return copy


def model_of(tokenizer: Tokenizer, template: str) -> ServedModel:
    return msgspec.structs.replace(speaking(template), tokenizer=tokenizer, vocabulary=Vocabulary(tokenizer))


def talk(model: ServedModel, **fields: object) -> Talk:
    tools = [{"type": "function", "function": {"name": "now"}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}
    return Talk.of(decode(msgspec.json.encode(body), ChatRequest), model)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_markers_are_read_and_other_special_tokens_stay_silent(make: object) -> None:
    tokenizer = special(make())  # type: ignore[operator]
    model = model_of(tokenizer, ALWAYS_THINKING)
    manners = talk(model).manners
    assert manners is not None
    assert len(manners.shown) == 4
    detokenizer, speech, message = model.vocabulary.detokenizer(manners.shown), Speech(manners), Message()
    call = CALL if make is byte_level else ""  # the other one has no letters for JSON
    tokens = tokenizer.encode("so the fox</think>the dog" + call, add_special_tokens=False).ids
    assert tokenizer.token_to_id("</think>") in tokens
    for token in [0, *tokens]:
        message.add(speech.feed(detokenizer.feed([token]), 1))
    message.add(speech.flush(detokenizer.flush()))
    body = message.body()
    assert body["reasoning_content"] == "so the fox"
    assert body["content"] == "the dog"
    assert [known["function"]["name"] for known in body.get("tool_calls", [])] == (["now"] if call else [])
    silent = model.vocabulary.detokenizer()
    assert silent.feed([tokenizer.token_to_id("<think>")]) + silent.flush() == ""


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"tools": [{"type": "function", "function": {"name": "now", "strict": True}}]}],
)
@pytest.mark.parametrize("template", [QWEN, ALWAYS_THINKING])
async def test_grammars_want_the_tokens_and_not_their_letters(template: str, fields: dict[str, object]) -> None:
    tokenizer = special(byte_level())
    model = model_of(tokenizer, template)
    told = talk(model, **fields)
    assert told.constraint is not None
    size = tokenizer.get_vocab_size()
    compiler = Compiler(Words(tokenizer.to_str, size, (END,)))
    matcher = await compiler.compile(Grammar(text=told.constraint.text(told.begins, model.marker)), [END])
    compiler.close()
    thought = "so the fox</think>\n" if told.begins == "open" else ""
    tokens = [*tokenizer.encode(thought + CALL, add_special_tokens=False).ids, END]
    assert matcher.admissible(tokens) == len(tokens)
    letters = byte_level().encode("<tool_call>", add_special_tokens=False).ids
    spelled = [*tokenizer.encode(thought, add_special_tokens=False).ids, *letters]
    spelled += tokenizer.encode('\n{"name": "rm"', add_special_tokens=False).ids
    if "tool_choice" in fields:
        assert matcher.admissible(spelled) < len(spelled)
