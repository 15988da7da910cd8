"""The message bus: msgspec structs over NATS, with trace context in the headers. The one boundary where NATS's exceptions
become `BusError`.

Delivery is at most once and in order from one publisher to one subscriber; whoever needs more counts (see
`messages.Emit.index`). While the broker is away `publish` and `request` fail at once instead of buffering: a buffered
message could arrive after its deadline, or be lost without a word.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from opentelemetry.context import Context

from shared import subjects
from shared.config import Settings
from shared.errors import BusError, ConfigError, NobodyListens
from shared.telemetry import traces

log = logging.getLogger(__name__)

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode

CONNECT_TIMEOUT_S = 10.0
"""How long the first connection may take; later ones are tried for ever."""


class Message(Generic[T]):
    """One message: its body and where it came from."""

    __slots__ = ("_raw", "body")

    def __init__(self, body: T, raw: Msg) -> None:
        self.body = body
        self._raw = raw

    @property
    def context(self) -> Context:
        """The sender's trace context; a fresh root where there is none."""
        return traces.extract(self._raw.headers)

    @property
    def wants_reply(self) -> bool:
        """Whether it is a request."""
        return bool(self._raw.reply)

    async def reply(self, answer: msgspec.Struct) -> None:
        """Answers a request; nothing where the sender wants no answer. Raises `BusError` while the broker is away."""
        if not self._raw.reply:
            return
        await _mapped(self._raw.respond(_encode(answer)), f"reply to {self._raw.subject}")


Handler = Callable[[Message[T]], Awaitable[None]]


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How the broker is reached: nats:// or tls:// URL, and either a user with a password, a token, or neither. `ca`: PEM file
    of who signs the broker's certificate; empty: the system's authorities. Not for logs: it holds secrets."""

    url: str
    token: str = ""
    user: str = ""
    password: str = ""
    ca: str = ""

    @classmethod
    def of(cls, settings: Settings) -> Access:
        return cls(
            url=settings.nats_url,
            token=settings.nats_token,
            user=settings.nats_user,
            password=settings.nats_password,
            ca=settings.nats_ca,
        )

    def __repr__(self) -> str:
        return f"Access(url={_shown(self.url)!r}, user={self.user!r})"


class Bus:
    """A connection to the broker that comes back by itself. Used from one event loop."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._closing = False
        self._connected_once = False
        self._echo_subject = ""
        self._echoes: dict[bytes, asyncio.Future[None]] = {}
        self._errors: deque[str] = deque(maxlen=64)
        self.malformed = 0
        """Messages dropped because they did not decode."""
        self.failed = 0
        """Messages whose handler raised; logged with their traceback."""

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, access: Access, *, name: str = "kvmesh", timeout_s: float = CONNECT_TIMEOUT_S
    ) -> AsyncIterator[Bus]:
        """Raises `BusError`, naming the URL, when the broker is not there within `timeout_s` or does not let us in, and
        `ConfigError` for a `ca` that is no file of certificates."""
        client = Client()
        bus = cls(client)
        options: dict[str, Any] = {
            "name": name,
            **_credentials(access),
            "inbox_prefix": subjects.reply_prefix(access.user),
            "reconnect_time_wait": 0.1,
            "max_reconnect_attempts": -1,
            "ping_interval": 1,
            "max_outstanding_pings": 2,
            "pending_size": 0,
            "error_cb": bus._on_error,
            "disconnected_cb": bus._on_disconnect,
            "reconnected_cb": bus._on_reconnect,
        }
        await _connect(bus, access.url, options, timeout_s)
        bus._connected_once = True
        bus._echo_subject = client.new_inbox()
        await bus._listen_to_echoes()
        try:
            yield bus
        finally:
            bus._closing = True
            await asyncio.shield(bus._close())

    @property
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Called in the event loop each time the broker is back."""
        self._reconnect_callbacks.append(callback)

    async def publish(self, subject: str, body: msgspec.Struct, *, context: Context | None = None) -> None:
        """Hands the message to the broker's connection. Raises `BusError` while the broker is away."""
        headers = traces.inject(context) or None
        await _mapped(self._client.publish(subject, _encode(body), headers=headers), f"publish on {subject}")

    async def request(
        self,
        subject: str,
        body: msgspec.Struct,
        reply: type[T] | Any,
        *,
        timeout_s: float,
        context: Context | None = None,
    ) -> T:
        """The answer, decoded as `reply`. Raises `BusError`: nobody listens, no answer in time, or one that is malformed."""
        what = f"request on {subject}"
        if not self.connected:
            raise BusError(f"{what}: the broker is away")
        headers = traces.inject(context) or None
        call = self._client.request(subject, _encode(body), timeout=timeout_s, headers=headers)
        message = await _mapped(cancellable(call), what)
        try:
            answer: T = self._decoder(reply).decode(message.data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise BusError(f"{what}: malformed answer: {error}") from None
        return answer

    async def subscribe(self, subject: str, kind: type[T] | Any, handler: Handler[T]) -> Subscription:
        """`handler` is awaited for one message after another; a long one must hand over to a task. What does not decode as
        `kind` is counted and dropped; an exception is logged and the next message handled."""
        decoder = self._decoder(kind)

        async def deliver(raw: Msg) -> None:
            try:
                body = decoder.decode(raw.data)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                self.malformed += 1
                log.warning("dropped a malformed message on %s: %s", subject, error)
                return
            try:
                await handler(Message(body, raw))
            except Exception:  # the outermost frame of a delivery: one bad message must not end the subscription
                self.failed += 1
                log.exception("the handler of %s failed", subject)

        made = await _mapped(self._client.subscribe(subject, cb=deliver), f"subscribe to {subject}")
        await self.flush()
        if any(f'subscription to "{subject}"'.lower() in error.lower() for error in self._errors):
            raise BusError(f"the broker does not let this user subscribe to {subject}")
        return made

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Until the broker has seen everything published so far. Raises `BusError`.

        By a message to ourselves: nats-py's own flush leaves a future behind when it is cancelled or times out, on which its
        reader dies when the answer comes after all."""
        token = secrets.token_bytes(8)
        self._echoes[token] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await _mapped(self._client.publish(self._echo_subject, token), "flush")
                await self._echoes[token]
        except TimeoutError:
            raise BusError("flush: no answer in time") from None
        finally:
            del self._echoes[token]

    async def _listen_to_echoes(self) -> None:
        async def echo(raw: Msg) -> None:
            waiting = self._echoes.get(raw.data)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

        await _mapped(self._client.subscribe(self._echo_subject, cb=echo), "subscribe")

    async def _close(self) -> None:
        """Sends what is buffered where that is quick, then closes."""
        try:
            if self.connected:
                await self.flush(1.0)
        except BusError:
            log.info("closed without a last flush")
        await self._client.close()

    def _decoder(self, kind: Any) -> msgspec.msgpack.Decoder[Any]:
        if kind not in self._decoders:
            self._decoders[kind] = msgspec.msgpack.Decoder(kind)
        return self._decoders[kind]

    async def _on_error(self, error: Exception) -> None:
        self._errors.append(str(error) or type(error).__name__)
        if self._connected_once:
            log.warning("broker: %s", str(error) or type(error).__name__)

    async def _on_disconnect(self) -> None:
        if not self._closing:
            log.warning("the broker is away")

    async def _on_reconnect(self) -> None:
        log.info("the broker is back")
        for callback in self._reconnect_callbacks:
            callback()


def _credentials(access: Access) -> dict[str, Any]:
    """Of `Client.connect`. Raises `ConfigError` for what cannot be an address or a file of certificates."""
    if not _is_address(access.url):
        raise ConfigError("KVMESH_NATS_URL", _shown(access.url), "nats://HOST:PORT or tls://HOST:PORT")
    options: dict[str, Any] = {}
    if access.user:
        options |= {"user": access.user, "password": access.password}
    if access.token:
        options["token"] = access.token
    if access.ca or urlsplit(access.url).scheme == "tls":
        try:
            options["tls"] = ssl.create_default_context(cafile=access.ca or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("KVMESH_NATS_CA", access.ca, f"a PEM file of certificates ({error})") from None
    return options


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    try:
        return parts.scheme in ("nats", "tls") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False


def _shown(url: str) -> str:
    """Without what may be secret in it."""
    return re.sub("//[^/@]*@", "//", url)


async def _connect(bus: Bus, url: str, options: dict[str, Any], timeout_s: float) -> None:
    """nats-py tries for ever when `max_reconnect_attempts` is -1, the first time too; so the wait has its own deadline. Why it
    was not let in it tells the error callback alone."""
    client = bus._client
    try:
        async with asyncio.timeout(timeout_s):
            await client.connect(url, **options)
    except TimeoutError:
        await client.close()
        why = "; ".join(dict.fromkeys(bus._errors)) or "no answer"
        raise BusError(f"no broker at {_shown(url)} within {timeout_s:g} s: {why}") from None
    except (OSError, nats.errors.Error) as error:
        await client.close()
        raise BusError(f"no broker at {_shown(url)}: {error}") from None


async def cancellable(call: Awaitable[T]) -> T:
    """`call`, from which a cancellation always comes out. On Python 3.11 `asyncio.wait_for`, which the client uses, returns
    the answer and drops a cancellation that comes in the same moment."""
    task = asyncio.current_task()
    assert task is not None, "called from a task"
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


async def _mapped(call: Awaitable[T], what: str) -> T:
    try:
        return await call
    except nats.errors.NoRespondersError:
        raise NobodyListens(f"{what}: nobody listens") from None
    except (TimeoutError, nats.errors.TimeoutError):
        raise BusError(f"{what}: no answer in time") from None
    except nats.errors.OutboundBufferLimitError:
        raise BusError(f"{what}: the broker is away") from None
    except (OSError, nats.errors.Error) as error:
        raise BusError(f"{what}: {str(error) or type(error).__name__}") from None
