"""One HTTP connection, and how long and how often it may keep the server waiting.

aiohttp bounds the length of a line (8190 bytes) and the number of headers (128). Here are the other bounds, and its answers to
what is no HTTP, which would be plain text, and would bring the client's headers, with what is secret in them, into the log.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from shared.errors import Refused, RequestError
from shared.web.errors import ErrorAnswer, Handler, describe

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
"""How long a connection may idle between requests: longer than the usual minute of a load balancer. The headers of every
request but the first have as long."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Of a server's connections."""

    headers_s: float = 10.0
    """From the connection to the end of its first request's headers."""
    max_connections: int = 4096


class Connection(RequestHandler):
    """Made for each client. Past `max_connections` one is answered with 503 and closed."""

    __slots__ = ("_bounds", "_deadline", "_open", "_taken")

    def __init__(
        self, server: web.Server, loop: asyncio.AbstractEventLoop, bounds: Bounds, open_: set[Connection]
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # which turns it off, as its runner does
            keepalive_timeout=KEEP_ALIVE_S,
        )
        self._bounds = bounds
        self._open = open_
        self._deadline: asyncio.TimerHandle | None = None
        self._taken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if len(self._open) >= self._bounds.max_connections:
            stream = cast(asyncio.Transport, transport)
            stream.write(_raw(describe(Refused(f"{len(self._open)} connections are open already"))))
            stream.close()
            return
        self._taken = True
        self._open.add(self)
        super().connection_made(transport)
        self._deadline = asyncio.get_running_loop().call_later(self._bounds.headers_s, self._late)

    def data_received(self, data: bytes) -> None:
        if self._taken:
            super().data_received(data)

    def eof_received(self) -> None:
        if self._taken:
            super().eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._taken:
            self._open.discard(self)
            self.began()
            super().connection_lost(exc)

    def began(self) -> None:
        """Its first request is there."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Of what was no HTTP, or had too long a line or too many headers; whatever an application raises it answers itself."""
        self.began()
        if status >= 500:
            log.error("%s %s failed", request.method, request.path, exc_info=exc)
            answer = describe(RuntimeError())
        else:
            log.info("a request of %s could not be read: %s", request.remote, type(exc).__name__)
            answer = describe(RequestError(f"this is no HTTP request: {type(exc).__name__}", code="bad_request"))
        if request.writer.output_size > 0:
            raise ConnectionError("a part of an answer was sent already")
        response = answer.response()
        response.force_close()
        return response

    def _late(self) -> None:
        if self.transport is not None:
            late = RequestError("the request's headers did not arrive in time", status=408, code="request_timeout")
            self.transport.write(_raw(describe(late)))
        self.force_close()


@web.middleware
async def note_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells the connection that a request's headers are here."""
    if isinstance(request.protocol, Connection):
        request.protocol.began()
    return await handler(request)


def _raw(answer: ErrorAnswer) -> bytes:
    body = answer.body.encode()
    reasons = {408: "Request Timeout", 503: "Service Unavailable"}
    headers = {
        **answer.headers,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines = [
        f"HTTP/1.1 {answer.status} {reasons[answer.status]}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
