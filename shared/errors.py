"""Every exception kvmesh raises, one tree.

    KvmeshError
    ├── ConfigError            a setting is wrong: names it, its value and what it takes
    ├── RequestError           the client's request is wrong: HTTP status, parameter, code
    ├── Refused                a sound request that cannot be taken now: reason, Retry-After
    ├── GrammarError           a grammar that cannot be compiled, or met a limit
    ├── ModelError             a model directory that cannot be loaded or is not supported
    ├── EngineError
    │   ├── ExecutorDied       the executor process ended: exit status
    │   ├── RankLost           a rank did not come to what the ranks do together: which
    │   ├── RowsFailed         rows that are not sound, or came to nothing
    │   └── StepTimeout        a step did not answer by its deadline
    ├── FabricError            a fabric call failed: call, code, peer
    │   ├── FabricUnavailable  no such provider here, or it could not be opened
    │   ├── PeerLost           the peer's control connection ended or fell silent
    │   ├── PeerUnreachable    the peer could not be reached: the address tried
    │   ├── RemoteAccessError  the target refused a write: bad key or out of range
    │   ├── TransferCancelled  cancelled by us, and drained
    │   └── TransferTimeout    not complete by its deadline
    ├── BusError               the broker cannot be reached, or refused
    │   └── NobodyListens      the broker is there, the one addressed is not
    └── MeshError
        ├── PairMismatch       two instances that cannot work together: both values
        └── AttemptFailed      an attempt ended without its answer: stage, reason, retryable

Foreign exceptions are mapped at one boundary each: libfabric's in `shared.transfer`, NATS's in `shared.bus`, the
executor's in `shared.engine`.
"""

from __future__ import annotations


class KvmeshError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(KvmeshError):
    """A setting is wrong. Raised once, at start; it stops the process."""

    def __init__(self, setting: str, value: object, takes: str) -> None:
        super().__init__(f"{setting}={value!r}: takes {takes}")
        self.setting, self.value, self.takes = setting, value, takes


class RequestError(KvmeshError):
    """The client's request is wrong; `status` is the HTTP status, `param` the JSON field (None: the whole body)."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


class Refused(KvmeshError):
    """A sound request that cannot be taken now. `retry_after_s` is a hint for the client, seconds."""

    def __init__(self, reason: str, *, retry_after_s: float = 1.0, status: int = 503) -> None:
        super().__init__(reason)
        self.reason, self.retry_after_s, self.status = reason, retry_after_s, status


class GrammarError(KvmeshError):
    """A grammar that is none, is too complex, or does not allow what was drawn; the text says which."""


class ModelError(KvmeshError):
    """A model directory cannot be loaded, or holds something that is not supported (the text names both)."""


class EngineError(KvmeshError):
    """The engine could not run a step."""


class ExecutorDied(EngineError):
    """The executor process ended. `status` as in `subprocess`: negative is a signal, None is not yet known."""

    def __init__(self, status: int | None, detail: str = "") -> None:
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        super().__init__(f"the executor ended with {how}{': ' + detail if detail else ''}")
        self.status, self.detail = status, detail


class RankLost(EngineError):
    """Rank `rank` of `ranks` has ended, or did not come to a collective within `deadline_s` seconds."""

    def __init__(self, rank: int, ranks: int, deadline_s: float) -> None:
        super().__init__(f"rank {rank} of {ranks} has ended, or did not come within {deadline_s:g} s")
        self.rank, self.ranks, self.deadline_s = rank, ranks, deadline_s


class RowsFailed(EngineError, ValueError):
    """The rows of a step are not sound, or their logits are not numbers. Only they are concerned: the ranks are in step."""


class StepTimeout(EngineError):
    """A step did not answer within `timeout_s` seconds."""

    def __init__(self, step: int, timeout_s: float) -> None:
        super().__init__(f"step {step} did not answer within {timeout_s:g} s")
        self.step, self.timeout_s = step, timeout_s


class FabricError(KvmeshError):
    """A fabric call failed. `call` is the libfabric or system call, `code` its positive error number (0: none),
    `peer` the identity of the other side where there is one."""

    def __init__(self, message: str, *, call: str = "", code: int = 0, peer: int | None = None) -> None:
        where = f" [{call}: {code}]" if call else ""
        at = f" (peer {peer:016x})" if peer is not None else ""
        super().__init__(f"{message}{where}{at}")
        self.message, self.call, self.code, self.peer = message, call, code, peer


class FabricUnavailable(FabricError):
    """The provider is not on this machine, or could not be opened."""


class PeerLost(FabricError):
    """The peer's control connection ended or fell silent; all that was outstanding to it has failed."""


class PeerUnreachable(FabricError):
    """The peer could not be reached within the time given; the text names the address that was tried."""


class RemoteAccessError(FabricError):
    """The target refused a write (bad key, out of range); nothing was written there."""


class TransferCancelled(FabricError):
    """The transfer was cancelled on this side and what had been posted has drained."""


class TransferTimeout(FabricError):
    """The transfer was not complete by its deadline."""


class BusError(KvmeshError):
    """The broker cannot be reached, or refused what was asked."""


class NobodyListens(BusError):
    """No one has subscribed to the subject of a request: that start of the instance is gone (or not yet back)."""


class MeshError(KvmeshError):
    """Something between instances went wrong."""


class PairMismatch(MeshError):
    """Two instances cannot work together: `field` differs, both values are named."""

    def __init__(self, field: str, prefiller: object, decoder: object) -> None:
        super().__init__(f"{field} differs: prefiller has {prefiller}, decoder has {decoder}")
        self.field, self.prefiller, self.decoder = field, prefiller, decoder


class AttemptFailed(MeshError):
    """An attempt ended without its answer. `stage` says where; `retryable` is False where another pair would fail too."""

    def __init__(self, stage: str, reason: str, *, retryable: bool = True) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage, self.reason, self.retryable = stage, reason, retryable
