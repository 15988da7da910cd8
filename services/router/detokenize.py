"""Tokens to text as they come. The concatenation of all pieces is exactly what decoding all tokens at once gives, and no
piece holds U+FFFD for a character that is only incomplete so far.

Two ways: byte-level tokenizers (GPT-2's alphabet: Llama 3, Qwen, SmolLM) map every token to bytes, so that an incremental
UTF-8 decoder is all it takes; any other tokenizer is asked to decode a small window again.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tokenizers import Tokenizer, decoders

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one output."""

    def feed(self, tokens: list[int]) -> str:
        """The text that is certain now, and was not before these tokens."""
        ...

    def flush(self) -> str:
        """The rest, once no token follows: an incomplete character becomes U+FFFD here."""
        ...


class Vocabulary:
    """What a tokenizer says of each id; shared by all detokenizers of a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._alphabet = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}

    def detokenizer(self, shown: frozenset[int] = frozenset(), *, keep_special: bool = False) -> Detokenizer:
        """Special tokens have text, their names, only where they are `shown`, or all are kept."""
        return (ByteLevel if self.byte_level else Windowed)(self, shown, keep_special=keep_special)

    def named_bytes_of(self, token: int) -> bytes:
        """The same; a special token stands for its name."""
        return self.spelled(token)[1] if token in self.special else self.bytes_of(token)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token of a byte-level tokenizer stands for; none for a special token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._look_up(token)
        return known

    def spelled(self, token: int) -> tuple[str, bytes]:
        """A token by itself: its text, or its bytes spelled out where they are no whole characters, and its bytes. A special
        token goes by its name. Raises nothing for an id that the tokenizer does not have: it has no bytes."""
        name = self.tokenizer.id_to_token(token) or ""
        if token in self.special or not name:
            return name, name.encode()
        raw = self.bytes_of(token) if self.byte_level else _piece_bytes(name)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def open_ended(self, token: int) -> bool:
        """Whether the token is one raw byte of a byte-fallback tokenizer: what it means depends on what follows."""
        return _BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(token) or "") is not None

    def _look_up(self, token: int) -> bytes:
        text = self.tokenizer.id_to_token(token)
        if text is None or token in self.special:
            return b""
        try:
            return bytes([self._alphabet[character] for character in text])
        except KeyError:
            return text.encode()


def _piece_bytes(name: str) -> bytes:
    """Of a piece of SentencePiece's."""
    if _BYTE_TOKEN.fullmatch(name):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


class ByteLevel:
    """For tokenizers whose tokens are bytes."""

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(
        self, vocabulary: Vocabulary, shown: frozenset[int] = frozenset(), *, keep_special: bool = False
    ) -> None:
        named = {token: vocabulary.spelled(token)[1] for token in shown}
        self._bytes_of: Callable[[int], bytes] = vocabulary.bytes_of
        if keep_special:
            self._bytes_of = vocabulary.named_bytes_of
        elif named:
            self._bytes_of = lambda token: named.get(token) or vocabulary.bytes_of(token)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: list[int]) -> str:
        if len(tokens) == 1:
            return self._decoder.decode(self._bytes_of(tokens[0]))
        return self._decoder.decode(b"".join(map(self._bytes_of, tokens)))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class Windowed:
    """For every other tokenizer. Text up to `_anchor`'s end is out. `_held` are the tokens since; they go out when the last
    of them cannot change its text any more, which is told by decoding them behind the anchor, the last token that had text:
    what a decoder does at the beginning of a text (dropping a space) is then done to the anchor."""

    __slots__ = ("_anchor", "_held", "_keep_special", "_shown", "_vocabulary")

    def __init__(
        self, vocabulary: Vocabulary, shown: frozenset[int] = frozenset(), *, keep_special: bool = False
    ) -> None:
        self._shown = frozenset() if keep_special else shown
        self._vocabulary = vocabulary
        self._keep_special = keep_special
        self._anchor: list[int] = []
        self._held: list[int] = []

    def feed(self, tokens: list[int]) -> str:
        special = () if self._keep_special else self._vocabulary.special
        pieces: list[str] = []
        for token in tokens:
            if token in self._shown:
                pieces += (self._release(final=True), self._vocabulary.spelled(token)[0])
            elif token not in special:
                self._held.append(token)
                if not self._vocabulary.open_ended(token):
                    pieces.append(self._release(final=False))
        return "".join(pieces)

    def flush(self) -> str:
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        decode = partial(self._vocabulary.tokenizer.decode, skip_special_tokens=not self._keep_special)
        before = decode(self._anchor)
        text = decode(self._anchor + self._held)
        if not final and text.endswith(_REPLACEMENT):
            return ""
        if len(text) > len(before):
            self._anchor = self._held
        else:
            self._anchor = self._anchor + self._held
        self._held = []
        return text[len(before) :]
