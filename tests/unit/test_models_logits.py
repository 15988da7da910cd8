"""Logits at every position beside transformers on the same weights, and the same bits however the work is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.engine.protocol import Row
from shared.engine.whole import GREEDY, Whole, WholeConfig
from shared.messages import Sampling
from shared.models import _kernels
from shared.models.model import ModelOptions
from tests import random_models

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

VARIANTS = {
    "llama-tied": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 40}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-llama3-rope": (
        "llama",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64, "rope_theta": 5e5}},
    ),
    "qwen3-untied": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": {**random_models.YARN, "mscale": None, "mscale_all_dim": None}}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3-moe", {}),
    "qwen3-moe-every-second": ("qwen3-moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False}),
    "qwen3-moe-all-experts": ("qwen3-moe", {"num_experts_per_tok": 6}),
    "deepseek": ("deepseek-v3", {}),
    "deepseek-one-query-matrix": ("deepseek-v3", {"q_lora_rank": None}),
    "deepseek-not-interleaved": ("deepseek-v3", {"rope_interleave": False}),
    "deepseek-plain-rope": ("deepseek-v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "deepseek-one-mscale": ("deepseek-v3", {"rope_parameters": {**random_models.YARN, "mscale": None}}),
    "deepseek-raw-weights": ("deepseek-v3", {"norm_topk_prob": False, "routed_scaling_factor": 0.5}),
    "deepseek-two-shared": ("deepseek-v3", {"n_shared_experts": 2, "n_group": 1, "topk_group": 1}),
    "deepseek-all-dense": ("deepseek-v3", {"first_k_dense_replace": 3}),
    "gemma3": ("gemma3", {}),
    "gemma3-tied": ("gemma3", {"tie_word_embeddings": True}),
    "gemma3-pattern": ("gemma3", {"layer_types": None, "sliding_window_pattern": 2, "sliding_window": 1}),
    "gemma3-wide-window": ("gemma3", {"sliding_window": 100, "query_pre_attn_scalar": 16}),
}
LENGTH = 150
TOKENS = np.random.default_rng(0).integers(0, 160, LENGTH).tolist()


@pytest.fixture(scope="module", autouse=True)
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def expected_logits(directory: Path, tokens: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].numpy()


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the standard deviation of the logits."""
    return float(abs(got - expected).max() / expected.std())


def logits_of(whole: Whole, tokens: list[int]) -> np.ndarray:
    (pages,) = whole.page_tables([len(tokens)])
    return whole.model.all_logits([Row(tokens=tokens, start=0, pages=pages)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, tmp_path):
    kind, changes = VARIANTS[variant]
    random_models.save(kind, tmp_path, **changes)
    expected = expected_logits(tmp_path, TOKENS)
    for isa in _kernels.instruction_sets():
        whole = Whole(tmp_path, WholeConfig(options=ModelOptions(isa=isa, threads=2), page_size=16))
        assert relative_error(logits_of(whole, TOKENS), expected) < 1e-4


def test_bfloat16_weights_are_float32_weights_that_were_rounded(tmp_path):
    source = random_models.save("llama", tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "rounded")
    expected = expected_logits(tmp_path / "rounded", TOKENS)
    for directory in (tmp_path / "source", tmp_path / "rounded"):
        whole = Whole(directory, WholeConfig(options=ModelOptions(weights_dtype="bfloat16")))
        assert relative_error(logits_of(whole, TOKENS), expected) < 1e-4
    auto = Whole(tmp_path / "rounded", WholeConfig())
    assert auto.model.weights_bytes == whole.model.weights_bytes
    assert Whole(source, WholeConfig()).model.weights_bytes == 2 * whole.model.weights_bytes


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe", "deepseek-v3", "gemma3"])
def test_bfloat16_checkpoints_stay_bfloat16(kind, tmp_path):
    source = random_models.save(kind, tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "rounded")
    whole = Whole(tmp_path / "rounded", WholeConfig())
    assert relative_error(logits_of(whole, TOKENS), expected_logits(tmp_path / "rounded", TOKENS)) < 1e-4
    assert whole.model.weights_bytes < 0.6 * Whole(source, WholeConfig()).model.weights_bytes


def test_float16_in_shards_is_held_exactly(tmp_path):
    source = random_models.save("llama", tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    expected = expected_logits(tmp_path / "shards", TOKENS)
    assert relative_error(logits_of(Whole(tmp_path / "shards", WholeConfig()), TOKENS), expected) < 1e-4


def test_a_bfloat16_cache_is_close(tmp_path):
    random_models.save("llama", tmp_path)
    expected = expected_logits(tmp_path, TOKENS)
    got = logits_of(Whole(tmp_path, WholeConfig(kv_dtype="bfloat16")), TOKENS)
    assert 1e-4 < abs(got - expected).mean() / expected.std() < 0.05


@pytest.fixture(scope="module", params=random_models.KINDS)
def directory(request, tmp_path_factory):
    return random_models.save(request.param, tmp_path_factory.mktemp(request.param))


def boundary_lengths(page: int, chunk: int) -> list[int]:
    """Prompts whose last token follows around every boundary."""
    edges = [1, page, 2 * page, chunk, 2 * chunk, 64, 128]
    return sorted({1, 2} | {edge + 1 + d for edge in edges for d in (-1, 0, 1)})


@pytest.mark.parametrize("chunk", [1, 7])
def test_decoded_and_chunked_logits_equal_transformers(directory, chunk):
    """Of latent attention this is the absorbed form beside transformers' own, which expands every latent to all heads."""
    whole = Whole(directory, WholeConfig(page_size=16))
    (pages,) = whole.page_tables([LENGTH])
    cuts = range(0, LENGTH, chunk)
    got = [whole.model.all_logits([Row(tokens=TOKENS[i : i + chunk], start=i, pages=pages)]) for i in cuts]
    assert relative_error(np.concatenate(got), expected_logits(directory, TOKENS)) < 1e-4


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("page", "chunk"), [(1, 3), (16, 16), (64, 7), (5, 64)])
def test_chunks_pages_and_mates_change_no_bit(directory, page, chunk, kv_dtype):
    reference = Whole(directory, WholeConfig(kv_dtype=kv_dtype, page_size=256, chunk_tokens=512))
    config = WholeConfig(
        kv_dtype=kv_dtype,
        page_size=page,
        chunk_tokens=chunk,
        kv_tokens=4096,
        options=ModelOptions(threads=3),
    )
    cut = Whole(directory, config)
    prompts = [TOKENS[:n] for n in boundary_lengths(page, chunk)]
    expected = [reference.generate([prompt], 4)[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > len(prompts) // 2
    assert cut.generate(prompts, 4) == expected

    tables = cut.page_tables([len(prompt) for prompt in prompts])
    for prompt, pages in zip(prompts, tables, strict=True):
        cut.prefill(prompt[:-1], pages)
    rows = [Row(tokens=p[-1:], start=len(p) - 1, pages=pages) for p, pages in zip(prompts, tables, strict=True)]
    whole_logits = logits_of(reference, prompts[-1])
    assert np.array_equal(cut.model.all_logits(rows), whole_logits[[len(p) - 1 for p in prompts]])


def test_a_prefill_model_leaves_out_a_head_of_its_own(tmp_path):
    sizes = []
    for tied in (True, False):
        directory = random_models.save("qwen3", tmp_path / str(tied), tie_word_embeddings=tied)
        options = ModelOptions(purpose="prefill")
        whole, model = Whole(directory, WholeConfig()), Whole(directory, WholeConfig(options=options)).model
        sizes.append(whole.model.weights_bytes - model.weights_bytes)
        (pages,) = whole.page_tables([3])
        assert model.step([Row(tokens=[1, 2], start=0, pages=pages)]) == [None]
    assert sizes == [0, 160 * 64 * 4]
    rows = [Row(tokens=[1], start=0, pages=pages, sample=sample) for sample in (None, GREEDY)]
    with pytest.raises(ValueError, match="row 1: asks for a token"):
        model.step(rows)


def test_mixed_rows_in_one_step(directory):
    """A prefill chunk, a decode and a first token together give what each gives alone."""
    whole = Whole(directory, WholeConfig(page_size=8))
    tables = whole.page_tables([60, 60, 60])
    sampling = Sampling(temperature=1.0, seed=3)
    rows = [
        Row(tokens=TOKENS[20:50], start=20, pages=tables[0], sample=sampling),
        Row(tokens=[TOKENS[59]], start=59, pages=tables[1], sample=GREEDY),
        Row(tokens=[TOKENS[0]], start=0, pages=tables[2]),
    ]
    whole.prefill(TOKENS[:20], tables[0])
    whole.prefill(TOKENS[:59], tables[1])
    together = whole.model.step(rows)
    assert together[2] is None
    assert [whole.model.step([row])[0] for row in rows] == together


def test_the_callback_comes_once_a_layer_after_its_keys(directory):
    whole = Whole(directory, WholeConfig(page_size=8))
    (pages,) = whole.page_tables([10])
    calls: list[int] = []
    for sample in (None, GREEDY):
        calls.clear()
        whole.model.step([Row(tokens=TOKENS[:9], start=0, pages=pages, sample=sample)], lambda: calls.append(1))
        assert len(calls) == random_models.SMALL["num_hidden_layers"]
    calls.clear()
    assert whole.model.step([], lambda: calls.append(1)) == []
    assert len(calls) == random_models.SMALL["num_hidden_layers"]


BAD_ROWS = [
    (Row(tokens=[1, 160], start=0, pages=bytes(4)), "token outside"),
    (Row(tokens=[-1], start=0, pages=bytes(4)), "token outside"),
    (Row(tokens=[], start=0, pages=bytes(4)), "no tokens"),
    (Row(tokens=[1], start=-1, pages=bytes(4)), "position -1"),
    (Row(tokens=[1], start=16, pages=bytes(4)), "needs 2 pages, has 1"),
    (Row(tokens=[1], start=0, pages=b""), "needs 1 pages, has 0"),
    (Row(tokens=[1], start=0, pages=b"\xff\xff\xff\xff"), "page -1"),
    (Row(tokens=[1], start=0, pages=b"\x00\x01\x00\x00"), "page 256"),
    (Row(tokens=[1], start=0, pages=bytes(3)), "buffer size"),
    (Row(tokens=[1], start=512, pages=bytes(4 * 64)), "position 512 of 512"),
    (Row(tokens=[1], start=2**40, pages=bytes(4)), "position"),
]


@pytest.mark.parametrize(("row", "text"), BAD_ROWS)
def test_bad_rows_raise_before_anything_is_written(directory, row, text):
    whole = Whole(directory, WholeConfig(page_size=16, kv_tokens=1024))
    good = Row(tokens=[1, 2], start=0, pages=bytes(4))
    calls: list[int] = []
    with pytest.raises(ValueError, match=text):
        whole.model.step([good, row], lambda: calls.append(1))
    assert not calls
    assert whole.model.step([good]) == [None]
