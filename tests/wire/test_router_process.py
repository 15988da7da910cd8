"""The router as a process: quick to start, small, one line when something is wrong, gone when told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.broker import Broker
from tests.tiny_model import TEMPLATE, byte_level

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What a router reads of a model directory: everything but the weights' contents."""
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    byte_level().save(str(directory / "tokenizer.json"))
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return directory


@contextmanager
def router(*flags: str, environ: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "services.router", *flags]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def flags(broker: Broker, model: Path) -> list[str]:
    return ["--nats-url", broker.url, "--nats-token", broker.token, "--model", str(model), "--port", "0"]


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready role=router name=router incarnation="), line
    return line.rsplit("http=", 1)[1].strip()


def test_it_starts_quickly_stays_small_and_ends_when_told(shared_broker: Broker, model: Path) -> None:
    begin = time.monotonic()
    with router(*flags(shared_broker, model)) as process:
        url = url_of(process)
        assert time.monotonic() - begin < 3.0, "a second on a quiet machine"
        with urllib.request.urlopen(url + "/v1/models", timeout=5) as answer:
            assert json.load(answer)["data"][0]["id"] == "tiny-model"
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(url + "/ready", timeout=5)
        assert raised.value.code == 503
        raised.value.close()
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = int(status.partition("VmRSS:")[2].split()[0]) * 1024
        assert resident < 150e6
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in maps
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 0


def test_a_second_router_on_a_port_says_so_in_one_line(shared_broker: Broker, model: Path) -> None:
    with router(*flags(shared_broker, model)) as first:
        port = url_of(first).rsplit(":", 1)[1]
        with router(*flags(shared_broker, model)[:-1], port) as second:
            assert second.wait(timeout=10) == 1
            assert second.stderr is not None
            assert f"KVMESH_PORT={port}: takes a free port" in second.stderr.read()


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--max-attempts", "0"], "KVMESH_MAX_ATTEMPTS='0': takes a whole number of at least 1"),
        (["--name", "Bad_Name"], "KVMESH_NAME='Bad_Name'"),
        (["--model", "/nowhere"], "model '/nowhere': takes a directory"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_1(
    shared_broker: Broker, model: Path, extra: list[str], says: str
) -> None:
    with router(*flags(shared_broker, model), *extra) as process:
        assert process.wait(timeout=30) == 1
        assert process.stderr is not None
        said = process.stderr.read()
    assert says in said
    assert "Traceback" not in said


def test_settings_come_from_the_environment_too(shared_broker: Broker, model: Path) -> None:
    environ = {
        "KVMESH_SERVED_MODEL": "my-name",
        "KVMESH_NATS_URL": shared_broker.url,
        "KVMESH_NATS_TOKEN": shared_broker.token,
    }
    with (
        router("--model", str(model), "--port", "0", environ=environ) as process,
        urllib.request.urlopen(url_of(process) + "/v1/models", timeout=5) as answer,
    ):
        assert json.load(answer)["data"][0]["id"] == "my-name"
