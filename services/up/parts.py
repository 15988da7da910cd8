"""Which processes a local mesh consists of, and what each is told. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from shared.config import SPECULATE_TAKES, Settings, variable
from shared.errors import ConfigError


class UpSettings(Settings, frozen=True, kw_only=True):
    """Flags of `kvmesh up`. Whatever else the parts take comes to them through the environment."""

    name: Annotated[str, Meta(description="name of the supervisor in its own lines")] = "up"
    model: Annotated[str, Meta(description="directory, hub id, or the built-in default model")] = (
        "smollm2-135m-instruct"
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the OpenAI-compatible API")] = 8000
    prefillers: Annotated[int, Meta(ge=1, le=64, description="prefill instances")] = 1
    prefill_tp: Annotated[int, Meta(ge=1, description="tensor parallel of each prefill instance")] = 1
    decoders: Annotated[int, Meta(ge=1, le=64, description="decode instances")] = 2
    decode_tp: Annotated[int, Meta(ge=1, description="tensor parallel of each decode instance")] = 1
    decode_dp: Annotated[int, Meta(ge=1, description="data parallel of each decode instance")] = 1

    speculate: Annotated[
        str, Meta(description=f"of the instances: who proposes tokens that the model then verifies: {SPECULATE_TAKES}")
    ] = "off"

    @property
    def prefill_executors(self) -> int:
        return self.prefillers * self.prefill_tp

    @property
    def decode_executors(self) -> int:
        return self.decoders * self.decode_tp * self.decode_dp

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


def threads_each(cores: int, prefill_executors: int, decode_executors: int) -> tuple[int, int]:
    """Threads of an executor on the prefill and on the decode side: each side has half of the cores, each executor at least
    one."""
    half = max(1, cores // 2)
    return max(1, half // prefill_executors), max(1, (cores - half) // decode_executors)


def plan(settings: UpSettings, cores: int, given: Mapping[str, str]) -> list[Part]:
    """The parts in the order in which they start. A KVMESH_THREADS that was given stands. Raises `ConfigError` for a KVMESH_TP or
    KVMESH_DP that was given: which side would it be for?"""
    _refuse_unsided(given)
    for_prefill, for_decode = threads_each(cores, settings.prefill_executors, settings.decode_executors)

    def instance(kind: Kind, number: int, of: int, threads: int, its: Mapping[str, object]) -> Part:
        name = kind if of == 1 else f"{kind}-{number + 1}"
        told = {"KVMESH_NAME": name, "KVMESH_PORT": "0", "KVMESH_THREADS": given.get("KVMESH_THREADS", str(threads))}
        return Part(kind, name, told | {variable(field): str(value) for field, value in its.items()})

    common = {"speculate": settings.speculate}
    prefill = common | {"tp": settings.prefill_tp}
    decode = common | {"tp": settings.decode_tp, "dp": settings.decode_dp}
    return [
        Part("router", "router", {"KVMESH_NAME": "router", "KVMESH_PORT": str(settings.port)}),
        *(instance("decode", i, settings.decoders, for_decode, decode) for i in range(settings.decoders)),
        *(instance("prefill", i, settings.prefillers, for_prefill, prefill) for i in range(settings.prefillers)),
    ]


def _refuse_unsided(given: Mapping[str, str]) -> None:
    for name, instead in (("KVMESH_TP", "KVMESH_PREFILL_TP and KVMESH_DECODE_TP"), ("KVMESH_DP", "KVMESH_DECODE_DP")):
        if given.get(name):
            raise ConfigError(name, given[name], f"nothing in kvmesh up, which has {instead}")
