"""A decoder takes or refuses at once; every refusal names why."""

from __future__ import annotations

import msgspec
import pytest

from services.decode.admission import Capacity, pages_at_admission, refuse
from shared.layout import KvLayout
from shared.messages import Announce, FabricEndpoint, Generate, InstanceRef, Load, ModelIdentity, Sampling

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_size=4, dtype="float32")
MODEL = ModelIdentity(name="m", digest="d", vocab_size=100, max_positions=64)
ME = InstanceRef("decode", 7)
PREFILLER = Announce(
    role="prefill",
    instance=InstanceRef("prefill", 9),
    state="ready",
    model=MODEL,
    layout=LAYOUT,
    fabric=FabricEndpoint("tcp", b""),
    max_batch=1,
    load=Load(free_pages=1, largest_free_pages=1, total_pages=1),
    http="",
)
GENERATE = Generate(
    attempt="a",
    router=InstanceRef("router", 1),
    decoder=ME,
    prefiller=PREFILLER,
    tokens=[1, 2, 3],
    sampling=Sampling(temperature=0),
    max_tokens=5,
    stop_token_ids=[],
    budget_s=10,
)
NOW = Capacity(
    me=ME,
    model=MODEL,
    layout=LAYOUT,
    tp=1,
    total_pages=10,
    free_pages=5,
    waiting=0,
    max_waiting=4,
    draining=False,
    starved=False,
    attempts=frozenset(),
)


def changed(struct, **fields):
    return msgspec.structs.replace(struct, **fields)


def capacity(**fields):
    from dataclasses import replace

    return replace(NOW, **fields)


def test_takes_what_fits():
    assert refuse(GENERATE, NOW) is None
    assert refuse(changed(GENERATE, tokens=[5], prefiller=None), NOW) is None
    assert refuse(changed(GENERATE, prefiller=changed(PREFILLER, tp=8)), capacity(tp=2)) is None


@pytest.mark.parametrize(
    ("generate", "now", "code", "retryable", "names"),
    [
        (changed(GENERATE, decoder=InstanceRef("decode", 6)), NOW, "stale_incarnation", True, "0000000000000007"),
        (GENERATE, capacity(attempts=frozenset("a")), "duplicate", False, "already"),
        (changed(GENERATE, tokens=[]), NOW, "invalid", False, "empty"),
        (changed(GENERATE, max_tokens=0), NOW, "invalid", False, "max_tokens"),
        (changed(GENERATE, tokens=[1] * 64), NOW, "invalid", False, "64 positions"),
        (changed(GENERATE, tokens=[1, 100]), NOW, "invalid", False, "0 to 99"),
        (changed(GENERATE, tokens=[1, -1]), NOW, "invalid", False, "0 to 99"),
        (changed(GENERATE, max_tokens=50), NOW, "invalid", False, "the pool has 10"),
        (changed(GENERATE, prefiller=None), NOW, "mismatch", True, "no prefiller"),
        (
            changed(GENERATE, prefiller=changed(PREFILLER, layout=changed(LAYOUT, page_size=8))),
            NOW,
            "mismatch",
            True,
            "page_size=8.*page_size=4",
        ),
        (
            changed(GENERATE, prefiller=changed(PREFILLER, model=changed(MODEL, digest="e"))),
            NOW,
            "mismatch",
            True,
            "prefiller has e, decoder has d",
        ),
        (
            changed(GENERATE, prefiller=changed(PREFILLER, tp=3)),
            capacity(tp=2),
            "mismatch",
            True,
            "prefiller has 3, decoder has 2, 1 KV heads",
        ),
        (GENERATE, capacity(draining=True), "draining", True, "leaving"),
        (GENERATE, capacity(waiting=4), "busy", True, "4 admitted"),
        (GENERATE, capacity(free_pages=0), "busy", True, "0 of 10"),
        (GENERATE, capacity(starved=True), "busy", True, "pages"),
    ],
)
def test_refuses_naming_why(generate, now, code, retryable, names):
    refusal = refuse(generate, now)
    assert refusal is not None
    assert (refusal.code, refusal.retryable, refusal.attempt) == (code, retryable, generate.attempt)
    import re

    assert re.search(names, refusal.reason)


@pytest.mark.parametrize(("prompt", "pages"), [(1, 1), (3, 1), (4, 2), (7, 2), (8, 3)])
def test_the_first_growth_has_a_place(prompt, pages):
    assert pages_at_admission(LAYOUT, prompt) == pages
