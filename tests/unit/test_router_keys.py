"""API keys: whose a header is, and what each may use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.router import new_key
from services.router.keys import Holder, KeyEntry, Keyring, digest, read_keys
from shared.errors import ConfigError, Refused, RequestError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def entry(key: str = "secret", **limits: int) -> KeyEntry:
    return KeyEntry(sha256=digest(key), **limits)


def test_without_keys_everybody_may() -> None:
    ring = Keyring({}, Clock())
    with ring.holder(None).request():
        ring.holder("Bearer whatever").admit(10**9)


def test_a_requests_choices_count_as_requests() -> None:
    holder = Keyring({"a": entry("first", max_concurrent=3)}, Clock()).holder("Bearer first")
    with holder.request(), holder.choices(2), holder.request(), pytest.raises(Refused), holder.request():
        pass
    with holder.request(), holder.request(), pytest.raises(Refused), holder.choices(3):
        pass
    with holder.request(), pytest.raises(RequestError, match="at once"), holder.choices(4):
        pass
    with holder.request(), holder.choices(3):
        pass


def test_each_key_has_its_holder() -> None:
    ring = Keyring({"a": entry("first"), "b": entry("second")}, Clock())
    assert ring.holder("Bearer first").name == "a"
    assert ring.holder("bearer  second").name == "b"


@pytest.mark.parametrize(
    "header", [None, "", "first", "Bearer", "Bearer ", "Bearer firs", "Bearer First", "Basic first"]
)
def test_what_is_no_key_is_401(header: str | None) -> None:
    ring = Keyring({"a": entry("first")}, Clock())
    with pytest.raises(RequestError) as raised:
        ring.holder(header)
    assert (raised.value.status, raised.value.code) == (401, "invalid_api_key")


def test_every_entry_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a match: otherwise the time would tell the place."""
    compared: list[str] = []

    def compare(known: str, given: str) -> bool:
        compared.append(known)
        return known == given

    monkeypatch.setattr("services.router.keys.hmac.compare_digest", compare)
    keys = {name: entry(name) for name in ("a", "b", "c")}
    assert Keyring(keys, Clock()).holder("Bearer a").name == "a"
    assert compared == [known.sha256 for known in keys.values()]


def test_requests_at_once() -> None:
    holder = Holder("a", entry(max_concurrent=1), Clock())
    with holder.request():
        with pytest.raises(Refused, match="at once") as raised, holder.request():
            pass
        assert raised.value.status == 429
    with holder.request():
        pass


def test_tokens_per_minute() -> None:
    clock = Clock()
    holder = Holder("a", entry(tokens_per_minute=60), clock)
    holder.admit(50)
    holder.admit(5)  # five are left: an output may have any length, so the last one in may go below
    holder.charge(25)
    with pytest.raises(Refused, match="60 tokens per minute") as raised:
        holder.admit(1)
    assert raised.value.status == 429
    clock.now += raised.value.retry_after_s - 1.1
    with pytest.raises(Refused):
        holder.admit(1)
    clock.now += 1.2
    holder.admit(1)
    clock.now += 3600.0  # no more than a minute's worth is saved up
    holder.admit(60)
    with pytest.raises(Refused):
        holder.admit(1)


def test_a_new_key_is_in_the_file_by_its_digest_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    new_key.main(["team-a", "--file", str(file), "--max-concurrent", "3", "--tokens-per-minute", "99"])
    first = capsys.readouterr().out.strip()
    new_key.main(["team-b", "--file", str(file)])
    keys = read_keys(str(file))
    assert keys["team-a"] == KeyEntry(sha256=digest(first), max_concurrent=3, tokens_per_minute=99)
    assert keys["team-b"].max_concurrent is None
    assert first not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["team-a"], "a name that .* does not have yet"),
        (["Team A"], "lower-case letters"),
        (["team-b", "--max-concurrent", "0"], "--max-concurrent=0: takes a whole number of at least 1"),
        (["team-b", "--tokens-per-minute", "-1"], "--tokens-per-minute"),
    ],
)
def test_what_cannot_be_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    file = tmp_path / "keys.toml"
    new_key.add(file, "team-a", None, None)
    before = file.read_text()
    with pytest.raises(SystemExit):
        new_key.main([*arguments, "--file", str(file)])
    assert re.search(said, capsys.readouterr().err)
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("", "keys"),
        ("[keys]", "at least one key"),
        ("[keys.a]\nsha256 = 'short'", "sha256"),
        ("[keys.a]\nkey = 'plain'", "key"),
        (f"[keys.'a b']\nsha256 = '{digest('x')}'", "lower-case"),
        ("not toml", "keys.NAME"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str, takes: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=takes) as raised:
        read_keys(str(file))
    assert raised.value.setting.startswith("KVMESH_API_KEYS")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(str(tmp_path / "nothing.toml"))
