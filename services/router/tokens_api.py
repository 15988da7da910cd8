"""/tokenize and /detokenize: what the model makes of a text, and back, without running it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from services.router.messages import chat_messages
from services.router.model import ServedModel
from services.router.openai_types import ChatMessage
from services.router.validate import decode
from shared.errors import RequestError

Read = Callable[[web.Request], Awaitable[bytes]]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prompt`, or `messages` through the chat template, as a generation would get them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt; a template writes its own."""
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct, frozen=True, omit_defaults=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class TokensApi:
    """Handlers. `read` gives a request's body, once whoever sent it may."""

    def __init__(self, model: ServedModel, read: Read) -> None:
        self._model, self._read = model, read

    def add_to(self, app: web.Application) -> None:
        for prefix in ("", "/v1"):
            app.router.add_post(f"{prefix}/tokenize", self.tokenize)
            app.router.add_post(f"{prefix}/detokenize", self.detokenize)

    async def tokenize(self, http: web.Request) -> web.Response:
        asked = decode(await self._read(http), TokenizeRequest)
        self._check_model(asked.model)
        tokens = await self._tokens(asked)
        strings = [self._model.vocabulary.spelled(token)[0] for token in tokens] if asked.return_token_strs else None
        return _json(Tokenized(len(tokens), self._model.max_positions, tokens, strings))

    async def detokenize(self, http: web.Request) -> web.Response:
        asked = decode(await self._read(http), DetokenizeRequest)
        self._check_model(asked.model)
        size = self._model.identity.vocab_size
        for token in asked.tokens:
            if not 0 <= token < size:
                raise RequestError(f"tokens: {token} is not a token id from 0 to {size - 1}", param="tokens")
        return _json(Detokenized(self._model.tokenizer.decode(asked.tokens, skip_special_tokens=False)))

    async def _tokens(self, asked: TokenizeRequest) -> list[int]:
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("takes one of prompt and messages", param="prompt")
        if asked.prompt is not None:
            return await self._model.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
        as_text = self._model.manner.arguments_as_text
        text = self._model.chat_prompt(chat_messages(asked.messages or [], arguments_as_text=as_text), None)
        return await self._model.encode(text, add_special_tokens=bool(asked.add_special_tokens))

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model.name):
            message = f"the model {name!r} does not exist here; this is {self._model.name!r}"
            raise RequestError(message, param="model", status=404, code="model_not_found")


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
