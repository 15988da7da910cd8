"""A model over several ranks beside the whole one, and the sums that join them; the ranks are threads here."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shared.engine.collective import shared_bytes
from shared.engine.protocol import Row
from shared.engine.whole import GREEDY, Whole, WholeConfig
from shared.errors import ModelError, RankLost, RowsFailed
from shared.messages import Scoring
from shared.models.collective import Peers, SharedMemory
from shared.models.config import load_config
from shared.models.model import SCORED_AT_ONCE, Model, ModelOptions
from shared.models.shard import Shard, sharded_layout
from tests import random_models

TOKENS = np.random.default_rng(0).integers(0, 160, 70).tolist()
PAGES = np.arange(8, dtype="<i4").tobytes()

VARIANTS = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {}),
    "qwen3-odd-vocabulary": ("qwen3", {"vocab_size": 163}),
    "llama-odd-vocabulary": ("llama", {"vocab_size": 163}),
    "qwen3-moe": ("qwen3-moe", {}),
    "deepseek-v3": ("deepseek-v3", {}),
    "gemma3": ("gemma3", {}),
}


def on_ranks(ranks, call):
    memory = np.zeros(shared_bytes(ranks), np.uint8)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: call(SharedMemory(memory, rank, ranks, deadline_s=20.0)), range(ranks)))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_caches_are_the_whole_models(tmp_path, name, ranks):
    kind, changes = VARIANTS[name]
    directory = random_models.save(kind, tmp_path, **changes)
    whole = Whole(directory, WholeConfig(page_size=16, kv_tokens=128))
    expected = whole.model.all_logits([Row(tokens=TOKENS, start=0, pages=PAGES)])
    layout = sharded_layout(whole.layout, ranks)
    regions = [np.zeros(layout.region_bytes(8), np.uint8) for _ in range(ranks)]

    def run(peers):
        model = Model(directory, ModelOptions(), layout, 8, regions[peers.rank], peers=Peers(tensor=peers))
        calls: list[int] = []
        assert model.step([Row(tokens=TOKENS[:40], start=0, pages=PAGES)], lambda: calls.append(1)) == [None]
        assert len(calls) == layout.num_layers
        return model.all_logits([Row(tokens=TOKENS, start=0, pages=PAGES)])

    logits = on_ranks(ranks, run)[0]
    assert abs(logits - expected).max() / expected.std() < 1e-3
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.98
    kv_heads = load_config(directory).kv_heads
    if kv_heads < ranks:  # replicas hold the same bytes
        for rank in range(ranks):
            assert (regions[rank] == regions[rank // (ranks // kv_heads) * (ranks // kv_heads)]).all()


def test_the_first_of_several_ranks_scores_known_tokens(tmp_path):
    """More of them than have their logits in memory at once, beside a row that draws."""
    directory = random_models.save("llama", tmp_path)
    whole = Whole(directory, WholeConfig(page_size=16, kv_tokens=128))
    logits = whole.model.all_logits([Row(tokens=TOKENS, start=0, pages=PAGES)]).astype(np.float64)
    known = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    scoring = Scoring(2, TOKENS[3:], 3)
    own = np.arange(8, 16, dtype="<i4").tobytes()
    layout = sharded_layout(whole.layout, 2)

    def run(peers):
        kv = np.zeros(layout.region_bytes(16), np.uint8)
        model = Model(directory, ModelOptions(), layout, 16, kv, peers=Peers(tensor=peers))
        other = Row(tokens=TOKENS[:9], start=0, pages=own, sample=GREEDY)
        return model.draw([other, Row(tokens=TOKENS, start=0, pages=PAGES, scoring=scoring)])

    first, second = on_ranks(2, run)
    assert list(first.scores) == [1]
    assert second.scores == {}
    assert first.tokens == [[int(logits[8].argmax())], []]
    assert len(first.scores[1]) == len(TOKENS) - 3 > SCORED_AT_ONCE
    for at, one in enumerate(first.scores[1], 2):
        assert one.logprob == pytest.approx(known[at, TOKENS[at + 1]], abs=1e-3)
        assert [token for token, _ in one.top] == np.argsort(-known[at])[:3].tolist()


@pytest.mark.parametrize("scoring", [Scoring(-1, [1], 0), Scoring(69, [1, 2], 0), Scoring(0, [160], 0)])
def test_scores_of_what_is_not_there_are_refused(tmp_path, scoring):
    whole = Whole(random_models.save("llama", tmp_path), WholeConfig(page_size=16, kv_tokens=128))
    with pytest.raises(RowsFailed, match="scores"):
        whole.model.draw([Row(tokens=TOKENS, start=0, pages=PAGES, scoring=scoring)])


@pytest.mark.parametrize(("heads", "ranks"), [(4, 2), (2, 2), (2, 4), (1, 4)])
def test_kv_heads_by_rank(heads, ranks):
    for rank in range(ranks):
        part = Shard(rank=rank, ranks=ranks).kv_heads(heads)
        assert part == slice(rank * heads // ranks, max(1, heads // ranks) + rank * heads // ranks)


def test_what_does_not_divide_is_refused(tmp_path):
    config = load_config(random_models.save("llama", tmp_path))
    with pytest.raises(ModelError, match="3"):
        Shard(rank=0, ranks=3).config(config)
    with pytest.raises(ModelError, match="2 KV heads"):
        sharded_layout(config.layout(page_size=16, dtype="float32"), 3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sums_have_the_same_bits_in_every_rank(ranks):
    shapes = [(1, 1), (3, 50), (1, 1 << 18), (2, 300_001), (0, 5)]
    arrays = [
        [np.random.default_rng((rank, i)).standard_normal(shape, np.float32) for i, shape in enumerate(shapes)]
        for rank in range(ranks)
    ]
    expected = [sum(own[i].astype(np.float64) for own in arrays) for i in range(len(shapes))]

    def run(peers):
        for _ in range(20):
            peers.barrier()
        for array in arrays[peers.rank]:
            peers.all_reduce_sum(array)

    on_ranks(ranks, run)
    for i, right in enumerate(expected):
        assert all((own[i] == arrays[0][i]).all() for own in arrays)
        np.testing.assert_allclose(arrays[0][i], right, atol=1e-5)


def test_a_rank_that_does_not_come_is_named():
    memory = np.zeros(shared_bytes(2), np.uint8)
    lead = SharedMemory(memory, 0, 2, deadline_s=0.05)
    with pytest.raises(RankLost, match="rank 1 of 2") as raised:
        lead.barrier()
    assert raised.value.rank == 1


def test_a_rank_that_has_ended_is_noticed_before_the_deadline():
    memory = np.zeros(shared_bytes(2), np.uint8)
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    lead = SharedMemory(memory, 0, 2, deadline_s=60.0)
    memory[128:256].view(np.int64)[1] = child
    with pytest.raises(RankLost, match="rank 1 of 2"):
        lead.all_reduce_sum(np.zeros((1, 4), np.float32))
