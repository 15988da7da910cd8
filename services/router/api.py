"""The OpenAI-compatible HTTP interface."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
from aiohttp import web
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from services.router.answers import OpenStream, Stream, StreamedAnswer, WholeAnswer, body_of
from services.router.attempts import Attempt
from services.router.choices import completion_prompts, jobs_of, prompt_of, together
from services.router.console import add_console
from services.router.keys import Holder, Keyring
from services.router.openai_types import ChatRequest, CompletionRequest, ModelCard, ModelList
from services.router.openapi import add_openapi
from services.router.reasoning import Begins
from services.router.relay import Request
from services.router.service import RouterService
from services.router.structured import Constraint, compiled, constraint
from services.router.talk import Talk
from services.router.tokens_api import TokensApi
from services.router.validate import (
    Job,
    Prompt,
    check,
    decode,
)
from shared.errors import AttemptFailed, BusError, Refused, RequestError
from shared.telemetry import traces
from shared.web.errors import describe, errors_as_json
from shared.web.health import add_health
from shared.web.sse import EventStream

BODY_S = 30.0
"""A client must have sent its request's body within this."""

_LABEL = re.compile(r"[!-~]{1,128}")

Prepare = Callable[[bytes], Awaitable[list[Job]]]


class Api:
    """Handlers. One a router."""

    def __init__(self, service: RouterService, keys: Keyring, *, body_s: float = BODY_S) -> None:
        self._service = service
        self._keys = keys
        self._body_s = body_s
        self._model = service.model

    def application(self) -> web.Application:
        app = web.Application(middlewares=[errors_as_json], client_max_size=self._service.settings.max_body_bytes)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{id:.+}", self.model)
        TokensApi(self._model, self._allowed).add_to(app)
        add_openapi(app, self._model)
        add_console(app, self._service, self._keys)
        add_health(app, self._service.readiness, self._service.metrics.registry)
        return app

    async def chat(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, "chat", self._chat_jobs)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, "completions", self._completion_jobs)

    async def models(self, http: web.Request) -> web.Response:
        self._holder(http)
        return _json(ModelList(data=[self._card()]))

    async def model(self, http: web.Request) -> web.Response:
        self._holder(http)
        name = http.match_info["id"]
        if name != self._model.name:
            message = f"the model {name!r} does not exist here; this is {self._model.name!r}"
            raise RequestError(message, param="model", status=404, code="model_not_found")
        return _json(self._card())

    def _card(self) -> ModelCard:
        model = self._model
        return ModelCard(id=model.name, created=model.created, max_model_len=model.max_positions)

    async def _chat_jobs(self, body: bytes) -> list[Job]:
        request = decode(body, ChatRequest)
        check(request, self._model)
        talk = Talk.of(request, self._model)
        tokens = await self._model.encode(talk.prompt, add_special_tokens=bool(request.special_tokens))
        prompt = Prompt(tokens[-(request.truncate_prompt_tokens or 0) :])
        jobs = jobs_of(request, [prompt], self._model, self._service.limits())
        return await self._constrained([talk.mannered(job) for job in jobs], talk.constraint, talk.begins)

    async def _completion_jobs(self, body: bytes) -> list[Job]:
        request = decode(body, CompletionRequest)
        check(request, self._model)
        given = completion_prompts(request.prompt, self._model.identity.vocab_size)
        prompts = [await prompt_of(request, one, self._model) for one in given]
        jobs = jobs_of(request, prompts, self._model, self._service.limits())
        return await self._constrained(jobs, constraint(request), "closed")

    async def _constrained(self, jobs: list[Job], wanted: Constraint | None, begins: Begins) -> list[Job]:
        """All choices of a request match the same grammar."""
        if wanted is None:
            return jobs
        model, service = self._model, self._service
        grammar = await compiled(wanted, begins, model.marker, jobs[0].stop_token_ids, service.grammars)
        return [msgspec.structs.replace(job, grammar=grammar) for job in jobs]

    async def _answer(self, http: web.Request, endpoint: str, prepare: Prepare) -> web.StreamResponse:
        """One request, its span and its metrics; every error is answered here."""
        began = time.monotonic()
        label = _label(http)
        outcome = "disconnected"
        try:
            with self._span(http, {"kvmesh.endpoint": endpoint, "kvmesh.request_id": label}) as span:
                response, outcome = await self._respond(http, prepare, began, label, span)
                return response
        except ConnectionError:
            return web.Response(status=499)
        except Exception as error:
            if not isinstance(error, KNOWN):
                raise
            outcome = outcome_of(error)
            response = describe(error).response()
            response.headers["x-request-id"] = label
            return response
        finally:
            metrics = self._service.metrics
            metrics.requests.labels(endpoint, outcome).inc()
            metrics.e2e.observe(time.monotonic() - began)

    async def _respond(
        self, http: web.Request, prepare: Prepare, began: float, label: str, span: Span
    ) -> tuple[web.StreamResponse, str]:
        holder = self._holder(http)
        if self._service.draining:
            raise Refused("this router is shutting down")
        with holder.request():
            asked = await prepare(await self._read(http))
            with holder.choices(len(asked)):
                prompt_tokens = sum(len(job.tokens) for job in asked)
                span.set_attribute("kvmesh.prompt_tokens", prompt_tokens)
                holder.admit(prompt_tokens)
                if asked[0].stream:
                    return await self._stream(http, asked, holder, began, label, span)
                return await self._whole(asked, holder, began, label, span)

    async def _allowed(self, http: web.Request) -> bytes:
        """The body, of whoever may send one."""
        self._holder(http)
        return await self._read(http)

    def _holder(self, http: web.Request) -> Holder:
        return self._keys.holder(http.headers.get("Authorization"))

    async def _whole(
        self, jobs: list[Job], holder: Holder, began: float, label: str, span: Span
    ) -> tuple[web.StreamResponse, str]:
        answers = [WholeAnswer(job, self._model.vocabulary) for job in jobs]
        requests = [self._request(job, answer, began) for job, answer in zip(jobs, answers, strict=True)]
        try:
            attempts = await together(self._service.relay.run, requests)
        finally:
            holder.charge(sum(answer.tokens for answer in answers))
        _note(span, requests, attempts)
        body, headers = body_of(answers, attempts), _headers(attempts, label)
        return web.Response(body=body, headers=headers, content_type="application/json"), "ok"

    async def _stream(
        self, http: web.Request, jobs: list[Job], holder: Holder, began: float, label: str, span: Span
    ) -> tuple[web.StreamResponse, str]:
        stream = Stream(jobs, _opener(http, label))
        answers = [StreamedAnswer(job, self._model.vocabulary, stream) for job in jobs]
        requests = [self._request(job, answer, began) for job, answer in zip(jobs, answers, strict=True)]

        async def run(at: int) -> Attempt:
            attempt = await self._service.relay.run(requests[at])
            await answers[at].finish(attempt)
            return attempt

        outcome = "ok"
        try:
            _note(span, requests, await together(run, range(len(jobs))))
        except KNOWN as error:
            if stream.events is None:
                raise
            outcome = outcome_of(error)
            span.record_exception(error)
            await stream.fail(describe(error).body)
        finally:
            holder.charge(sum(answer.tokens for answer in answers))
        assert stream.events is not None
        return stream.events.response, outcome

    async def _read(self, http: web.Request) -> bytes:
        if http.content.is_eof():
            return await http.read()
        try:
            async with asyncio.timeout(self._body_s):
                return await http.read()
        except TimeoutError:
            raise RequestError(
                "the request's body did not arrive in time", status=408, code="request_timeout"
            ) from None

    def _span(self, http: web.Request, attributes: dict[str, str]) -> AbstractContextManager[Span]:
        """The request's span; none where nobody could see it."""
        if not self._service.settings.otlp_endpoint and "traceparent" not in http.headers:
            return nullcontext(INVALID_SPAN)
        parent = traces.extract(http.headers)
        return traces.span("router.request", parent=parent, kind=SpanKind.SERVER, attributes=attributes)

    def _request(self, job: Job, answer: WholeAnswer | StreamedAnswer, began: float) -> Request:
        service = self._service
        return Request(job, answer, service.metrics, began=began, timeout_s=service.settings.request_timeout_s)


KNOWN = (RequestError, Refused, AttemptFailed, BusError, TimeoutError, web.HTTPException)
"""What a request may raise on purpose; the rest is a fault of the program, answered and logged by the middleware."""


def outcome_of(error: BaseException) -> str:
    match error:
        case RequestError() | web.HTTPException():
            return "rejected"
        case Refused(status=429):
            return "busy"
        case Refused() | BusError():
            return "unavailable"
        case TimeoutError():
            return "timeout"
        case _:
            return "failed"


def _label(http: web.Request) -> str:
    """The client's own id of the request, where it sent a plain one. It labels, and never identifies."""
    given = http.headers.get("x-request-id", "")
    return given if _LABEL.fullmatch(given) else secrets.token_hex(16)


def _opener(http: web.Request, label: str) -> OpenStream:
    async def open_stream(attempt: Attempt, first: bytes) -> EventStream:
        return await EventStream.open(http, _headers([attempt], label), first)

    return open_stream


def _headers(attempts: Sequence[Attempt], label: str) -> dict[str, str]:
    """Of each choice, by commas; of a stream, what is known when it begins: of the choice that was first."""
    return {
        "x-kvmesh-path": ",".join(dict.fromkeys(attempt.pair.path for attempt in attempts)),
        "x-kvmesh-attempt": ",".join(attempt.id for attempt in attempts),
        "x-kvmesh-tries": ",".join(str(attempt.number) for attempt in attempts),
        "x-request-id": label,
    }


def _note(span: Span, requests: Sequence[Request], attempts: Sequence[Attempt]) -> None:
    if not span.is_recording():
        return
    headers = _headers(attempts, "")
    span.set_attribute("kvmesh.path", headers["x-kvmesh-path"])
    span.set_attribute("kvmesh.attempt", headers["x-kvmesh-attempt"])
    span.set_attribute("kvmesh.output_tokens", sum(attempt.received for attempt in attempts))
    first = [request.first_at - request.began for request in requests if request.first_at is not None]
    if first:
        span.set_attribute("kvmesh.ttft_s", min(first))


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
