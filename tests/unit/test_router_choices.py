"""The choices of a request: their order, their seeds, what is counted once; and running them together."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from services.router.choices import jobs_of, prompt_of, together
from services.router.chunks import usage_of
from services.router.openai_types import CompletionRequest
from services.router.validate import MAX_CHOICES, Job, Limits, Prompt, check, decode
from shared.errors import RequestError
from tests.tiny_model import BOS, served_model

MODEL = served_model()


def request(**fields: Any) -> CompletionRequest:
    made = decode(msgspec.json.encode({"model": "tiny", "prompt": "hi", **fields}), CompletionRequest)
    check(made, MODEL)
    return made


def made(prompts: list[list[int]], **fields: Any) -> list[Job]:
    return jobs_of(request(**fields), [Prompt(tokens) for tokens in prompts], MODEL, Limits(512))


def test_choices_are_in_openais_order_under_one_id() -> None:
    jobs = made([[5], [6, 7]], n=3)
    assert [(job.index, job.tokens) for job in jobs] == [(i, [5] if i < 3 else [6, 7]) for i in range(6)]
    assert len({(job.id, job.created) for job in jobs}) == 1
    assert usage_of(jobs, 4).prompt_tokens == 3, "a prompt counts once, whatever n is"


def test_a_seed_gives_each_choice_draws_of_its_own_the_same_each_time() -> None:
    seeds = [job.sampling.seed for job in made([[5]], n=5, seed=7)]
    assert seeds == [job.sampling.seed for job in made([[5]], n=5, seed=7)]
    assert len(set(seeds)) == 5
    assert seeds[0] == made([[5]], seed=7)[0].sampling.seed, "the first is what n=1 gives"
    assert not set(seeds[1:]) & {job.sampling.seed for seed in range(20) for job in made([[5]], seed=seed)}
    assert seeds == [job.sampling.seed for job in made([[6], [5]], n=5, seed=7)][5:], "whatever stands beside it"


def test_without_a_seed_all_draw_differently() -> None:
    assert len({job.sampling.seed for job in made([[5], [5]], n=3)}) == 6


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": MAX_CHOICES + 1}, {"n": 2.5}, {"n": True}, {"best_of": 2}])
def test_what_is_no_number_of_choices_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        request(**fields)
    assert (raised.value.status, raised.value.param) == (400, next(iter(fields)))
    request(n=4, best_of=4)


def test_choices_are_bounded_over_all_prompts() -> None:
    assert len(made([[5]] * 2, n=MAX_CHOICES // 2)) == MAX_CHOICES
    with pytest.raises(RequestError, match="at most 128") as raised:
        made([[5]] * 3, n=MAX_CHOICES // 2)
    assert raised.value.param == "n"


async def test_an_echoed_text_is_given_back_as_it_was_with_where_its_tokens_begin() -> None:
    text = "na\u00efve <|user|>\U0001f642!"
    prompt = await prompt_of(request(echo=True), text, MODEL)
    assert prompt.text == text
    assert prompt.tokens[0] == BOS
    assert prompt.starts[0] == 0
    names = [MODEL.tokenizer.id_to_token(token) for token in prompt.tokens]
    assert prompt.starts[names.index("<|user|>")] == text.index("<|user|>")
    assert prompt.starts == sorted(prompt.starts)
    cut = await prompt_of(request(echo=True, truncate_prompt_tokens=1), text, MODEL)
    assert (cut.text, cut.tokens, cut.starts) == ("!", prompt.tokens[-1:], [0])


async def test_echoed_ids_are_spelled() -> None:
    ids = MODEL.tokenizer.encode("a\U0001f642b", add_special_tokens=True).ids
    plain = await prompt_of(request(echo=True), ids, MODEL)
    assert (plain.text, plain.starts[0], plain.starts[-1]) == ("a\U0001f642b", 0, 2)
    kept = await prompt_of(request(echo=True, skip_special_tokens=False), ids, MODEL)
    assert kept.text == "<|bos|>a\U0001f642b"
    assert kept.starts[1] == len("<|bos|>")


async def test_a_prompt_is_cut_to_its_last_tokens() -> None:
    assert (await prompt_of(request(truncate_prompt_tokens=2), [5, 6, 7], MODEL)).tokens == [6, 7]
    assert (await prompt_of(request(truncate_prompt_tokens=9), [5, 6, 7], MODEL)).tokens == [5, 6, 7]


async def test_the_first_failure_ends_all_and_is_what_is_raised() -> None:
    ended: list[int] = []
    started = asyncio.Barrier(3)

    async def run(at: int) -> int:
        try:
            await started.wait()
            if at == 1:
                raise RequestError("no")
            await asyncio.Event().wait()
        finally:
            ended.append(at)
        return at

    with pytest.raises(RequestError, match="no"):
        await together(run, range(3))
    assert sorted(ended) == [0, 1, 2]


async def test_results_are_in_order() -> None:
    async def run(at: int) -> int:
        for _ in range(3 - at):
            await asyncio.sleep(0)
        return at

    assert await together(run, range(3)) == [0, 1, 2]
    assert await together(run, [1]) == [1]
