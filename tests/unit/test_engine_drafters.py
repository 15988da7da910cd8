"""Drafters over the ranks of a group, in processes: every rank knows what rank 0 drew, and what it could not draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.client import ExecutorConfig
from shared.engine.group import ExecutorGroup
from shared.engine.protocol import Row, Step, StepDone, StepError
from shared.engine.whole import GREEDY
from shared.messages import Sampling
from shared.models.config import load_config
from tests import random_models

PAGES = np.arange(8, dtype="<i4").tobytes()
PROMPT = list(range(40))
DEADLINE_S = 30.0


@pytest.fixture(scope="module", params=["mtp", "model"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ExecutorConfig:
    folder = tmp_path_factory.mktemp(request.param)
    fields: dict[str, Any] = {"drafter": request.param}
    directory = random_models.save_mtp(folder) if request.param == "mtp" else random_models.save("llama", folder)
    draft: Path | None = None
    if request.param == "model":
        draft = random_models.save("qwen3-moe", folder / "draft", num_experts=4)
        fields["draft_model"] = str(draft)
    layout = load_config(directory).layout(
        page_size=16, dtype="float32", mtp=draft is None, draft=load_config(draft) if draft else None
    )
    return ExecutorConfig(model=str(directory), layout=layout, num_pages=8, load_timeout_s=DEADLINE_S, **fields)


async def decode(group: ExecutorGroup, sampling: Sampling) -> tuple[list[int], list[list[int]]]:
    """Tokens and proposals of some steps in which what was proposed is verified."""
    (done,) = await group.step(
        [Step(step=0, rows=[Row(tokens=PROMPT[:-1], start=0, pages=PAGES)], signal=True)], timeout_s=30
    )
    assert isinstance(done, StepDone)
    assert done.counter % group.layout.all_layers == 0
    tokens, hidden, drafts, proposed = list(PROMPT), done.hidden.get(0, b""), list[int](), list[list[int]]()
    for number in range(1, 6):
        row = Row(
            tokens=[tokens[-1], *drafts],
            start=len(tokens) - 1,
            pages=PAGES,
            sample=sampling,
            drafts=len(drafts),
            propose=3,
            hidden=hidden,
        )
        (done,) = await group.step([Step(step=number, rows=[row])], timeout_s=DEADLINE_S)
        assert isinstance(done, StepDone), done
        tokens += done.sampled[0]
        drafts, hidden = done.proposed[0], b""
        proposed.append(drafts)
    return tokens, proposed


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.5, seed=3)])
async def test_proposals_do_not_depend_on_the_number_of_ranks(config: ExecutorConfig, sampling: Sampling) -> None:
    async with ExecutorGroup.start(config) as alone, ExecutorGroup.start(config, 2) as two:
        assert await decode(two, sampling) == await decode(alone, sampling)


async def test_what_rank_0_cannot_draw_fails_the_step_in_all_ranks_at_once(config: ExecutorConfig) -> None:
    row = Row(tokens=PROMPT, start=0, pages=PAGES, sample=GREEDY, propose=2)
    bad = Row(tokens=PROMPT, start=0, pages=PAGES, sample=Sampling(temperature=0.0, logit_bias={1000: 1.0}), propose=2)
    async with ExecutorGroup.start(config, 2) as group:
        (before,) = await group.step([Step(step=1, rows=[row])], timeout_s=DEADLINE_S)
        (failed,) = await group.step([Step(step=2, rows=[bad])], timeout_s=DEADLINE_S)
        assert isinstance(failed, StepError)
        assert "logit_bias" in failed.detail
        (after,) = await group.step([Step(step=3, rows=[row])], timeout_s=DEADLINE_S)
        assert isinstance(before, StepDone)
        assert isinstance(after, StepDone)
        assert (after.sampled, after.proposed) == (before.sampled, before.proposed)


async def test_a_draft_that_says_no_numbers_fails_the_step_in_all_ranks_at_once(tmp_path: Path) -> None:
    directory, draft = random_models.save("llama", tmp_path / "model"), random_models.save("qwen2", tmp_path / "draft")
    tensors = load_file(draft / "model.safetensors")
    tensors["lm_head.weight"][:] = torch.nan
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    layout = load_config(directory).layout(page_size=16, dtype="float32", draft=load_config(draft))
    config = ExecutorConfig(
        model=str(directory),
        layout=layout,
        num_pages=8,
        drafter="model",
        draft_model=str(draft),
        load_timeout_s=DEADLINE_S,
    )
    row = Row(tokens=PROMPT, start=0, pages=PAGES, sample=GREEDY)
    async with ExecutorGroup.start(config, 2) as group:
        asking = msgspec.structs.replace(row, propose=2)
        (failed,) = await group.step([Step(step=1, rows=[asking])], timeout_s=DEADLINE_S)
        assert isinstance(failed, StepError)
        assert "not numbers" in failed.detail
        (after,) = await group.step([Step(step=2, rows=[row])], timeout_s=DEADLINE_S)
        assert isinstance(after, StepDone)
