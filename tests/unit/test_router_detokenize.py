"""Pieces of text: together exactly the whole, and never a replacement character for what is only incomplete."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.router.detokenize import ByteLevel, Vocabulary, Windowed
from tests import tiny_model

TOKENIZERS = {"byte-level": tiny_model.byte_level(), "byte-fallback": tiny_model.byte_fallback()}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}

names = st.sampled_from(sorted(TOKENIZERS))


def split(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    return [tokens[a:b] for a, b in itertools.pairwise(edges)]


def pieces_of(name: str, tokens: list[int], cuts: list[int]) -> list[str]:
    detokenizer = VOCABULARIES[name].detokenizer()
    return [detokenizer.feed(part) for part in split(tokens, cuts)] + [detokenizer.flush()]


@given(names, st.text(max_size=60), st.lists(st.integers(0, 200), max_size=30))
def test_any_text_in_any_split_comes_out_whole(name: str, text: str, cuts: list[int]) -> None:
    tokens = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    pieces = pieces_of(name, tokens, cuts)
    assert "".join(pieces) == TOKENIZERS[name].decode(tokens)


@given(names, st.data(), st.lists(st.integers(0, 200), max_size=30))
def test_any_tokens_at_all_come_out_as_decoding_them_at_once(name: str, data: st.DataObject, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    assert "".join(pieces_of(name, tokens, cuts)) == tokenizer.decode(tokens)


@given(st.text(max_size=40))
def test_one_token_at_a_time_no_piece_holds_half_a_character(text: str) -> None:
    for name, tokenizer in TOKENIZERS.items():
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.decode(tokens)
        pieces = pieces_of(name, tokens, list(range(len(tokens))))
        assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")


def byte_tokens(text: bytes, tokenizer: Tokenizer) -> list[int]:
    """One token a byte, of the byte-level tokenizer."""
    alphabet = {byte: VOCABULARIES["byte-level"].bytes_of(i) for i in range(270) for byte in [i]}
    by_bytes = {piece: token for token, piece in alphabet.items() if len(piece) == 1}
    return [by_bytes[bytes([byte])] for byte in text]


def test_a_character_comes_with_its_last_byte() -> None:
    tokens = byte_tokens("a🙂b".encode(), TOKENIZERS["byte-level"])
    detokenizer = VOCABULARIES["byte-level"].detokenizer()
    assert [detokenizer.feed([token]) for token in tokens] == ["a", "", "", "", "🙂", "b"]


def test_what_stays_incomplete_is_replaced_at_the_end_only() -> None:
    tokens = byte_tokens("a🙂".encode()[:-1], TOKENIZERS["byte-level"])
    detokenizer = VOCABULARIES["byte-level"].detokenizer()
    assert detokenizer.feed(tokens) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_have_no_text_and_other_added_ones_have() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    tool = tokenizer.token_to_id("<tool>")
    detokenizer = VOCABULARIES["byte-level"].detokenizer()
    assert detokenizer.feed([tiny_model.BOS, tool, tiny_model.END]) == "<tool>"


@pytest.mark.parametrize("name", VOCABULARIES)
def test_special_tokens_that_are_kept_go_by_their_names(name: str) -> None:
    tokenizer, vocabulary = TOKENIZERS[name], VOCABULARIES[name]
    special = min(vocabulary.special)
    tokens = [special, *tokenizer.encode("hi there", add_special_tokens=False).ids, special]
    detokenizer = vocabulary.detokenizer(keep_special=True)
    text = "".join(detokenizer.feed([token]) for token in tokens) + detokenizer.flush()
    assert text == tokenizer.decode(tokens, skip_special_tokens=False)
    assert text.count(tokenizer.id_to_token(special)) == 2


def test_ids_that_the_tokenizer_does_not_know_have_no_text() -> None:
    """A model's vocabulary is often padded beyond the tokenizer's."""
    for vocabulary in VOCABULARIES.values():
        assert vocabulary.detokenizer().feed([100_000]) == ""


@pytest.mark.parametrize(("name", "kind"), [("byte-level", ByteLevel), ("byte-fallback", Windowed)])
def test_each_tokenizer_gets_the_way_that_fits_it(name: str, kind: type) -> None:
    assert type(VOCABULARIES[name].detokenizer()) is kind


def test_the_window_stays_small() -> None:
    """Decoding a long output again and again would be quadratic."""
    windowed = Windowed(VOCABULARIES["byte-fallback"])
    tokens = TOKENIZERS["byte-fallback"].encode("the quick brown fox " * 100).ids
    for token in tokens:
        windowed.feed([token])
        assert len(windowed._anchor) + len(windowed._held) < 8
