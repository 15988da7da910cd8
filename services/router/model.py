"""What the router knows of the model it serves: tokenizer, chat template, limits. No weights."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from services.router.detokenize import Vocabulary
from services.router.dialects import SILENT, Manner
from services.router.structured import literal
from services.router.template import ChatTemplate, Ending
from shared.errors import ModelError, RequestError
from shared.messages import ModelIdentity

INLINE_CHARACTERS = 1024
"""A third of a millisecond. Longer texts are tokenized in a thread, so that the streams go on meanwhile."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """The name clients use."""
    identity: ModelIdentity
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    template: ChatTemplate | None
    created: int
    """Seconds since 1970, for /v1/models."""
    manner: Manner = SILENT
    """How it writes tool calls and thoughts."""

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: while it is the same, so is what a seed draws, but for the order of float sums."""
        return _fingerprint(self.identity.digest)

    @property
    def max_positions(self) -> int:
        return self.identity.max_positions

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        kwargs: dict[str, Any] | None,
        tools: list[dict[str, Any]] | None = None,
        ending: Ending = "generation",
    ) -> str:
        if self.template is None:
            raise RequestError(f"{self.name} has no chat template: use /v1/completions", param="messages")
        return self.template.render(messages, kwargs, tools, ending)

    def marker(self, text: str) -> str:
        """`text` as a Lark grammar has it: where it is a special token, that token."""
        token = self.tokenizer.token_to_id(text)
        return f"<[{token}]>" if token in self.vocabulary.special else literal(text)

    def special_tokens(self, texts: Collection[str]) -> frozenset[int]:
        """Those of `texts` that are special tokens."""
        tokens = map(self.tokenizer.token_to_id, texts)
        return frozenset(token for token in tokens if token is not None and token in self.vocabulary.special)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of `text`, with what the tokenizer's post-processor adds (a BOS) only where asked."""
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    async def spans(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """Tokens of `text`, and where in it each begins, characters; 0 for what stands before it."""
        (found,) = await asyncio.to_thread(self.tokenizer.encode_batch, [text], add_special_tokens=add_special_tokens)
        return found.ids, [start for start, _ in found.offsets]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """By the batch interface: it lets go of the interpreter while it works, which `encode` does not."""
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


@cache
def _fingerprint(digest: str) -> str:
    return "fp_" + hashlib.sha256(f"{digest} {version('kvmesh')}".encode()).hexdigest()[:10]


def load_tokenizer(directory: Path) -> Tokenizer:
    """Raises `ModelError` naming the file. Truncation and padding that the file may ask for are switched off."""
    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  (tokenizers raises bare Exception)
        raise ModelError(f"{path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
