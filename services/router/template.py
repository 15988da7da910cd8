"""A model's chat template: Jinja from its directory, rendered in a sandbox with the names that templates expect."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ModelError, RequestError

RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"})
"""Names that `chat_template_kwargs` cannot set."""


Ending = Literal["generation", "messages", "within"]
"""Where a prompt ends: where the assistant's answer begins, after the last message, or within it, at the end of its text."""


class ChatTemplate:
    """Messages to prompt text, special tokens included; the text is tokenized without adding any."""

    def __init__(self, source: str, tokens: dict[str, str], tool_source: str | None = None) -> None:
        """`tokens`: the special tokens by name, `bos_token` and so on. `tool_source`: another template, for requests with
        tools. Raises `ModelError` on bad Jinja."""
        try:
            self._template = _environment().from_string(source)
            self._with_tools = self._template if tool_source is None else _environment().from_string(tool_source)
        except TemplateError as error:
            raise ModelError(f"the chat template does not parse: {error}") from None
        self._tokens = tokens
        self.source = source if tool_source is None else f"{source}\n{tool_source}"
        """All of it."""

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """The template in a model's directory (chat_template.jinja, else tokenizer_config.json); None: it has none."""
        config = _json(directory / "tokenizer_config.json")
        source = _source(directory, config)
        if source is None:
            return None
        tokens = {
            name: token
            for name, value in config.items()
            if name.endswith("_token") and (token := _token_text(value)) is not None
        }
        return cls(source, tokens, _named(config, "tool_use"))

    def render(
        self,
        messages: list[dict[str, Any]],
        kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        ending: Ending = "generation",
    ) -> str:
        """The prompt, up to `ending`. `RequestError` where the template rejects the messages."""
        if ending == "within" and not messages[-1]["content"]:
            message = "continue_final_message: the last message has no text to go on with"
            raise RequestError(message, param="continue_final_message")
        text = self._render(messages, kwargs, tools, add_generation_prompt=ending == "generation")
        return _until_last(text, messages[-1]["content"]) if ending == "within" else text

    def _render(
        self,
        messages: list[dict[str, Any]],
        kwargs: dict[str, Any] | None,
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        try:
            return (self._with_tools if tools else self._template).render(
                **self._tokens,
                **(kwargs or {}),
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise RequestError(f"the chat template rejects these messages: {error}", param="messages") from None


def _until_last(text: str, content: str) -> str:
    """`text` up to the end of `content`, the last message's, of which a template may have trimmed the ends."""
    for written in (content, content.rstrip(), content.lstrip(), content.strip()):
        if written and (at := text.rfind(written)) >= 0:
            return text[: at + len(written)]
    message = "continue_final_message: the chat template does not write the last message as it is"
    raise RequestError(message, param="continue_final_message")


def _source(directory: Path, config: dict[str, Any]) -> str | None:
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    inside = config.get("chat_template")
    return _named(config, "default") if isinstance(inside, list) else inside


def _named(config: dict[str, Any], name: str) -> str | None:
    """One of several templates."""
    inside = config.get("chat_template")
    entries = inside if isinstance(inside, list) else []
    return next((entry["template"] for entry in entries if entry.get("name") == name), None)


def _json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    return content


def _token_text(value: object) -> str | None:
    """A special token is its text, or an object that holds it as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: object, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
