"""The choices of one request: `n` for each of its prompts, in OpenAI's order, each a job of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from services.router.model import ServedModel
from services.router.openai_types import CompletionRequest
from services.router.validate import MAX_CHOICES, Job, Limits, Prompt, Request, plan, shown
from shared.errors import RequestError

_STEP = 0x9E3779B97F4A7C15
"""Odd, with well-mixed bits (2**64 over the golden ratio): seeds that clients choose do not meet each other's choices."""

A = TypeVar("A")
B = TypeVar("B")


def jobs_of(request: Request, prompts: Sequence[Prompt], model: ServedModel, limits: Limits) -> list[Job]:
    """One a choice: all of the first prompt, then all of the second. Raises `RequestError`."""
    n = request.n or 1
    if len(prompts) * n > MAX_CHOICES:
        message = f"n={n} for {len(prompts)} prompts: at most {MAX_CHOICES} choices in one request"
        raise RequestError(message, param="n", code="invalid_value")
    planned = [plan(request, prompt, model, limits) for prompt in prompts]
    return [_choice(planned[0], job, at * n + i, i, request.seed) for at, job in enumerate(planned) for i in range(n)]


def _choice(first: Job, job: Job, index: int, number: int, seed: int | None) -> Job:
    """Choice `number` of its prompt."""
    if not index:
        return job
    drawn = secrets.randbits(63) if seed is None else (job.sampling.seed + number * _STEP) % 2**63
    return msgspec.structs.replace(
        job,
        id=first.id,
        created=first.created,
        index=index,
        repeats_prompt=number > 0,
        sampling=msgspec.structs.replace(job.sampling, seed=drawn),
    )


def completion_prompts(prompt: str | list[Any], vocab_size: int) -> list[str | list[int]]:
    """The prompts of a completion: text or token ids, one or a list of them."""
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = prompt if several else [prompt]
    if len(prompts) > MAX_CHOICES:
        raise RequestError(f"prompt: takes at most {MAX_CHOICES} prompts, not {len(prompts)}", param="prompt")
    return [
        _completion_prompt(one, f"prompt.{i}" if len(prompts) > 1 else "prompt", vocab_size)
        for i, one in enumerate(prompts)
    ]


def _completion_prompt(prompt: Any, param: str, vocab_size: int) -> str | list[int]:
    if not isinstance(prompt, str | list):
        raise RequestError(f"{param} is neither text nor a list of token ids", param=param, code="invalid_type")
    if not prompt:
        raise RequestError(f"{param} is empty", param=param, code="empty_string")
    if isinstance(prompt, str):
        return prompt
    for token in prompt:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise RequestError(f"{param}: {shown(token)} is not a token id from 0 to {vocab_size - 1}", param=param)
    return prompt


async def prompt_of(request: CompletionRequest, given: str | list[int], model: ServedModel) -> Prompt:
    """The tokens of a completion's prompt; with the text that they are, where that is echoed."""
    last = slice(-(request.truncate_prompt_tokens or 0), None)
    if isinstance(given, list):
        return _spelled(given[last], request, model) if request.echo else Prompt(given[last])
    special = request.special_tokens is not False
    if not request.echo:
        return Prompt((await model.encode(given, add_special_tokens=special))[last])
    tokens, starts = await model.spans(given, add_special_tokens=special)
    cut = starts[last][0] if len(tokens) > len(tokens[last]) else 0
    return Prompt(tokens[last], given[cut:], [start - cut for start in starts[last]])


def _spelled(tokens: list[int], request: CompletionRequest, model: ServedModel) -> Prompt:
    """Each begins where the text ends that is certain before it."""
    detokenizer = model.vocabulary.detokenizer(keep_special=request.skip_special_tokens is False)
    starts, text = [], ""
    for token in tokens:
        starts.append(len(text))
        text += detokenizer.feed([token])
    return Prompt(tokens, text + detokenizer.flush(), starts)


async def together(run: Callable[[A], Awaitable[B]], given: Sequence[A]) -> list[B]:
    """`run` of each at once: all results, in order. Raises what the first that fails raises, once all have ended: the others
    are cancelled."""
    if len(given) == 1:
        return [await run(given[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_of(run, one)) for one in given]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _of(run: Callable[[A], Awaitable[B]], one: A) -> B:
    return await run(one)
