"""Checkpoints of fp8 blocks, as DeepSeek-V3's: dequantised as they are read."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.whole import Whole, WholeConfig
from shared.errors import ModelError
from shared.models.checkpoint import Checkpoint, e4m3_values
from tests import random_models
from tests.unit.test_models_logits import TOKENS, expected_logits, logits_of, relative_error

WIDE = {"hidden_size": 136, "moe_intermediate_size": 132, "intermediate_size": 260, "num_hidden_layers": 2}
"""Matrices of more than one block, the last one cut off."""


def test_every_byte_means_what_torch_says():
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3_values(), expected)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and the scales that undo their division, a block of 128 x 128 at a time."""
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[block].abs().max() / 448
            values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def dequantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = scales.repeat_interleave(128, 0)[: values.shape[0]].repeat_interleave(128, 1)[:, : values.shape[1]]
    return values.float() * wide


def test_an_fp8_checkpoint_is_its_dequantised_self(tmp_path):
    source = random_models.save("deepseek-v3", tmp_path / "source", **WIDE)
    tensors = load_file(source / "model.safetensors")
    linear = [name for name in tensors if name.endswith("proj.weight") or "proj_with_mqa" in name]
    small, plain = dict(tensors), dict(tensors)
    for name in linear:
        small[name], small[name + "_scale_inv"] = quantised(tensors[name])
        plain[name] = dequantised(small[name], small[name + "_scale_inv"])
    for directory, weights in (("fp8", small), ("plain", plain)):
        shutil.copytree(source, tmp_path / directory)
        save_file(weights, tmp_path / directory / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    got, expected = (
        logits_of(Whole(tmp_path / "fp8", WholeConfig()), TOKENS),
        expected_logits(tmp_path / "plain", TOKENS),
    )
    assert np.array_equal(got, logits_of(Whole(tmp_path / "plain", WholeConfig()), TOKENS))
    assert relative_error(got, expected) < 1e-4
    assert relative_error(got, expected_logits(source, TOKENS)) > 1e-2


def test_fp8_without_scales_or_with_others_is_refused(tmp_path):
    values = torch.zeros(200, 10, dtype=torch.float8_e4m3fn)
    save_file({"a": values, "b": values.clone(), "b_scale_inv": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ModelError, match="a has dtype F8_E4M3"):
        checkpoint.read("a", (200, 10))
    with pytest.raises(ModelError, match=r"b_scale_inv has shape \[1, 1\], the configuration wants \[2, 1\]"):
        checkpoint.read("b", (200, 10))
