"""A decoder's grammars, beside the same model run whole: what is drawn, whoever its batch mates are, and however often it was
preempted; and every way in which a grammar can end an attempt leaves no page behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from services.router.structured import Constraint, Entry, literal, of_choice, of_regex, of_schema
from shared.engine.protocol import Row
from shared.engine.whole import Whole, WholeConfig
from shared.grammar import Compiler, Vocabulary
from shared.messages import Grammar, Sampling
from tests.inproc import Mesh, ModelEngine, Node, StubRouter, mesh, real_fabric
from tests.tiny_model import END, byte_level

PAGE, MAX_TOKENS = 4, 120
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def grammar(entry: Entry) -> Grammar:
    return Grammar(text=Constraint((entry,), "").text("closed", literal))


def prompt(length: int, seed: int) -> list[int]:
    return [(7 * i * (seed + 3) + seed) % 300 + 5 for i in range(length)]


async def drawn(whole: Whole, tokens: list[int], wanted: Grammar, sampling: Sampling) -> list[int]:
    """The same model, one row at a time."""
    compiler = Compiler(Vocabulary(byte_level().to_str, whole.model.config.vocab_size, (END,)))
    matcher = await compiler.compile(wanted, [END])
    compiler.close()
    (pages,) = whole.page_tables([len(tokens) + MAX_TOKENS])
    whole.prefill(tokens[:-1], pages)
    past = list(tokens)
    while len(past) < len(tokens) + MAX_TOKENS and not matcher.finished:
        row = Row(tokens=past[-1:], start=len(past) - 1, pages=pages, sample=sampling, mask=matcher.masks())
        (token,) = whole.model.step([row])
        assert token is not None
        if token == END:
            break
        matcher.accept(token)
        past.append(token)
    return past[len(tokens) :]


@asynccontextmanager
async def nodes(directory: Path, **decoder: Any) -> AsyncIterator[tuple[Mesh, StubRouter, Node, Node]]:
    async with mesh(real_fabric, ModelEngine(directory, page_size=PAGE)) as made:
        router, prefill = await made.router(), await made.prefiller(pages=128)
        yield made, router, prefill, await made.decoder("d", **decoder)


async def test_each_matches_as_if_alone_and_preemption_changes_nothing(served_directory: Path) -> None:
    whole = Whole(served_directory, WholeConfig(page_size=PAGE, kv_tokens=1024))
    asked = [
        (prompt(9 + seed, seed), grammar(entry), Sampling(temperature=float(seed % 2) * 1.3, seed=seed))
        for seed, entry in enumerate([of_schema(SCHEMA), of_regex("[ab]{3,40}"), of_choice(["Paris", "Rome"], "")] * 2)
    ]
    expected = [await drawn(whole, *one) for one in asked]
    async with nodes(served_directory, pages=256) as (made, router, prefill, roomy):
        tight = await made.decoder("tight", pages=34)

        async def run(node: Node, tokens: list[int], wanted: Grammar, sampling: Sampling) -> list[int]:
            fields: dict[str, Any] = {"sampling": sampling, "max_tokens": MAX_TOKENS, "stop_token_ids": [END]}
            return await router.run(node, prefill.announce, tokens, grammar=wanted, budget_s=60.0, **fields)

        together = await asyncio.gather(*(run(roomy, *one) for one in asked))
        preempted = await asyncio.gather(*(run(tight, *one) for one in asked))
        assert tight.service.ranks[0].scheduler.preempted > 0
        await roomy.until_idle()
        await tight.until_idle()
    assert together == expected
    assert preempted == expected
    jsonschema.validate(json.loads(byte_level().decode(expected[0])), SCHEMA)


async def test_a_grammar_that_cannot_be_compiled_ends_the_attempt_with_the_reason(served_directory: Path) -> None:
    async with nodes(served_directory) as (_, router, prefill, decoder):
        for tokens in (prompt(20, 1), [9]):
            generate = router.generate(
                decoder, prefill.announce if len(tokens) > 1 else None, tokens, grammar=Grammar(text="start: nowhere")
            )
            await router.start(generate)
            await router.until(lambda g=generate: router.ended(g.attempt))  # type: ignore[misc]
            emit = router.emits[generate.attempt][-1]
            assert emit.error is not None
            assert emit.error.startswith("grammar: ")
            assert "nowhere" in emit.error
            assert not emit.retryable
        await decoder.until_idle()
        await prefill.until_idle()


async def test_a_limit_that_is_met_on_the_way_ends_the_attempt(served_directory: Path) -> None:
    """Such a grammar is sound at first; a decoder says so when it meets the limit, and its other rows go on."""
    wide = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}$"} for i in range(500)},
    }
    late = {"lark_grammar": 'start: "abcdefghijkl" @body\n%llguidance {}'}
    text = json.dumps({"grammars": [{"name": "main", **late}, {"name": "body", **of_schema(wide)}]})
    async with nodes(served_directory) as (_, router, prefill, decoder):
        other = router.generate(decoder, prefill.announce, prompt(12, 2), max_tokens=40)
        await router.start(other)
        generate = router.generate(decoder, prefill.announce, prompt(12, 1), max_tokens=60, grammar=Grammar(text=text))
        await router.start(generate)
        await router.until(lambda: router.ended(generate.attempt))
        emit = router.emits[generate.attempt][-1]
        assert emit.error is not None
        assert emit.error.startswith("grammar: ")
        assert len(await router.result(other)) == 40
        await decoder.until_idle()


class Held:
    """A tokenizer that is not read before `let`: every compile of the decoder waits for it."""

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.get_running_loop()
        self.asked, self.let = asyncio.Event(), asyncio.Event()
        self._text = (directory / "tokenizer.json").read_text()

    def __call__(self) -> str:
        self.loop.call_soon_threadsafe(self.asked.set)
        asyncio.run_coroutine_threadsafe(self.let.wait(), self.loop).result(timeout=20)
        return self._text


def hold(decoder: Node, directory: Path) -> Held:
    held = Held(directory)
    decoder.service._grammars._compiler._vocabulary._tokenizer = held
    return held


@pytest.mark.parametrize("tokens", [[9], prompt(20, 1)], ids=["alone", "prefill"])
async def test_a_slow_compile_holds_up_only_its_own_request(served_directory: Path, tokens: list[int]) -> None:
    async with nodes(served_directory) as (_, router, prefill, decoder):
        held = hold(decoder, served_directory)
        prefiller = prefill.announce if len(tokens) > 1 else None
        generate = router.generate(
            decoder, prefiller, tokens, grammar=grammar(of_choice(["Paris"], "")), stop_token_ids=[END]
        )
        await router.start(generate)
        await held.asked.wait()
        assert len(await router.run(decoder, prefill.announce, prompt(20, 2))) == 6
        assert generate.attempt not in router.emits
        held.let.set()
        assert byte_level().decode(await router.result(generate)) == "Paris"
        assert router.emits[generate.attempt][-1].finish == "stop"
        await decoder.until_idle()


@pytest.mark.parametrize("tokens", [[9], prompt(20, 1)], ids=["alone", "prefill"])
async def test_cancelled_or_late_while_it_is_compiled(served_directory: Path, tokens: list[int]) -> None:
    async with nodes(served_directory) as (_, router, prefill, decoder):
        held = hold(decoder, served_directory)
        prefiller = prefill.announce if len(tokens) > 1 else None
        wanted = grammar(of_choice(["Paris"], ""))
        cancelled = router.generate(decoder, prefiller, tokens, grammar=wanted)
        late = router.generate(decoder, prefiller, tokens, grammar=wanted, budget_s=0.5)
        await router.start(cancelled)
        await router.start(late)
        await held.asked.wait()
        await router.cancel(cancelled)
        await router.until(lambda: router.ended(late.attempt))
        assert "deadline" in (router.emits[late.attempt][-1].error or "")
        await decoder.until_idle()
        assert cancelled.attempt not in router.emits
        held.let.set()
        assert byte_level().decode(await router.run(decoder, prefiller, tokens, grammar=wanted)) == "Paris"
        await decoder.until_idle()


async def test_the_prefiller_knows_nothing_of_it(served_directory: Path) -> None:
    from shared.messages import Prefill

    assert "grammar" not in Prefill.__struct_fields__
    assert Tokenizer.from_file(str(served_directory / "tokenizer.json")).token_to_id("<|end|>") == END
