"""Frames of the step protocol: 4 bytes little-endian length, then msgpack. See `shared.engine.protocol`."""

from __future__ import annotations

import socket

import msgspec

from shared.errors import EngineError

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 28


def pack(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def body_bytes(header: bytes) -> int:
    """Length of the body that follows. Raises `EngineError` for one that no frame has: the stream is out of step."""
    length = int.from_bytes(header, "little")
    if length > MAX_FRAME_BYTES:
        raise EngineError(f"a frame of {length} bytes: the stream is out of step")
    return length


def receive(sock: socket.socket) -> bytes | None:
    """The next frame's body from a blocking socket; None where the peer closed, between frames or within one."""
    header = _receive_exactly(sock, HEADER_BYTES)
    return None if header is None else _receive_exactly(sock, body_bytes(header))


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
