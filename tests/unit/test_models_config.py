"""What is read from a model directory, and what is refused, by name."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.errors import ModelError
from shared.models.checkpoint import Checkpoint
from shared.models.config import load_config
from shared.models.digest import model_digest
from shared.models.rope import Rope
from shared.models.rope_table import frequencies, rope_table

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def write(directory, *, generation=None, **changes):
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_config(directory)


def test_llama(tmp_path):
    config = write(tmp_path, generation={"eos_token_id": [2, 7]})
    assert (config.hidden, config.layers, config.heads, config.kv_heads, config.head_dim) == (64, 3, 4, 2, 16)
    assert config.rope == Rope(theta=10000.0)
    assert config.eos_ids == [2, 7]
    assert config.dtype == "bfloat16"
    assert not config.head_norms
    layout = config.layout(page_size=16, dtype="float32")
    assert layout.page_bytes == 2 * 2 * 16 * 16 * 4


def test_defaults(tmp_path):
    config = write(tmp_path, num_key_value_heads=None, eos_token_id=None, torch_dtype=None, dtype="float16")
    assert config.kv_heads == 4
    assert config.eos_ids == []
    assert config.dtype == "float32"


def test_qwen3(tmp_path):
    sliding = {"use_sliding_window": False, "sliding_window": 4096, "layer_types": ["full_attention"] * 3}
    config = write(tmp_path, architectures=["Qwen3ForCausalLM"], **sliding)
    assert config.head_norms
    assert config.head_dim == 128


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


def test_both_spellings_of_rope(tmp_path):
    old = write(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    new = write(tmp_path, rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3})
    assert old.rope == new.rope
    assert old.rope.original_positions == 128
    assert write(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).rope.factor == 2.0


REFUSED = [
    ("architectures", ["MistralForCausalLM"], "LlamaForCausalLM or Qwen2ForCausalLM"),
    ("architectures", None, "LlamaForCausalLM or"),
    ("hidden_act", "gelu", "silu"),
    ("quantization_config", {"bits": 4}, "float32, bfloat16"),
    ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}, "default, linear, llama3 and yarn"),
    ("rope_scaling", "yarn", "an object"),
    ("quantization_config", {"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size [128, 128]"),
    ("torch_dtype", "float8_e4m3fn", "float32, bfloat16"),
    ("layer_types", ["sliding_attention"] * 3, "full_attention"),
    ("partial_rotary_factor", 0.5, "1.0"),
    ("num_key_value_heads", 3, "divisor of num_attention_heads=4"),
    ("head_dim", 15, "even"),
    ("eos_token_id", 160, "below vocab_size=160"),
    ("eos_token_id", "x", "token id"),
    ("hidden_size", 0, "at least 1"),
    ("hidden_size", "64", "whole number"),
    ("rms_norm_eps", -1, "above 0"),
    ("tie_word_embeddings", "yes", "true or false"),
]


@pytest.mark.parametrize(("field", "value", "supported"), REFUSED)
def test_refused_with_field_value_and_what_is_supported(tmp_path, field, value, supported):
    with pytest.raises(ModelError) as caught:
        write(tmp_path, **{field: value})
    text = str(caught.value)
    assert field in text or (field, "dtype" in text) == ("torch_dtype", True)
    assert supported in text
    assert "config.json" in text


QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "head_dim": 16}
REFUSED_OF = [
    (QWEN_MOE, "num_experts_per_tok", 9, "at most 8"),
    (QWEN_MOE, "mlp_only_layers", ["x"], "list"),
    (QWEN_MOE, "norm_topk_prob", 1, "true or false"),
    (DEEPSEEK, "attention_bias", True, "False"),
    (DEEPSEEK, "scoring_func", "softmax", "sigmoid"),
    (DEEPSEEK, "topk_method", "greedy", "noaux_tc"),
    (DEEPSEEK, "moe_layer_freq", 2, "1"),
    (DEEPSEEK, "n_group", 3, "divisor of the 8"),
    (DEEPSEEK, "topk_group", 5, "n_group=4"),
    (DEEPSEEK, "num_experts_per_tok", 5, "at most 4"),
    (DEEPSEEK, "qk_rope_head_dim", 7, "even"),
    (DEEPSEEK, "first_k_dense_replace", -1, "0 or more"),
    (GEMMA, "final_logit_softcapping", 30.0, "None"),
    (GEMMA, "use_bidirectional_attention", True, "False"),
    (GEMMA, "hidden_activation", "gelu", "gelu_pytorch_tanh"),
    (GEMMA, "layer_types", ["full_attention"], "each of 3 layers"),
    (GEMMA, "layer_types", ["chunked_attention"] * 3, "sliding_attention"),
]


@pytest.mark.parametrize(("base", "field", "value", "supported"), REFUSED_OF)
def test_refused_of_an_architecture(tmp_path, base, field, value, supported):
    write(tmp_path, **base)
    with pytest.raises(ModelError) as caught:
        write(tmp_path, **base | {field: value})
    assert f"{field}={value!r}" in str(caught.value)
    assert supported in str(caught.value)


def test_qwen2_has_biases_on_q_k_and_v_alone(tmp_path):
    config = write(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, False, False)


def test_qwen_experts(tmp_path):
    experts = write(tmp_path, **QWEN_MOE, decoder_sparse_step=2).experts
    assert experts.sparse == [False, True, False]
    assert write(tmp_path, **QWEN_MOE, mlp_only_layers=[0, 2]).experts == experts
    assert (experts.count, experts.per_token, experts.sigmoid, experts.groups) == (8, 2, False, 1)
    assert write(tmp_path, **QWEN_MOE | {"num_experts": None}, num_local_experts=4).experts.count == 4


def test_a_latent_is_cached_once(tmp_path):
    config = write(tmp_path, **DEEPSEEK)
    assert config.experts.sparse == [False, True, True]
    assert config.experts.shared_intermediate == 64
    layout = config.layout(page_size=16, dtype="bfloat16")
    assert (layout.kind, layout.num_kv_heads, layout.head_dim) == ("mla", 1, 40)
    assert layout.page_bytes == 16 * 40 * 2
    assert layout.region_bytes(5) == 3 * 5 * layout.page_bytes
    assert layout.digest() != msgspec.structs.replace(layout, kind="gqa").digest()


def test_yarn(tmp_path):
    yarn = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = write(tmp_path, **DEEPSEEK, rope_scaling=yarn)
    once = 0.1 * np.log(40) + 1
    assert config.rope.table_scale == 1.0
    assert config.score_scale == pytest.approx(24**-0.5 * once**2)
    assert write(tmp_path, **DEEPSEEK, rope_scaling=yarn | {"mscale": 0}).rope.table_scale == pytest.approx(once)
    assert write(tmp_path, **DEEPSEEK, rope_scaling=yarn | {"attention_factor": 1.5}).rope.table_scale == 1.5


def test_a_deepseek_config_as_it_is_published(tmp_path):
    yarn = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    blocks = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    published = {
        "num_key_value_heads": 4,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "attention_bias": False,
        "q_lora_rank": 24,
        "quantization_config": blocks,
        "rope_scaling": {**yarn, "original_max_position_embeddings": 4096},
    }
    config = write(tmp_path, **DEEPSEEK | published)
    assert config.latent.interleaved
    assert (config.latent.q_rank, config.latent.cached_dim, config.latent.query_dim) == (24, 40, 24)
    assert (config.experts.scale, config.experts.groups, config.experts.top_groups) == (2.5, 4, 2)
    assert config.dtype == "bfloat16"


def test_gemma_windows(tmp_path):
    old = write(tmp_path, **GEMMA, sliding_window_pattern=2, rope_local_base_freq=5e3, rope_theta=None)
    assert old.window.layers == [True, False, True]
    assert (old.window.rope.theta, old.rope.theta, old.tied_embeddings) == (5e3, 1e6, True)
    parameters = {"sliding_attention": {"rope_theta": 5e3}, "full_attention": {"rope_theta": 1e6}}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    new = write(tmp_path, **GEMMA, layer_types=kinds, rope_parameters=parameters)
    assert new == old


def test_sliding_window_that_is_used_is_refused(tmp_path):
    with pytest.raises(ModelError, match="sliding_window=4096"):
        write(tmp_path, use_sliding_window=True, sliding_window=4096)


def test_directories_without_a_sound_config(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="object"):
        load_config(tmp_path)


def save_shards(directory):
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, directory / "model-00001-of-00002.safetensors")
    save_file({"b": np.arange(4, dtype=np.float16)}, directory / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_checkpoint_in_shards(tmp_path):
    save_shards(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert "a" in checkpoint
    assert "c" not in checkpoint
    assert checkpoint.read("a", (2, 3)).values.tolist() == [[0, 1, 2], [3, 4, 5]]
    stored = checkpoint.read("b", (4,))
    assert stored.dtype == "float16"
    assert stored.as_float32().tolist() == [0, 1, 2, 3]


def test_checkpoint_errors_name_the_tensor(tmp_path):
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        Checkpoint(tmp_path)
    save_file({"a": np.arange(6, dtype=np.float32), "i": np.arange(3)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ModelError, match="no tensor 'b'"):
        checkpoint.read("b", (1,))
    with pytest.raises(ModelError, match=r"a has shape \[6\], the configuration wants \[2, 3\]"):
        checkpoint.read("a", (2, 3))
    with pytest.raises(ModelError, match="i has dtype I64; supported is F32, BF16, F16"):
        checkpoint.read("i", (3,))
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-40])
    with pytest.raises(ModelError, match="cut short"):
        Checkpoint(tmp_path).read("a", (6,))
    for broken in (b"", b"\xff" * 20, (5).to_bytes(8, "little") + b"{{{{{"):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            Checkpoint(tmp_path)


def test_digest_sees_every_part(tmp_path):
    with pytest.raises(ModelError, match="no \\*"):
        model_digest(tmp_path)
    write(tmp_path)
    save_shards(tmp_path)
    digests = {model_digest(tmp_path)}
    assert model_digest(tmp_path) in digests
    (tmp_path / "tokenizer.json").write_text("{}")
    digests.add(model_digest(tmp_path))
    write(tmp_path, rms_norm_eps=1e-6)
    digests.add(model_digest(tmp_path))
    shard = tmp_path / "model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    digests.add(model_digest(tmp_path))
    shard.rename(tmp_path / "model-3.safetensors")
    digests.add(model_digest(tmp_path))
    assert len(digests) == 5
    assert all(len(digest) == 32 for digest in digests)


def test_rope_table_holds_cosines_then_sines():
    table = rope_table(Rope(theta=100.0), 4, 3)
    angles = np.arange(3)[:, None] * np.array([1.0, 0.1])
    np.testing.assert_allclose(table, np.concatenate([np.cos(angles), np.sin(angles)], 1), atol=1e-7)


def test_llama3_scaling_keeps_high_and_stretches_low_frequencies():
    plain = frequencies(Rope(theta=5e5), 64)
    scaled = frequencies(Rope(theta=5e5, scaling="llama3", factor=8.0, original_positions=8192), 64)
    assert scaled[0] == plain[0]
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8)
    assert (scaled <= plain).all()
    assert (scaled >= plain / 8 * 0.999).all()
