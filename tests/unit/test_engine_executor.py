"""The executor process, alone in its group: real processes, killed, starved and lied to."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.engine import frames
from shared.engine.client import ExecutorConfig
from shared.engine.counter import create_counter
from shared.engine.group import ExecutorGroup
from shared.engine.process import ChildProcess
from shared.engine.protocol import Row, Step, StepDone, StepError
from shared.engine.whole import GREEDY, Whole, WholeConfig
from shared.errors import EngineError, ExecutorDied, ModelError, StepTimeout
from shared.kv.region import KvRegion
from shared.messages import Sampling
from shared.models import _kernels
from shared.models.config import load_config
from shared.models.source import DEFAULT_MODEL, resolve
from tests import random_models

PAGES = np.arange(16, dtype="<i4").tobytes()
LAYERS = random_models.SMALL["num_hidden_layers"]
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_models.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def slow_directory(tmp_path_factory):
    """A model whose long prompts take a while, so that there is time to interfere."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "max_position_embeddings": 8192}
    return random_models.save("llama", tmp_path_factory.mktemp("slow"), **sizes)


def config_for(directory: Path, **changes) -> ExecutorConfig:
    layout = load_config(directory).layout(page_size=16, dtype="float32")
    settings = {"model": str(directory), "layout": layout, "num_pages": 64, "threads": 2, "load_timeout_s": DEADLINE_S}
    return ExecutorConfig(**(settings | changes))


def long_step(number: int) -> Step:
    """Some hundred milliseconds of work for the slow model."""
    pages = np.arange(256, dtype="<i4").tobytes()
    return Step(step=number, rows=[Row(tokens=[1] * 4096, start=0, pages=pages)], signal=True)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


async def run(executor: ExecutorGroup, step: Step) -> StepDone:
    (answer,) = await executor.step([step], timeout_s=DEADLINE_S)
    assert isinstance(answer, StepDone), answer
    return answer


async def test_generates_what_the_whole_model_does(directory):
    prompt = list(range(40))
    (expected,) = Whole(directory, WholeConfig(page_size=16)).generate([prompt], 6)
    async with ExecutorGroup.start(config_for(directory)) as executor:
        assert executor.started[0].attention == f"cpu-{_kernels.instruction_sets()[0]}"
        assert executor.started[0].weights_bytes > 0
        assert executor.kv_bytes == executor.layout.region_bytes(64)
        done = await run(executor, Step(step=0, rows=[Row(tokens=prompt[:-1], start=0, pages=PAGES)], signal=True))
        assert (done.step, done.sampled, done.counter) == (0, [[]], LAYERS)
        assert 0 < done.begin_ns < done.end_ns
        tokens, token = [], prompt[-1]
        for i in range(6):
            row = Row(tokens=[token], start=len(prompt) - 1 + i, pages=PAGES, sample=GREEDY)
            done = await run(executor, Step(step=i + 1, rows=[row]))
            ((token,),) = done.sampled
            tokens.append(token)
            assert done.counter == LAYERS
        assert tokens == expected


async def test_seeded_sampling_does_not_depend_on_the_executor(directory):
    row = Row(tokens=[1, 2, 3], start=0, pages=PAGES, sample=Sampling(temperature=1.0, seed=11))
    other = Row(tokens=[4], start=0, pages=np.array([20], "<i4").tobytes(), sample=Sampling(temperature=1.0, seed=12))
    draws = []
    for rows in ([row], [other, row], [row, other]):
        async with ExecutorGroup.start(config_for(directory, threads=len(rows))) as executor:
            done = await run(executor, Step(step=1, rows=rows))
            draws += done.sampled[rows.index(row)]
    assert len(set(draws)) == 1


async def test_the_region_is_shared_and_only_the_rows_pages_are_written(directory):
    async with ExecutorGroup.start(config_for(directory)) as executor:
        layout = executor.layout
        region = np.memmap(f"/proc/self/fd/{executor.kv_fds[0]}", np.uint8, "r+", shape=(executor.kv_bytes,))
        pages = np.array([9, 3], "<i4").tobytes()
        await run(executor, Step(step=0, rows=[Row(tokens=[5] * 20, start=0, pages=pages)]))
        by_page = region.reshape(layout.num_layers, 64, layout.page_bytes)
        assert set(np.nonzero(by_page.any(axis=(0, 2)))[0].tolist()) == {3, 9}
        del by_page, region


def memory_mb(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise AssertionError(field)


@pytest.mark.slow
async def test_memory_is_weights_and_cache_and_little_more():
    """The bound is weights, KV and 500 MB, at the peak; without torch a tenth of that is enough."""
    directory = resolve(DEFAULT_MODEL)
    layout = load_config(directory).layout(page_size=16, dtype="bfloat16")
    config = ExecutorConfig(model=str(directory), layout=layout, num_pages=64, threads=2)
    async with ExecutorGroup.start(config) as executor:
        pages = np.arange(32, dtype="<i4").tobytes()
        await run(executor, Step(step=0, rows=[Row(tokens=[1] * 512, start=0, pages=pages, sample=GREEDY)]))
        held = (executor.started[0].weights_bytes + executor.kv_bytes) / 2**20
        assert held < memory_mb(executor.pids[0], "VmHWM") < held + 100


BAD_ROWS = [
    (Row(tokens=[1], start=256, pages=PAGES), "needs 17 pages, has 16"),
    (Row(tokens=[1], start=0, pages=b"\x40\x00\x00\x00"), "page 64 of 64"),
    (Row(tokens=[160], start=0, pages=PAGES), "token outside"),
    (Row(tokens=[], start=0, pages=PAGES), "no tokens"),
    (Row(tokens=[1], start=2**62, pages=PAGES), "position"),
]


async def test_bad_rows_fail_their_step_and_nothing_else(directory):
    async with ExecutorGroup.start(config_for(directory)) as executor:
        for number, (row, text) in enumerate(BAD_ROWS):
            (answer,) = await executor.step([Step(step=number, rows=[row], signal=True)], timeout_s=DEADLINE_S)
            assert isinstance(answer, StepError)
            assert answer.step == number
            assert text in answer.detail
        done = await run(executor, Step(step=99, rows=[Row(tokens=[1], start=0, pages=PAGES, sample=GREEDY)]))
        assert done.counter == 0


async def test_a_killed_executor_is_noticed_at_once(directory):
    async with asyncio.timeout(DEADLINE_S):
        async with ExecutorGroup.start(config_for(directory)) as executor:
            died = asyncio.create_task(executor.died())
            os.kill(executor.pids[0], signal.SIGKILL)
            with pytest.raises(ExecutorDied, match="signal 9"):
                await died
            assert await executor._executors[0].exited() == -signal.SIGKILL
            with pytest.raises(ExecutorDied, match="signal 9"):
                await run(executor, Step(step=1, rows=[]))


async def test_killed_in_the_middle_of_a_step(slow_directory):
    async with asyncio.timeout(DEADLINE_S):
        async with ExecutorGroup.start(config_for(slow_directory, num_pages=256)) as executor:
            step = asyncio.create_task(run(executor, long_step(1)))
            await counter_above(executor, 0)
            os.kill(executor.pids[0], signal.SIGKILL)
            with pytest.raises(ExecutorDied) as caught:
                await step
            assert caught.value.status == -signal.SIGKILL


def counter_of(fd: int) -> _kernels.LayerCounter:
    return _kernels.LayerCounter(np.memmap(f"/proc/self/fd/{fd}", np.uint64, "r+", shape=(1,)))


async def counter_above(executor: ExecutorGroup, value: int) -> int:
    return await asyncio.to_thread(counter_of(executor.counter_fd).wait_above, value, DEADLINE_S)


async def test_a_step_that_is_late_ends_the_executor(slow_directory):
    async with asyncio.timeout(DEADLINE_S):
        async with ExecutorGroup.start(config_for(slow_directory, num_pages=256)) as executor:
            with pytest.raises(StepTimeout, match=r"step 7 did not answer within 0\.01 s"):
                await executor.step([long_step(7)], timeout_s=0.01)
            assert await executor._executors[0].exited() == -signal.SIGKILL
            with pytest.raises(ExecutorDied):
                await run(executor, Step(step=8, rows=[]))


async def test_one_step_at_a_time_and_a_cancelled_one_is_waited_for(slow_directory):
    async with asyncio.timeout(DEADLINE_S):
        async with ExecutorGroup.start(config_for(slow_directory, num_pages=256)) as executor:
            first = asyncio.create_task(run(executor, long_step(1)))
            await counter_above(executor, 0)
            with pytest.raises(EngineError, match="step 2 while another one runs"):
                await run(executor, Step(step=2, rows=[]))
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert await counter_above(executor, 0) < 8
            done = await run(executor, Step(step=3, rows=[], signal=True))
            assert (done.step, done.counter) == (3, 16)


async def test_close_is_idempotent_and_leaves_nothing(directory):
    before = open_fds()
    async with ExecutorGroup.start(config_for(directory)) as executor:
        pid = executor.pids[0]
        await run(executor, Step(step=1, rows=[]))
        await executor.close()
        await executor.close()
        assert await executor._executors[0].exited() == 0
        with pytest.raises(ExecutorDied):
            await run(executor, Step(step=2, rows=[]))
    assert open_fds() == before
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_close_in_the_middle_of_a_step_and_of_the_start(slow_directory):
    before = open_fds()
    async with asyncio.timeout(DEADLINE_S):
        async with ExecutorGroup.start(config_for(slow_directory, num_pages=256)) as executor:
            step = asyncio.create_task(run(executor, long_step(1)))
            await counter_above(executor, 0)
        with pytest.raises((ExecutorDied, asyncio.CancelledError)):
            await step
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), ExecutorGroup.start(config_for(slow_directory)):
            pytest.fail("no process starts so fast")
    assert open_fds() == before


async def test_models_that_cannot_be_loaded(directory, tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        async with ExecutorGroup.start(config_for(directory, model=str(tmp_path))):
            pass
    layout = msgspec.structs.replace(config_for(directory).layout, head_dim=32)
    with pytest.raises(ModelError, match="the layout is"):
        async with ExecutorGroup.start(config_for(directory, layout=layout)):
            pass
    with pytest.raises(EngineError, match=r"not ready within 0\.001 s"):
        async with ExecutorGroup.start(config_for(directory, load_timeout_s=0.001)):
            pass


def test_dies_with_its_parent(directory):
    """A parent that is killed takes its executor along, also while that is busy or hung."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(directory)], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
    try:
        os.set_blocking(child, True)
        assert wait_readable(child, DEADLINE_S)
    finally:
        os.close(child)


_PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from shared.engine.client import ExecutorConfig
from shared.engine.group import ExecutorGroup
from shared.models.config import load_config
from shared.models.source import DEFAULT_MODEL, resolve
async def main():
    layout = load_config(Path(sys.argv[1])).layout(page_size=16, dtype="float32")
    async with ExecutorGroup.start(ExecutorConfig(model=sys.argv[1], layout=layout, num_pages=4)) as executor:
        os.kill(executor.pids[0], signal.SIGSTOP)
        print(executor.pids[0], flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def wait_readable(fd: int, timeout_s: float) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


async def test_ends_at_end_of_file(directory):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = spawn_bare(theirs)
        theirs.close()
        ours.close()
        async with asyncio.timeout(DEADLINE_S):
            assert await child.exited() == 0


async def test_garbage_ends_it(directory):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = spawn_bare(theirs, stderr=subprocess.DEVNULL)
        theirs.close()
        ours.sendall((1 << 31).to_bytes(4, "little"))
        async with asyncio.timeout(DEADLINE_S):
            assert await child.exited() != 0


def spawn_bare(sock: socket.socket, **options) -> ChildProcess:
    command = [sys.executable, "-m", "shared.engine.executor", "--fd", str(sock.fileno()), "--parent", str(os.getpid())]
    return ChildProcess(command, pass_fds=[sock.fileno()], environ=os.environ, **options)


async def test_a_process_that_does_not_stop_is_made_to():
    @asynccontextmanager
    async def stubborn(code: str):
        child = ChildProcess(
            [sys.executable, "-c", code + "; print(1, flush=True); signal.pause()"],
            pass_fds=[],
            environ=os.environ,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        with child.stdout:
            child.stdout.readline()
            yield child

    async with stubborn("import signal") as child:
        assert await child.end(0.05) == -signal.SIGTERM
    async with stubborn("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)") as child:
        assert await child.end(0.05) == -signal.SIGKILL
        assert await child.end(0.05) == -signal.SIGKILL


def test_frames():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message = Step(step=3, rows=[Row(tokens=[1], start=0, pages=b"abcd", sample=GREEDY)])
        theirs.sendall(frames.pack(message) * 2)
        theirs.sendall(frames.pack(message)[:-1])
        theirs.close()
        for _ in range(2):
            body = frames.receive(ours)
            assert body is not None
            assert msgspec.msgpack.decode(body, type=Step) == message
        assert frames.receive(ours) is None
    with pytest.raises(EngineError, match="out of step"):
        frames.body_bytes(b"\xff\xff\xff\xff")


def test_the_region_is_zeroed_shared_and_of_fixed_size():
    region = KvRegion(10_000)
    with region.map() as first, region.map() as second:
        assert not any(first[:])
        first[9_999] = 7
        assert second[9_999] == 7
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, 100)
    fd = region.fd
    assert not os.get_inheritable(fd)
    region.close()
    region.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="at least one byte"):
        KvRegion(0)


def test_the_counter_counts_and_wakes_other_processes():
    fd = create_counter()
    try:
        counter = counter_of(fd)
        code = (
            "import mmap, sys, numpy; from shared.models import _kernels;"
            "word = numpy.frombuffer(mmap.mmap(int(sys.argv[1]), 4096), numpy.uint64, count=1);"
            "print('ready', flush=True);"
            f"print(_kernels.LayerCounter(word).wait_above(0, {DEADLINE_S}))"
        )
        waiter = subprocess.Popen(
            [sys.executable, "-c", code, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True
        )
        assert waiter.stdout is not None
        with waiter.stdout:
            assert waiter.stdout.readline() == "ready\n"
            assert counter.advance() == 1
            assert waiter.stdout.readline() == "1\n"
        assert waiter.wait(DEADLINE_S) == 0
        assert (counter.value, int.from_bytes(os.pread(fd, 8, 0), "little")) == (1, 1)
        assert counter.wait_above(1, 0.01) == 1
    finally:
        os.close(fd)
