"""Answers in OpenAI's JSON, whole and in chunks; tokens in, events out."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.answers import Stream, StreamedAnswer, WholeAnswer, body_of
from services.router.attempts import Attempt
from services.router.validate import Job
from shared.messages import Sampling, TokenLogprob
from shared.web.errors import ErrorBody, ErrorDetail
from shared.web.sse import EventStream
from tests.tiny_model import byte_level, served_model
from tests.unit.test_router_attempts import attempt

VOCABULARY = served_model().vocabulary


def job(**fields: Any) -> Job:
    defaults: dict[str, Any] = {
        "id": "chatcmpl-1",
        "kind": "chat",
        "created": 1,
        "model": "tiny",
        "tokens": [5, 6],
        "sampling": Sampling(temperature=0.0),
        "max_tokens": 99,
        "stops": (),
        "keep_stop": False,
        "stop_token_ids": [],
        "stream": True,
        "include_usage": False,
        "continuous_usage": False,
        "return_token_ids": False,
    }
    return Job(**{**defaults, **fields})


def ids(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False).ids


class Wire:
    """Stands in for an `EventStream`: keeps what is sent; its client reads when told to."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.backlog = 0
        self.drains = 0
        self.closed = False

    def send(self, events: bytes) -> None:
        assert not self.closed
        if events:
            self.sent.append(events)

    async def drain(self) -> None:
        self.drains += 1
        self.backlog = 0

    async def close(self, last: bytes) -> None:
        self.send(last)
        self.closed = True

    @property
    def events(self) -> list[bytes]:
        return b"".join(self.sent).removesuffix(b"\n\n").split(b"\n\n")

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event.removeprefix(b"data: ")) for event in self.events if event != b"data: [DONE]"]


def streamed(**fields: Any) -> tuple[StreamedAnswer, Wire, Attempt]:
    wire = Wire()

    async def open_stream(_: Attempt, first: bytes) -> EventStream:
        wire.send(first)
        return cast(EventStream, wire)

    asked = job(**fields)
    return StreamedAnswer(asked, VOCABULARY, Stream([asked], open_stream)), wire, attempt()[0]


def body(answer: WholeAnswer, at: Attempt) -> dict[str, Any]:
    """The answer of one choice."""
    made: dict[str, Any] = json.loads(body_of([answer], [at]))
    return made


def deltas(wire: Wire) -> str:
    return "".join(choice["delta"].get("content", "") for chunk in wire.chunks for choice in chunk["choices"])


async def play(answer: StreamedAnswer, at: Attempt, pieces: list[list[int]], finish: str = "stop") -> None:
    """As the relay does: the task advances when it is wanted."""
    for piece in pieces:
        if answer.on_tokens(piece, []) and not answer.stopped:
            await answer.advance(at)
    at.finish = finish  # type: ignore[assignment]
    await answer.advance(at)
    await answer.finish(at)


async def test_a_stream_has_role_text_reason_and_done() -> None:
    answer, wire, at = streamed()
    await play(answer, at, [[token] for token in ids("hello, world")])
    first, *middle, last = wire.chunks
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert deltas(wire) == "hello, world"
    assert len(middle) == len(ids("hello, world"))
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in wire.chunks} == {
        ("chatcmpl-1", "chat.completion.chunk", 1, "tiny")
    }
    assert all("usage" not in chunk for chunk in wire.chunks)
    assert wire.events.count(b"data: [DONE]") == 1
    assert wire.events[-1] == b"data: [DONE]"
    assert wire.closed


async def test_a_completion_streams_text() -> None:
    answer, wire, at = streamed(kind="completion")
    await play(answer, at, [[token] for token in ids("hello")], finish="length")
    assert "".join(chunk["choices"][0]["text"] for chunk in wire.chunks) == "hello"
    assert wire.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert wire.chunks[0]["object"] == "text_completion"


async def test_usage_comes_in_one_last_chunk_without_choices() -> None:
    answer, wire, at = streamed(include_usage=True)
    await play(answer, at, [ids("hello")])
    *others, last = wire.chunks
    assert last["choices"] == []
    made = len(ids("hello"))
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": made,
        "total_tokens": 2 + made,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert all(chunk["usage"] is None for chunk in others)


async def test_continuous_usage_counts_along() -> None:
    answer, wire, at = streamed(include_usage=True, continuous_usage=True)
    tokens = ids("the quick brown")
    await play(answer, at, [[token] for token in tokens])
    counts = [chunk["usage"]["completion_tokens"] for chunk in wire.chunks]
    assert counts == [0, *range(1, len(tokens) + 1), len(tokens), len(tokens)]


async def test_a_stop_string_ends_the_text_and_asks_for_the_task() -> None:
    answer, wire, at = streamed(stops=("wor",))
    pieces = [[token] for token in ids("hello, world")]
    wanted = [answer.on_tokens(piece, []) for piece in pieces[:1]]
    await answer.advance(at)
    wanted += [answer.on_tokens(piece, []) for piece in pieces[1:]]
    assert answer.stopped
    assert wanted[-1]
    await answer.finish(at)
    assert deltas(wire) == "hello, "
    assert wire.chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_half_a_character_and_half_a_stop_string_are_held_and_then_released() -> None:
    answer, wire, at = streamed(stops=("!!",))
    await play(answer, at, [[token] for token in ids("🙂!")], finish="length")
    assert deltas(wire) == "🙂!"
    assert all("\ufffd" not in event.decode() for event in wire.events)


async def test_a_slow_clients_tokens_wait_as_tokens_and_all_arrive() -> None:
    answer, wire, at = streamed()
    pieces = [[token] for token in ids("the quick brown fox jumps")]
    assert answer.on_tokens(pieces[0], [])
    await answer.advance(at)
    sent = len(wire.sent)
    wire.backlog = 1 << 20
    for piece in pieces[1:]:
        assert answer.on_tokens(piece, []), "the task must come and wait for the client"
    assert len(wire.sent) == sent
    at.finish = "stop"
    await answer.advance(at)
    assert wire.drains == 1
    await answer.finish(at)
    assert deltas(wire) == "the quick brown fox jumps"


async def test_another_attempt_starts_from_nothing() -> None:
    answer, wire, at = streamed()
    answer.on_tokens(ids("wrong"), [])
    assert not answer.begun
    answer.reset()
    await play(answer, at, [ids("right")])
    assert deltas(wire) == "right"


async def test_an_error_is_an_event_and_no_done_follows() -> None:
    answer, wire, at = streamed()
    answer.on_tokens(ids("hel"), [])
    await answer.advance(at)
    assert answer.begun
    await answer.stream.fail(ErrorBody(ErrorDetail(message="m", type="server_error")))
    name, data = wire.events[-1].split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["error"]["message"] == "m"
    assert b"data: [DONE]" not in wire.events
    assert wire.closed


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_token_ids_come_along_where_asked_for(kind: Any) -> None:
    answer, wire, at = streamed(kind=kind, return_token_ids=True)
    tokens = ids("hello 🙂 !")
    await play(answer, at, [[token] for token in tokens])
    assert [token for chunk in wire.chunks for token in chunk["choices"][0]["token_ids"]] == tokens
    holder = wire.chunks[0] if kind == "chat" else wire.chunks[0]["choices"][0]
    assert holder["prompt_token_ids"] == [5, 6]
    assert "prompt_token_ids" not in wire.chunks[1]


@given(st.text(max_size=30), st.sampled_from(["chat", "completion"]), st.booleans())
def test_a_whole_answer_holds_any_text(text: str, kind: Any, ask_ids: bool) -> None:
    answer = WholeAnswer(job(kind=kind, return_token_ids=ask_ids), VOCABULARY)
    tokens = ids(text)
    for token in tokens:
        assert not answer.on_tokens([token], [])
    at = attempt()[0]
    at.finish = "length"
    said = body(answer, at)
    choice = said["choices"][0]
    assert (choice["message"]["content"] if kind == "chat" else choice["text"]) == byte_level().decode(tokens)
    assert choice["finish_reason"] == "length"
    assert said["usage"]["completion_tokens"] == len(tokens)
    assert choice.get("token_ids") == (tokens if ask_ids else None)


def test_a_whole_answer_is_cut_at_a_stop_string() -> None:
    answer = WholeAnswer(job(stops=("o, w",)), VOCABULARY)
    wanted = [answer.on_tokens([token], []) for token in ids("hello, world")]
    assert wanted[-1]
    said = body(answer, attempt()[0])
    assert said["choices"][0]["message"] == {"role": "assistant", "content": "hell", "refusal": None}
    assert said["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stop", ["\U0001f642", "\u00e9\U0001f642", "x\u00e9", "\u6771"])
async def test_a_stop_string_is_found_across_tokens_that_are_parts_of_characters(stop: str, keep: bool) -> None:
    text = "ax\u00e9\U0001f642b\u6771c"
    alphabet = "".join(word for word, _ in byte_level().pre_tokenizer.pre_tokenize_str(text))
    pieces = [[byte_level().token_to_id(byte)] for byte in alphabet]
    assert len(pieces) == len(text.encode()), "a token a byte"
    asked = {"stops": (stop,), "keep_stop": keep}
    answer, wire, at = streamed(**asked)
    whole = WholeAnswer(job(**asked), VOCABULARY)
    for piece in pieces:
        if not answer.stopped:
            if answer.on_tokens(piece, []) and not answer.stopped:
                await answer.advance(at)
            whole.on_tokens(piece, [])
    await answer.advance(at)
    await answer.finish(at)
    wanted = text[: text.index(stop) + (len(stop) if keep else 0)]
    assert deltas(wire) == wanted
    assert body(whole, at)["choices"][0]["message"]["content"] == wanted
    assert wire.chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("split", [1, 3, 100])
def test_a_stop_string_counts_from_min_tokens_on(split: int) -> None:
    text = "ab STOP cd STOP ef"
    asked = job(stream=False, stops=("STOP",), sampling=Sampling(temperature=0.0, min_tokens=len(ids("ab STOP c"))))
    answer = WholeAnswer(asked, VOCABULARY)
    tokens = ids(text)
    for at in range(0, len(tokens), split):
        answer.on_tokens(tokens[at : at + split], [])
    said = body(answer, attempt()[0])
    assert said["choices"][0]["message"]["content"] == "ab STOP cd "


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 99])
async def test_what_comes_after_a_stop_string_is_counted_nowhere_however_many_come_at_once(
    keep: bool, size: int
) -> None:
    tokens = ids("abc.def.")
    known = [TokenLogprob(-float(i), []) for i in range(len(tokens))]
    fields = {"stops": ("c.d",), "keep_stop": keep, "return_token_ids": True, "kind": "text"}
    asked = job(**fields, sampling=Sampling(temperature=0.0, logprobs=0), include_usage=True)
    whole = WholeAnswer(asked, served_model().vocabulary)
    for at in range(0, len(tokens), size):
        whole.on_tokens(tokens[at : at + size], known[at : at + size])
    answer = body(whole, attempt()[0])
    (choice,) = answer["choices"]
    until = next(i for i in range(len(tokens)) if "c.d" in byte_level().decode(tokens[: i + 1])) + 1
    assert choice["text"] == ("abc.d" if keep else "ab")
    assert choice["token_ids"] == tokens[:until]
    assert answer["usage"]["completion_tokens"] == until
    assert choice["logprobs"]["token_logprobs"] == [-float(i) for i in range(until)]
    answers, wire, at_once = streamed(**fields, sampling=Sampling(temperature=0.0, logprobs=0), include_usage=True)
    for at in range(0, len(tokens), size):
        answers.on_tokens(tokens[at : at + size], known[at : at + size])
    await answers.advance(at_once)
    await answers.finish(at_once)
    chunks = [chunk for chunk in wire.chunks if chunk["choices"]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == tokens[:until]
    said = [
        lp for chunk in chunks for lp in (chunk["choices"][0]["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    ]
    assert said == [-float(i) for i in range(until)]
