"""The engine in one process that prefills and decodes in the same steps: continuous batching with chunked prefill, the chunk in
one forward with the decoding rows (as in Sarathi-Serve, Agrawal et al., 2024, arXiv 2403.02310). No HTTP, no broker: nothing
between the model and the clock."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec

from loadtest.interference.load import Heard, Load

PAGE_SIZE = 64
KV_TOKENS = 65536


class Sequence:
    def __init__(self, prompt: list[int], most: int, pages: bytes) -> None:
        self.tokens = list(prompt)
        self.most = most
        self.pages = pages
        self.computed = 0
        self.times: list[float] = []

    @property
    def left(self) -> int:
        """Of the prompt, to be prefilled: all but its last token."""
        return len(self.tokens) - 1 - self.computed if not self.times else 0

    @property
    def done(self) -> bool:
        return len(self.times) >= self.most


@contextmanager
def mixed_engine(model: str, *, threads: int, chunk_tokens: int) -> Iterator[Callable[[Load], Heard]]:
    """In a process of its own, on all cores that this one has."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs, model, threads, chunk_tokens), daemon=True
    )
    process.start()
    theirs.close()

    def run(load: Load) -> Heard:
        ours.send(load)
        heard: Heard = ours.recv()
        return heard

    try:
        ours.recv()
        yield run
    finally:
        ours.close()
        process.terminate()
        process.join()


def _serve(requests: Connection, model: str, threads: int, chunk_tokens: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    from shared.engine.whole import Whole, WholeConfig
    from shared.models.model import ModelOptions
    from shared.models.source import resolve

    options = ModelOptions(threads=threads)
    config = WholeConfig(options=options, kv_dtype="bfloat16", page_size=PAGE_SIZE, kv_tokens=KV_TOKENS)
    engine = Mixed(Whole(resolve(model), config), chunk_tokens)
    requests.send("ready")
    while True:
        try:
            load = requests.recv()
        except EOFError:
            return
        requests.send(engine.run(load))


class Mixed:
    def __init__(self, whole: object, chunk_tokens: int) -> None:
        from shared.engine.whole import Whole

        assert isinstance(whole, Whole)
        self._whole, self._chunk_tokens = whole, chunk_tokens

    def run(self, load: Load) -> Heard:
        """The streams are given their first token before the clock starts."""
        arrivals = load.arrivals()
        most = 4096
        tables = self._whole.page_tables(
            [load.stream_prompt_tokens + most] * load.streams
            + [load.prompt_tokens + load.output_tokens] * len(arrivals)
        )
        streams = [Sequence(load.stream_prompt(i), most, tables[i]) for i in range(load.streams)]
        prompts = [
            Sequence(load.prompt(i), load.output_tokens, table) for i, table in enumerate(tables[load.streams :])
        ]
        running: list[Sequence] = list(streams)
        while any(not stream.times for stream in streams):
            self._step(running)
        due = deque(zip(arrivals, prompts, strict=True))
        began = time.perf_counter()
        for stream in streams:
            stream.times = [began]
        while (now := time.perf_counter()) - began < load.seconds:
            while due and due[0][0] <= now - began:
                running.append(due.popleft()[1])
            self._step(running)
            running = [sequence for sequence in running if not sequence.done]
        ended = [(at, prompt) for at, prompt in zip(arrivals, prompts, strict=True) if prompt.done]
        return Heard(
            [[at - began for at in stream.times] for stream in streams],
            [at for at, _ in ended],
            [prompt.times[0] - began for _, prompt in ended],
            [prompt.times[-1] - began for _, prompt in ended],
        )

    def _step(self, running: list[Sequence]) -> None:
        """One forward: a row for each sequence that decodes, and of the prompts, oldest first, what the chunk has room for."""
        from shared.engine.protocol import Row
        from shared.messages import Sampling

        rows, drawing, room = [], [], self._chunk_tokens
        for sequence in running:
            if not sequence.left:
                at = len(sequence.tokens) - 1
                rows.append(
                    Row(tokens=sequence.tokens[-1:], start=at, pages=sequence.pages, sample=Sampling(temperature=0.0))
                )
                drawing.append(sequence)
                room -= 1
        for sequence in running:
            take = min(sequence.left, room)
            if take > 0:
                first = sequence.computed
                rows.append(Row(tokens=sequence.tokens[first : first + take], start=first, pages=sequence.pages))
                sequence.computed += take
                room -= take
        tokens = self._whole.model.draw(rows).tokens
        now = time.perf_counter()
        for sequence, token in zip(drawing, tokens, strict=False):
            sequence.tokens += msgspec.convert(token, list[int])
            sequence.times.append(now)
