"""Structured output: from a request's `response_format` or `structured_outputs` to a grammar, checked before anything runs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import llguidance
import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.router.dialects import THINK, THOUGHT
from services.router.openai_types import Common, JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from services.router.reasoning import Begins
from shared.errors import GrammarError, RequestError
from shared.grammar import Compiler
from shared.messages import Grammar

MAX_CHARACTERS = 1 << 17
"""Of a schema as JSON, a regex, or a grammar."""

MAX_GRAMMAR_BYTES = 1 << 18
"""Of all together."""

MAX_GBNF_CHARACTERS = 1 << 13
MAX_GBNF_RULES = 128
"""Converting it takes the square of its rules."""

MAX_DEPTH = 64
"""Of a schema's nesting."""

MAX_CHOICES = 4096

WHITESPACE = r"[ \t\n\r]{0,32}"
"""Between the tokens of JSON. Bounded, or a model can go on with blanks for ever."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}


Marker = Callable[[str], str]
"""A text as a Lark grammar has it: `literal`, or the special token that it is."""

Entry = dict[str, Any]
"""A grammar as the engine's list of them has it: a JSON schema or Lark."""


class Constraint(msgspec.Struct, frozen=True):
    """What the output must match: any one of `entries`, which `param` of the request asks for."""

    entries: tuple[Entry, ...]
    param: str

    def text(self, begins: Begins, marker: Marker) -> str:
        """The grammar, behind the thought with which the output may begin. A thought that has begun must end."""
        named = [{"name": f"body{i}", **entry} for i, entry in enumerate(self.entries)]
        if begins == "closed" and len(named) == 1:
            return json.dumps({"grammars": named}, ensure_ascii=False)
        main = f"start: ({' | '.join(f'@body{i}' for i in range(len(named)))})\n"
        if begins != "closed":
            thought = "thought" if begins == "open" else f"({marker(THINK)} thought)?"
            blank = "thought: lead BLANK\nBLANK: /[ \\n]{0,8}/\n"
            main = main.replace("start: ", f"start: {thought} ") + blank + lead(THOUGHT, marker)
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *named]}, ensure_ascii=False)


def constraint(request: Common) -> Constraint | None:
    """What the output must match; None: anything. Raises `RequestError` for what is wrong by its form alone."""
    asked, options = request.response_format, request.structured_outputs
    wanted = _formatted(asked) if isinstance(asked, JsonObjectFormat | JsonSchemaFormat) else None
    if options is None:
        return wanted
    if wanted is not None:
        raise _wrong("structured_outputs", "takes nothing beside a response_format")
    return _structured(options)


async def compiled(
    wanted: Constraint, begins: Begins, marker: Marker, end_tokens: list[int], compiler: Compiler
) -> Grammar:
    """For an output that begins so. Raises `RequestError` where it cannot be compiled within the limits, a decoder's too."""
    if any("gbnf" in entry for entry in wanted.entries):
        wanted = await asyncio.to_thread(_converted, wanted)
    text = wanted.text(begins, marker)
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise _wrong(
            wanted.param, f"makes a grammar of {len(text.encode())} bytes; at most {MAX_GRAMMAR_BYTES} are taken"
        )
    grammar = Grammar(text=text)
    try:
        await compiler.compile(grammar, end_tokens)
    except GrammarError as error:
        raise _wrong(wanted.param, str(error)) from None
    return grammar


def _formatted(asked: JsonObjectFormat | JsonSchemaFormat) -> Constraint:
    if isinstance(asked, JsonObjectFormat):
        return Constraint((of_schema(ANY_OBJECT),), "response_format")
    param = "response_format.json_schema.schema"
    schema = asked.json_schema.schema
    return Constraint((of_schema(ANY_OBJECT if schema is None else checked(schema, param)),), param)


def _structured(options: StructuredOutputs) -> Constraint:
    given = [name for name in StructuredOutputs.__struct_fields__ if getattr(options, name) not in (None, False)]
    if len(given) != 1:
        takes = "exactly one of json, regex, choice, grammar and json_object"
        raise _wrong("structured_outputs", f"takes {takes}, not {len(given)}")
    param = f"structured_outputs.{given[0]}"
    if options.json is not None:
        return Constraint((of_schema(checked(_parsed(options.json, param), param)),), param)
    if options.regex is not None:
        return Constraint((of_regex(_short(options.regex, param)),), param)
    if options.choice is not None:
        return Constraint((of_choice(options.choice, param),), param)
    if options.grammar is not None:
        return Constraint((of_grammar(_short(options.grammar, param), param),), param)
    return Constraint((of_schema(ANY_OBJECT),), param)


def checked(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """The schema, where it is neither too long nor too deep."""
    if _depth(schema) > MAX_DEPTH:
        raise _wrong(param, f"is nested more than {MAX_DEPTH} levels deep")
    _short(msgspec.json.encode(schema).decode(), param)
    return schema


def of_schema(schema: dict[str, Any]) -> Entry:
    return {"json_schema": with_options(schema)}


def with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """What is not enforced is refused, and not overlooked."""
    given = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
    return {**schema, "x-guidance": {**(given if isinstance(given, dict) else {}), **options}}


def of_regex(regex: str) -> Entry:
    return {"lark_grammar": json.loads(llguidance.LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"]}


def of_choice(choices: list[str], param: str) -> Entry:
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise _wrong(param, f"takes 1 to {MAX_CHOICES} texts, none of them empty")
    return {"lark_grammar": _short("start: " + " | ".join(map(literal, dict.fromkeys(choices))), param)}


def literal(text: str) -> str:
    """`text` as a Lark grammar has it."""
    return json.dumps(text, ensure_ascii=False)


def lead(until: str, marker: Marker) -> str:
    """The Lark rule `lead`: any text up to the first `until`, which is part of it; and the terminal `TEXT`: any text."""
    text = "TEXT: /(.|\\n)*/\n"
    if marker(until) != literal(until):
        return f"lead: TEXT {marker(until)}\n{text}"
    escaped = re.escape(until).replace("/", "\\/")
    return f"lead[lazy]: /(.|\\n)*{escaped}/\n{text}"


def of_grammar(text: str, param: str) -> Entry:
    """Lark, or GBNF, which is converted later."""
    rules = text.count("::=")
    if not rules:
        return {"lark_grammar": text}
    if rules > MAX_GBNF_RULES or len(text) > MAX_GBNF_CHARACTERS:
        takes = f"GBNF of at most {MAX_GBNF_CHARACTERS} characters and {MAX_GBNF_RULES} rules; Lark may be longer"
        raise _wrong(param, f"takes {takes}")
    return {"gbnf": text}


def _converted(wanted: Constraint) -> Constraint:
    """With GBNF as Lark. In a thread: it takes some time, and gives others theirs."""
    entries = tuple(
        {"lark_grammar": _as_lark(entry["gbnf"], wanted.param)} if "gbnf" in entry else entry
        for entry in wanted.entries
    )
    return Constraint(entries, wanted.param)


def _as_lark(gbnf: str, param: str) -> str:
    try:
        lark: str = gbnf_to_lark(gbnf)
    except Exception as error:  # noqa: BLE001 - the converter raises whatever a malformed text leads it to
        raise _wrong(param, f"is no GBNF: {error}") from None
    return lark


def _parsed(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        return msgspec.json.decode(_short(schema, param), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise _wrong(param, f"is not a JSON object: {error}") from None


def _short(text: str, param: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise _wrong(param, f"has {len(text)} characters; at most {MAX_CHARACTERS} are taken")
    return text


def _depth(value: Any) -> int:
    """Levels of objects and lists, counted without recursion."""
    depth, level = 0, [value]
    while level := [child for one in level for child in _children(one)]:
        depth += 1
    return depth


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _wrong(param: str, what: str) -> RequestError:
    return RequestError(f"{param}: {what}", param=param, code="invalid_value")
