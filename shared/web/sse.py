"""Server-sent events on an aiohttp response, written without a task switch.

`StreamResponse.write` is a coroutine; a decode step has tokens for every stream at once, and waking each stream's task for
one token costs more than the token. So `send` frames and writes to the transport synchronously, and the owner drains only
when `backlog` says that the client is slow.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter


class _Response(web.StreamResponse):
    """Headers go out with the first write, in one packet, as aiohttp does it for its own `Response`."""

    _send_headers_immediately = False


_AT_ONCE = 32 << 10
"""What aiohttp writes without waiting for the client to read: once the status is out, nothing may come between it and the
stream that others write to."""

DONE = b"data: [DONE]\n\n"

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def data(payload: bytes) -> bytes:
    """One event whose data is `payload`, which holds no newline (JSON does not)."""
    return b"data: " + payload + b"\n\n"


def error(payload: bytes) -> bytes:
    """An `error` event: named, so that EventSource sees it, and with the error object as data, so that OpenAI's clients
    raise."""
    return b"event: error\ndata: " + payload + b"\n\n"


class EventStream:
    """One open stream. Made by `open`; `close` ends it; after the client left, `send` does nothing."""

    def __init__(self, response: web.StreamResponse, writer: AbstractStreamWriter, request: web.Request) -> None:
        self.response = response
        self._writer = writer
        self._transport = request.transport
        self._chunked = request.version >= HttpVersion11

    @classmethod
    async def open(cls, request: web.Request, headers: Mapping[str, str], first: bytes) -> EventStream:
        """Sends status 200, the headers and the `first` events. Raises `ConnectionError` where the client has left."""
        response = _Response(headers={**HEADERS, **headers})
        writer = await response.prepare(request)
        if writer is None or request.transport is None:
            raise ConnectionResetError("the client has left")
        await response.write(first[:_AT_ONCE])
        stream = cls(response, writer, request)
        stream.send(first[_AT_ONCE:])
        return stream

    def send(self, events: bytes) -> None:
        """Writes whole events; they are on the wire by the end of this turn of the event loop, unless the client is
        slow. Empty: nothing."""
        transport = self._transport
        if not events or transport is None or transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    @property
    def backlog(self) -> int:
        """Bytes that wait because the client does not read."""
        transport = self._transport
        return transport.get_write_buffer_size() if transport is not None and not transport.is_closing() else 0

    async def drain(self) -> None:
        """Until the client has read most of what waits. Raises `ConnectionError` when it leaves meanwhile."""
        await self._writer.drain()

    async def close(self, last: bytes) -> None:
        """Sends the `last` events and ends the response; the connection can take the next request."""
        await self.response.write_eof(last)
