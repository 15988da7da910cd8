"""How families of models write tool calls and thoughts, and which of them a chat template speaks."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from shared.errors import ModelError

ToolDialect = Literal["hermes", "llama3_json", "deepseek_v3", "deepseek_v31"]

THINK, THOUGHT = "<think>", "</think>"
"""Around what a model thinks before it answers: Qwen 3, DeepSeek R1 and those that follow them."""

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """A call as it is written: `before_name`, the name, `after_name`, its arguments as JSON, `after_arguments`, in pieces of
    which some are tokens of their own. `around` all calls, and between two of them `separator` (None: one call only)."""

    name: ToolDialect
    before_name: tuple[str, ...]
    after_name: tuple[str, ...]
    after_arguments: tuple[str, ...]
    around: tuple[str, str] = ("", "")
    separator: str | None = None
    begin: str = ""
    """What a call begins with. Empty: an output is calls from its first character on, or has none."""
    close: str = ""
    noise: tuple[str, ...] = ()
    """Markers that say nothing."""
    head: tuple[str, str] | None = None
    """The texts before and after the name, where a head with the name comes before the arguments. None: both are in one
    object, `{"name": ..., "arguments": {...}}`, in any order."""

    @property
    def markers(self) -> set[str]:
        """Texts that may be tokens, and special ones."""
        return {text for text in (self.begin, self.close, *self.noise, *(self.head or ())) if text}


HERMES = Dialect(
    name="hermes",
    before_name=("<tool_call>", '\n{"name": "'),
    after_name=('", "arguments": ',),
    after_arguments=("}\n", "</tool_call>"),
    separator="\n",
    begin="<tool_call>",
    close="</tool_call>",
)
LLAMA3_JSON = Dialect(
    name="llama3_json",
    before_name=('{"name": "',),
    after_name=('", "parameters": ',),
    after_arguments=("}",),
    noise=("<|python_tag|>",),
)
DEEPSEEK_V3 = Dialect(
    name="deepseek_v3",
    before_name=(_CALL, "function", _SEP),
    after_name=("\n```json\n",),
    after_arguments=("\n```", _CALL_END),
    around=(_CALLS, _CALLS_END),
    separator="\n",
    begin=_CALL,
    close=_CALL_END,
    noise=(_CALLS, _CALLS_END),
    head=(_SEP, "\n"),
)
DEEPSEEK_V31 = Dialect(
    name="deepseek_v31",
    before_name=(_CALL,),
    after_name=(_SEP,),
    after_arguments=(_CALL_END,),
    around=(_CALLS, _CALLS_END),
    separator="",
    begin=_CALL,
    close=_CALL_END,
    noise=(_CALLS, _CALLS_END),
    head=("", _SEP),
)
DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (HERMES, LLAMA3_JSON, DEEPSEEK_V3, DEEPSEEK_V31)}


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of how a model speaks; read off its template, or set."""

    tools: Dialect | None
    """None: the template takes no tools, or writes calls in a form that is not known here."""
    thinks: bool
    takes_tools: bool
    """The template has a place for tools."""
    takes_effort: bool
    """The template has a place for `reasoning_effort`."""
    arguments_as_text: bool
    """The template wants the arguments of earlier calls as JSON text, not as an object."""


SILENT = Manner(tools=None, thinks=False, takes_tools=False, takes_effort=False, arguments_as_text=False)
"""Of a model without a template."""


def manner_of(source: str, *, tools: str = "auto", reasoning: str = "auto") -> Manner:
    """Of a chat template; `tools` and `reasoning` are the settings: "auto", "none", or a parser's name. Raises `ModelError`
    where tools are to be parsed that the template cannot name."""
    takes_tools = re.search(r"\btools\b", source) is not None
    if tools not in ("auto", "none") and not takes_tools:
        raise ModelError(f"KVMESH_TOOL_PARSER={tools}: the chat template has no tools")
    dialect = _dialect_in(source) if takes_tools else None
    return Manner(
        tools=dialect if tools == "auto" else DIALECTS.get(tools),
        thinks=THOUGHT in source if reasoning == "auto" else reasoning != "none",
        takes_tools=takes_tools,
        takes_effort="reasoning_effort" in source,
        arguments_as_text=re.search(r"\barguments\b['\"]?\]?\s*\)?\s*\|\s*tojson", source) is None,
    )


def _dialect_in(source: str) -> Dialect | None:
    if _CALL in source:
        return DEEPSEEK_V3 if "```json" in source else DEEPSEEK_V31
    if "<function=" in source:
        return None
    if HERMES.begin in source:
        return HERMES
    if '"parameters": ' in source and ("ipython" in source or "<|python_tag|>" in source):
        return LLAMA3_JSON
    return None
