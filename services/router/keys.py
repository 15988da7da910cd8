"""Who may use the API, and how much of it: keys, kept as digests in a file, each with limits of its own.

    [keys.team-a]
    sha256 = "9f86d0..."          # of the key; `kvmesh key team-a --file keys.toml` makes one and shows the key once
    max_concurrent = 8            # requests at once; more get 429
    tokens_per_minute = 60000     # prompt and output together, on average; more get 429 with the time to wait

A key is compared by its digest and with every entry, in constant time: how long a refusal takes says nothing of any key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.config import variable
from shared.errors import ConfigError, Refused, RequestError
from shared.subjects import check_name

BUSY_RETRY_S = 1.0
"""Retry-After for a key with too many requests at once: when one of them ends is not known."""


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key as the file has it. A limit that is None is none."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Meta(ge=1)] | None = None


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: dict[str, KeyEntry]


def digest(key: str) -> str:
    """As the file has it. Keys are random and long, so that a plain hash is as good as a slow one."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: str) -> dict[str, KeyEntry]:
    """By name. Raises `ConfigError` for a file that cannot be read, says something else, or has no key."""
    setting = variable("api_keys")
    try:
        keys = msgspec.toml.decode(Path(path).read_bytes(), type=KeyFile).keys
    except OSError as error:
        raise ConfigError(setting, path, f"a file of keys that can be read ({error.strerror})") from None
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(setting, path, f"a file of [keys.NAME] tables ({error})") from None
    if not keys:
        raise ConfigError(setting, path, "a file with at least one key")
    for name in keys:
        check_name(f"{setting}: keys", name)
    return keys


class Holder:
    """One key in use. `clock` gives seconds, and never goes back."""

    def __init__(self, name: str, entry: KeyEntry, clock: Callable[[], float]) -> None:
        self.name = name
        self._entry, self._clock = entry, clock
        self._running = 0
        self._tokens = float(entry.tokens_per_minute or 0)
        self._filled = clock()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request while it runs. Raises `Refused` with 429 where the key has too many already."""
        with self._counted(1):
            yield

    @contextmanager
    def choices(self, count: int) -> Iterator[None]:
        """Within `request`: each of a request's choices counts as one. Raises also `RequestError` where they never fit."""
        most = self._entry.max_concurrent
        if most is not None and count > most:
            raise RequestError(f"{count} choices: this key may have {most} at once", param="n", code="invalid_value")
        with self._counted(count - 1):
            yield

    @contextmanager
    def _counted(self, more: int) -> Iterator[None]:
        most = self._entry.max_concurrent
        if most is not None and self._running + more > most:
            raise Refused(f"this key may have {most} request(s) at once", status=429, retry_after_s=BUSY_RETRY_S)
        self._running += more
        try:
            yield
        finally:
            self._running -= more

    def admit(self, prompt_tokens: int) -> None:
        """Charges a prompt, where something is left of this minute's tokens; raises `Refused` with 429 else. How long the
        output will be is not known: it is charged when it is there, and the next request waits for the debt."""
        rate = self._entry.tokens_per_minute
        if rate is None:
            return
        self._fill(rate)
        if self._tokens <= 0:
            wait_s = (1 - self._tokens) * 60 / rate
            raise Refused(f"this key's {rate} tokens per minute are used up", status=429, retry_after_s=wait_s)
        self._tokens -= prompt_tokens

    def charge(self, output_tokens: int) -> None:
        if self._entry.tokens_per_minute is not None:
            self._tokens -= output_tokens

    def _fill(self, rate: int) -> None:
        now = self._clock()
        self._tokens = min(float(rate), self._tokens + (now - self._filled) * rate / 60)
        self._filled = now


class Keyring:
    """All keys; without any, everybody is one holder without limits."""

    def __init__(self, entries: dict[str, KeyEntry], clock: Callable[[], float]) -> None:
        self._holders = [(entry.sha256, Holder(name, entry, clock)) for name, entry in entries.items()]
        self._anybody = Holder("", KeyEntry(sha256=""), clock)

    def holder(self, authorization: str | None) -> Holder:
        """Whose `Authorization` header it is. Raises `RequestError` with 401 where it names no key."""
        if not self._holders:
            return self._anybody
        scheme, _, key = (authorization or "").partition(" ")
        given, found = digest(key.strip()), None
        for known, holder in self._holders:
            if hmac.compare_digest(known, given):
                found = holder
        if found is None or scheme.lower() != "bearer":
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise RequestError(message, status=401, code="invalid_api_key")
        return found
