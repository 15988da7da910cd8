"""Who is there: incarnations, silence, states, and why two never meet."""

from __future__ import annotations

import logging

import msgspec
import pytest

from services.router.dispatch import Need, NoPair, Pair, choose
from services.router.registry import Registry, mismatch_of
from shared.messages import PROTOCOL, Announce, InstanceRef, ModelIdentity
from tests.fake_mesh import LAYOUT, announcement

MODEL = ModelIdentity(name="tiny", digest="d1", vocab_size=400, max_positions=512)


def registry(*announces: Announce) -> Registry:
    made = Registry(MODEL, dead_after_s=2.0)
    for announce in announces:
        made.observe(announce, 0.0)
    return made


def names(made: Registry) -> tuple[list[str], list[str]]:
    return [d.ref.name for d in made.decoders], [p.ref.name for p in made.prefillers]


def test_an_instance_is_there_from_its_first_heartbeat() -> None:
    made = registry(announcement("decode", "d0"), announcement("prefill", "p0"))
    assert names(made) == (["d0"], ["p0"])
    assert made.missing() is None


@pytest.mark.case("F3")
def test_a_new_incarnation_replaces_the_old_and_says_so() -> None:
    made = registry(announcement("decode", "d0", 1))
    assert made.observe(announcement("decode", "d0", 2), 0.1) == [(InstanceRef("d0", 1), "was restarted")]
    assert [d.ref.incarnation for d in made.decoders] == [2]


def test_late_heartbeats_of_an_old_incarnation_bring_nothing_back() -> None:
    made = registry(announcement("decode", "d0", 1), announcement("decode", "d0", 2))
    assert made.observe(announcement("decode", "d0", 1), 0.2) == []
    assert [d.ref.incarnation for d in made.decoders] == [2]


def test_a_decoder_and_a_prefiller_may_have_the_same_name() -> None:
    made = registry(announcement("decode", "x", 1), announcement("prefill", "x", 2))
    assert names(made) == (["x"], ["x"])


def test_silence_is_death_and_a_heartbeat_brings_it_back() -> None:
    made = registry(announcement("decode", "d0", 1))
    assert made.sweep(1.9) == []
    assert made.sweep(2.1) == [InstanceRef("d0", 1)]
    assert made.decoders == []
    made.observe(announcement("decode", "d0", 1), 3.0)
    assert names(made)[0] == ["d0"]


def test_silence_that_is_our_own_deafness_kills_nobody() -> None:
    made = registry(announcement("decode", "d0", 1))
    made.pardon(10.0)
    assert made.sweep(11.9) == []
    assert made.sweep(12.1) == [InstanceRef("d0", 1)]


def test_draining_ones_get_nothing_new_and_lose_nothing() -> None:
    made = registry(announcement("decode", "d0", 1))
    assert made.observe(announcement("decode", "d0", 1, state="draining"), 0.1) == []
    assert made.decoders == []
    assert made.missing() == "no decode instance is usable (d0 is draining); no prefill instance is there"


def test_one_that_left_is_gone_for_good() -> None:
    made = registry(announcement("decode", "d0", 1))
    assert made.observe(announcement("decode", "d0", 1, state="left"), 0.1) == [(InstanceRef("d0", 1), "has left")]
    made.observe(announcement("decode", "d0", 1), 0.2)
    assert made.instances == []


def test_one_that_is_said_to_be_stale_is_not_used_again() -> None:
    made = registry(announcement("decode", "d0", 1))
    made.stale(InstanceRef("d0", 1))
    made.observe(announcement("decode", "d0", 1), 0.2)
    assert made.decoders == []


def test_a_refusal_because_of_draining_counts_until_the_next_change() -> None:
    made = registry(announcement("decode", "d0", 1))
    made.draining(InstanceRef("d0", 1))
    assert made.decoders == []


@pytest.mark.parametrize(
    ("theirs", "field", "ours_shown", "theirs_shown"),
    [
        ({"layout": msgspec.structs.replace(LAYOUT, page_size=64)}, "layout.page_size", "16", "64"),
        ({"layout": msgspec.structs.replace(LAYOUT, dtype="bfloat16")}, "layout.dtype", "float32", "bfloat16"),
        ({"layout": msgspec.structs.replace(LAYOUT, num_kv_heads=3)}, "layout.num_kv_heads", "1", "3"),
        ({"layout": msgspec.structs.replace(LAYOUT, num_layers=5)}, "layout.num_layers", "2", "5"),
        ({"layout": msgspec.structs.replace(LAYOUT, head_dim=4)}, "layout.head_dim", "8", "4"),
        ({"layout": msgspec.structs.replace(LAYOUT, kind="mla")}, "layout.kind", "gqa", "mla"),
        ({"drafter": "mtp"}, "speculate", "no drafter", "mtp"),
        ({"layout": msgspec.structs.replace(LAYOUT, draft=LAYOUT)}, "layout.draft", "None", "KvLayout"),
        ({"tp": 0}, "tp", "1 for 1 KV heads", "0 for 1 KV heads"),
    ],
)
@pytest.mark.case("C3")
def test_a_layout_that_differs_is_named_with_both_values(
    theirs: dict[str, object], field: str, ours_shown: str, theirs_shown: str
) -> None:
    made = registry(announcement("prefill", "p0"), announcement("decode", "d0", **theirs))  # type: ignore[arg-type]
    assert isinstance(choose(made.decoders, made.prefillers, Need(5), 0.0), NoPair)
    reason = made.missing()
    assert reason is not None
    assert "p0" in reason
    assert "d0" in reason
    assert f"{field} differs: prefiller has {ours_shown}, decoder has {theirs_shown}" in reason


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"digest": "d2"}, ["model differs", "tiny (d2)", "tiny (d1)"]),
        ({"protocol": 9}, ["protocol differs", "9", str(PROTOCOL)]),
    ],
)
def test_an_instance_of_another_model_or_protocol_is_named_with_both_values(
    fields: dict[str, object], shown: list[str]
) -> None:
    made = registry(announcement("decode", "d0", **fields), announcement("prefill", "p0"))  # type: ignore[arg-type]
    assert made.decoders == []
    assert isinstance(choose(made.decoders, made.prefillers, Need(5), 0.0), NoPair)
    reason = made.missing()
    assert reason is not None
    assert all(text in reason for text in shown)


def test_a_mismatch_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    other = msgspec.structs.replace(LAYOUT, page_size=64)
    made = registry(announcement("prefill", "p0"), announcement("decode", "d0", layout=other))
    for beat in range(5):
        made.observe(announcement("decode", "d0", layout=other), float(beat))
        made.observe(announcement("decode", "d1", 7 + beat, layout=LAYOUT), float(beat))
    assert [r.getMessage() for r in caplog.records if "never paired" in r.getMessage()] == [
        "never paired: prefill p0 and decode d0: layout.page_size differs: prefiller has 16, decoder has 64"
    ]


def test_one_mismatch_among_working_pairs_is_no_reason_to_be_unready() -> None:
    other = msgspec.structs.replace(LAYOUT, page_size=64)
    made = registry(announcement("prefill"), announcement("decode", "d0"), announcement("decode", "d1", layout=other))
    assert made.missing() is None
    assert len(made.mismatches()) == 1


@pytest.mark.parametrize(
    ("heads", "prefill_tp", "decode_tp"), [(6, 2, 3), (6, 3, 2), (4, 3, 3), (4, 4, 3), (2, 3, 1), (4, 0, 1), (0, 1, 1)]
)
def test_shardings_that_do_not_divide_are_never_paired(heads: int, prefill_tp: int, decode_tp: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, num_kv_heads=heads)
    prefill = announcement("prefill", "p0", layout=layout, tp=prefill_tp)
    made = registry(prefill, announcement("decode", "d0", layout=layout, tp=decode_tp))
    assert isinstance(choose(made.decoders, made.prefillers, Need(5), 0.0), NoPair)
    reason = made.missing()
    assert reason is not None
    values = f"prefiller has {prefill_tp} for {heads} KV heads, decoder has {decode_tp} for {heads} KV heads"
    assert f"tp differs: {values}" in reason


@pytest.mark.parametrize("prefill_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("decode_tp", [1, 2, 4, 8])
def test_shardings_that_divide_are_paired(prefill_tp: int, decode_tp: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, num_kv_heads=4)
    prefill = announcement("prefill", "p0", layout=layout, tp=prefill_tp)
    made = registry(prefill, announcement("decode", "d0", layout=layout, tp=decode_tp, dp=3))
    assert (made.missing(), made.mismatches()) == (None, [])
    assert isinstance(choose(made.decoders, made.prefillers, Need(5), 0.0), Pair)


def test_mismatch_of_checks_protocol_and_model_too() -> None:
    ours = announcement("prefill", "p0")
    for field, value in (
        ("protocol", {"protocol": 9}),
        ("model", {"digest": "zz"}),
        ("verify", {"verify": "pages"}),
        ("speculate", {"drafter": "mtp"}),
    ):
        mismatch = mismatch_of(ours, announcement("decode", "d0", **value))  # type: ignore[arg-type]
        assert mismatch is not None
        assert mismatch.field == field
    assert mismatch_of(ours, announcement("decode", "d0")) is None


def test_the_memory_of_ended_incarnations_is_bounded() -> None:
    made = registry()
    for incarnation in range(1000):
        made.observe(announcement("decode", "d0", incarnation), 0.0)
    assert len(made._retired) <= 256
    assert len(made.instances) == 1
