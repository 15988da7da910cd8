"""How a model is split is checked before anything is started; a bad setting is named with what this model takes."""

from __future__ import annotations

import os

import pytest

from shared.config import DecodeSettings, PrefillSettings
from shared.errors import ConfigError
from shared.models.config import load_config
from shared.opening import check_ranks, pool_pages, threads_of
from tests import random_models


@pytest.fixture(scope="module", params=["llama", "qwen3-moe", "deepseek-v3"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def config(kind, tmp_path_factory):
    return load_config(random_models.save(kind, tmp_path_factory.mktemp(kind)))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_tensor_parallel_that_divides_is_taken(config, tp):
    check_ranks(PrefillSettings(tp=tp), config)
    check_ranks(DecodeSettings(tp=tp), config)


@pytest.mark.parametrize("tp", [3, 8, 64])
def test_another_is_named_with_what_the_model_takes(config, tp):
    for settings in (PrefillSettings(tp=tp), DecodeSettings(tp=tp, dp=2)):
        with pytest.raises(ConfigError, match=f"KVMESH_TP={tp}: takes one of 1, 2, 4 for this model"):
            check_ranks(settings, config)


def test_experts_must_divide_by_all_ranks(kind, config):
    takes = {
        "qwen3-moe": {1: "1, 2, 3, 6 for the 6 experts", 2: "1, 3 for the 6 experts"},
        "deepseek-v3": {1: "1, 2, 4, 8 for the 8 experts", 2: "1, 2, 4 for the 8 experts"},
    }
    for tp, dp in ((1, 5), (2, 5)):
        settings = DecodeSettings(tp=tp, dp=dp)
        if kind == "llama":
            check_ranks(settings, config)
            continue
        with pytest.raises(ConfigError, match=f"KVMESH_DP=5: takes one of {takes[kind][tp]} .* KVMESH_TP={tp}"):
            check_ranks(settings, config)
    check_ranks(DecodeSettings(tp=1, dp=2), config)


def test_cores_are_shared_out_among_the_executors():
    cores = len(os.sched_getaffinity(0))
    assert threads_of(PrefillSettings()) == cores
    assert threads_of(DecodeSettings(tp=cores, dp=2)) == 1
    assert threads_of(DecodeSettings(tp=2, dp=2, threads=3)) == 3


def test_a_pool_holds_whole_pages_and_at_least_one():
    assert pool_pages(DecodeSettings(kv_tokens=100, page_size=64, dp=2)) == 1
    with pytest.raises(ConfigError, match="KVMESH_KV_TOKENS=64: takes at least KVMESH_PAGE_SIZE"):
        pool_pages(DecodeSettings(kv_tokens=64, page_size=128))
