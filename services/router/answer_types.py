"""The answers of the API as structs, for its description: `chunks` writes the same JSON by hand, and tests hold both together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.router.openai_types import Usage

Fingerprint = Annotated[str, Meta(description="While it is the same, so is what a seed draws")]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]


class CalledFunction(msgspec.Struct):
    name: str
    arguments: Annotated[str, Meta(description="JSON")]


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(msgspec.Struct):
    role: Literal["assistant"]
    content: Annotated[str | None, Meta(description="null where there are only calls or thoughts")]
    refusal: None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """The whole answer of a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: Fingerprint
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token. The first token of an echoed prompt has null for what it cannot have."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """The whole answer of a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: Fingerprint
    choices: list[TextChoice]
    usage: Usage


class Health(msgspec.Struct):
    status: Literal["alive"]


class Ready(msgspec.Struct):
    """`reason` where it is not ready."""

    status: Literal["ready", "not ready"]
    reason: str | msgspec.UnsetType = msgspec.UNSET
    instances: list[dict[str, Any]] = []
