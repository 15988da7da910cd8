"""Chat users under Locust: answers stream in; TTFT, the gaps between tokens, the whole time and tokens/s are Locust's metrics.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --users 8 --run-time 60s --headless --html report/load.html

Closed (each user asks, reads, thinks, asks again) unless `--rate` or `--trace` is given: then it is open, and requests are made
at the times of the trace or of a Poisson process, whoever has been answered by then; `--users` only bounds how many run at once.
Prompts are token ids, so that lengths are exact, unless `--chat` is given. KVMESH_API_KEY: where the router asks for one.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from locust import HttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtest.traffic.traffic import Lengths, Request, drawn, poisson, prompt, read

KIND = "LLM"

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "they",
    "at",
    "be",
)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_flags(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("kvmesh")
    group.add_argument("--model-name", default="", help="model to ask for; default: the one that is served")
    group.add_argument(
        "--chat", action="store_true", help="chat messages of as many words as prompts would have tokens"
    )
    group.add_argument("--prompt-lengths", default="256:1024:3072", help="tokens, as median:p95:most")
    group.add_argument("--output-lengths", default="64:256:512", help="tokens, as median:p95:most")
    group.add_argument("--rate", type=float, default=0.0, help="requests a second, on average: an open load")
    group.add_argument("--trace", default="", help="a trace (Mooncake's JSONL, Azure's CSV): an open load")
    group.add_argument("--trace-speed", type=float, default=1.0, help="how much faster than it was")
    group.add_argument("--most-tokens", type=int, default=4096, help="a trace's requests are cut to so many tokens")
    group.add_argument("--think-s", type=float, default=0.0, help="of a user between two requests, on average (closed)")
    group.add_argument("--traffic-seed", type=int, default=1, help="of lengths, times and prompts")


class Schedule:
    """The next request, for whichever user is free. Thread-safe, and greenlet-safe: nothing in it waits."""

    def __init__(self, options: Namespace) -> None:
        self._requests = _requests(options)
        self._lock = threading.Lock()
        self._number = 0
        self.began: float | None = None

    def next(self) -> tuple[int, Request] | None:
        """None: the trace has ended. Times count from the first call."""
        with self._lock:
            self.began = self.began or time.monotonic()
            self._number += 1
            request = next(self._requests, None)
            return None if request is None else (self._number, request)


_schedules: list[Schedule] = []
"""The last one is that of the run."""


def _requests(options: Namespace) -> Iterator[Request]:
    if options.trace:
        return iter(read(Path(options.trace), speed=options.trace_speed, most=options.most_tokens))
    lengths = Lengths.parse(options.prompt_lengths), Lengths.parse(options.output_lengths)
    requests = drawn(*lengths, options.traffic_seed)
    return poisson(requests, options.rate, options.traffic_seed) if options.rate else requests


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _start(environment: Environment, **_: Any) -> None:
    assert environment.parsed_options is not None
    try:
        _schedules.append(Schedule(environment.parsed_options))
    except ValueError as error:
        raise SystemExit(f"locustfile: {error}") from None


class Stream:
    """When what of one answer came."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.first: float | None = None
        self.last = began
        self.tokens = 0
        self.gaps: list[float] = []
        self.error = ""
        self.done = False

    def read(self, lines: Iterable[bytes]) -> None:
        """To the end. `error` says what was wrong."""
        for line in lines:
            if line == b"data: [DONE]":
                self.done = True
            elif line.startswith(b"data: {"):
                self._event(json.loads(line[6:]))
        if not self.done and not self.error:
            self.error = "the stream ended without [DONE]"

    def _event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
            return
        count = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
        if not count:
            return
        now = time.perf_counter()
        if self.first is None:
            self.first = now
        else:
            self.gaps += [(now - self.last) / count] * count
        self.last, self.tokens = now, self.tokens + count


class ChatUser(HttpUser):
    """One that streams."""

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self._think = random.Random(f"{options.traffic_seed} {id(self)}")
        if key := os.environ.get("KVMESH_API_KEY"):
            self.client.headers["Authorization"] = f"Bearer {key}"
        self._model = options.model_name or self.client.get("/v1/models", name="models").json()["data"][0]["id"]

    @task
    def ask(self) -> None:
        schedule = _schedules[-1]
        found = schedule.next()
        if found is None:
            if self.environment.runner is not None:
                self.environment.runner.quit()
            return
        number, request = found
        if request.at_s is not None:
            assert schedule.began is not None
            late = time.monotonic() - schedule.began - request.at_s
            if late < 0:
                time.sleep(-late)
            else:
                self._fire("lateness of the open load", late)
        self._run(number, request)
        think_s = self.environment.parsed_options.think_s
        if request.at_s is None and think_s:
            time.sleep(self._think.expovariate(1 / think_s))

    def _run(self, number: int, request: Request) -> None:
        path, body = self._asked(number, request)
        body |= {
            "model": self._model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        stream = Stream(time.perf_counter())
        with self.client.post(path, json=body, stream=True, catch_response=True, name=path) as answer:
            if answer.status_code != 200:
                answer.failure(f"{answer.status_code}: {answer.text[:200]}")
                return
            stream.read(answer.iter_lines(chunk_size=1024))
            if stream.error:
                answer.failure(stream.error)
                return
            answer.success()
        self._measure(stream)

    def _asked(self, number: int, request: Request) -> tuple[str, dict[str, Any]]:
        options = self.environment.parsed_options
        tokens = prompt(request, number, options.traffic_seed)
        if not options.chat:
            return "/v1/completions", {"prompt": tokens}
        text = " ".join(WORDS[token % len(WORDS)] for token in tokens)
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}

    def _measure(self, stream: Stream) -> None:
        if stream.first is None:
            return
        self._fire("TTFT", stream.first - stream.began, length=stream.tokens)
        self._fire("E2E", stream.last - stream.began, length=stream.tokens)
        for gap in stream.gaps:
            self._fire("ITL", gap)
        if stream.gaps:
            rate = len(stream.gaps) / max(stream.last - stream.first, 1e-9)
            self.environment.events.request.fire(
                request_type=KIND,
                name="tokens/s of a stream (not ms)",
                response_time=rate,
                response_length=stream.tokens,
                exception=None,
                context={},
            )

    def _fire(self, name: str, seconds: float, *, length: int = 0) -> None:
        """Locust's times are milliseconds."""
        self.environment.events.request.fire(
            request_type=KIND,
            name=name,
            response_time=seconds * 1e3,
            response_length=length,
            exception=None,
            context={},
        )
