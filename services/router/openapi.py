"""The API's description, OpenAPI 3.1: schemas from the structs that requests are decoded into, prose from here."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from services.router.answer_types import ChatCompletion, Completion, Health, Ready
from services.router.console import PAGE, ConsoleState
from services.router.model import ServedModel
from services.router.openai_types import NEUTRAL, ChatRequest, CompletionRequest, ModelCard, ModelList
from services.router.tokens_api import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from services.router.validate import MAX_BIASES, MAX_LOGPROBS, MAX_STOP_TOKENS, MAX_STOPS, RANGES
from shared.web.errors import ErrorBody

_REF = "#/components/schemas/{name}"
_STRUCTS = (
    ChatRequest,
    CompletionRequest,
    ChatCompletion,
    Completion,
    ModelList,
    ModelCard,
    TokenizeRequest,
    Tokenized,
    DetokenizeRequest,
    Detokenized,
    Health,
    Ready,
    ConsoleState,
    ErrorBody,
)

_ERRORS = {
    "400": "The request is wrong: `param` names the field, `message` what it takes.",
    "401": "No valid API key, where keys are asked for.",
    "404": "No such model or path.",
    "405": "The path does not take this method.",
    "408": "The request's body did not arrive in time.",
    "413": "The request's body is too large.",
    "429": "Busy, or over a limit of the API key; Retry-After says when to come again.",
    "500": "The answer could not be made, and another try would fail too.",
    "503": "Not now: nothing is ready, or every attempt failed; Retry-After says when to come again.",
    "504": "The deadline passed before the answer was complete.",
}

_STREAM = (
    "With `stream: true` server-sent events: each `data:` one chunk with some of the choices' text, the last `[DONE]`. After the "
    "first byte an error is an event named `error`, with the same body as everywhere, and no `[DONE]` follows."
)
_BOTH = (
    "`n` choices for each prompt run as attempts of their own; `usage` counts a prompt once. A parameter that would change the "
    "meaning and is not supported gets a 400 that names it."
)
_TOKENIZE = "The tokens of a text, or of messages through the chat template: what a generation would get."


def document(model: ServedModel) -> dict[str, Any]:
    """For the model that is served."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvmesh",
            "version": version("kvmesh"),
            "description": "OpenAI-compatible text generation over a mesh of prefill and decode instances.",
        },
        "paths": _paths(),
        "components": {
            "schemas": _schemas(model),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def add_openapi(app: web.Application, model: ServedModel) -> None:
    """/openapi.json asks for no key: it tells nothing that /health and /ready do not."""
    body = msgspec.json.encode(document(model))

    async def describe(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app.router.add_get("/openapi.json", describe)


def _paths() -> dict[str, Any]:
    chat = _post("chat", "Answer a conversation.", f"{_BOTH} {_STREAM}", "ChatRequest", "ChatCompletion", streams=True)
    text = _post(
        "complete", "Go on with a text.", f"{_BOTH} {_STREAM}", "CompletionRequest", "Completion", streams=True
    )
    paths = {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": text},
        "/v1/models": {"get": _get("models", "The models that are served: one.", "ModelList")},
        "/v1/models/{id}": {"get": _get("model", "The model of that name.", "ModelCard"), "parameters": [_ID]},
    }
    for prefix, name in (("", ""), ("/v1", "_v1")):
        spelled = _post(f"tokenize{name}", "Text to tokens.", _TOKENIZE, "TokenizeRequest", "Tokenized")
        back = _post(f"detokenize{name}", "Tokens to text.", "", "DetokenizeRequest", "Detokenized")
        paths |= {f"{prefix}/tokenize": {"post": spelled}, f"{prefix}/detokenize": {"post": back}}
    for path, (name, kind) in PAGE.items():
        paths[path] = {"get": _open(f"console_{name.replace('.', '_')}", "Of the console's page.", {kind: {}})}
    state = _get("console_state", "What the console shows.", "ConsoleState")
    del state["responses"]["404"]
    paths["/console/state"] = {"get": state}
    ready = _open("ready", "Whether a request would find a working pair now.", _json("Ready"))
    ready["responses"]["503"] = {"description": "Not now: the reason.", "content": _json("Ready")}
    return paths | {
        "/health": {"get": _open("health", "This process runs.", _json("Health"))},
        "/ready": {"get": ready},
        "/metrics": {"get": _open("metrics", "Prometheus text.", {"text/plain": {"schema": {"type": "string"}}})},
        "/openapi.json": {"get": _open("describe", "This.", {"application/json": {"schema": {"type": "object"}}})},
    }


_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}


def _errors(*statuses: str) -> dict[str, Any]:
    return {status: {"description": _ERRORS[status], "content": _json("ErrorBody")} for status in statuses}


def _post(
    name: str, summary: str, description: str, request: str, answer: str, *, streams: bool = False
) -> dict[str, Any]:
    content = _json(answer) | ({"text/event-stream": {}} if streams else {})
    return {
        "operationId": name,
        "summary": summary,
        "description": description,
        "security": [{}, {"key": []}],
        "requestBody": {"required": True, "content": _json(request)},
        "responses": {"200": {"description": "The answer.", "content": content}, **_errors(*_ERRORS)},
    }


def _get(name: str, summary: str, answer: str) -> dict[str, Any]:
    operation = _open(name, summary, _json(answer))
    operation["responses"] |= _errors("401", "404")
    return {**operation, "security": [{}, {"key": []}]}


def _open(name: str, summary: str, content: dict[str, Any]) -> dict[str, Any]:
    responses = {"200": {"description": "The answer.", "content": content}, **_errors("405")}
    return {"operationId": name, "summary": summary, "responses": responses}


def _schemas(model: ServedModel) -> dict[str, Any]:
    _, found = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    schemas: dict[str, Any] = found
    for name, kind in (("ChatRequest", ChatRequest), ("CompletionRequest", CompletionRequest)):
        properties = schemas[name]["properties"]
        properties["model"] = {"enum": [model.name]}
        for field, (low, high, above) in RANGES.items():
            _limit(properties[field], {"exclusiveMinimum" if above else "minimum": low, "maximum": high})
        for field in NEUTRAL.keys() & set(kind.__struct_encode_fields__):
            properties[field] = {"enum": [None, *NEUTRAL[field]], "description": "Not supported."}
        _bound(properties, model)
    _limit(schemas["ChatRequest"]["properties"]["top_logprobs"], {"minimum": 0, "maximum": MAX_LOGPROBS})
    _limit(schemas["CompletionRequest"]["properties"]["logprobs"], {"minimum": 0, "maximum": MAX_LOGPROBS})
    for field in ("max_tokens", "max_completion_tokens"):
        _limit(schemas["ChatRequest"]["properties"][field], {"minimum": 1})
    schemas["ChatRequest"]["properties"]["messages"]["minItems"] = 1
    schemas["CompletionRequest"]["properties"]["prompt"] = _prompt(model)
    for name in ("TokenizeRequest", "DetokenizeRequest"):
        schemas[name]["properties"]["model"] = {"enum": [None, model.name]}
    schemas["DetokenizeRequest"]["properties"]["tokens"] = {"type": "array", "items": _token(model)}
    return schemas


def _bound(properties: dict[str, Any], model: ServedModel) -> None:
    """What is not a number's range."""
    text = {"type": "string", "minLength": 1}
    properties["stop"] = {"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOPS}, {"type": "null"}]}
    ids = {"type": "array", "items": _token(model), "maxItems": MAX_STOP_TOKENS}
    properties["stop_token_ids"] = {"anyOf": [ids, {"type": "null"}]}
    bias = {"type": "number", "minimum": -100, "maximum": 100}
    biases = {
        "type": "object",
        "additionalProperties": bias,
        "maxProperties": MAX_BIASES,
        "description": "By token id.",
    }
    properties["logit_bias"] = {"anyOf": [biases, {"type": "null"}]}


def _token(model: ServedModel) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": model.identity.vocab_size - 1}


def _prompt(model: ServedModel) -> dict[str, Any]:
    one = [{"type": "string", "minLength": 1}, {"type": "array", "items": _token(model), "minItems": 1}]
    return {"anyOf": [*one, {"type": "array", "items": {"anyOf": one}, "minItems": 1}]}


def _limit(schema: dict[str, Any], limits: dict[str, int]) -> None:
    """The alternative of `schema` that is a number."""
    next(one for one in schema["anyOf"] if one["type"] in ("integer", "number")).update(limits)
