"""Which requests a load test makes, and what is made of what it hears."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from loadtest.interference.load import Heard, Load, summarise
from loadtest.traffic.traffic import BLOCK, Lengths, Request, drawn, poisson, prompt, read


def test_lengths_have_the_median_and_the_tail_that_were_asked_for() -> None:
    lengths, source = Lengths.parse("256:1024:3072"), random.Random(1)
    found = sorted(lengths.draw(source) for _ in range(4000))
    assert found[2000] == pytest.approx(256, rel=0.1)
    assert found[3800] == pytest.approx(1024, rel=0.15)
    assert max(found) <= 3072
    for bad in ("1:2", "a:b:c", "5:4:9", "0:1:2"):
        with pytest.raises(ValueError, match=r"takes"):
            Lengths.parse(bad)


def test_an_open_load_comes_at_its_rate_and_is_the_same_for_the_same_seed() -> None:
    lengths = Lengths(8, 16, 32)
    found = list(itertools.islice(poisson(drawn(lengths, lengths, 3), 5.0, 3), 2000))
    assert found[-1].at_s == pytest.approx(400, rel=0.1)
    assert found == list(itertools.islice(poisson(drawn(lengths, lengths, 3), 5.0, 3), 2000))


def test_traces_of_each_kind(tmp_path: Path) -> None:
    mooncake = tmp_path / "trace.jsonl"
    mooncake.write_text(
        '{"timestamp": 27000, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 30000, "input_length": 600, "output_length": 9, "hash_ids": [1, 7]}\n'
    )
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n"
        "2023-11-16 18:17:04.0319569,396,109\n"
    )
    plain = tmp_path / "own.csv"
    plain.write_text("time_s,prompt_tokens,output_tokens\n1.5,10,2\n0.5,20,3\n")
    first, second = read(mooncake, speed=2.0)
    assert first == Request(1200, 5, 0.0, (1, 2))
    assert second.at_s == 1.5
    assert prompt(first, 1, 0)[:BLOCK] == prompt(second, 2, 0)[:BLOCK], "the same block"
    assert prompt(first, 1, 0)[BLOCK : BLOCK + 88] != prompt(second, 2, 0)[BLOCK:], "and another one"
    assert [len(prompt(one, 1, 0)) for one in (first, second)] == [1200, 600]
    assert [one.prompt_tokens for one in read(azure)] == [374, 396]
    assert read(azure)[1].at_s == pytest.approx(0.052, abs=1e-3)
    assert [(one.at_s, one.prompt_tokens) for one in read(plain)] == [(0.0, 20), (1.0, 10)]
    (cut, _) = read(mooncake, most=100)
    assert (cut.prompt_tokens, cut.output_tokens) == (95, 5)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "time_s,prompt_tokens,output_tokens\n1,x,2\n", "a.csv:2: not a request"),
        ("a.csv", "time_s,prompt_tokens,output_tokens\n1,0,2\n", "a.csv:2: not a request"),
        ("a.csv", "time_s,prompt_tokens,output_tokens\n", "there is no request"),
        ("a.jsonl", '{"input_length": 1}\n', "a.jsonl:1: not a request"),
        ("a.jsonl", "nonsense\n", "a.jsonl:1:"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        read(tmp_path / name)


def test_a_summary_is_over_the_streams_own_gaps() -> None:
    load = Load(seconds=10.0, streams=2, output_tokens=4)
    heard = Heard(tokens=[[0.0, 1.0, 2.0, 5.0], [0.0, 1.0, 2.0, 3.0]], asked=[1.0, 2.0], first=[1.5, 4.0], last=[2, 5])
    found = summarise(load, heard)
    assert (found.itl_p50, found.itl_max, found.ttft_p50, found.ttft_p99) == (1.0, 3.0, 2.0, 2.0)
    assert found.tpot == pytest.approx((5 / 3 + 1) / 2)
    assert (found.stream_tokens_per_s, found.tokens_per_s, found.prompts) == (0.4, 1.6, 2)
    with pytest.raises(ValueError, match="no prompt ended"):
        summarise(load, Heard(tokens=heard.tokens))
