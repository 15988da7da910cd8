"""A broker with users and TLS, as `kvmesh credentials` makes it: each role can do what it needs, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from services.up import credentials
from shared.bus import Access, Bus, Message
from shared.errors import BusError, ConfigError
from shared.messages import Discover, InstanceRef
from shared.subjects import ANNOUNCE, DISCOVER, Service, inbox
from tests.broker import Broker

ROLES: tuple[Service, ...] = get_args(Service)
ME = InstanceRef("me", 1)
QUIET_S = 0.2
"""What should not come has not come after this."""


class Note(msgspec.Struct, tag=True):
    text: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("credentials") / "made"
    credentials.write(directory, ["127.0.0.1"], 4222, 30)
    return directory


@pytest.fixture(scope="module")
def guarded(made: Path) -> Iterator[Broker]:
    with Broker(made / "nats.conf") as broker:
        yield broker


def told(made: Path, role: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (made / f"{role}.env").read_text().splitlines())


def access(made: Path, guarded: Broker, role: str, **changes: str) -> Access:
    said = told(made, role)
    assert said["KVMESH_NATS_URL"] == "tls://127.0.0.1:4222"
    own = Access(
        url=f"tls://127.0.0.1:{guarded.port}",
        user=said["KVMESH_NATS_USER"],
        password=said["KVMESH_NATS_PASSWORD"],
        ca=said["KVMESH_NATS_CA"],
    )
    return msgspec.structs.replace(own, **changes)


def connect(made: Path, guarded: Broker, role: str) -> AbstractAsyncContextManager[Bus]:
    return Bus.connect(access(made, guarded, role), name=role, timeout_s=3.0)


@asynccontextmanager
async def everybody(made: Path, guarded: Broker) -> AsyncIterator[dict[str, Bus]]:
    async with (
        connect(made, guarded, "router") as router,
        connect(made, guarded, "prefill") as prefill,
        connect(made, guarded, "decode") as decode,
    ):
        yield {"router": router, "prefill": prefill, "decode": decode}


MAY_SEND: dict[Service, set[str]] = {
    "router": {DISCOVER, inbox("decode", ME), inbox("router", ME)},
    "decode": {ANNOUNCE, inbox("prefill", ME), inbox("router", ME)},
    "prefill": {ANNOUNCE, inbox("decode", ME)},
}
MAY_HEAR: dict[Service, set[str]] = {
    "router": {ANNOUNCE, inbox("router", ME)},
    "decode": {DISCOVER, inbox("decode", ME)},
    "prefill": {DISCOVER, inbox("prefill", ME)},
}
SUBJECTS = [ANNOUNCE, DISCOVER, *(inbox(role, ME) for role in ROLES)]


@pytest.mark.parametrize("subject", [*SUBJECTS, "kvmesh.>", ">", "_INBOX.>", "_INBOX_router.>", "anything"])
@pytest.mark.parametrize("role", ROLES)
async def test_who_may_hear(made: Path, guarded: Broker, role: Service, subject: str) -> None:
    async def ignore(_: Message[Note]) -> None:
        pass

    async with connect(made, guarded, role) as bus:
        if subject in MAY_HEAR[role] or subject == f"_INBOX_{role}.>":
            await bus.subscribe(subject, Note, ignore)
            return
        with pytest.raises(BusError, match="does not let this user subscribe"):
            await bus.subscribe(subject, Note, ignore)


@pytest.mark.parametrize("subject", SUBJECTS)
async def test_who_may_send(made: Path, guarded: Broker, subject: str) -> None:
    heard: set[str] = set()

    async def note(message: Message[Note]) -> None:
        heard.add(message.body.text)

    async with everybody(made, guarded) as buses:
        for role in ROLES:
            if subject in MAY_HEAR[role]:
                await buses[role].subscribe(subject, Note, note)
        for role in ROLES:
            await buses[role].publish(subject, Note(role))
            await buses[role].flush()
        for bus in buses.values():
            await bus.flush()
        await asyncio.sleep(QUIET_S)
    assert heard == {role for role in ROLES if subject in MAY_SEND[role]}


async def test_requests_are_answered(made: Path, guarded: Broker) -> None:
    async def answer(message: Message[Note]) -> None:
        await message.reply(Note("yes"))

    async with everybody(made, guarded) as buses:
        await buses["decode"].subscribe(inbox("decode", ME), Note, answer)
        said = await buses["router"].request(inbox("decode", ME), Note("?"), Note, timeout_s=2.0)
        assert said == Note("yes")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"password": "wrong"}, "(?i)authorization"),
        ({"user": "nobody"}, "(?i)authorization"),
        ({"user": "", "password": ""}, "(?i)authorization"),
        ({"ca": ""}, "(?i)certificate"),
    ],
)
async def test_who_is_not_let_in(made: Path, guarded: Broker, changes: dict[str, str], why: str) -> None:
    with pytest.raises(BusError, match=why) as raised:
        async with Bus.connect(access(made, guarded, "router", **changes), timeout_s=1.5):
            pass
    assert told(made, "router")["KVMESH_NATS_PASSWORD"] not in str(raised.value)


async def test_nobody_talks_without_tls(made: Path, guarded: Broker) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
    assert b'"tls_required":true' in await reader.readline()
    writer.write(b'CONNECT {"user":"router","verbose":false}\r\nPING\r\n')
    async with asyncio.timeout(5):
        said = await reader.read()
    assert b"PONG" not in said
    writer.close()


async def test_another_name_than_the_certificates_is_refused(made: Path, guarded: Broker) -> None:
    with pytest.raises(BusError, match=r"(?i)certificate"):
        async with Bus.connect(access(made, guarded, "router", url=f"tls://localhost:{guarded.port}"), timeout_s=1.5):
            pass


async def test_a_file_that_is_no_certificate_is_named(made: Path, guarded: Broker, tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("nothing")
    for file in (tmp_path / "no.pem", tmp_path / "missing.pem"):
        with pytest.raises(ConfigError, match="KVMESH_NATS_CA"):
            async with Bus.connect(access(made, guarded, "router", ca=str(file))):
                pass


def test_secrets_are_for_their_owner_alone(made: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in made.iterdir()}
    assert modes.pop("ca.pem") & 0o444
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("arguments", [["--port", "0"], ["--days", "0"]])
def test_what_makes_no_credentials(tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        credentials.main([str(tmp_path / "new"), *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_what_is_there_is_not_replaced(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (made / "nats.conf").read_text()
    with pytest.raises(SystemExit):
        credentials.main([str(made)])
    assert "an empty directory" in capsys.readouterr().err
    assert (made / "nats.conf").read_text() == before


async def test_credentials_are_not_logged(made: Path, guarded: Broker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    own = access(made, guarded, "router")
    async with Bus.connect(own) as bus:
        await bus.publish(DISCOVER, Discover())
        await bus.flush()
    logging.getLogger(__name__).info("%r", own)
    assert own.password not in caplog.text


def test_files_that_are_carried_elsewhere_name_their_place_there(tmp_path: Path) -> None:
    credentials.write(tmp_path / "made", ["broker"], 4222, 30, seen_at=Path("/etc/kvmesh"))
    assert told(tmp_path / "made", "decode")["KVMESH_NATS_CA"] == "/etc/kvmesh/ca.pem"
    assert 'cert_file: "/etc/kvmesh/broker.pem"' in (tmp_path / "made" / "nats.conf").read_text()
