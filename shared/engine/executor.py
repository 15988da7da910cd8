"""The executor process: `python -m shared.engine.executor --fd N`, N its end of the socket pair.

It loads one model, runs the steps it is sent, one at a time, and ends at `Stop`, at end-of-file, or with its parent.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import msgspec
import numpy as np

from shared.engine import frames
from shared.engine.collective import shared_bytes
from shared.engine.counter import COUNTER_BYTES
from shared.engine.protocol import Start, Started, StartFailed, Step, StepDone, StepError, Stop, ToExecutor
from shared.errors import RankLost, RowsFailed
from shared.models import _kernels
from shared.models.collective import Peers, SharedMemory
from shared.models.drafter import Followed
from shared.models.model import Model, ModelOptions

_PR_SET_PDEATHSIG = 1
_decoder = msgspec.msgpack.Decoder(ToExecutor)


class Runner:
    """A loaded model, its KV region and its layer counter. Raises what loading raises; `run` raises where other ranks cannot
    go on without what this one did not do."""

    def __init__(self, start: Start) -> None:
        kv = np.frombuffer(_map(start.kv_fd, start.layout.region_bytes(start.num_pages)), np.uint8)
        word = np.frombuffer(_map(start.counter_fd, COUNTER_BYTES), np.uint64, count=1)
        self.counter = _kernels.LayerCounter(word)
        options = msgspec.convert(
            {
                "weights_dtype": start.weights_dtype,
                "threads": start.threads,
                "purpose": start.purpose,
                "drafter": start.drafter,
                "draft_model": start.draft_model,
            },
            ModelOptions,
        )
        self._leads = start.rank == 0
        peers = _peers(start)
        self._alone = peers == Peers()
        self.model = Model(Path(start.model), options, start.layout, start.num_pages, kv, peers=peers)

    def run(self, step: Step) -> StepDone | StepError:
        begin_ns = time.monotonic_ns()
        try:
            drawn = self.model.draw(step.rows, self._advance if step.signal and self._leads else None)
        except RowsFailed as error:
            return StepError(step=step.step, detail=str(error), counter=self.counter.value)
        except Exception as error:
            if not self._alone:
                raise
            detail = "".join(traceback.format_exception(error))
            return StepError(step=step.step, detail=detail, counter=self.counter.value)
        end_ns = time.monotonic_ns()
        followed = drawn.followed or Followed([], {})
        return StepDone(
            step=step.step,
            sampled=drawn.tokens,
            begin_ns=begin_ns,
            end_ns=end_ns,
            counter=self.counter.value,
            logprobs=drawn.logprobs,
            proposed={i: tokens for i, tokens in enumerate(followed.proposed) if tokens},
            hidden=followed.hidden,
            scores=drawn.scores,
        )

    def _advance(self) -> None:
        self.counter.advance()


def _peers(start: Start) -> Peers:
    return Peers(
        tensor=_end(start.tensor_fd, start.rank % start.tp, start.tp),
        experts=_end(start.expert_fd, start.rank, start.tp * start.dp),
    )


def _end(fd: int | None, rank: int, ranks: int) -> SharedMemory | None:
    if fd is None:
        return None
    return SharedMemory(np.frombuffer(_map(fd, shared_bytes(ranks)), np.uint8), rank, ranks)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    """A shared, writable mapping of an inherited memfd; the descriptor is closed."""
    mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    return mapping


def serve(sock: socket.socket) -> None:
    """Answer frames until `Stop` or end-of-file."""
    runner = _start(sock)
    while runner is not None and (body := frames.receive(sock)) is not None:
        message = _decoder.decode(body)
        if not isinstance(message, Step):
            return
        sock.sendall(frames.pack(runner.run(message)))


def _start(sock: socket.socket) -> Runner | None:
    """The runner that the first frame asks for, answered; None where there is nothing to go on with."""
    body = frames.receive(sock)
    message = Stop() if body is None else _decoder.decode(body)
    if not isinstance(message, Start):
        return None
    begin = time.monotonic()
    try:
        runner = Runner(message)
    except Exception as error:  # noqa: BLE001 - the outermost frame of loading: whatever it raises is its answer
        sock.sendall(frames.pack(StartFailed(detail=f"{type(error).__name__}: {error}")))
        return None
    load_s = time.monotonic() - begin
    started = Started(load_s=load_s, weights_bytes=runner.model.weights_bytes, attention=runner.model.attention_name)
    sock.sendall(frames.pack(started))
    return runner


def _die_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent ends; `parent` is who it was at the start of both."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def main() -> None:
    parser = argparse.ArgumentParser(prog="shared.engine.executor", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the parent")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    arguments = parser.parse_args()
    _die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    with socket.socket(fileno=arguments.fd) as sock:
        try:
            serve(sock)
        except (BrokenPipeError, ConnectionResetError):
            sys.exit("the parent closed the connection")
        except RankLost as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
