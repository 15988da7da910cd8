"""Settings: one frozen struct a process, filled from `KVMESH_*` variables and command-line flags, checked once at start.

Field `page_size` is the variable `KVMESH_PAGE_SIZE` and the flag `--page-size`; a flag wins over a variable, a variable over
the default. A bad value raises `ConfigError` with the setting's name and what it takes. The README's table of settings is
printed from these structs (`kvmesh settings`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from shared.errors import ConfigError

MOST_DRAFTS = 16

SPECULATE_TAKES = (
    "off, ngram (the request's own tokens), mtp (the model's multi-token prediction layer) "
    "or draft:<directory or hub id> (a smaller model)"
)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What every process takes."""

    name: Annotated[
        str, Meta(description="stable name of this instance; default: the role; auto: role and host name")
    ] = ""
    nats_url: Annotated[str, Meta(description="the broker: nats:// or tls://")] = "nats://127.0.0.1:4222"
    nats_token: Annotated[str, Meta(description="the broker's token; empty: none")] = ""
    nats_user: Annotated[str, Meta(description="user at the broker (`kvmesh credentials` makes one a role)")] = ""
    nats_password: Annotated[str, Meta(description="the user's password")] = ""
    nats_ca: Annotated[
        str, Meta(description="PEM file of who signs a tls:// broker's certificate; empty: the system's authorities")
    ] = ""
    host: Annotated[str, Meta(description="address on which HTTP listens; auto: what the broker sees")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port on which HTTP listens; 0: a free one")] = 0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least severe line shown")] = (
        "info"
    )
    otlp_endpoint: Annotated[
        str, Meta(description="OTLP/HTTP collector, for example http://host:4318; empty: no traces")
    ] = ""
    heartbeat_s: Annotated[float, Meta(gt=0, description="seconds between an instance's heartbeats")] = 0.5
    dead_after_s: Annotated[
        float, Meta(gt=0, description="silence after which an instance counts as dead, seconds")
    ] = 2.0
    drain_s: Annotated[float, Meta(ge=0, description="grace for running requests after SIGTERM, seconds")] = 30.0


class InstanceSettings(Settings, frozen=True, kw_only=True):
    """What prefill and decode instances take besides."""

    model: Annotated[str, Meta(description="directory, hub id, or the built-in default model")] = (
        "smollm2-135m-instruct"
    )
    weights_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Meta(description="dtype of the weights; auto: as the checkpoint")
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Meta(description="dtype of the KV cache; auto: as the checkpoint")
    ] = "auto"
    tp: Annotated[
        int, Meta(ge=1, description="tensor parallel: executors that share every layer's heads and weights")
    ] = 1
    page_size: Annotated[int, Meta(ge=1, le=1024, description="tokens in a page")] = 64
    kv_tokens: Annotated[
        int, Meta(ge=64, description="tokens that the KV pool of each data parallel rank holds, rounded down to pages")
    ] = 32768
    threads: Annotated[
        int, Meta(ge=0, description="CPU threads of each executor; 0: cores shared out among the local ones")
    ] = 0
    fabric: Annotated[str, Meta(description="tcp, shm (trusted peers on one host) or libfabric:<provider>")] = "tcp"
    fabric_host: Annotated[
        str,
        Meta(description="where peers reach this fabric; several, by commas: several NICs; auto: what the broker sees"),
    ] = "127.0.0.1"
    verify: Annotated[
        Literal["no", "pages"],
        Meta(description="pages: every page of KV is checked after its transfer; on all instances or on none"),
    ] = "no"
    speculate: Annotated[
        str,
        Meta(description=f"who proposes tokens that the model then verifies: {SPECULATE_TAKES}"),
    ] = "off"
    draft_tokens: Annotated[
        int, Meta(ge=1, le=MOST_DRAFTS, description="most tokens proposed for a request in one step")
    ] = 6
    step_timeout_s: Annotated[float, Meta(gt=0, description="a step that takes longer ends the instance, seconds")] = (
        120.0
    )
    load_timeout_s: Annotated[float, Meta(gt=0, description="the executor must be ready within, seconds")] = 300.0


class PrefillSettings(InstanceSettings, frozen=True, kw_only=True):
    chunk_tokens: Annotated[int, Meta(ge=1, description="prompt tokens computed in one forward, over all prompts")] = (
        512
    )
    max_queue: Annotated[int, Meta(ge=1, description="prompts that may wait or run; more are refused")] = 256
    transfer_timeout_s: Annotated[
        float, Meta(gt=0, description="deadline of one write after its layer is computed")
    ] = 30.0


class DecodeSettings(InstanceSettings, frozen=True, kw_only=True):
    dp: Annotated[
        int,
        Meta(ge=1, description="data parallel: ranks of KVMESH_TP executors with a KV pool and a batch of their own"),
    ] = 1
    max_batch: Annotated[
        int, Meta(ge=1, description="most requests in the running batch of each data parallel rank")
    ] = 32
    max_waiting: Annotated[
        int, Meta(ge=1, description="most admitted requests that wait for their KV, times data parallel ranks")
    ] = 64
    quarantine_s: Annotated[
        float, Meta(gt=0, description="a cancelled transfer whose prefiller stays silent is fenced after, seconds")
    ] = 2.0


class RouterSettings(Settings, frozen=True, kw_only=True):
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the OpenAI-compatible API")] = 8000
    model: Annotated[str, Meta(description="directory, hub id, or the built-in default model")] = (
        "smollm2-135m-instruct"
    )
    served_model: Annotated[str, Meta(description="name clients use; default: the model's")] = ""
    request_timeout_s: Annotated[float, Meta(gt=0, description="deadline of a request, seconds")] = 600.0
    max_queue: Annotated[int, Meta(ge=0, description="requests that may wait at the router for room; more get 429")] = (
        512
    )
    queue_timeout_s: Annotated[float, Meta(gt=0, description="longest wait at the router for room, seconds")] = 60.0
    absence_s: Annotated[
        float,
        Meta(
            ge=0, description="how long a request waits, seconds, for a working pair that was there and may come back"
        ),
    ] = 5.0
    max_attempts: Annotated[int, Meta(ge=1, description="attempts at one request while no byte was sent")] = 3
    retry_ratio: Annotated[
        float, Meta(ge=0, description="part of the last 30 s' requests that may be further attempts, over all requests")
    ] = 0.2
    retry_floor: Annotated[int, Meta(ge=0, description="further attempts in 30 s that are always allowed")] = 32
    api_keys: Annotated[
        str, Meta(description="file of API keys (`kvmesh key` makes one); empty: whoever reaches the port may use it")
    ] = ""
    tool_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "deepseek_v3", "deepseek_v31"],
        Meta(description="form of the model's tool calls; auto: as its chat template has it; none: no tools"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think"],
        Meta(description="think: thoughts stand in think tags; auto: where the chat template has such"),
    ] = "auto"
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 4 << 20


class Proposer(NamedTuple):
    """What `InstanceSettings.speculate` says. `model`: of a draft."""

    kind: Literal["off", "ngram", "mtp", "draft"]
    model: str = ""


def proposer(settings: InstanceSettings) -> Proposer:
    """Raises `ConfigError`."""
    kind, _, model = settings.speculate.partition(":")
    match kind:
        case "off" | "ngram" | "mtp" if settings.speculate == kind:
            return Proposer(kind)
        case "draft" if model:
            return Proposer(kind, model)
    raise ConfigError("KVMESH_SPECULATE", settings.speculate, SPECULATE_TAKES)


S = TypeVar("S", bound=Settings)


def variable(field: str) -> str:
    """The environment variable of a field."""
    return f"KVMESH_{field.upper()}"


def load(kind: type[S], argv: Sequence[str], environ: Mapping[str, str], *, prog: str) -> S:
    """Settings of `kind` from flags and variables. Raises `ConfigError`; `--help` and unknown flags exit as argparse does."""
    parser = argparse.ArgumentParser(
        prog=prog, description=f"Every flag is also a variable, for example {variable('name')}."
    )
    for field in describe(kind):
        parser.add_argument(field.flag, dest=field.name, default=None, help=f"{field.help} [{field.default}]")
    flags = vars(parser.parse_args(argv))
    given: dict[str, str] = {}
    for field in describe(kind):
        value = flags[field.name] if flags[field.name] is not None else environ.get(field.variable)
        if value is not None and (value != "" or field.default == ""):
            given[field.name] = value
    return convert(kind, given)


def convert(kind: type[S], given: Mapping[str, object]) -> S:
    """Settings of `kind` from text values, each checked alone so that the error names the right one."""
    checked: dict[str, object] = {}
    hints = get_type_hints(kind, include_extras=True)
    for name, value in given.items():
        try:
            checked[name] = msgspec.convert(value, hints[name], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(variable(name), value, _takes(hints[name], str(error))) from None
    return msgspec.convert(checked, kind)


def _takes(hint: Any, fallback: str) -> str:
    meta: Meta = hint.__metadata__[0]
    bounds = [
        f"{word} {bound}"
        for word, bound in (("at least", meta.ge), ("more than", meta.gt), ("at most", meta.le))
        if bound is not None
    ]
    base = hint.__origin__
    if getattr(base, "__origin__", None) is Literal:
        return "one of " + ", ".join(base.__args__)
    kind = {int: "a whole number", float: "a number", str: "text"}.get(base, fallback)
    return " ".join([kind, *(["of " + " and ".join(bounds)] if bounds else [])])


class SettingInfo(msgspec.Struct, frozen=True):
    """One row of the table of settings."""

    name: str
    variable: str
    flag: str
    default: object
    help: str


def describe(kind: type[Settings]) -> list[SettingInfo]:
    """Every setting of `kind`, in the order of definition."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        SettingInfo(
            field.name,
            variable(field.name),
            "--" + field.name.replace("_", "-"),
            field.default,
            hints[field.name].__metadata__[0].description or "",
        )
        for field in msgspec.structs.fields(kind)
    ]
