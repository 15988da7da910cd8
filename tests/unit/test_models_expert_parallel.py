"""Experts that are spread over ranks beside the whole model, and the all-to-all that joins them; the ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shared.engine.collective import shared_bytes
from shared.engine.protocol import Row
from shared.engine.whole import GREEDY, Whole, WholeConfig
from shared.errors import ModelError, RankLost, RowsFailed
from shared.models.collective import Peers, SharedMemory
from shared.models.config import load_config
from shared.models.model import Model, ModelOptions
from shared.models.shard import Shard, sharded_layout
from tests import random_models

DEADLINE_S = 20.0
PAGES = np.arange(8, dtype="<i4").tobytes()
KINDS = {"deepseek-v3": {}, "qwen3-moe": {"num_experts": 8}}


@pytest.fixture(scope="module", params=KINDS)
def directory(request, tmp_path_factory):
    return random_models.save(request.param, tmp_path_factory.mktemp(request.param), **KINDS[request.param])


@pytest.fixture(scope="module")
def whole(directory):
    return Whole(directory, WholeConfig(page_size=16, kv_tokens=128))


def tokens_for(rank: int, count: int) -> list[int]:
    return np.random.default_rng(rank).integers(0, 160, count).tolist()


class Group:
    """`call(model, d, t)` in each rank of `dp` groups of `tp`; the results of each group's first rank."""

    def __init__(self, directory, tp: int, dp: int) -> None:
        self.directory, self.tp, self.dp = directory, tp, dp
        self.layout = sharded_layout(load_config(directory).layout(page_size=16, dtype="float32"), tp)
        self.experts = np.zeros(shared_bytes(tp * dp), np.uint8)
        self.tensor = [np.zeros(shared_bytes(tp), np.uint8) for _ in range(dp)]

    def _run(self, call, rank):
        d, t = divmod(rank, self.tp)
        tensor = SharedMemory(self.tensor[d], t, self.tp, deadline_s=DEADLINE_S) if self.tp > 1 else None
        peers = Peers(tensor, SharedMemory(self.experts, rank, self.tp * self.dp, deadline_s=DEADLINE_S))
        kv = np.zeros(self.layout.region_bytes(8), np.uint8)
        return call(Model(self.directory, ModelOptions(), self.layout, 8, kv, peers=peers), d, t)

    def run(self, call):
        with ThreadPoolExecutor(self.tp * self.dp) as pool:
            return list(pool.map(lambda rank: self._run(call, rank), range(self.tp * self.dp)))[:: self.tp]


def hidden(model, tokens):
    """Of all tokens, also of none."""
    return model._run(model._plan([Row(tokens=tokens, start=0, pages=PAGES)] if tokens else []), None, fill_only=False)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_logits_are_the_whole_models_for_uneven_rows(directory, whole, dp, tp):
    lengths = [70, 0, 1, 13] if dp == 4 else [5, 90]

    def run(model, d, t):
        x = hidden(model, tokens_for(d, lengths[d]))
        return model._network.logits(x).copy()

    for d, logits in enumerate(Group(directory, tp, dp).run(run)):
        assert logits.shape[0] == lengths[d]
        if lengths[d]:
            row = Row(tokens=tokens_for(d, lengths[d]), start=0, pages=PAGES)
            expected = whole.model.all_logits([row])
            assert abs(logits - expected).max() / expected.std() < 1e-3


def test_a_step_that_only_fills_and_one_that_draws_stay_together(directory, whole):
    """Alone, the first would leave out the last layer's experts."""
    prompt = tokens_for(0, 30)
    whole.prefill(prompt[:-1], PAGES)
    expected = whole.model.step([Row(tokens=prompt[-1:], start=29, pages=PAGES, sample=GREEDY)])

    def run(model, d, t):
        fill = [Row(tokens=prompt[:-1], start=0, pages=PAGES)]
        model.step(fill if d == 0 else [Row(tokens=[3], start=0, pages=PAGES, sample=GREEDY)])
        return model.step([Row(tokens=prompt[-1:], start=29, pages=PAGES, sample=GREEDY)] if d == 0 else [])

    assert Group(directory, 1, 2).run(run) == [expected, []]


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_that_are_not_sound_hold_nobody_up(directory, whole, tp):
    good = Row(tokens=tokens_for(1, 20), start=0, pages=PAGES, sample=GREEDY)
    expected = whole.model.step([good])

    def run(model, d, t):
        if d == 0:
            for bad in (Row(tokens=[999], start=0, pages=PAGES), Row(tokens=[1 << 80], start=0, pages=PAGES)):
                with pytest.raises(RowsFailed):
                    model.step([bad])
            return model.step([good])
        drawn = [model.step([good]), model.step([good]), model.step([])]
        assert drawn[0] == drawn[1]
        return drawn[0]

    assert Group(directory, tp, 2).run(run) == [expected, expected]


def test_what_does_not_divide_is_refused(directory):
    config = load_config(directory)
    with pytest.raises(ModelError, match="expert parallel 3: takes a divisor of the model's 8 experts"):
        Shard(ep=3).config(config)
    assert [list(Shard(ep_rank=r, ep=4).experts(8)) for r in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    whole = Shard(ep=4).config(config).experts
    assert whole is not None
    assert whole.intermediate == config.experts.intermediate


def exchange(ranks, call):
    memory = np.zeros(shared_bytes(ranks), np.uint8)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: call(SharedMemory(memory, rank, ranks, deadline_s=DEADLINE_S)), range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_arrive_once_and_in_order(ranks):
    """Rows of 4000 numbers: 65 fit into a turn, so that the largest exchange takes several."""
    width, rounds = 4000, 6
    counts = np.random.default_rng(ranks).integers(0, 4, (rounds, ranks, ranks))
    counts[1] = 0
    counts[2, 0] = 70

    def run(peers):
        for number, count in enumerate(counts):
            mark = [peers.rank * 100 + to + number / 8 for to in range(ranks) for _ in range(count[peers.rank, to])]
            sent = np.repeat(np.array(mark, np.float32)[:, None], width, 1)
            sent += np.arange(sent.shape[0], dtype=np.float32)[:, None] / 1024
            kept = peers.all_to_all(sent, count[peers.rank].tolist())
            assert kept.counts == count[:, peers.rank].tolist()
            begin = 0
            for source, n in enumerate(kept.counts):
                first = count[source, : peers.rank].sum()
                expected = source * 100 + peers.rank + number / 8 + (first + np.arange(n)) / 1024
                assert (kept.values[begin : begin + n] == expected.astype(np.float32)[:, None]).all()
                begin += n
            assert kept.values.shape == (begin, width)
            peers.barrier()

    exchange(ranks, run)


def test_received_rows_stay_while_they_are_held_and_their_memory_is_used_again():
    def run(peers):
        first = peers.all_to_all(np.ones((2, 8), np.float32), [1, 1]).values
        second = peers.all_to_all(np.zeros((2, 8), np.float32), [1, 1]).values
        held = bool((first == 1).all() and (second == 0).all())
        place = first.ctypes.data
        del first
        third = peers.all_to_all(np.ones((2, 8), np.float32), [1, 1]).values
        return held and third.ctypes.data == place and bool((second == 0).all())

    assert exchange(2, run) == [True, True]


def test_counts_that_do_not_fit_the_rows_are_refused():
    peers = SharedMemory(np.zeros(shared_bytes(1), np.uint8), 0, 1)
    for counts, text in (([3], "add up"), ([1, 1], "one count a rank"), ([-1], "0 or more")):
        with pytest.raises(ValueError, match=text):
            peers.all_to_all(np.zeros((2, 4), np.float32), counts)
    with pytest.raises(ValueError, match="larger than a slot"):
        peers.all_to_all(np.zeros((1, 1 << 19), np.float32), [1])


def test_a_rank_that_does_not_come_to_the_exchange_is_named():
    memory = np.zeros(shared_bytes(3), np.uint8)
    here = threading.Barrier(2)

    def run(rank):
        peers = SharedMemory(memory, rank, 3, deadline_s=0.2)
        here.wait()
        with pytest.raises(RankLost, match="rank 2 of 3"):
            peers.all_to_all(np.zeros((1, 4), np.float32), [0, 0, 1])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
