"""Which processes a local mesh consists of, and what each is told. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from shared.config import Settings


class UpSettings(Settings, frozen=True, kw_only=True):
    """Flags of `kvmesh up`. Whatever else the parts take comes to them through the environment."""

    name: Annotated[str, Meta(description="name of the supervisor in its own lines")] = "up"
    model: Annotated[str, Meta(description="directory, hub id, or the built-in default model")] = (
        "smollm2-135m-instruct"
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the OpenAI-compatible API")] = 8000
    prefillers: Annotated[int, Meta(ge=1, le=64, description="prefill instances")] = 1
    decoders: Annotated[int, Meta(ge=1, le=64, description="decode instances")] = 2
    restart: Annotated[
        Literal["yes", "no"], Meta(description="yes: a part that dies is started again; no: the mesh ends with it")
    ] = "no"
    start_timeout_s: Annotated[float, Meta(gt=0, description="every part must be ready within, seconds")] = 300.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe line the parts show")
    ] = "warning"


Kind = Literal["router", "prefill", "decode"]


@dataclass(frozen=True)
class Part:
    """One process: `name` in lines and on the bus, and what it is told besides what all are told."""

    kind: Kind
    name: str
    environment: Mapping[str, str]

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-m", f"services.{self.kind}"]


def threads_each(cores: int, prefillers: int, decoders: int) -> tuple[int, int]:
    """Threads of a prefiller's and of a decoder's executor: each side has half of the cores, each executor at least one."""
    half = max(1, cores // 2)
    return max(1, half // prefillers), max(1, (cores - half) // decoders)


def plan(settings: UpSettings, cores: int, given: Mapping[str, str]) -> list[Part]:
    """The parts in the order in which they start. A KVMESH_THREADS that was given stands."""
    for_prefill, for_decode = threads_each(cores, settings.prefillers, settings.decoders)

    def instance(kind: Kind, number: int, of: int, threads: int) -> Part:
        name = kind if of == 1 else f"{kind}-{number + 1}"
        told = {"KVMESH_NAME": name, "KVMESH_PORT": "0", "KVMESH_THREADS": given.get("KVMESH_THREADS", str(threads))}
        return Part(kind, name, told)

    return [
        Part("router", "router", {"KVMESH_NAME": "router", "KVMESH_PORT": str(settings.port)}),
        *(instance("decode", i, settings.decoders, for_decode) for i in range(settings.decoders)),
        *(instance("prefill", i, settings.prefillers, for_prefill) for i in range(settings.prefillers)),
    ]
