"""/console: a page for people who run a mesh, and the one document that it reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

import msgspec
from aiohttp import web

from services.router.keys import Keyring
from services.router.recent import Finished, Percentiles
from services.router.registry import Instance
from services.router.service import RouterService
from shared.messages import Load, Role, State

MAX_INSTANCES = 128
MAX_PAIRS = 512

PAGE = {
    "/console": ("console.html", "text/html"),
    "/console/console.css": ("console.css", "text/css"),
    "/console/console.js": ("console.js", "text/javascript"),
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Path → file beside this one, content type."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class ShownInstance(msgspec.Struct, frozen=True, kw_only=True):
    """As of its last heartbeat."""

    name: str
    role: Role
    state: State
    load: Load
    max_batch: int
    tp: int
    dp: int
    attempts: int
    """Of this router, on it now."""


class ConsoleState(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    router: str
    reason: str | None
    """Why a request would find no working pair now."""
    queued: int
    max_queue: int
    running: int
    """Choices in this router, the queued ones included."""
    instances: list[ShownInstance]
    """At most `MAX_INSTANCES`, by role and name, of `instances_total`."""
    instances_total: int
    pairs: list[tuple[str, str]]
    """Ready prefillers and decoders that work together, by name, of those that are shown; at most `MAX_PAIRS`."""
    requests: list[Finished]
    """The last ones that ended, oldest first."""
    ttft: Percentiles
    itl: Percentiles


def state_of(service: RouterService) -> ConsoleState:
    everyone = sorted(service.registry.instances, key=lambda known: (known.role, known.ref.name))
    shown = everyone[:MAX_INSTANCES]
    recent = service.relay.recent
    return ConsoleState(
        model=service.model.name,
        router=service.me.name,
        reason=service.readiness().reason,
        queued=len(service.relay.line),
        max_queue=service.settings.max_queue,
        running=service.relay.running,
        instances=[_shown(known) for known in shown],
        instances_total=len(everyone),
        pairs=pairs_of(shown),
        requests=recent.requests(),
        ttft=recent.ttft(),
        itl=recent.itl(),
    )


def pairs_of(instances: list[Instance]) -> list[tuple[str, str]]:
    """(prefiller, decoder)."""
    ready = [known for known in instances if known.ready]
    prefillers, decoders = ([one for one in ready if one.role == role] for role in ("prefill", "decode"))
    pairs = [(p.ref.name, d.ref.name) for p in prefillers for d in decoders if p.kind.feeds(d.kind)]
    return pairs[:MAX_PAIRS]


def _shown(known: Instance) -> ShownInstance:
    announce = known.announce
    return ShownInstance(
        name=known.ref.name,
        role=announce.role,
        state=announce.state,
        load=announce.load,
        max_batch=announce.max_batch,
        tp=announce.tp,
        dp=announce.dp,
        attempts=known.tally.attempts,
    )


def add_console(app: web.Application, service: RouterService, keys: Keyring) -> None:
    """The page asks for no key, and tells nothing; what it shows, /console/state, does."""
    for path, (name, kind) in PAGE.items():
        app.router.add_get(path, _serving(files("services.router").joinpath("static", name).read_bytes(), kind))

    async def state(http: web.Request) -> web.Response:
        keys.holder(http.headers.get("Authorization"))
        body = msgspec.json.encode(state_of(service))
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    app.router.add_get("/console/state", state)


def _serving(body: bytes, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def serve(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    return serve
