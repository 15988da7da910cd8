"""Rows with drafts: what stands is what is drawn without drafts, bit by bit, whatever the drafts are."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shared.engine.ints import pack_ints
from shared.engine.protocol import Row
from shared.engine.whole import GREEDY, Whole, WholeConfig
from shared.errors import RowsFailed
from shared.messages import Sampling
from shared.models.model import ModelOptions
from shared.models.verify import places_of
from tests import random_models

PROMPT = random.Random(5).choices(range(160), k=21)
SAMPLINGS = {
    "greedy": GREEDY,
    "plain": Sampling(temperature=1.0, seed=7),
    "cut": Sampling(temperature=0.8, seed=3, top_p=0.9, top_k=30, min_p=0.01),
    "penalties": Sampling(temperature=0.9, seed=1, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.4),
}


@pytest.fixture(scope="module", params=random_models.KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.save("llama", tmp_path_factory.mktemp("llama"))


def whole(directory: Path, threads: int = 1) -> Whole:
    return Whole(directory, WholeConfig(options=ModelOptions(threads=threads), page_size=4, kv_tokens=512))


class Decoding:
    """One sequence after its prompt, whose last token is to be run. Its tokens are right; drafts are the test's."""

    def __init__(self, engine: Whole, sampling: Sampling) -> None:
        self.engine, self.sampling, self.tokens = engine, sampling, list(PROMPT)
        (self.pages,) = engine.page_tables([128])
        engine.prefill(PROMPT[:-1], self.pages)

    def row(self, drafts: list[int]) -> Row:
        return Row(
            tokens=[self.tokens[-1], *drafts],
            start=len(self.tokens) - 1,
            pages=self.pages,
            sample=self.sampling,
            drafts=len(drafts),
            history=pack_ints(self.tokens),
            prompt_tokens=len(PROMPT),
        )

    def step(self, drafts: list[int]) -> list[int]:
        (drawn,) = self.engine.model.draw([self.row(drafts)]).tokens
        self.tokens += drawn
        return drawn


def one_by_one(engine: Whole, sampling: Sampling, count: int) -> list[int]:
    decoding = Decoding(engine, sampling)
    return [token for _ in range(count) for token in decoding.step([])]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_of_many_tokens_has_the_logits_of_rows_of_one(directory: Path, threads: int) -> None:
    """Around every boundary of blocks of rows and of keys, beside other rows or not, whatever came to the places before."""
    engine = whole(directory, threads)
    tokens = random.Random(1).choices(range(160), k=70 + 17)
    own, beside = engine.page_tables([128, 128])
    engine.prefill(tokens[:70], own)
    engine.prefill(tokens[:40], beside)
    alone = np.concatenate(
        [engine.model.all_logits([Row(tokens=[t], start=70 + i, pages=own)]) for i, t in enumerate(tokens[70:])]
    )
    for count in range(1, 18):
        garbage = Row(tokens=[3] * 17, start=70, pages=own)
        engine.model.all_logits([garbage])
        row = Row(tokens=tokens[70 : 70 + count], start=70, pages=own)
        assert np.array_equal(engine.model.all_logits([row]), alone[:count]), count
        other = Row(tokens=tokens[40:45], start=40, pages=beside)
        assert np.array_equal(engine.model.all_logits([other, row])[5:], alone[:count]), count


@pytest.mark.parametrize("name", SAMPLINGS)
def test_output_does_not_depend_on_the_drafts(directory: Path, name: str) -> None:
    sampling = SAMPLINGS[name]
    engine = whole(directory)
    expected = one_by_one(engine, sampling, 24)
    chosen = random.Random(name)
    decoding, steps, stood = Decoding(engine, sampling), 0, 0
    while len(decoding.tokens) < len(PROMPT) + 20:
        done = len(decoding.tokens) - len(PROMPT)
        right = chosen.randrange(5)
        drafts = (expected[done : done + right] + chosen.choices(range(160), k=chosen.randrange(3)))[:4]
        drawn = decoding.step(drafts)
        agreeing = next(
            (i for i, (a, b) in enumerate(zip(drafts, expected[done:], strict=False)) if a != b), len(drafts)
        )
        assert drawn == expected[done : done + agreeing + 1]
        steps, stood = steps + 1, stood + agreeing
    assert decoding.tokens[len(PROMPT) :] == expected[: len(decoding.tokens) - len(PROMPT)]
    assert 5 < stood < 4 * steps, "of the drafts some must stand, and some fall"


def test_log_probabilities_are_those_without_drafts(llama: Path) -> None:
    engine = whole(llama)
    sampling = Sampling(temperature=0.0, logprobs=3)
    decoding, known = Decoding(engine, sampling), []
    for _ in range(5):
        draws = engine.model.draw([decoding.row([])])
        decoding.tokens += draws.tokens[0]
        known += draws.logprobs[0]
    output = decoding.tokens[len(PROMPT) :]
    draws = engine.model.draw([Decoding(engine, sampling).row(output[:4])])
    assert (draws.tokens, draws.logprobs) == ([output], {0: known})
    wrong = engine.model.draw([Decoding(engine, sampling).row([output[0], output[1] + 1, output[2]])])
    assert (wrong.tokens, wrong.logprobs) == ([output[:2]], {0: known[:2]})


def chi_square(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> tuple[float, int]:
    """Of two samples of one size, and its degrees of freedom; what is rare is counted as one."""
    common = {key for key in first | second if first[key] + second[key] >= 20}
    pairs = [(first[key], second[key]) for key in common]
    pairs.append((first.total() - sum(a for a, _ in pairs), second.total() - sum(b for _, b in pairs)))
    return sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b), len(pairs) - 1


def test_sampled_tokens_are_distributed_as_without_drafts(llama: Path) -> None:
    """Two independent sets of seeds, one with drafts and one without: pairs of tokens of three likely ones. The bound is the
    chi-square distribution's mean plus five of its standard deviations. Drafts that were taken where they are only likely,
    as a wrong rule would, are far beyond it (checked at the end)."""
    engine, seeds = whole(llama), 1200
    likely = one_by_one(engine, GREEDY, 2)

    def pairs(first_seed: int, drafts: list[int]) -> Counter[tuple[int, ...]]:
        found: Counter[tuple[int, ...]] = Counter()
        for seed in range(first_seed, first_seed + seeds):
            decoding = Decoding.__new__(Decoding)
            decoding.engine, decoding.tokens, decoding.pages = engine, list(PROMPT), pages
            decoding.sampling = Sampling(temperature=0.7, seed=seed, top_k=4)
            decoding.step(drafts)
            while len(decoding.tokens) < len(PROMPT) + 2:
                decoding.step([])
            found[tuple(decoding.tokens[len(PROMPT) : len(PROMPT) + 2])] += 1
        return found

    pages = Decoding(engine, GREEDY).pages
    without, drafted = pairs(0, []), pairs(10**6, likely)
    statistic, freedom = chi_square(without, drafted)
    assert freedom >= 5
    bound = freedom + 5 * (2 * freedom) ** 0.5
    assert statistic < bound, (statistic, freedom)
    biased = drafted.copy()
    for key in list(biased):
        moved = biased[key] // 5 if key[0] != likely[0] else 0
        biased[key] -= moved
        biased[tuple(likely)] += moved
    assert chi_square(without, biased)[0] > bound, "the test would not see a bias"


def test_places_are_those_after_each_token_that_may_be_the_last() -> None:
    rows = [
        Row(tokens=[1, 2, 3], start=4, pages=b""),
        Row(tokens=[5, 6, 7], start=9, pages=b"", sample=GREEDY, drafts=2),
        Row(tokens=[8, 9], start=0, pages=b"", sample=GREEDY),
    ]
    found = [(place.row, place.token, place.position, place.drafts) for place in places_of(rows)]
    assert found == [(1, 3, 10, []), (1, 4, 11, [6]), (1, 5, 12, [6, 7]), (2, 7, 2, [])]


@pytest.mark.parametrize("drafts", [-1, 1, 5])
def test_drafts_that_cannot_be_are_refused(llama: Path, drafts: int) -> None:
    engine = whole(llama)
    (pages,) = engine.page_tables([16])
    with pytest.raises(RowsFailed, match=f"row 0: {drafts} drafts of 1 tokens"):
        engine.model.draw([Row(tokens=[1], start=0, pages=pages, sample=GREEDY, drafts=drafts)])
