"""From a request's bytes to a `Job`: everything that can be wrong without a device is a `RequestError` here."""

from __future__ import annotations

import re
import secrets
import time
from functools import cache
from operator import attrgetter
from typing import Any, Literal, TypeVar

import msgspec

from services.router.model import ServedModel
from services.router.openai_types import NEUTRAL, ChatRequest, Common, CompletionRequest
from services.router.speech import Manners
from services.router.template import RESERVED, Ending
from shared.errors import RequestError
from shared.messages import Grammar, Sampling

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_CHOICES = 128
"""Of one request: prompts times `n`."""
MAX_REPETITION_PENALTY = 100
MOST = 2**31 - 1

RANGES: dict[str, tuple[int, int, bool]] = {
    "n": (1, MAX_CHOICES, False),
    "temperature": (0, 2, False),
    "top_p": (0, 1, True),
    "min_p": (0, 1, False),
    "top_k": (-1, MOST, False),
    "seed": (-(2**63), 2**63 - 1, False),
    "max_tokens": (0, MOST, False),
    "max_completion_tokens": (0, MOST, False),
    "min_tokens": (0, MOST, False),
    "truncate_prompt_tokens": (1, MOST, False),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "repetition_penalty": (0, MAX_REPETITION_PENALTY, True),
}
"""The least and the most of a parameter of both endpoints, and whether it must be above the least."""

R = TypeVar("R", bound=msgspec.Struct)
Request = ChatRequest | CompletionRequest


class Prompt(msgspec.Struct, frozen=True):
    """One prompt. `text` and `starts` (where in it each token begins, characters) only where it is to be echoed."""

    tokens: list[int]
    text: str = ""
    starts: list[int] = []


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a sound request, ready for a decoder. All choices of a request have one `id`."""

    id: str
    kind: Literal["chat", "completion"]
    created: int
    model: str
    tokens: list[int]
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...]
    keep_stop: bool
    stop_token_ids: list[int]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    grammar: Grammar | None = None
    """What the output must match; it has been compiled here."""
    manners: Manners | None = None
    """None: the output is text and nothing else."""
    index: int = 0
    """Of the choice."""
    repeats_prompt: bool = False
    """An earlier choice has the same prompt, and it was counted there."""
    fingerprint: str = ""
    echo: Prompt | None = None
    """What comes before the output."""
    keep_special: bool = False
    """Special tokens have text."""

    @property
    def prompt_logprobs(self) -> int | None:
        """As in `Generate`."""
        return None if self.echo is None else self.sampling.logprobs

    @property
    def alone(self) -> bool:
        """It runs at a decoder alone: see `Generate.prefiller`."""
        return len(self.tokens) == 1 or self.max_tokens == 0 or self.prompt_logprobs is not None


class Limits(msgspec.Struct, frozen=True):
    """The longest that fits: the model's positions, and what the pools of the instances that are there can hold."""

    positions: int
    pool_tokens: int | None = None
    """Tokens of the largest pool of a decoder's data parallel rank. None: no decoder is known."""
    prefill_tokens: int | None = None
    """Tokens of the largest prefiller's pool. None: no prefiller is known."""


def decode(body: bytes, kind: type[R]) -> R:
    """The request in `body`, its types checked."""
    try:
        request: R = _decoder(kind).decode(body)
        return request
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def _explained(text: str) -> RequestError:
    """msgspec's "Expected `float | null`, got `str` - at `$.temperature`" as an error that names the parameter."""
    detail, _, path = text.partition(" - at `$")
    where = re.sub(r"\[(\d+)\]", r".\1", path.rstrip("`")).lstrip(".").replace("[...]", ".*")
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", detail):
        param = f"{where}.{match[1]}".lstrip(".")
        return RequestError(f"{param}: no such parameter here", param=param, code="unknown_parameter")
    if match := re.fullmatch(r"Object missing required field `(.*)`", detail):
        param = f"{where}.{match[1]}".lstrip(".")
        return RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    if match := re.fullmatch(r"Expected `(.*)`, got `(.*)`", detail):
        kinds = [_NAMES.get(kind, kind) for kind in match[1].split(" | ") if kind != "null"]
        got = _NAMES.get(match[2], match[2])
        detail = f"takes {' or '.join(kinds)}, not {got}"
    return RequestError(f"{where or 'the body'}: {detail}", param=where or None, code="invalid_type")


def chat_ending(request: ChatRequest) -> Ending:
    """Where the prompt is to end."""
    if not request.continue_final_message:
        return "messages" if request.add_generation_prompt is False else "generation"
    if request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise RequestError(message, param="continue_final_message", code="invalid_value")
    return "within"


def template_kwargs(request: ChatRequest, model: ServedModel) -> dict[str, Any] | None:
    for name in request.chat_template_kwargs or {}:
        if name in RESERVED or not name.isidentifier():
            param = f"chat_template_kwargs.{name}"
            raise RequestError(f"{param} cannot be set by a request", param=param)
    if request.reasoning_effort is None:
        return request.chat_template_kwargs
    if not model.manner.takes_effort:
        message = f"reasoning_effort={request.reasoning_effort}: the model's chat template has no place for it"
        raise _unsupported("reasoning_effort", message)
    return {**(request.chat_template_kwargs or {}), "reasoning_effort": request.reasoning_effort}


def check(request: Request, model: ServedModel) -> None:
    """What needs no tokens: the model's name, parameters' ranges, parameters that are not supported."""
    if request.model != model.name:
        message = f"the model {request.model!r} does not exist here; this is {model.name!r}"
        raise RequestError(message, param="model", status=404, code="model_not_found")
    names = _UNSUPPORTED[type(request)]
    values = attrgetter(*names)(request)
    if values.count(None) < len(values):
        _check_neutral(dict(zip(names, values, strict=True)))
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only for stream=true", param="stream_options")
    _check_ranges(request)
    _check_choices(request)
    _check_stops(request, model)
    logit_bias(request, model.identity.vocab_size)
    logprobs(request)


def _check_choices(request: Common) -> None:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise _unsupported("best_of", f"best_of={request.best_of} is not supported, only as many as n")
    if request.echo and isinstance(request, ChatRequest):
        raise _unsupported("echo", "echo is not supported for chat: use /v1/completions")


_UNSUPPORTED: dict[type, tuple[str, ...]] = {
    kind: tuple(name for name in NEUTRAL if name in kind.__struct_fields__) for kind in (ChatRequest, CompletionRequest)
}


def _check_neutral(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None and not any(_same(value, allowed) for allowed in NEUTRAL[name]):
            raise _unsupported(name, f"{name}={shown(value)} is not supported")


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def _unsupported(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_parameter")


def _check_ranges(request: Request) -> None:
    if not request.echo:
        _range("max_tokens", request.max_tokens, 1, MOST)
        _range("max_completion_tokens", request.max_completion_tokens, 1, MOST)
    for name, (low, high, above) in RANGES.items():
        _range(name, getattr(request, name), low, high, above=above)


def _range(name: str, value: float | None, low: float, high: float, *, above: bool = False) -> None:
    if value is not None and not (low < value <= high if above else low <= value <= high):
        takes = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise RequestError(
            f"{name}={value}: takes a number {takes}", param=name.partition(".")[0], code="invalid_value"
        )


def _check_stops(request: Common, model: ServedModel) -> None:
    stops = stop_strings(request)
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: takes at most {MAX_STOPS} strings, not {len(stops)}", param="stop")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        takes = f"strings of 1 to {MAX_STOP_CHARACTERS} characters"
        raise RequestError(f"stop: takes {takes}", param="stop")
    tokens = request.stop_token_ids or []
    if len(tokens) > MAX_STOP_TOKENS or any(not 0 <= token < model.identity.vocab_size for token in tokens):
        takes = f"at most {MAX_STOP_TOKENS} ids from 0 to {model.identity.vocab_size - 1}"
        raise RequestError(f"stop_token_ids: takes {takes}", param="stop_token_ids")


def logit_bias(request: Common, vocab_size: int) -> dict[int, float]:
    """Token id → what is added to its logit. JSON's keys are text: decimal ids."""
    given = request.logit_bias or {}
    if len(given) > MAX_BIASES:
        raise RequestError(f"logit_bias: takes at most {MAX_BIASES} tokens, not {len(given)}", param="logit_bias")
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and int(token) < vocab_size):
            message = f"logit_bias: {token!r} is not a token id from 0 to {vocab_size - 1}"
            raise RequestError(message, param="logit_bias", code="invalid_value")
        _range(f"logit_bias.{token}", bias, -100, 100)
    return {int(token): bias for token, bias in given.items()}


def logprobs(request: Request) -> int | None:
    """How many of the likeliest tokens to name with each; None: no log-probabilities."""
    if isinstance(request, CompletionRequest):
        _range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
        return request.logprobs
    _range("top_logprobs", request.top_logprobs, 0, MAX_LOGPROBS)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs is only for logprobs=true", param="top_logprobs", code="invalid_value")
    return (request.top_logprobs or 0) if request.logprobs else None


def stop_strings(request: Common) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def plan(request: Request, prompt: Prompt, model: ServedModel, limits: Limits) -> Job:
    """The job of the first choice for a checked request's prompt."""
    chat = isinstance(request, ChatRequest)
    options = request.stream_options
    return Job(
        id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        kind="chat" if chat else "completion",
        created=int(time.time()),
        model=model.name,
        tokens=prompt.tokens,
        sampling=_sampling(request, model.identity.vocab_size),
        max_tokens=_max_tokens(request, len(prompt.tokens), limits, "messages" if chat else "prompt"),
        stops=stop_strings(request),
        keep_stop=bool(request.include_stop_str_in_output),
        stop_token_ids=[*(() if request.ignore_eos else model.eos_token_ids), *(request.stop_token_ids or ())],
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage or options.continuous_usage_stats),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        fingerprint=model.fingerprint,
        echo=prompt if request.echo else None,
        keep_special=request.skip_special_tokens is False,
    )


def _sampling(request: Request, vocab_size: int) -> Sampling:
    seed = secrets.randbits(63) if request.seed is None else request.seed % 2**63
    return Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k if request.top_k is not None and request.top_k > 0 else None,
        min_p=request.min_p or 0.0,
        seed=seed,
        logit_bias=logit_bias(request, vocab_size),
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs(request),
    )


def _max_tokens(request: Request, prompt: int, limits: Limits, param: str) -> int:
    """How many tokens the output may have: what was asked, or the rest of what fits."""
    if prompt == 0:
        raise RequestError("the prompt has no tokens", param=param, code="empty_string")
    most, what = limits.positions, f"the model's context of {limits.positions} tokens"
    if limits.pool_tokens is not None and limits.pool_tokens < most:
        most, what = limits.pool_tokens, f"the KV pool of {limits.pool_tokens} tokens"
    code = "context_length_exceeded"
    if prompt + 1 > most:
        raise RequestError(f"the prompt has {prompt} tokens: too long for {what}", param=param, code=code)
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    alone = request.echo and (request.logprobs is not None or asked == 0)
    if limits.prefill_tokens is not None and prompt - 1 > limits.prefill_tokens and not alone:
        message = f"the prompt has {prompt} tokens: too long for the prefill pool of {limits.prefill_tokens}"
        raise RequestError(message, param=param, code=code)
    if request.min_tokens is not None and asked is not None and request.min_tokens > asked:
        message = f"min_tokens={request.min_tokens} is more than {name}={asked}"
        raise RequestError(message, param="min_tokens", code="invalid_value")
    if asked is None:
        return 16 if isinstance(request, CompletionRequest) else most - prompt
    if prompt + asked > most:
        message = f"{name}={asked} and a prompt of {prompt} tokens do not fit {what}; at most {most - prompt} do"
        raise RequestError(message, param=name, code=code)
    return asked
