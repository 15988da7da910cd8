"""The tail context: what follows an attempt's last page, written into the decoder's slot and checked before the first step.

Layout, little-endian, 48 bytes: magic "KVMT", version u16, reserved u16, attempt 16 bytes, layout digest u64, tokens u32,
pages u32, writes u32 (all of the attempt's, the tail included), payload bytes u32. The payload follows: the digests of the pages
(`shared.kv.digests`) where the decoder asked for them, and the model's last hidden state of the last token whose KV was written,
float32, where a multi-token prediction layer is to go on from it; else nothing.
"""

from __future__ import annotations

import struct

import msgspec

from shared.errors import AttemptFailed

SLOT_BYTES = 256
"""Bytes of a slot: the header, and room for what may follow it. A payload of digests comes on top."""

_HEADER = struct.Struct("<4sHH16sQIIII")
_MAGIC = b"KVMT"
_VERSION = 1


class Tail(msgspec.Struct, frozen=True):
    """`tokens` are the tokens whose KV was written, `pages` the pages that hold them, `writes` the writes posted."""

    attempt: str
    layout_digest: int
    tokens: int
    pages: int
    writes: int
    payload_bytes: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            0,
            bytes.fromhex(self.attempt),
            self.layout_digest,
            self.tokens,
            self.pages,
            self.writes,
            self.payload_bytes,
        )


HEADER_BYTES = _HEADER.size


def check(found: bytes | memoryview, expected: Tail) -> None:
    """Raises `AttemptFailed` naming the first field in which the slot's bytes are not what this attempt must have."""
    magic, version, _, attempt, digest, tokens, pages, writes, payload = _HEADER.unpack_from(found)
    for name, is_, should in (
        ("magic", magic, _MAGIC),
        ("version", version, _VERSION),
        ("attempt", attempt.hex(), expected.attempt),
        ("layout digest", digest, expected.layout_digest),
        ("tokens", tokens, expected.tokens),
        ("pages", pages, expected.pages),
        ("writes", writes, expected.writes),
        ("payload bytes", payload, expected.payload_bytes),
    ):
        if is_ != should:
            raise AttemptFailed("tail context", f"{name} is {is_!r}, expected {should!r}")
