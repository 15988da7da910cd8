"""The requests of OpenAI's API as structs. Types are checked here, meaning in `validate`.

Every field is one of three: used; harmless, so accepted and ignored (`user`, `metadata`, `store` ...); or one that would
change the meaning and is not supported, which is accepted only with the value that changes nothing (`NEUTRAL` below).
A field that is in none of these is refused by name: a misspelt `temprature` must not be a silent no-op.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Part(msgspec.Struct, frozen=True):
    """One part of list-form content."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(msgspec.Struct, frozen=True):
    """An earlier answer's."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema. None: no arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


class ChatMessage(msgspec.Struct, frozen=True):
    """Fields that only echo an earlier answer (`refusal`, `annotations` ...) are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: padding against traffic analysis, which we do not add."""


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`strict` changes nothing: the output always matches. No schema: any object."""

    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: JsonSchema


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's: exactly one of these."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """GBNF, or llguidance's Lark."""
    json_object: bool | None = None


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`; it wins."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Only the prompt's last so many tokens."""
    n: int | None = None
    best_of: int | None = None
    """Only as many as `n`: nothing is made that is not answered."""
    echo: bool | None = None
    """Completions only."""
    request_id: str | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Harmless.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None

    # Not supported: see `NEUTRAL`.
    length_penalty: Any = None
    use_beam_search: Any = None
    spaces_between_special_tokens: Any = None
    """Of no effect with the tokenizers that are served: they put no spaces there."""
    priority: Any = None
    prompt_logprobs: Any = None


class ChatRequest(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The prompt ends within the last message, which the answer goes on with."""
    special_tokens: bool | None = msgspec.field(default=None, name="add_special_tokens")
    """Default: false, for a template writes its own."""

    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Default: auto where there are tools."""
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """Where the template has a place for it."""
    include_reasoning: bool | None = None
    """False: what the model thinks is left out of the answer."""

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    verbosity: Any = None


class CompletionRequest(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    """Text, token ids, or a list of either."""
    logprobs: int | None = None
    suffix: Any = None
    special_tokens: bool | None = msgspec.field(default=None, name="add_special_tokens")


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True, False),
    "priority": (0,),
    "prompt_logprobs": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "suffix": ("",),
}
"""Fields that are not supported, and the values besides null that ask for nothing."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """Of a model that thinks."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "kvmesh"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"
