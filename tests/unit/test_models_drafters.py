"""Drafters: what they propose is what they would say alone, and it never changes what the model says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from shared.engine.ints import pack_ints
from shared.engine.protocol import Row
from shared.engine.whole import GREEDY, Whole, WholeConfig
from shared.errors import ModelError, RowsFailed
from shared.messages import Sampling
from shared.models.model import ModelOptions
from tests import random_models

PROMPT = random.Random(5).choices(range(160), k=19)
SAMPLINGS = [GREEDY, Sampling(temperature=0.8, seed=4), Sampling(temperature=0.6, seed=1, repetition_penalty=1.3)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of other heads and layers."""
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 32}
    return random_models.save("qwen3", tmp_path_factory.mktemp("qwen"), **sizes)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.save_mtp(tmp_path_factory.mktemp("mtp"))


def whole(directory: Path, **options: object) -> Whole:
    return Whole(directory, WholeConfig(options=ModelOptions(**options), page_size=4, kv_tokens=256))  # type: ignore[arg-type]


class Decoding:
    """A sequence whose drafter keeps up with it: what the prefiller runs, then what the decoder does."""

    def __init__(self, engine: Whole, sampling: Sampling, *, chunk: int = 8) -> None:
        self.engine, self.sampling, self.tokens = engine, sampling, list(PROMPT)
        (self.pages,) = engine.page_tables([96])
        self.proposed: list[int] = []
        self.chained = 0
        self.hidden = b""
        self.accepted = 0
        done, total = 0, len(PROMPT) - 1
        while done < total:
            end = min(done + chunk, total)
            following = PROMPT[end] if end < total else None
            row = Row(tokens=PROMPT[done:end], start=done, pages=self.pages, following=following)
            followed = engine.model.draw([row]).followed
            assert followed is not None
            self.hidden = followed.hidden.get(0, b"")
            done = end

    def step(self, propose: int, drafts: int = 100) -> list[int]:
        given = self.proposed[:drafts]
        row = Row(
            tokens=[self.tokens[-1], *given],
            start=len(self.tokens) - 1,
            pages=self.pages,
            sample=self.sampling,
            drafts=len(given),
            history=pack_ints(self.tokens),
            prompt_tokens=len(PROMPT),
            propose=propose,
            chained=min(self.chained, 1 + len(given)),
            hidden=self.hidden,
        )
        draws = self.engine.model.draw([row])
        assert draws.followed is not None
        self.tokens += draws.tokens[0]
        self.proposed, self.hidden = draws.followed.proposed[0], b""
        self.chained = propose if self.engine.layout.draft else 0
        self.accepted += len(draws.tokens[0]) - 1
        return draws.tokens[0]


def plain(directory: Path, sampling: Sampling, count: int) -> list[int]:
    engine = whole(directory)
    (pages,) = engine.page_tables([96])
    engine.prefill(PROMPT[:-1], pages)
    tokens = list(PROMPT)
    for _ in range(count):
        row = Row(
            tokens=tokens[-1:],
            start=len(tokens) - 1,
            pages=pages,
            sample=sampling,
            history=pack_ints(tokens),
            prompt_tokens=len(PROMPT),
        )
        tokens += engine.model.draw([row]).tokens[0]
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_model_that_drafts_for_itself_is_always_right(llama: Path, sampling: Sampling) -> None:
    expected = plain(llama, sampling, 30)
    decoding = Decoding(whole(llama, drafter="model", draft_model=str(llama)), sampling)
    steps = [(3, 100), (3, 100), (2, 1), (0, 100), (4, 0), (4, 2), (1, 100), (3, 100), (3, 100)]
    for propose, drafts in steps:
        given = len(decoding.proposed[:drafts])
        assert len(decoding.step(propose, drafts)) == given + 1
        assert len(decoding.proposed) == propose
    output = decoding.tokens[len(PROMPT) :]
    assert output == expected[: len(output)]
    assert decoding.proposed == expected[len(output) :][:3]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_draft_model_proposes_what_it_would_say(llama: Path, qwen: Path, sampling: Sampling) -> None:
    expected = plain(llama, sampling, 30)
    decoding = Decoding(whole(llama, drafter="model", draft_model=str(qwen)), sampling)
    alone = whole(qwen)
    for propose in (3, 4, 1, 0, 2, 3, 3):
        decoding.step(propose)
        (pages,) = alone.page_tables([96])
        alone.prefill(decoding.tokens[:-1], pages)
        tokens = list(decoding.tokens)
        for _ in range(propose):
            row = Row(
                tokens=tokens[-1:],
                start=len(tokens) - 1,
                pages=pages,
                sample=sampling,
                history=pack_ints(tokens),
                prompt_tokens=len(PROMPT),
            )
            tokens += alone.model.draw([row]).tokens[0]
        assert decoding.proposed == tokens[len(decoding.tokens) :]
    output = decoding.tokens[len(PROMPT) :]
    assert output == expected[: len(output)]


class Reference:
    """The same written out in torch: `transformers` has the network and the block, the report what joins them."""

    def __init__(self, directory: Path) -> None:
        fields = json.loads((directory / "config.json").read_text())
        layers = fields["num_hidden_layers"]
        config = DeepseekV3Config(**{**fields, "num_hidden_layers": layers + 1})
        self.network = DeepseekV3ForCausalLM.from_pretrained(
            directory, config=config, attn_implementation="eager"
        ).eval()
        from safetensors.torch import load_file

        tensors = load_file(directory / "model.safetensors")
        self.mix = tensors[f"model.layers.{layers}.eh_proj.weight"]
        self.enorm, self.hnorm, self.norm = (
            tensors[f"model.layers.{layers}.{name}.weight"] for name in ("enorm", "hnorm", "shared_head.norm")
        )
        self.block = self.network.model.layers[layers]
        self.network.model.layers = self.network.model.layers[:layers]
        self.eps = fields["rms_norm_eps"]

    def rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    @torch.no_grad()
    def proposals(self, tokens: list[int], count: int) -> Iterator[torch.Tensor]:
        """Logits of each proposal after `tokens`, the best of each going into the next."""
        ids = torch.tensor([tokens])
        hidden = self.network.model(ids).last_hidden_state[:, :-1]
        following = tokens[1:]
        for _ in range(count):
            embedded = self.network.model.embed_tokens(torch.tensor([following]))
            x = torch.cat([self.rms(embedded, self.enorm), self.rms(hidden, self.hnorm)], -1) @ self.mix.T
            length = len(following)
            positions = torch.arange(length)[None]
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            turned = self.network.model.rotary_emb(x, positions)
            out = self.block(x, attention_mask=mask, position_ids=positions, position_embeddings=turned)
            x = out[0] if isinstance(out, tuple) else out
            state = self.rms(x, self.norm)[:, -1:]
            logits = self.network.lm_head(state)[0, 0]
            yield logits
            hidden = torch.cat([hidden, state], 1)
            following = [*following, int(logits.argmax())]


def test_the_mtp_layer_is_that_of_the_report(deepseek: Path) -> None:
    reference = Reference(deepseek)
    decoding = Decoding(whole(deepseek, drafter="mtp"), GREEDY)
    for propose, drafts in [(3, 100), (2, 100), (3, 1), (0, 100), (1, 0), (3, 100)]:
        decoding.step(propose, drafts)
        wanted = [int(logits.argmax()) for logits in reference.proposals(decoding.tokens, propose)]
        assert decoding.proposed == wanted
    assert decoding.tokens[len(PROMPT) :] == plain(deepseek, GREEDY, len(decoding.tokens) - len(PROMPT))


@pytest.mark.parametrize("chunk", [1, 5, 18])
def test_mtp_does_not_depend_on_how_a_prompt_was_cut_or_that_it_is_run_again(deepseek: Path, chunk: int) -> None:
    engine = whole(deepseek, drafter="mtp")
    first, other = Decoding(engine, GREEDY), Decoding(engine, GREEDY, chunk=chunk)
    for propose in (2, 3, 3):
        assert first.step(propose) == other.step(propose)
        assert first.proposed == other.proposed
    again = Row(
        tokens=first.tokens,
        start=0,
        pages=first.pages,
        sample=GREEDY,
        history=pack_ints(first.tokens),
        prompt_tokens=len(PROMPT),
        propose=3,
    )
    draws, at_once = engine.model.draw([again]), first.step(3, 0)
    assert draws.followed is not None
    assert (draws.tokens[0], draws.followed.proposed[0]) == (at_once, first.proposed)


def test_hidden_states_are_the_models_after_the_norm(deepseek: Path) -> None:
    decoding = Decoding(whole(deepseek, drafter="mtp"), GREEDY)
    reference = Reference(deepseek)
    with torch.no_grad():
        wanted = reference.network.model(torch.tensor([PROMPT])).last_hidden_state[0, -2].numpy()
    np.testing.assert_allclose(np.frombuffer(decoding.hidden, "<f4"), wanted, atol=1e-3, rtol=1e-3)


def test_without_its_drafter_the_model_is_the_same(deepseek: Path) -> None:
    assert plain(deepseek, GREEDY, 6) == whole(deepseek).generate([PROMPT], 6)[0]


def test_what_cannot_draft_is_refused(llama: Path, deepseek: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no multi-token prediction layer"):
        whole(llama, drafter="mtp")
    other = random_models.save("llama", tmp_path / "other", vocab_size=150)
    with pytest.raises(ModelError, match="a draft of 150 tokens for a model of 160"):
        whole(llama, drafter="model", draft_model=str(other))
    short = random_models.save("llama", tmp_path / "short", max_position_embeddings=256)
    with pytest.raises(ModelError, match="a draft of 256 positions for a model of 512"):
        whole(llama, drafter="model", draft_model=str(short))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"propose": 4}, "4 proposals need places up to 25; it has 6 pages"),
        ({"sample": None, "propose": 1}, "no token to follow"),
        ({"chained": 2}, "2 of 1 tokens are said to have been run"),
        ({"hidden": bytes(8)}, "a hidden state of 8 bytes before position 20"),
    ],
)
def test_rows_that_ask_for_what_cannot_be_are_refused(deepseek: Path, changes: dict[str, object], why: str) -> None:
    engine = whole(deepseek, drafter="mtp")
    (pages,) = engine.page_tables([24])
    row = Row(tokens=[1], start=20, pages=pages, sample=GREEDY)
    with pytest.raises(RowsFailed, match=why):
        engine.model.draw([msgspec.structs.replace(row, **changes)])


def test_nobody_proposes_without_a_drafter(llama: Path) -> None:
    engine = whole(llama)
    (pages,) = engine.page_tables([24])
    with pytest.raises(RowsFailed, match="there is no drafter"):
        engine.model.draw([Row(tokens=[1], start=0, pages=pages, sample=GREEDY, propose=1)])
