"""Tools of a chat request: what the template gets, what may be called, and the grammar where a call is forced."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from services.router.dialects import Dialect, Manner
from services.router.openai_types import ChatRequest, Function, NamedTool
from services.router.structured import MAX_CHARACTERS, Marker, checked, lead, literal, with_options
from shared.errors import RequestError

MAX_TOOLS = 128

_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may call."""

    dialect: Dialect
    functions: tuple[Function, ...]
    """All that are offered to the model."""
    forced: tuple[Function, ...] = ()
    """One of these must be called."""
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    @property
    def for_template(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": _as_given(function)} for function in self.functions]


def tools_of(request: ChatRequest, manner: Manner) -> Tools | None:
    """None: no tools are offered, as with tool_choice "none". Raises `RequestError`."""
    functions, choice = tuple(tool.function for tool in request.tools or ()), request.tool_choice
    _check(functions)
    if not functions and (choice == "required" or isinstance(choice, NamedTool)):
        raise _wrong("tool_choice", "asks for a call, and tools is empty")
    if not functions or choice == "none":
        return None
    if manner.tools is None:
        why = "the model's chat template has no place for tools"
        if manner.takes_tools:
            why = "the form in which this model calls tools is not known here (the setting KVMESH_TOOL_PARSER)"
        raise RequestError(f"tools: {why}; only tool_choice none is taken", param="tools", code="unsupported_parameter")
    return Tools(
        dialect=manner.tools,
        functions=functions,
        forced=_forced(functions, choice),
        parallel=request.parallel_tool_calls is not False and manner.tools.separator is not None,
    )


def _forced(functions: tuple[Function, ...], choice: object) -> tuple[Function, ...]:
    if isinstance(choice, NamedTool):
        named = tuple(function for function in functions if function.name == choice.function.name)
        if not named:
            raise _wrong("tool_choice.function.name", f"{choice.function.name!r} is none of the tools")
        return named
    return functions if choice == "required" else ()


def _check(functions: Sequence[Function]) -> None:
    if len(functions) > MAX_TOOLS:
        raise _wrong("tools", f"takes at most {MAX_TOOLS}, not {len(functions)}")
    names = [function.name for function in functions]
    for i, function in enumerate(functions):
        if not _NAME.fullmatch(function.name) or names.index(function.name) != i:
            takes = "letters, digits and any of _ . : -, at most 128, each name once"
            raise _wrong(f"tools.{i}.function.name", f"takes {takes}")
        checked(function.parameters or {}, f"tools.{i}.function.parameters")
    if sum(len(msgspec.json.encode(function)) for function in functions) > MAX_CHARACTERS:
        raise _wrong("tools", f"are more than {MAX_CHARACTERS} characters together")


def calls_grammar(tools: Tools, marker: Marker) -> str | None:
    """The Lark grammar that the output must match so that it calls as it should; None: it may say anything. Where a call is not
    forced but a function is strict, everything goes until a call begins."""
    if tools.forced:
        return f"start: {_block(tools, marker)}\n" + _rules(tools, tools.forced, marker)
    if not any(function.strict for function in tools.functions):
        return None
    rules = _rules(tools, tools.functions, marker)
    if not tools.dialect.begin:
        return f"start: {_block(tools, marker)} | FREE\nFREE: /([^{{<](.|\\n)*)?/\n{rules}"
    first = tools.dialect.around[0] or tools.dialect.begin
    block = _block(tools, marker).removeprefix(marker(first)).strip() if tools.dialect.around[0] else ""
    before = lead(first, marker)
    if block:
        return f"start: (lead {block})* TEXT\n{before}{rules}"
    rest = _call_rules(tools, tools.functions, marker, skip=1)
    return f"start: (lead rest)* TEXT\nrest: {_names('r', len(tools.functions))}\n{before}{rest}"


def only_calls(tools: Tools, marker: Marker) -> str:
    """The grammar of calls alone, for an output that is either calls or something else."""
    return f"start: {_block(tools, marker)}\n" + _rules(tools, tools.functions, marker)


def _block(tools: Tools, marker: Marker) -> str:
    before, after = (marker(text) if text else "" for text in tools.dialect.around)
    separator = tools.dialect.separator
    more = f"({literal(separator)} call)*" if separator else "call*"
    return " ".join(filter(None, (before, "call", more if tools.parallel else "", after)))


def _rules(tools: Tools, functions: Sequence[Function], marker: Marker) -> str:
    return f"call: {_names('r', len(functions))}\n" + _call_rules(tools, functions, marker)


def _names(prefix: str, count: int) -> str:
    return " | ".join(f"{prefix}{i}" for i in range(count))


def _call_rules(tools: Tools, functions: Sequence[Function], marker: Marker, skip: int = 0) -> str:
    """A rule for each function's call and one for its arguments. `skip`: pieces of the beginning that have been said."""
    dialect, rules = tools.dialect, []
    after = " ".join(map(marker, dialect.after_arguments))
    for i, function in enumerate(functions):
        before = " ".join(map(marker, dialect.before_name[skip:]))
        name, neck = literal(function.name), " ".join(map(marker, dialect.after_name))
        schema = json.dumps(with_options(_parameters(function, tools)), ensure_ascii=False)
        rules.append(f"r{i}: {before} {name} {neck} a{i} {after}\na{i}: %json {schema}\n")
    return "".join(rules)


def _parameters(function: Function, tools: Tools) -> dict[str, Any]:
    """The schema that its arguments must match: any object where that is not asked for."""
    if not tools.forced and not function.strict:
        return {"type": "object"}
    return function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _as_given(function: Function) -> dict[str, Any]:
    given = {name: getattr(function, name) for name in ("name", "description", "parameters")}
    return {name: value for name, value in given.items() if value is not None}


def _wrong(param: str, what: str) -> RequestError:
    return RequestError(f"{param}: {what}", param=param, code="invalid_value")
