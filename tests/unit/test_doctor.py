"""What the doctor makes of what it finds: findings, exit status, break-even."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.doctor import host, mesh, reach
from services.doctor.break_even import Speeds, break_even
from services.doctor.findings import Finding, as_json, as_text, exit_status
from services.doctor.main import judge_break_even
from services.doctor.reach import Reached, Transfers
from services.prefill.metrics import PrefillMetrics
from shared.config import InstanceSettings
from shared.errors import ModelError
from shared.messages import PROTOCOL, Load
from tests.fake_mesh import LAYOUT, announcement
from tests.record_sysfs import materialise

OK, WARN, FAIL = (
    Finding("ok", "a", "well"),
    Finding("warn", "bb", "so\nso"),
    Finding("fail", "c", "bad", {"x_s": 1.0}),
)
MEASURED = Speeds(prefill_tokens_per_s=1000.0, step_s=0.02, exposed_s=0.005, hop_s=0.001)
RECORDED = Path(__file__).parent / "topologies"


def test_only_a_failure_is_exit_status_1() -> None:
    assert exit_status([]) == 0
    assert exit_status([OK, WARN]) == 0
    assert exit_status([OK, FAIL, WARN]) == 1


def test_a_finding_is_one_line() -> None:
    assert as_text([OK, WARN, FAIL]).split("\n") == [
        "ok    a   well",
        "warn  bb  so so",
        "fail  c   bad",
        "1 ok, 1 warn, 1 fail",
    ]


def test_json_has_status_and_numbers() -> None:
    said = json.loads(as_json([OK, FAIL]))
    assert said["status"] == 1
    assert said["findings"][1] == {"level": "fail", "what": "c", "text": "bad", "numbers": {"x_s": 1.0}}


def test_break_even_is_where_the_cost_of_both_is_equal() -> None:
    found = break_even(MEASURED, 1)
    assert found is not None
    assert found.cost_s == pytest.approx(0.005 + 0.001 + 1.5 * 0.02)
    assert found.tokens == 36
    more = break_even(MEASURED, 4)
    assert more is not None
    assert more.tokens == 9


@pytest.mark.parametrize("field", ["prefill_tokens_per_s", "step_s", "exposed_s", "hop_s"])
def test_no_break_even_of_what_was_not_measured(field: str) -> None:
    speeds = msgspec.structs.replace(MEASURED, **{field: None})
    assert break_even(speeds, 1) is None
    assert speeds.missing == [field]


def test_a_speed_of_nothing_is_not_measured_and_no_time_is() -> None:
    assert break_even(msgspec.structs.replace(MEASURED, prefill_tokens_per_s=0.0), 1) is None
    assert break_even(msgspec.structs.replace(MEASURED, exposed_s=0.0), 1) is not None
    with pytest.raises(ValueError, match="stream"):
        break_even(MEASURED, 0)


def load(**fields: float) -> Load:
    return Load(free_pages=1, largest_free_pages=1, total_pages=1, **fields)  # type: ignore[arg-type]


def test_break_even_uses_what_the_mesh_says() -> None:
    instances = [
        announcement("prefill", "p0", load=load(prefill_tokens_per_s=1000.0)),
        announcement("decode", "d0", load=load(step_s=0.02, running=4)),
        announcement("decode", "other", digest="d2", load=load(step_s=0.5)),
    ]
    transfers = Transfers(bytes=1e6, busy_s=0.1, exposed_s=0.01, count=2)
    found, other = judge_break_even(instances, [Reached(transfers=transfers), Reached(), Reached()], 0.001)
    assert (found.level, found.numbers["tokens_at_1_streams"], found.numbers["tokens_at_4_streams"]) == ("ok", 36, 9)
    assert "P = 1000 tokens/s, x = 5.00 ms" in found.text
    assert other.level == "warn"
    assert "not measured yet: prefill_tokens_per_s, exposed_s" in other.text


def test_transfers_are_read_as_a_prefiller_counts_them() -> None:
    registry = CollectorRegistry()
    metrics = PrefillMetrics(registry)
    assert reach.read_transfers(generate_latest(registry).decode()) is None
    for seconds in (0.25, 0.5):
        metrics.exposed.observe(seconds)
        metrics.transfer.observe(2 * seconds)
    metrics.bytes.inc(3000)
    read = reach.read_transfers(generate_latest(registry).decode())
    assert read == Transfers(bytes=3000.0, busy_s=1.5, exposed_s=0.75, count=2.0)
    assert reach.exposed_s([read, None]) == 0.375
    assert reach.exposed_s([None]) is None


def test_libfabric_has_the_provider_or_it_is_named() -> None:
    have = ["tcp", "shm", "libfabric:verbs;ofi_rxm"]
    assert host.judge_libfabric("1.17", have, "tcp").level == "ok"
    assert host.judge_libfabric("1.17", have, "libfabric:verbs").level == "ok"
    missing = host.judge_libfabric("1.17", have, "libfabric:efa")
    assert missing.level == "fail"
    assert "KVMESH_FABRIC=libfabric:efa is not there" in missing.text
    assert host.judge_libfabric("2.5", have, "shm").level == "fail"
    assert host.judge_libfabric("1.17", ["libfabric:efa"], "libfabric:efa").level == "warn"


def test_memlock_counts_where_memory_is_locked() -> None:
    limit, verbs = 8 << 20, "libfabric:verbs"
    assert host.judge_memlock(limit, 1 << 30, "tcp").level == "ok"
    assert host.judge_memlock(limit, limit, verbs).level == "ok"
    assert host.judge_memlock(resource.RLIM_INFINITY, 1 << 40, verbs).level == "ok"
    assert host.judge_memlock(limit, None, verbs).level == "warn"
    short = host.judge_memlock(limit, 1 << 30, verbs)
    assert short.level == "fail"
    assert "ulimit -l to 1048576" in short.text


def test_a_region_is_that_of_one_rank() -> None:
    settings = InstanceSettings(kv_tokens=1024, page_size=16)
    assert host.region_bytes(LAYOUT, settings) == LAYOUT.region_bytes(64)
    two = msgspec.structs.replace(LAYOUT, num_kv_heads=2)
    assert host.region_bytes(two, msgspec.structs.replace(settings, tp=2)) == LAYOUT.region_bytes(64)
    with pytest.raises(ModelError, match="tensor parallel 2"):
        host.region_bytes(msgspec.structs.replace(LAYOUT, num_kv_heads=3), msgspec.structs.replace(settings, tp=2))
    assert host.layout_of(msgspec.structs.replace(settings, model="no such directory")) is None


def test_huge_pages_matter_to_a_nic(tmp_path: Path) -> None:
    folder = tmp_path / "kernel" / "mm" / "transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    assert host.judge_hugepages(tmp_path, "tcp").level == "ok"
    assert host.judge_hugepages(tmp_path, "libfabric:verbs").level == "warn"
    (folder / "shmem_enabled").write_text("always [within_size] advise never deny force\n")
    assert host.judge_hugepages(tmp_path, "libfabric:verbs").level == "ok"


def test_rdma_wants_a_device(tmp_path: Path) -> None:
    dgx = materialise((RECORDED / "dgx-h100.txt").read_text(), tmp_path / "dgx")
    nics = host.judge_topology(dgx, "libfabric:verbs")[-1]
    assert nics.level == "ok"
    assert "mlx5_0 (0000:" in nics.text
    vm = materialise((RECORDED / "small-vm.txt").read_text(), tmp_path / "vm")
    assert host.judge_topology(vm, "libfabric:verbs")[-1].level == "fail"
    assert host.judge_topology(vm, "tcp")[-1].level == "ok"
    assert host.judge_topology(tmp_path / "nothing", "tcp")[-1].level == "warn"


def test_a_pair_must_fit_and_be_ready() -> None:
    prefill, decode = announcement("prefill", "p0"), announcement("decode", "d0")
    assert [f.level for f in mesh.judge_pairs([prefill, decode], 0)] == ["ok"]
    draining = mesh.judge_pairs([announcement("prefill", "p0", state="draining"), decode], 0)[-1]
    assert draining.level == "fail"
    assert "no prefill instance is ready" in draining.text
    other = mesh.judge_pairs([announcement("prefill", "p0", digest="d2"), decode], 0)[-1]
    assert (other.level, other.numbers["pairs"]) == ("fail", 0)
    versions = mesh.judge_pairs([prefill, decode, announcement("decode", "old", protocol=PROTOCOL - 1)], 2)
    assert [f.level for f in versions] == ["warn", "warn", "ok"]


def test_a_slow_broker_is_a_warning() -> None:
    assert mesh.judge_broker([0.001] * 99 + [1.0]).level == "ok"
    assert mesh.judge_broker([0.001] * 99 + [1.0]).numbers["p99_s"] == 0.001
    assert mesh.judge_broker([0.01] * 100).level == "warn"
    assert mesh.quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_an_instance_that_is_not_reached_is_a_failure_with_advice() -> None:
    decode = announcement("decode", "d0")
    timed = Reached(tcp_connect_s=0.001, http_p50_s=0.002, http_p99_s=0.003)
    assert reach.judge_reach(decode, Reached(error="refused"), "fake").level == "fail"
    assert reach.judge_reach(decode, timed, "tcp").level == "warn"
    no_fabric = msgspec.structs.replace(timed, fabric_error="no route")
    assert "KVMESH_FABRIC_HOST" in reach.judge_reach(decode, no_fabric, "fake").text
    assert reach.judge_reach(decode, no_fabric, "fake").level == "fail"
    well = reach.judge_reach(decode, msgspec.structs.replace(timed, fabric_connect_s=0.004), "fake")
    assert well.level == "ok"
    assert well.numbers["write_bandwidth_bytes_per_s"] is None
    leaving = announcement("decode", "d0", state="draining")
    assert reach.judge_reach(leaving, timed, "fake").level == "warn"


def test_it_starts_without_the_engine() -> None:
    code = (
        "import sys, services.doctor.main as m, services.doctor.loopback; print({'numpy', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_native_module_that_does_not_load_is_a_finding() -> None:
    code = (
        "import sys; sys.modules['shared.transfer._native'] = None\n"
        "from services.doctor.main import look_around; from shared.config import InstanceSettings\n"
        "found = []; print(look_around(InstanceSettings(), found), found[0].level, found[0].what)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "fail", "libfabric"]
