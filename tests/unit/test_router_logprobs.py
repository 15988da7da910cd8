"""Log-probabilities as clients get them: chat's form and completions', whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.answers import WholeAnswer
from services.router.logprobs import Logprobs
from shared.messages import Emit, Sampling, TokenLogprob
from tests.tiny_model import served_model
from tests.unit.test_router_answers import body, ids, job
from tests.unit.test_router_attempts import attempt

VOCABULARY = served_model().vocabulary
TEXT = "h\u00e9llo"


def known(tokens: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(-0.25 * i, [(token, -0.25 * i), (5, -3.0)]) for i, token in enumerate(tokens)]


def asked(**fields: Any) -> Any:
    return job(sampling=Sampling(temperature=0.0, logprobs=2), **fields)


def test_chat_has_a_token_with_its_bytes() -> None:
    tokens = ids(TEXT)
    made = Logprobs(asked(), VOCABULARY)
    made.feed(tokens, known(tokens))
    said = made.take()
    assert said is not None
    content = said["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == TEXT
    assert [one["logprob"] for one in content] == [one.logprob for one in known(tokens)]
    assert all(len(one["top_logprobs"]) == 2 and one["top_logprobs"][0]["token"] == one["token"] for one in content)
    half = next(one for one in content if len(one["bytes"]) == 1 and one["bytes"][0] > 127)
    assert half["token"] == f"bytes:\\x{half['bytes'][0]:02x}"
    assert made.take() == {"content": [], "refusal": None}


def test_completions_have_parallel_lists() -> None:
    tokens = ids("hello")
    made = Logprobs(asked(kind="completion"), VOCABULARY)
    made.feed(tokens[:2], known(tokens)[:2])
    first = made.take()
    made.feed(tokens[2:], known(tokens)[2:])
    second = made.take()
    assert first is not None
    assert second is not None
    assert "".join(first["tokens"] + second["tokens"]) == "hello"
    starts = [len("".join((first["tokens"] + second["tokens"])[:i])) for i in range(len(tokens))]
    assert first["text_offset"] + second["text_offset"] == starts
    assert all(token in top for token, top in zip(first["tokens"], first["top_logprobs"], strict=True))


def test_a_special_token_goes_by_its_name() -> None:
    (special, *_) = sorted(VOCABULARY.special)
    assert VOCABULARY.spelled(special)[0] == VOCABULARY.tokenizer.id_to_token(special)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_whole_answer_has_them_all(kind: str) -> None:
    answer = WholeAnswer(asked(kind=kind, stream=False), VOCABULARY)
    tokens = ids("hello")
    for token, one in zip(tokens, known(tokens), strict=True):
        answer.on_tokens([token], [one])
    (choice,) = body(answer, attempt()[0])["choices"]
    found = choice["logprobs"]["content"] if kind == "chat" else choice["logprobs"]["tokens"]
    assert len(found) == len(tokens)


def test_nothing_asked_is_null() -> None:
    answer = WholeAnswer(job(stream=False), VOCABULARY)
    answer.on_tokens(ids("hello"), [])
    (choice,) = body(answer, attempt()[0])["choices"]
    assert choice["logprobs"] is None


def test_a_decoder_that_forgets_some_fails_its_attempt() -> None:
    at, ear = attempt()
    at.take(Emit(attempt=at.id, index=0, tokens=[1, 2], logprobs=known([1])), 1.0)
    assert at.failure is not None
    assert "1 log-probabilities for 2 tokens" in str(at.failure)
    assert not ear.tokens
