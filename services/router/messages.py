"""The messages of a chat request as its template gets them."""

from __future__ import annotations

import json
from typing import Any

from services.router.openai_types import ChatMessage, ToolCall
from shared.errors import RequestError


def chat_messages(messages: list[ChatMessage], *, arguments_as_text: bool = False) -> list[dict[str, Any]]:
    """Text content, `developer` as the `system` that templates know. Arguments of earlier calls are objects, or text where the
    template wants that."""
    if not messages:
        raise RequestError("messages is empty: it takes at least one", param="messages", code="empty_array")
    called: set[str] = set()
    rendered = []
    for i, message in enumerate(messages):
        rendered.append(_message(message, f"messages.{i}", called, arguments_as_text))
        called.update(call.id for call in message.tool_calls or ())
    return rendered


def _message(message: ChatMessage, where: str, called: set[str], arguments_as_text: bool) -> dict[str, Any]:
    if message.role == "function":
        raise _unsupported(f"{where}.role", "the role 'function' is not supported: use 'tool'")
    if message.function_call:
        raise _unsupported(f"{where}.function_call", f"{where}.function_call is not supported: use tool_calls")
    rendered: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if message.tool_calls:
        _only_for("assistant", message, where, "tool_calls")
        calls = enumerate(message.tool_calls)
        rendered["tool_calls"] = [_call(call, f"{where}.tool_calls.{j}", arguments_as_text) for j, call in calls]
    rendered["content"] = None if message.content is None and message.tool_calls else _content(message, where)
    if message.role == "tool":
        rendered["tool_call_id"] = _answered(message, where, called)
    optional = {"name": message.name, "reasoning_content": message.reasoning_content}
    return rendered | {name: value for name, value in optional.items() if value is not None}


def _only_for(role: str, message: ChatMessage, where: str, field: str) -> None:
    if message.role != role:
        raise RequestError(f"{where}.{field} is only for the role {role!r}", param=f"{where}.{field}")


def _answered(message: ChatMessage, where: str, called: set[str]) -> str:
    """The id of the call that a tool's message answers."""
    param = f"{where}.tool_call_id"
    if message.tool_call_id is None:
        raise RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    if message.tool_call_id not in called:
        raise RequestError(f"{param}: no earlier message makes the call {message.tool_call_id!r}", param=param)
    return message.tool_call_id


def _call(call: ToolCall, where: str, arguments_as_text: bool) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if not arguments_as_text:
        arguments = _parsed(arguments, f"{where}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _parsed(arguments: str, param: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{param} is not a JSON object", param=param, code="invalid_value")
    return value


def _content(message: ChatMessage, where: str) -> str:
    if message.content is None:
        raise RequestError(f"{where}.content is required", param=f"{where}.content", code="missing_required_parameter")
    if isinstance(message.content, str):
        return message.content
    pieces = []
    for i, part in enumerate(message.content):
        at = f"{where}.content.{i}"
        if part.type not in ("text", "input_text"):
            raise _unsupported(f"{at}.type", f"content of type {part.type!r} is not supported: this model takes text")
        if part.text is None:
            raise RequestError(f"{at}.text is required", param=f"{at}.text", code="missing_required_parameter")
        pieces.append(part.text)
    return "".join(pieces)


def _unsupported(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_parameter")
