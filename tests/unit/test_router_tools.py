"""Tools in a request: what the template gets, what is refused by name, and what a forced call must look like."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import msgspec
import pytest

from services.router.dialects import DIALECTS, SILENT, manner_of
from services.router.openai_types import ChatRequest
from services.router.speech import Manners, Message, Speech
from services.router.talk import Talk
from services.router.validate import decode
from shared.errors import ModelError, RequestError
from shared.grammar import Compiler, Vocabulary
from shared.messages import Grammar
from tests.chat_templates import ALWAYS_THINKING, TEMPLATES, THINKING, speaking
from tests.tiny_model import END, TEMPLATE, byte_level

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "東京"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CALLED: list[dict[str, Any]] = [
    *HI,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]


def talk(template: str = TEMPLATES["hermes"], **fields: Any) -> Talk:
    body = {"model": "tiny", "messages": HI, **fields}
    return Talk.of(decode(msgspec.json.encode(body), ChatRequest), speaking(template))


def refused(template: str = TEMPLATES["hermes"], **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        talk(template, **fields)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_of_calls_is_read_off_the_template(name: str) -> None:
    manner = manner_of(TEMPLATES[name])
    assert manner.tools is DIALECTS[name]
    assert not manner.thinks
    assert manner.arguments_as_text == name.startswith("deepseek")


def test_settings_win_over_the_template() -> None:
    assert manner_of(TEMPLATES["hermes"], tools="llama3_json").tools is DIALECTS["llama3_json"]
    assert manner_of(TEMPLATES["hermes"], tools="none").tools is None
    assert manner_of(THINKING).thinks
    assert manner_of(THINKING).takes_effort
    assert not manner_of(THINKING, reasoning="none").thinks
    assert manner_of(TEMPLATE, reasoning="think").thinks
    assert manner_of(TEMPLATE) == msgspec.structs.replace(SILENT, arguments_as_text=True)
    with pytest.raises(ModelError, match="KVMESH_TOOL_PARSER=hermes"):
        manner_of(TEMPLATE, tools="hermes")


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_calls_and_their_answers_are_in_the_prompt(name: str) -> None:
    prompt = talk(TEMPLATES[name], messages=CALLED, tools=[WEATHER]).prompt
    assert "of a city" in prompt
    assert '{"city": "Paris"}' in prompt
    assert "rain" in prompt
    assert prompt.endswith("<|assistant|>")


def test_without_a_choice_of_tools_they_are_not_offered() -> None:
    told = talk(tools=[WEATHER], tool_choice="none")
    assert "weather" not in told.prompt
    assert told.manners is None
    assert talk(TEMPLATE, tools=[WEATHER], tool_choice="none").manners is None
    assert talk(tools=[]).manners is None


def test_what_may_be_called_is_known() -> None:
    manners = talk(tools=[WEATHER, NOW], parallel_tool_calls=False).manners
    assert manners is not None
    assert manners.functions == {"weather", "now"}
    assert not manners.parallel
    assert talk(tools=[WEATHER, NOW]).constraint is None


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools.0.function.name", {"tools": [{"type": "function", "function": {"name": "two words"}}]}),
        ("tools.1.function.name", {"tools": [NOW, NOW]}),
        ("tools.0.type", {"tools": [{"type": "custom", "function": {"name": "f"}}]}),
        ("tools.0.function.x", {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [NOW], "tool_choice": "any"}),
        ("tool_choice.function.name", {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
        ("messages.0.tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages.0.tool_call_id", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c9"}]}),
        ("messages.0.tool_calls", {"messages": [{**CALLED[1], "role": "user"}]}),
        ("messages.0.function_call", {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}),
        ("messages.0.content", {"messages": [{"role": "assistant"}]}),
    ],
)
def test_what_is_wrong_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    assert refused(**fields).param == param


def test_arguments_of_earlier_calls_are_json_where_the_template_wants_an_object() -> None:
    broken = [{**CALLED[1], "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a'}}]}]
    assert refused(messages=broken).param == "messages.0.tool_calls.0.function.arguments"
    assert '{"a\n' in talk(TEMPLATES["deepseek_v3"], messages=broken).prompt


def test_a_template_without_tools_takes_none() -> None:
    error = refused(TEMPLATE, tools=[NOW])
    assert error.param == "tools"
    assert "no place for tools" in error.message
    assert "KVMESH_TOOL_PARSER" in refused("{{ tools }} <function=x>", tools=[NOW]).message


def test_reasoning_effort_only_where_the_template_takes_it() -> None:
    assert talk(THINKING, reasoning_effort="high").prompt.endswith("high")
    assert refused(reasoning_effort="high").param == "reasoning_effort"


def test_how_the_output_begins() -> None:
    assert talk(THINKING).begins == "maybe"
    assert talk(THINKING, chat_template_kwargs={"enable_thinking": False}).begins == "closed"
    assert talk(ALWAYS_THINKING).begins == "open"
    assert talk().begins == "closed"


async def say(told: Talk, template: str, seed: int, longest: int = 600) -> str:
    """What one says who draws evenly from what may be said, and ends as soon as that is possible."""
    assert told.constraint is not None
    vocabulary = byte_level()
    compiler = Compiler(Vocabulary(vocabulary.to_str, vocabulary.get_vocab_size(), (END,)))
    text = told.constraint.text(told.begins, speaking(template).marker)
    matcher, rng, tokens = await compiler.compile(Grammar(text=text), [END]), random.Random(seed), list[int]()
    compiler.close()
    while not matcher.finished and len(tokens) < longest:
        bits = int.from_bytes(matcher.masks(), "little")
        if bits >> END & 1:
            break
        tokens.append(rng.choice([token for token in range(vocabulary.get_vocab_size()) if bits >> token & 1]))
        matcher.accept(tokens[-1])
    return vocabulary.decode(tokens)


def read(manners: Manners | None, text: str) -> dict[str, Any]:
    assert manners is not None
    speech, message = Speech(manners), Message()
    message.add([*speech.feed(text, 1), *speech.flush()])
    return message.body()


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_forced_call_is_one_and_its_arguments_validate(name: str, parallel: bool) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        told = talk(TEMPLATES[name], tools=[NOW, WEATHER], tool_choice=choice, parallel_tool_calls=parallel)
        for seed in range(6):
            body = read(told.manners, await say(told, TEMPLATES[name], seed))
            assert body["content"] is None
            assert len(body["tool_calls"]) == 1 or (parallel and DIALECTS[name].separator is not None)
            for call in body["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                if call["function"]["name"] == "weather":
                    jsonschema.validate(arguments, WEATHER["function"]["parameters"])  # type: ignore[index]
                else:
                    assert choice == "required"
                    assert arguments == {}


@pytest.mark.parametrize("name", TEMPLATES)
async def test_several_calls_are_allowed_exactly_where_the_form_has_them(name: str) -> None:
    dialect = DIALECTS[name]
    call = "".join((*dialect.before_name, "now", *dialect.after_name, "{}", *dialect.after_arguments))
    twice = (
        dialect.around[0]
        + ("; " if dialect.separator is None else dialect.separator).join([call, call])
        + dialect.around[1]
    )
    for parallel in (True, False):
        told = talk(TEMPLATES[name], tools=[NOW], tool_choice="required", parallel_tool_calls=parallel)
        assert told.constraint is not None
        vocabulary = byte_level()
        compiler = Compiler(Vocabulary(vocabulary.to_str, vocabulary.get_vocab_size(), (END,)))
        text = told.constraint.text(told.begins, speaking(TEMPLATES[name]).marker)
        matcher = await compiler.compile(Grammar(text=text), [END])
        compiler.close()
        tokens = vocabulary.encode(twice, add_special_tokens=False).ids
        fits = matcher.admissible(tokens) == len(tokens)
        assert fits == (parallel and dialect.separator is not None)
        assert len(read(told.manners, twice)["tool_calls"]) == 1 + (parallel and dialect.separator is not None)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_strict_function_is_held_to_its_schema_wherever_it_is_called(name: str) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    told = talk(TEMPLATES[name], tools=[NOW, strict])
    assert told.constraint is not None
    dialect, vocabulary = DIALECTS[name], byte_level()
    compiler = Compiler(Vocabulary(vocabulary.to_str, vocabulary.get_vocab_size(), (END,)))
    grammar = Grammar(text=told.constraint.text(told.begins, speaking(TEMPLATES[name]).marker))

    async def allowed(function: str, arguments: str, before: str = "") -> bool:
        matcher = await compiler.compile(grammar, [END])
        call = "".join((*dialect.before_name, function, *dialect.after_name, arguments, *dialect.after_arguments))
        tokens = vocabulary.encode(before + dialect.around[0] + call + dialect.around[1], add_special_tokens=False).ids
        return matcher.admissible([*tokens, END]) == len(tokens) + 1

    assert await allowed("weather", '{"city": "Paris", "days": 3}')
    assert not await allowed("weather", '{"city": "Rome", "days": 3}')
    assert await allowed("now", '{"anything": [1]}')
    matcher = await compiler.compile(grammar, [END])
    plain = vocabulary.encode("It is just text.", add_special_tokens=False).ids
    assert matcher.admissible([*plain, END]) == len(plain) + 1
    if dialect.begin:
        assert await allowed("weather", '{"city": "Paris", "days": 3}', "I look. ")
        assert not await allowed("weather", '{"city": "Rome"}', "I look. ")
    compiler.close()


async def test_structured_output_beside_tools_is_either() -> None:
    told = talk(
        tools=[NOW], response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}
    )
    said = {await say(told, TEMPLATES["hermes"], seed) for seed in range(12)}
    assert "7" in said
    for text in said - {"7"}:
        assert {call["function"]["name"] for call in read(told.manners, text)["tool_calls"]} == {"now"}


@pytest.mark.parametrize("template", [THINKING, ALWAYS_THINKING])
async def test_structured_output_comes_after_the_thought(template: str) -> None:
    told = talk(
        template, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}
    )
    assert told.constraint is not None
    vocabulary = byte_level()
    compiler = Compiler(Vocabulary(vocabulary.to_str, vocabulary.get_vocab_size(), (END,)))
    grammar = Grammar(text=told.constraint.text(told.begins, speaking(template).marker))

    async def allowed(text: str) -> bool:
        tokens = [*vocabulary.encode(text, add_special_tokens=False).ids, END]
        return (await compiler.compile(grammar, [END])).admissible(tokens) == len(tokens)

    opened = "" if told.begins == "open" else "<think>"
    assert await allowed(opened + "\nIs {it} 8?\n</think>\n\n7")
    assert not await allowed(opened + "hm</think>8")
    assert not await allowed(opened + "hm 7")
    assert await allowed("7") == (told.begins == "maybe")
    compiler.close()
