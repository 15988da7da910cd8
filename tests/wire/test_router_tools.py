"""Tool calls and thoughts as the official client sees them, whole and streamed; the decoder is fake and says what it is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.broker import Broker
from tests.chat_templates import ALWAYS_THINKING, QWEN, THINKING, speaking
from tests.fake_mesh import saying
from tests.front import Front, front, ids

MESSAGES: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ARGUMENTS = ['{"city": "Paris 🙂"}', '{"city": "東京"}']
CALLS = "".join(f'\n<tool_call>\n{{"name": "weather", "arguments": {a}}}\n</tool_call>' for a in ARGUMENTS)
THOUGHT = "<think>\nRain, or sun?\n</think>\n\n"


@asynccontextmanager
async def router(nats: Broker, text: str, template: str = QWEN, finish: str = "stop") -> AsyncIterator[Front]:
    async with front(nats, speaking(template)) as made:
        await made.mesh.decoder(saying(*ids(text), finish=finish))
        await made.mesh.prefiller()
        await made.until_ready(2)
        yield made


async def whole(made: Front, **fields: Any) -> Any:
    async with made.openai() as client:
        return await client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)


async def streamed(made: Front, **fields: Any) -> Any:
    """The whole answer, as the client puts it together from the stream."""
    async with (
        made.openai() as client,
        client.chat.completions.stream(model="tiny", messages=MESSAGES, **fields) as stream,
    ):
        seen = [event async for event in stream]
        return await stream.get_final_completion(), seen


def calls_of(answer: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls or []]


async def test_calls(nats: Broker) -> None:
    async with router(nats, "I look." + CALLS) as made:
        answer = await whole(made, tools=[WEATHER])
        again, seen = await streamed(made, tools=[WEATHER])
    for got in (answer, again):
        assert calls_of(got) == [("weather", arguments) for arguments in ARGUMENTS]
        assert got.choices[0].message.content == "I look."
        assert got.choices[0].finish_reason == "tool_calls"
        assert len({call.id for call in got.choices[0].message.tool_calls}) == 2
    assert answer.usage.completion_tokens == len(ids("I look." + CALLS))
    fragments = [event for event in seen if event.type == "tool_calls.function.arguments.delta" and event.index == 0]
    assert len(fragments) > 3, "the arguments come as they are written"
    done = [event.arguments for event in seen if event.type == "tool_calls.function.arguments.done"]
    assert done == ARGUMENTS


async def test_only_calls_have_no_content(nats: Broker) -> None:
    async with router(nats, CALLS) as made:
        for answer in (await whole(made, tools=[WEATHER]), (await streamed(made, tools=[WEATHER]))[0]):
            assert answer.choices[0].message.content is None
        one = await whole(made, tools=[WEATHER], parallel_tool_calls=False)
        assert calls_of(one) == [("weather", ARGUMENTS[0])]
        assert one.choices[0].finish_reason == "tool_calls"
        again, _ = await streamed(made, tools=[WEATHER], parallel_tool_calls=False)
        assert calls_of(again) == [("weather", ARGUMENTS[0])]


async def test_without_tools_it_is_text(nats: Broker) -> None:
    async with router(nats, CALLS) as made:
        for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            answer = await whole(made, **fields)
            assert answer.choices[0].message.content == CALLS
            assert answer.choices[0].message.tool_calls is None
            assert answer.choices[0].finish_reason == "stop"


async def test_cut_short_within_a_call(nats: Broker) -> None:
    async with router(nats, CALLS) as made:
        tokens = len(ids(CALLS.split("Paris")[0]))
        answer = await whole(made, tools=[WEATHER], max_tokens=tokens)
        assert answer.choices[0].finish_reason == "length"
        assert ARGUMENTS[0].startswith(calls_of(answer)[0][1])


async def test_a_forced_call_sends_its_grammar_and_no_call_sends_none(nats: Broker) -> None:
    async with router(nats, CALLS) as made:
        await whole(made, tools=[WEATHER], tool_choice="required")
        await whole(made, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}})
        await whole(made, tools=[WEATHER])
        (decoder,) = [known for known in made.mesh.alive if hasattr(known, "generates")]
        texts = [generate.grammar and json.loads(generate.grammar.text) for generate in decoder.generates]
    assert texts[2] is None
    for text in texts[:2]:
        assert "weather" in json.dumps(text)


async def test_thoughts(nats: Broker) -> None:
    async with router(nats, THOUGHT + "It rains.", THINKING) as made:
        answer = await whole(made)
        again, _ = await streamed(made, stream_options={"include_usage": True})
        hidden = await whole(made, extra_body={"include_reasoning": False})
        off = await whole(made, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    for got in (answer, again):
        assert got.choices[0].message.content == "It rains."
        assert got.choices[0].message.reasoning_content == "Rain, or sun?"
        assert got.usage.completion_tokens_details.reasoning_tokens == len(ids(THOUGHT.strip()))
        assert got.usage.completion_tokens == len(ids(THOUGHT + "It rains."))
    assert hidden.choices[0].message.content == "It rains."
    assert not hasattr(hidden.choices[0].message, "reasoning_content")
    assert off.choices[0].message.content == THOUGHT + "It rains."


async def test_a_thought_that_the_prompt_begins(nats: Broker) -> None:
    async with router(nats, "Rain?</think>It rains." + CALLS, ALWAYS_THINKING) as made:
        for answer in (await whole(made, tools=[WEATHER]), (await streamed(made, tools=[WEATHER]))[0]):
            message = answer.choices[0].message
            assert (message.reasoning_content, message.content) == ("Rain?", "It rains.")
            assert len(calls_of(answer)) == 2


async def test_logprobs_and_token_ids_of_all_tokens_come(nats: Broker) -> None:
    """Also of those whose text is a marker's."""
    async with router(nats, CALLS) as made:
        body = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "stream": True, "return_token_ids": True}
        async with made.session.post(made.url + "/v1/chat/completions", json=body) as response:
            lines = [line async for line in response.content if line.startswith(b"data: {")]
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == ids(CALLS)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        (
            "tools",
            {"tools": [{**WEATHER, "function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"},
        ),
        ("tool_choice", {"tool_choice": "required"}),
        ("functions", {"extra_body": {"functions": [{"name": "f"}]}}),
        ("function_call", {"extra_body": {"function_call": {"name": "f"}}}),
    ],
)
async def test_bad_tools_are_a_400_that_names_them(nats: Broker, param: str, fields: dict[str, Any]) -> None:
    async with router(nats, CALLS) as made:
        with pytest.raises(openai.BadRequestError) as raised:
            await whole(made, **fields)
        assert raised.value.param == param
