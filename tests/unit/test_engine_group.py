"""Executors of one tensor parallel group: real processes, killed and starved."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.engine.client import ExecutorConfig
from shared.engine.group import ExecutorGroup
from shared.engine.protocol import Row, Step, StepDone, StepError
from shared.engine.whole import GREEDY, Whole, WholeConfig
from shared.errors import ExecutorDied, ModelError, StepTimeout
from shared.models.config import load_config
from tests import random_models

PAGES = np.arange(8, dtype="<i4").tobytes()
LAYERS = random_models.SMALL["num_hidden_layers"]
PROMPT = list(range(40))
DEADLINE_S = 30.0


def config_for(directory) -> ExecutorConfig:
    layout = load_config(directory).layout(page_size=16, dtype="float32")
    return ExecutorConfig(model=str(directory), layout=layout, num_pages=8, load_timeout_s=DEADLINE_S)


def prefill(number: int) -> Step:
    return Step(step=number, rows=[Row(tokens=PROMPT[:-1], start=0, pages=PAGES)], signal=True)


async def run(group: ExecutorGroup, step: Step) -> StepDone:
    (answer,) = await group.step([step], timeout_s=DEADLINE_S)
    assert isinstance(answer, StepDone), answer
    return answer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_models.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("kind", "ranks"), [("llama", 2), ("qwen3", 4), ("qwen3-moe", 2), ("deepseek-v3", 4), ("llama", 1)]
)
async def test_greedy_output_is_the_whole_models(tmp_path, kind, ranks):
    directory = random_models.save(kind, tmp_path)
    (expected,) = Whole(directory, WholeConfig(page_size=16)).generate([PROMPT], 6)
    async with ExecutorGroup.start(config_for(directory), ranks) as group:
        assert len(set(group.kv_fds)) == len(set(group.pids)) == ranks
        assert group.kv_bytes == group.layout.region_bytes(8) == os.fstat(group.kv_fds[-1]).st_size
        done = await run(group, prefill(0))
        assert (done.sampled, done.counter) == ([[]], LAYERS)
        tokens, token = [], PROMPT[-1]
        for i in range(6):
            row = Row(tokens=[token], start=len(PROMPT) - 1 + i, pages=PAGES, sample=GREEDY)
            ((token,),) = (await run(group, Step(step=i + 1, rows=[row]))).sampled
            tokens.append(token)
        assert tokens == expected


@pytest.mark.parametrize("rank", [0, 2])
async def test_a_killed_rank_is_named_and_ends_the_others(directory, rank):
    async with ExecutorGroup.start(config_for(directory), 4) as group:
        died = asyncio.ensure_future(group.died())
        os.kill(group.pids[rank], signal.SIGKILL)
        async with asyncio.timeout(2.0):
            with pytest.raises(ExecutorDied, match=f"signal 9: rank {rank} of 4"):
                await died
            await asyncio.gather(*(executor.exited() for executor in group._executors))
            with pytest.raises(ExecutorDied, match=f"rank {rank} of 4"):
                await group.step([prefill(0)], timeout_s=DEADLINE_S)


async def test_a_rank_killed_within_a_step_fails_it(directory):
    async with ExecutorGroup.start(config_for(directory), 2) as group:
        os.kill(group.pids[1], signal.SIGSTOP)
        step = asyncio.ensure_future(group.step([prefill(0)], timeout_s=DEADLINE_S))
        await asyncio.sleep(0)
        os.kill(group.pids[1], signal.SIGKILL)
        async with asyncio.timeout(2.0):
            with pytest.raises(ExecutorDied, match="rank 1 of 2"):
                await step


async def test_a_rank_that_stands_still_is_a_timeout(directory):
    async with ExecutorGroup.start(config_for(directory), 2) as group:
        os.kill(group.pids[1], signal.SIGSTOP)
        with pytest.raises(StepTimeout):
            await group.step([prefill(0)], timeout_s=0.3)
        with pytest.raises(ExecutorDied):
            await group.step([prefill(1)], timeout_s=DEADLINE_S)


async def test_a_failed_and_a_cancelled_step_leave_the_ranks_in_step(directory):
    async with ExecutorGroup.start(config_for(directory), 2) as group:
        bad = Step(step=0, rows=[Row(tokens=[1] * 40, start=0, pages=b"")])
        (answer,) = await group.step([bad], timeout_s=DEADLINE_S)
        assert isinstance(answer, StepError)
        assert "page" in answer.detail
        cancelled = asyncio.ensure_future(group.step([prefill(1)], timeout_s=DEADLINE_S))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await run(group, prefill(2))).counter == 2 * LAYERS


async def test_a_split_that_does_not_fit_is_refused_and_leaves_nothing(directory):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError, match="attention heads, 4"):
        async with ExecutorGroup.start(config_for(directory), 8):
            pass
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors were left open"


async def test_logits_that_are_not_numbers_fail_their_step_and_nothing_else(tmp_path):
    """Rank 0 alone sees them; the next step finds the ranks together."""
    directory = random_models.save("llama", tmp_path)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][:] = np.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    row = Row(tokens=[1, 2], start=0, pages=PAGES, sample=GREEDY)
    async with ExecutorGroup.start(config_for(directory), 2) as group:
        for number in range(2):
            (answer,) = await group.step([Step(step=number, rows=[row])], timeout_s=DEADLINE_S)
            assert isinstance(answer, StepError)
            assert "not numbers" in answer.detail
        assert (await run(group, prefill(2))).counter == LAYERS
