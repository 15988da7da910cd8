"""Structured output through the whole mesh: whatever a model with random weights would say, what comes out matches."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
import pytest_asyncio

from tests.mesh.processes import Up, up
from tests.tiny_model import byte_level

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "kind": {"enum": ["prefill", "décode", "東京"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "counts"],
    "additionalProperties": False,
}
CLOSING = {str(byte_level().token_to_id(text)): 40 for text in ('"', "}", "]")}
"""Bias that brings an unbounded output to an end."""

MESSAGES: Any = [{"role": "user", "content": "Say something about the capital of France."}]


class Step(pydantic.BaseModel):
    kind: Literal["add", "mul"]
    amount: int = pydantic.Field(ge=0, le=99)


class Plan(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    steps: list[Step] = pydantic.Field(min_length=1, max_length=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["1", "2"], ids=["tp1", "tp2"])
async def mesh(served_directory: Path, request: pytest.FixtureRequest) -> AsyncIterator[Up]:
    async with up(served_directory, "--decode-tp", request.param, "--decoders", "1") as made:
        yield made


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


async def say(mesh: Up, *, stream: bool = False, **fields: Any) -> tuple[str, str]:
    """The text and the reason."""
    asked = {"model": mesh.name, "messages": MESSAGES, "max_tokens": 300, **fields}
    if not stream:
        (choice,) = (await mesh.openai.chat.completions.create(**asked)).choices
        return choice.message.content or "", choice.finish_reason
    chunks = [chunk async for chunk in await mesh.openai.chat.completions.create(**asked, stream=True)]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
async def test_json_of_a_schema(mesh: Up, stream: bool) -> None:
    asked = [
        say(mesh, stream=stream, response_format=json_schema(SCHEMA), seed=seed, temperature=temperature)
        for seed in range(4)
        for temperature in (0, 1.5)
    ]
    for text, reason in await asyncio.gather(*asked):
        jsonschema.validate(json.loads(text), SCHEMA)
        assert reason == "stop"
    await mesh.until_idle()


@pytest.mark.parametrize(
    ("options", "matches"),
    [
        ({"regex": "(ab|c){2,5}[é🙂]"}, r"(ab|c){2,5}[é🙂]"),
        ({"choice": ["Paris", "Straße 東京"]}, "Paris|Straße 東京"),
        ({"grammar": 'root ::= "x" tail\ntail ::= "1" | "2" tail'}, "x2*1"),
        ({"grammar": 'start: A+\nA: /[ab]{2}/ | "é"'}, "([ab]{2}|é)+"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_regex_choice_and_grammar(mesh: Up, options: dict[str, Any], matches: str, stream: bool) -> None:
    text, reason = await say(mesh, stream=stream, extra_body={"structured_outputs": options}, seed=3)
    assert reason == "stop"
    assert re.fullmatch(matches, text), text


@pytest.mark.parametrize(
    "options", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
async def test_any_object(mesh: Up, options: dict[str, Any]) -> None:
    """It may be long; as far as it goes it is the beginning of one, and complete where it says so."""
    text, reason = await say(mesh, extra_body=options, seed=1, logit_bias=CLOSING)
    assert text.lstrip().startswith("{")
    assert reason == "stop"
    assert isinstance(json.loads(text), dict)


async def test_completions(mesh: Up) -> None:
    body = {"structured_outputs": {"json": json.dumps(SCHEMA)}}
    asked: dict[str, Any] = {"model": mesh.name, "prompt": [5, 6, 7], "max_tokens": 300, "extra_body": body}
    (choice,) = (await mesh.openai.completions.create(**asked)).choices
    jsonschema.validate(json.loads(choice.text), SCHEMA)
    stream = await mesh.openai.completions.create(**asked, stream=True)
    jsonschema.validate(json.loads("".join([chunk.choices[0].text async for chunk in stream])), SCHEMA)


async def test_a_prompt_of_one_token_needs_no_prefill(mesh: Up) -> None:
    body = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = await mesh.openai.completions.create(model=mesh.name, prompt=[9], max_tokens=9, extra_body=body)
    assert answer.choices[0].text in ("yes", "no")


async def test_the_clients_own_parse_helper(mesh: Up) -> None:
    asked: dict[str, Any] = {"model": mesh.name, "messages": MESSAGES, "max_tokens": 400}
    answer = await mesh.openai.chat.completions.parse(**asked, response_format=Plan)
    assert isinstance(answer.choices[0].message.parsed, Plan)
    async with mesh.openai.chat.completions.stream(**asked, response_format=Plan) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Plan)


async def test_cut_short_it_says_so(mesh: Up) -> None:
    text, reason = await say(mesh, response_format=json_schema(SCHEMA), max_tokens=5)
    assert reason == "length"
    assert text.startswith("{")


async def test_neither_min_tokens_nor_ignore_eos_nor_biases_break_the_grammar(mesh: Up) -> None:
    """A complete output ends, however many tokens were asked for; an end that is only possible is not taken under them."""
    for options in ({"min_tokens": 50}, {"ignore_eos": True}, {"logit_bias": {"1": 100, "40": 100}}):
        text, reason = await say(mesh, extra_body={"structured_outputs": {"choice": ["Paris", "Rome"]}, **options})
        assert (text in ("Paris", "Rome"), reason) == (True, "stop"), options
        text, reason = await say(mesh, extra_body={"structured_outputs": {"regex": "a+"}, **options}, max_tokens=60)
        assert set(text) == {"a"}, options
        assert reason == "length" if "ignore_eos" in options else len(text) >= options.get("min_tokens", 1)


async def test_stop_strings_cut_it(mesh: Up) -> None:
    text, reason = await say(mesh, extra_body={"structured_outputs": {"regex": "a{20}"}}, stop=["aaaaa"])
    assert (text, reason) == ("", "stop")


async def test_logprobs_are_the_models_own(mesh: Up) -> None:
    asked: dict[str, Any] = {"model": mesh.name, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "seed": 1}
    free = await mesh.openai.chat.completions.create(**asked, max_tokens=1)
    bound = await mesh.openai.chat.completions.create(**asked, extra_body={"structured_outputs": {"choice": ["Paris"]}})
    tops = [answer.choices[0].logprobs.content[0].top_logprobs for answer in (free, bound)]  # type: ignore[union-attr, index]
    assert tops[0] == tops[1]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format.json_schema.schema", {"response_format": json_schema({"type": "nothing"})}),
        ("response_format.json_schema.schema", {"response_format": json_schema({"not": {"type": "null"}})}),
        (
            "response_format.json_schema.name",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        ),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "(a"}}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": "start: nowhere"}}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": "root ::= ["}}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": 'root ::= "a"\n' * 129}}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": "root ::= " + "a" * 9000}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "a" * (1 << 18)}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
        ("structured_outputs.json", {"structured_outputs": {"json": "[1"}}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "x"}}),
    ],
)
async def test_what_is_wrong_is_a_400_that_names_it(mesh: Up, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await say(mesh, extra_body=fields)
    assert raised.value.param == param


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(80),
        {"enum": [f"{i:064}" for i in range(3000)]},
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i}}}$"} for i in range(1, 900)},
        },
    ],
    ids=["deep", "long", "complex"],
)
async def test_what_is_too_complex_is_a_400_while_others_go_on(mesh: Up, schema: dict[str, Any]) -> None:
    others = [asyncio.ensure_future(say(mesh, max_tokens=20)) for _ in range(3)]
    refused = await asyncio.gather(
        *(say(mesh, response_format=json_schema(schema)) for _ in range(6)), return_exceptions=True
    )
    assert all(isinstance(error, openai.BadRequestError) for error in refused), refused
    assert {error.param for error in refused} == {"response_format.json_schema.schema"}  # type: ignore[union-attr]
    await asyncio.gather(*others)
