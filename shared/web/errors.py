"""The one HTTP face of every error, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

| raised | status | type | code |
| --- | --- | --- | --- |
| `RequestError` | its own, 400 by default; 401 with WWW-Authenticate | invalid_request_error | its own |
| `Refused`, 429 | with Retry-After | rate_limit_error | rate_limit_exceeded |
| `Refused`, else | its own, 503 by default, with Retry-After | service_unavailable_error | unavailable |
| `AttemptFailed` in stage grammar, for good | 400 | invalid_request_error | grammar_failed |
| `AttemptFailed`, else | 503 with Retry-After where another try may work, else 500 | server_error | attempt_failed |
| `BusError` | 503 with Retry-After | service_unavailable_error | unavailable |
| `TimeoutError` | 504 | timeout_error | deadline_exceeded |
| aiohttp's 404, 405, 413 ... | the same | invalid_request_error | not_found, ... |
| anything else | 500; logged with its traceback | server_error | internal_error |
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from shared.errors import AttemptFailed, BusError, Refused, RequestError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and the data of an SSE `error` event."""

    error: ErrorDetail

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


class ErrorAnswer(msgspec.Struct, frozen=True):
    """An error as HTTP says it."""

    status: int
    body: ErrorBody
    headers: Mapping[str, str] = {}

    def response(self) -> web.Response:
        return web.Response(
            status=self.status, body=self.body.encode(), headers=self.headers, content_type="application/json"
        )


def describe(error: BaseException) -> ErrorAnswer:
    """The answer for `error`; never its internals when it is not one of ours."""
    match error:
        case RequestError(status=401):
            answer = _answer(401, error.message, "invalid_request_error", error.code)
            return msgspec.structs.replace(answer, headers={"WWW-Authenticate": "Bearer"})
        case RequestError():
            return _answer(error.status, error.message, "invalid_request_error", error.code, param=error.param)
        case Refused(status=429):
            return _retry(error.retry_after_s, 429, error.reason, "rate_limit_error", "rate_limit_exceeded")
        case Refused():
            kind, code = "service_unavailable_error", "unavailable"
            return _retry(error.retry_after_s, error.status, error.reason, kind, code)
        case AttemptFailed(retryable=True):
            return _retry(1.0, 503, str(error), "server_error", "attempt_failed")
        case AttemptFailed(stage="grammar"):
            return _answer(400, str(error), "invalid_request_error", "grammar_failed")
        case AttemptFailed():
            return _answer(500, str(error), "server_error", "attempt_failed")
        case BusError():
            return _retry(1.0, 503, str(error), "service_unavailable_error", "unavailable")
        case TimeoutError():
            message = "the deadline passed before the answer was complete"
            return _answer(504, message, "timeout_error", "deadline_exceeded")
        case web.HTTPException():
            return _http(error)
        case _:
            return _answer(500, "internal error", "server_error", "internal_error")


def _answer(
    status: int, message: str, kind: str, code: str | None, *, param: str | None = None, retry_after: str | None = None
) -> ErrorAnswer:
    headers = {"Retry-After": retry_after} if retry_after is not None else {}
    return ErrorAnswer(status, ErrorBody(ErrorDetail(message=message, type=kind, param=param, code=code)), headers)


def _retry(after_s: float, status: int, message: str, kind: str, code: str) -> ErrorAnswer:
    return _answer(status, message, kind, code, retry_after=str(max(1, math.ceil(after_s))))


def _http(error: web.HTTPException) -> ErrorAnswer:
    messages = {404: "no such path", 405: "method not allowed on this path", 413: "the request body is too large"}
    message = messages.get(error.status, error.reason)
    if isinstance(error, web.HTTPMethodNotAllowed):
        message = f"{error.method} is not allowed here; allowed: {', '.join(sorted(error.allowed_methods))}"
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    answer = _answer(error.status, message, kind, error.reason.lower().replace(" ", "_"))
    kept = {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}
    return msgspec.structs.replace(answer, headers=kept)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers every exception of a handler by `describe`. Cancellation passes: the client has left."""
    try:
        return await handler(request)
    except Exception as error:  # the outermost frame of a request
        answer = describe(error)
        if answer.status == 500 and not isinstance(error, AttemptFailed | web.HTTPException):
            log.exception("%s %s failed", request.method, request.path)
        return answer.response()
