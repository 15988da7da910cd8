"""Requests: what is taken, what is ignored, and for everything else an error that names the field and what it takes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.choices import completion_prompts
from services.router.messages import chat_messages
from services.router.openai_types import NEUTRAL, ChatRequest, CompletionRequest
from services.router.talk import Talk
from services.router.validate import (
    MAX_CHOICES,
    Job,
    Limits,
    Prompt,
    check,
    decode,
    plan,
)
from shared.errors import RequestError
from tests.tiny_model import END, served_model

MODEL = served_model()
LIMITS = Limits(512)
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Job:
    body = msgspec.json.encode({"model": "tiny", "messages": MESSAGES, **fields})
    request = decode(body, ChatRequest)
    check(request, MODEL)
    Talk.of(request, MODEL)
    return plan(request, Prompt([5, 6, 7]), MODEL, LIMITS)


def completion(**fields: Any) -> Job:
    request = decode(msgspec.json.encode({"model": "tiny", "prompt": "hi", **fields}), CompletionRequest)
    check(request, MODEL)
    completion_prompts(request.prompt, MODEL.identity.vocab_size)
    return plan(request, Prompt([5, 6, 7]), MODEL, LIMITS)


def rejected(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        chat(**fields)
    return raised.value


def test_defaults_are_openais() -> None:
    job = chat()
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k, job.sampling.min_p) == (
        1.0,
        1.0,
        None,
        0.0,
    )
    assert job.max_tokens == 512 - 3, "the rest of the context"
    assert completion().max_tokens == 16
    assert job.stop_token_ids == [END]
    assert (job.stream, job.include_usage, job.stops) == (False, False, ())


def test_everything_supported_arrives() -> None:
    job = chat(
        temperature=0,
        top_p=0.5,
        top_k=20,
        min_p=0.1,
        seed=-1,
        max_tokens=5,
        max_completion_tokens=7,
        stop=["a", "b"],
        stop_token_ids=[9],
        stream=True,
        stream_options={"include_usage": True},
    )
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 20, 0.1)
    assert sampling.seed == 2**63 - 1
    assert (job.max_tokens, job.stops, job.stop_token_ids) == (7, ("a", "b"), [END, 9])
    assert job.stream
    assert job.include_usage


@pytest.mark.parametrize("top_k", [-1, 0])
def test_no_limit_has_two_spellings_in_top_k(top_k: int) -> None:
    assert chat(top_k=top_k).sampling.top_k is None


def test_a_seed_is_minted_where_none_is_given() -> None:
    assert chat().sampling.seed != chat().sampling.seed
    assert chat(seed=7).sampling.seed == 7


def test_ignore_eos_leaves_only_the_clients_stop_tokens() -> None:
    assert chat(ignore_eos=True).stop_token_ids == []
    assert chat(ignore_eos=True, stop_token_ids=[3]).stop_token_ids == [3]


def test_harmless_fields_are_ignored() -> None:
    chat(
        user="me",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="k",
        parallel_tool_calls=True,
        request_id="r",
    )


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_field_that_is_not_supported_takes_null_and_what_changes_nothing(name: str) -> None:
    kind, call = (ChatRequest, chat) if name in ChatRequest.__struct_fields__ else (CompletionRequest, completion)
    assert name in kind.__struct_fields__
    for value in (None, *NEUTRAL[name]):
        call(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("web_search_options", {}),
        ("reasoning_effort", "high"),
        ("best_of", 2),
        ("echo", True),
        ("use_beam_search", True),
    ],
)
def test_a_field_that_would_change_the_meaning_is_refused_by_name(name: str, value: Any) -> None:
    error = rejected(**{name: value})
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
    assert name in error.message


@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("best_of", 2)])
def test_so_it_is_for_completions(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        completion(**{name: value})
    assert raised.value.param == name


def test_what_changes_the_draw_comes_to_the_sampling() -> None:
    job = chat(
        logit_bias={"5": -100, "7": 2.5},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        min_tokens=3,
        max_tokens=4,
        include_stop_str_in_output=True,
    )
    sampling = job.sampling
    assert sampling.logit_bias == {5: -100.0, 7: 2.5}
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (sampling.min_tokens, job.keep_stop) == (3, True)
    plain = chat().sampling
    assert not plain.looks_back
    assert not plain.logit_bias


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": [5]}, "logit_bias", "an object"),
        ({"presence_penalty": 2.1}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"min_tokens": -1}, "min_tokens", "from 0"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "only for logprobs=true"),
        ({"logprobs": 3}, "logprobs", "true or false"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "more than max_tokens=4"),
    ],
)
def test_what_cannot_change_the_draw_is_refused_by_name(fields: dict[str, Any], param: str, said: str) -> None:
    error = rejected(**fields)
    assert (error.status, error.param) == (400, param)
    assert said in error.message


def test_log_probabilities_in_both_forms() -> None:
    assert chat().sampling.logprobs is None
    assert chat(logprobs=False, top_logprobs=0).sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert completion().sampling.logprobs is None
    assert completion(logprobs=0).sampling.logprobs == 0
    assert completion(logprobs=5).sampling.logprobs == 5
    with pytest.raises(RequestError, match="logprobs"):
        completion(logprobs=21)


def test_an_unknown_field_is_refused_by_name() -> None:
    error = rejected(temprature=0.1)
    assert (error.param, error.code) == ("temprature", "unknown_parameter")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": "hot"}, "temperature", "takes a number, not text"),
        ({"temperature": 2.5}, "temperature", "from 0 to 2"),
        ({"temperature": -0.1}, "temperature", "from 0 to 2"),
        ({"top_p": 0}, "top_p", "above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p", "from 0 to 1"),
        ({"top_k": -2}, "top_k", "from -1"),
        ({"top_k": 1.5}, "top_k", "takes a whole number, not a number"),
        ({"max_tokens": 0}, "max_tokens", "from 1"),
        ({"max_completion_tokens": -5}, "max_completion_tokens", "from 1"),
        ({"seed": 2**63}, "seed", "from -9223372036854775808"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "1 to 1024 characters"),
        ({"stop": [1]}, "stop.0", "takes text"),
        ({"stop_token_ids": [400_000]}, "stop_token_ids", "ids from 0 to"),
        ({"stream": "yes"}, "stream", "takes true or false, not text"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only for stream=true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "no such parameter"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "takes a list, not text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "robot"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "is required"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "is required"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "takes text or a list"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "not supported"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.1.content.0.type",
            "'image_url' is not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "is required"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages.0.tool_calls.0.function",
            "is required",
        ),
        ({"model": None}, "model", "takes text, not null"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "cannot be set"),
    ],
)
def test_errors_name_the_field_and_what_it_takes(fields: dict[str, Any], param: str, says: str) -> None:
    error = rejected(**fields)
    assert error.status == 400
    assert error.param == param
    assert says in error.message


def test_a_missing_field_is_named() -> None:
    for body, param in ((b"{}", "model"), (b'{"model":"tiny"}', "messages")):
        with pytest.raises(RequestError, match="is required") as raised:
            decode(body, ChatRequest)
        assert raised.value.param == param


@pytest.mark.parametrize(
    "body", [b"", b"{", b"not json", b'{"model": "\xff"}', b"[1]", b'"x"', b"null", b"[" * 100_000]
)
def test_a_body_that_is_no_request_is_the_clients_error(body: bytes) -> None:
    with pytest.raises(RequestError) as raised:
        decode(body, ChatRequest)
    assert raised.value.status == 400


@given(st.binary(max_size=200))
def test_no_body_at_all_breaks_the_decoder(body: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest):
        with pytest.raises(RequestError):
            decode(body, kind)


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    body = b'{"model":"tiny","messages":[],"metadata":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    with pytest.raises(RequestError):
        decode(body, ChatRequest)


def test_another_model_is_404() -> None:
    error = rejected(model="gpt-4o")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")


def messages_of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    request = decode(msgspec.json.encode({"model": "tiny", "messages": messages}), ChatRequest)
    return chat_messages(request.messages)


def test_list_form_content_is_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    assert messages_of({"role": "user", "content": parts}) == [{"role": "user", "content": "ab"}]


def test_an_answer_can_be_sent_back_as_it_was() -> None:
    echoed = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None, "tool_calls": []}
    assert messages_of(echoed) == [{"role": "assistant", "content": "hi"}]


def test_a_developer_is_a_system_to_templates() -> None:
    assert messages_of({"role": "developer", "content": "x", "name": "n"}) == [
        {"role": "system", "content": "x", "name": "n"}
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        (["hi"], ["hi"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([0], [[0]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts_are_text_or_ids_one_or_a_list(prompt: Any, expected: Any) -> None:
    assert completion_prompts(prompt, 400) == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt"),
        ([[]], "prompt"),
        (["a", ""], "prompt.1"),
        ([[1], [400]], "prompt.1"),
        (["a", 1], "prompt.1"),
        ([400], "prompt"),
        ([-1], "prompt"),
        ([True], "prompt"),
        ([1, "a"], "prompt"),
        ([1.5], "prompt"),
        ([None], "prompt"),
        (["a"] * (MAX_CHOICES + 1), "prompt"),
    ],
)
def test_other_prompts_are_refused_by_name(prompt: Any, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        completion_prompts(prompt, 400)
    assert raised.value.param == param


class TestLength:
    def planned(self, prompt: int, limits: Limits, **fields: Any) -> Job:
        body = msgspec.json.encode({"model": "tiny", "messages": MESSAGES, **fields})
        return plan(decode(body, ChatRequest), Prompt([5] * prompt), MODEL, limits)

    def test_a_prompt_may_fill_all_positions_but_one(self) -> None:
        assert self.planned(511, LIMITS).max_tokens == 1
        with pytest.raises(RequestError, match="512 tokens") as raised:
            self.planned(512, LIMITS)
        assert (raised.value.param, raised.value.code) == ("messages", "context_length_exceeded")

    def test_what_is_asked_for_must_fit(self) -> None:
        assert self.planned(500, LIMITS, max_tokens=12).max_tokens == 12
        with pytest.raises(RequestError, match="at most 12 do") as raised:
            self.planned(500, LIMITS, max_completion_tokens=13)
        assert raised.value.param == "max_completion_tokens"

    def test_a_pool_that_is_smaller_than_the_context_is_the_limit(self) -> None:
        limits = Limits(512, pool_tokens=128, prefill_tokens=64)
        assert self.planned(50, limits).max_tokens == 78
        with pytest.raises(RequestError, match="KV pool of 128 tokens"):
            self.planned(50, limits, max_tokens=100)
        with pytest.raises(RequestError, match="prefill pool of 64"):
            self.planned(100, limits)
        assert self.planned(65, limits).max_tokens == 63, "the last token is not prefilled"

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(RequestError, match="no tokens"):
            self.planned(0, LIMITS)
