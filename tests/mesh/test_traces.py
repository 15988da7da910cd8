"""One request, one trace: from the client's own span through router, decoder and prefiller and back, read at a real OTLP
receiver; and the metrics that each process keeps."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys

from loadtest.otlp import receiver
from tests.mesh.processes import up
from tests.mesh.test_up import prompt

LAYERS = 3
SPANS = {
    "router.request",
    "router.queue",
    "router.attempt",
    "decode.admission",
    "decode.wait_kv",
    "decode.stream",
    "decode.first_step",
    "prefill.queue",
    "prefill.chunk",
    "kv.transfer",
    "kv.layer",
}


async def test_a_request_is_one_trace_with_its_layers_and_bytes(served_directory):
    with receiver() as traces:
        environment = {"KVMESH_OTLP_ENDPOINT": traces.endpoint, "KVMESH_CHUNK_TOKENS": "64"}
        async with up(served_directory, "--decoders", "1", **environment) as mesh:
            trace_id, parent = secrets.token_hex(16), secrets.token_hex(8)
            body = {"model": mesh.name, "prompt": prompt(100), "max_tokens": 4, "stream": True, "ignore_eos": True}
            answer = await mesh.http.post(
                mesh.url + "/v1/completions", json=body, headers={"traceparent": f"00-{trace_id}-{parent}-01"}
            )
            assert answer.status_code == 200
        spans = traces.wait_for(trace_id, SPANS)
    by_name = {name: [span for span in spans if span.name == name] for name in SPANS}
    ids = {span.span_id for span in spans} | {parent}
    assert all(span.parent_id in ids for span in spans), "a span hangs in the air"
    assert {span.service for span in spans} == {"kvmesh-router", "kvmesh-decode", "kvmesh-prefill"}

    request = by_name["router.request"][0]
    assert request.parent_id == parent
    assert 0 < request.attributes["kvmesh.ttft_s"] <= request.seconds
    assert [s.attributes["kvmesh.chunk.tokens"] for s in by_name["prefill.chunk"]] == [64, 35]

    transfer = by_name["kv.transfer"][0]
    layers = by_name["kv.layer"]
    assert len(layers) == 2 * LAYERS
    pages_bytes = 7 * LAYERS * (2 * 2 * 16 * 16 * 4)
    assert sum(span.attributes["kvmesh.bytes"] for span in layers) == pages_bytes
    assert transfer.attributes["kvmesh.bytes"] == pages_bytes + 48
    assert 0 <= transfer.attributes["kvmesh.hidden_ratio"] <= 1
    assert all(span.parent_id == transfer.span_id for span in layers)
    wait, first = by_name["decode.wait_kv"][0], by_name["decode.first_step"][0]
    assert wait.end_ns <= first.end_ns
    stream = by_name["decode.stream"][0]
    assert first.end_ns <= stream.begin_ns + 1000
    assert (stream.attributes["kvmesh.tokens"], stream.attributes["kvmesh.outcome"]) == (4, "length")
    assert stream.attributes["kvmesh.drafted"] == stream.attributes["kvmesh.accepted"] == 0
    assert not any(span.failed for span in spans)


async def test_metrics_tell_of_the_request_and_the_ledger(served_directory):
    async with up(served_directory, "--decoders", "1") as mesh:
        await mesh.complete(prompt(100))
        pages = {
            name: (await mesh.http.get(url + "/metrics")).text for name, (url, _) in mesh.parts.items() if "http" in url
        }
    for name, expected in {
        "router": ["kvmesh_ttft_seconds_count 1", "kvmesh_requests_total"],
        "decode": [
            "kvmesh_kv_wait_seconds_count 1.0",
            "kvmesh_decode_tokens_total 8.0",
            'kvmesh_pages{dp_rank="0",state="free"} 256',
            "kvmesh_occupancy 0.0",
            "kvmesh_running 0.0",
        ],
        "prefill": [
            "kvmesh_transfer_seconds_count 1.0",
            "kvmesh_transfer_hidden_ratio_count 1.0",
            "kvmesh_prefill_tokens_total 99.0",
            'kvmesh_pages{dp_rank="0",state="quarantined"} 0',
            "kvmesh_queued_prefill_tokens 0.0",
        ],
    }.items():
        for line in expected:
            assert line in pages[name], f"{name} has no {line}:\n" + "\n".join(
                re.findall("^kvmesh.*", pages[name], re.M)
            )


def test_without_an_endpoint_the_sdk_is_not_even_imported():
    code = (
        "import services.decode.main, services.prefill.main, services.router.main, sys;"
        "print(sorted(m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'torch', 'transformers', 'locust'))))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
