"""Data parallel ranks of one group, in lockstep: real processes, killed within an exchange."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from shared.engine.client import ExecutorConfig
from shared.engine.group import ExecutorGroup
from shared.engine.protocol import Row, Step, StepDone, StepError
from shared.engine.whole import GREEDY, Whole, WholeConfig
from shared.errors import ExecutorDied, ModelError, StepTimeout
from shared.models import _kernels
from shared.models.config import load_config
from tests import random_models

PAGES = np.arange(8, dtype="<i4").tobytes()
DEADLINE_S = 30.0
NEW = 5
DENSE_LAYERS = random_models.DEEPSEEK_V3["first_k_dense_replace"]
KINDS = {"deepseek-v3": {}, "qwen3-moe": {"num_experts": 8}, "llama": {}}


def config_for(directory) -> ExecutorConfig:
    layout = load_config(directory).layout(page_size=16, dtype="float32")
    return ExecutorConfig(model=str(directory), layout=layout, num_pages=8, load_timeout_s=DEADLINE_S)


async def run(group: ExecutorGroup, number: int, rows: list[list[Row]]) -> list[list[int | None]]:
    answers = await group.step([Step(step=number, rows=own) for own in rows], timeout_s=DEADLINE_S)
    assert all(isinstance(answer, StepDone) for answer in answers), answers
    return [answer.sampled for answer in answers if isinstance(answer, StepDone)]


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    return random_models.save("deepseek-v3", tmp_path_factory.mktemp("deepseek-v3"))


@pytest.mark.parametrize(
    ("kind", "tp", "dp", "ep"),
    [
        ("deepseek-v3", 1, 2, 2),
        ("deepseek-v3", 1, 4, 4),
        ("deepseek-v3", 2, 2, 4),
        ("qwen3-moe", 1, 2, 2),
        ("qwen3-moe", 1, 4, 4),
        ("qwen3-moe", 2, 2, 4),
        ("llama", 1, 2, 1),
    ],
)
async def test_greedy_output_is_the_whole_models(tmp_path, kind, tp, dp, ep):
    """Every rank has a prompt of its own, of another length, but one has none, and prefills it alone while others stand by."""
    directory = random_models.save(kind, tmp_path, **KINDS[kind])
    prompts = [np.random.default_rng(rank).integers(0, 160, 12 + 25 * rank).tolist() for rank in range(dp)]
    whole = Whole(directory, WholeConfig(page_size=16))
    expected = [whole.generate([prompt], NEW)[0] for prompt in prompts]
    if dp == 4:
        prompts[2], expected[2] = [], []
    async with ExecutorGroup.start(config_for(directory), tp, dp) as group:
        assert (group.tp, group.dp, group.ep) == (tp, dp, ep)
        assert len(group.kv_fds) == len(set(group.pids)) == tp * dp
        fills = [[Row(tokens=prompt[:-1], start=0, pages=PAGES)] if prompt else [] for prompt in prompts]
        for rank in range(dp):
            await run(group, rank, [fill if rank == d else [] for d, fill in enumerate(fills)])
        outputs: list[list[int]] = [[] for _ in prompts]
        for i in range(NEW):
            rows = [
                [Row(tokens=(prompt + output)[-1:], start=len(prompt) - 1 + i, pages=PAGES, sample=GREEDY)]
                if prompt
                else []
                for prompt, output in zip(prompts, outputs, strict=True)
            ]
            for output, sampled in zip(outputs, await run(group, 100 + i, rows), strict=True):
                output += [token for tokens in sampled for token in tokens]
        assert outputs == expected


async def test_bad_rows_of_one_rank_leave_the_others_answers_alone(spread):
    good = Row(tokens=list(range(20)), start=0, pages=PAGES, sample=GREEDY)
    async with ExecutorGroup.start(config_for(spread), dp=2) as group:
        expected = (await run(group, 0, [[good], [good]]))[0]
        bad = [good, Row(tokens=[1] * 40, start=0, pages=b"")]
        answers = await group.step([Step(step=1, rows=bad), Step(step=1, rows=[good])], timeout_s=DEADLINE_S)
        assert isinstance(answers[0], StepError)
        assert "page" in answers[0].detail
        assert isinstance(answers[1], StepDone)
        assert answers[1].sampled == expected
        assert await run(group, 2, [[good], [good]]) == [expected, expected]


@pytest.mark.parametrize("rank", [1, 3])
async def test_a_rank_killed_while_the_others_wait_in_the_exchange(spread, rank):
    """It is stopped first, so that the lead rank gets through the attention of the first layer with experts, and no further."""
    row = Row(tokens=[1, 2, 3], start=0, pages=PAGES, sample=GREEDY)
    async with ExecutorGroup.start(config_for(spread), dp=4) as group:
        os.kill(group.pids[rank], signal.SIGSTOP)
        step = asyncio.ensure_future(group.step([Step(step=0, rows=[row], signal=True)] * 4, timeout_s=DEADLINE_S))
        counter = _kernels.LayerCounter(np.memmap(f"/proc/self/fd/{group.counter_fd}", np.uint64, "r+", shape=(1,)))
        assert await asyncio.to_thread(counter.wait_above, DENSE_LAYERS, DEADLINE_S) == DENSE_LAYERS + 1
        os.kill(group.pids[rank], signal.SIGKILL)
        async with asyncio.timeout(2.0):
            with pytest.raises(ExecutorDied, match=f"signal 9: rank {rank} of 4"):
                await step
            await asyncio.gather(*(executor.exited() for executor in group._executors))
        assert counter.value == DENSE_LAYERS + 1


async def test_a_rank_that_stands_still_is_a_timeout(spread):
    async with ExecutorGroup.start(config_for(spread), dp=2) as group:
        os.kill(group.pids[1], signal.SIGSTOP)
        with pytest.raises(StepTimeout):
            await group.step([Step(step=0, rows=[])] * 2, timeout_s=0.3)


async def test_experts_that_cannot_be_spread_are_refused(tmp_path):
    directory = random_models.save("qwen3-moe", tmp_path, num_experts=6)
    with pytest.raises(ModelError, match="expert parallel 4: takes a divisor of the model's 6 experts"):
        async with ExecutorGroup.start(config_for(directory), tp=2, dp=2):
            pass
