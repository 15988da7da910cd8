"""Grammars: masks that allow what matches and nothing else, along drafts too, and an end exactly where there can be one."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router.structured import (
    ANY_OBJECT,
    Constraint,
    Entry,
    _converted,
    literal,
    of_choice,
    of_grammar,
    of_regex,
    of_schema,
)
from shared.errors import GrammarError, Refused
from shared.grammar import MAX_CACHED, MAX_PENDING, Compiler, Matcher, Vocabulary
from shared.messages import Grammar
from tests.tiny_model import END, byte_fallback, byte_level

SIZE = byte_level().get_vocab_size()
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def vocabulary() -> Vocabulary:
    return Vocabulary(byte_level().to_str, SIZE, (END,))


@pytest.fixture
async def compiler() -> AsyncIterator[Compiler]:
    made = Compiler(vocabulary())
    yield made
    made.close()


def allowed(mask: bytes) -> set[int]:
    bits = int.from_bytes(mask, "little")
    return {token for token in range(len(mask) * 8) if bits >> token & 1}


def ids(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False).ids


def drawn(matcher: Matcher, seed: int = 0, longest: int = 400) -> str | None:
    """What a model that draws evenly from what it may says; None where it came to no end."""
    rng, tokens = random.Random(seed), list[int]()
    for _ in range(longest):
        may = sorted(allowed(matcher.masks()))
        token = END if END in may else rng.choice(may)
        if token == END:
            break
        tokens.append(token)
        matcher.accept(token)
        if matcher.finished:
            break
    else:
        return None
    return byte_level().decode(tokens)


def grammar(entry: Entry) -> Grammar:
    return Grammar(text=_converted(Constraint((entry,), "")).text("closed", literal))


async def compile_text(compiler: Compiler, entry: Entry) -> Matcher:
    return await compiler.compile(grammar(entry), [END])


async def test_a_mask_has_a_bit_for_every_token_and_the_end_only_where_the_grammar_can_end(compiler: Compiler) -> None:
    matcher = await compile_text(compiler, of_regex("ab?"))
    (mask,) = [matcher.masks()]
    assert len(mask) == -(-SIZE // 32) * 4
    assert allowed(mask) <= set(range(SIZE))
    assert ids("a")[0] in allowed(mask)
    assert ids("b")[0] not in allowed(mask)
    assert END not in allowed(mask)
    matcher.accept(ids("a")[0])
    assert not matcher.finished
    assert allowed(matcher.masks()) == {END, ids("b")[0]}
    matcher.accept(ids("b")[0])
    assert matcher.finished


async def test_tokens_that_do_not_end_this_output_never_come(compiler: Compiler) -> None:
    matcher = await compiler.compile(grammar(of_regex("ab*")), [])
    matcher.accept(ids("a")[0])
    assert END not in allowed(matcher.masks())


async def test_masks_along_drafts_are_those_after_them_and_the_matcher_stays(compiler: Compiler) -> None:
    text = '{"name": "Zoë", "age": 12}'
    tokens = ids(text)
    alone = await compile_text(compiler, of_schema(PERSON))
    expected = [alone.masks()]
    for token in tokens:
        alone.accept(token)
        expected.append(alone.masks())
    assert alone.finished
    matcher = await compile_text(compiler, of_schema(PERSON))
    for at in range(len(tokens)):
        for count in (0, 1, 3):
            drafts = tokens[at : at + count]
            assert matcher.admissible(drafts) == len(drafts)
            assert matcher.masks(drafts) == b"".join(expected[at : at + len(drafts) + 1])
        assert not matcher.finished
        matcher.accept(tokens[at])
    assert matcher.finished


async def test_a_draft_that_is_not_allowed_is_found_and_changes_nothing(compiler: Compiler) -> None:
    matcher = await compile_text(compiler, of_schema(PERSON))
    good, bad = ids('{"name"'), ids("x")
    before = matcher.masks()
    assert matcher.admissible([*good, *bad, *good]) == len(good)
    assert matcher.admissible(bad) == 0
    with pytest.raises(GrammarError, match=f"draft {len(good)}"):
        matcher.masks([*good, *bad])
    assert matcher.masks() == before
    for token in good:
        matcher.accept(token)
    with pytest.raises(GrammarError):
        matcher.accept(bad[0])


async def test_drafts_over_the_end(compiler: Compiler) -> None:
    matcher = await compile_text(compiler, of_regex("ab?"))
    drafts = [ids("a")[0], ids("b")[0]]
    assert matcher.admissible([*drafts, ids("b")[0]]) == 2
    last = matcher.masks(drafts)[-len(matcher.masks()) :]
    assert allowed(last) == {END}
    assert not matcher.finished
    assert matcher.admissible([drafts[0], END]) == 2
    assert matcher.before_end([drafts[0], END, drafts[1]]) == [drafts[0]]
    assert matcher.before_end([*drafts, drafts[1]]) == drafts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (of_schema({"type": "wrong"}), "Invalid type"),
        (of_schema({"not": {"type": "string"}}), 'Unimplemented keys: \\["not"\\]'),
        (of_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (of_schema({"$ref": "#/$defs/nope"}), "nope"),
        (of_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (of_regex("(a|b"), "unclosed group"),
        (of_regex("(?=a)b"), "look-around"),
        (of_regex(""), "the empty one"),
        ({"lark_grammar": "start: foo"}, "unknown name"),
    ],
)
async def test_what_is_no_grammar_is_refused_with_the_reason(compiler: Compiler, text: Entry, says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        await compile_text(compiler, text)


@pytest.mark.parametrize(
    "text",
    [
        of_schema(
            {"type": "object", "properties": {f"p{i}": {"pattern": f"^[a-z]{{1,{i + 1}}}$"} for i in range(500)}}
        ),
        of_schema({"allOf": [{"anyOf": [{"properties": {f"a{i}": {}}} for i in range(9)]} for _ in range(9)]}),
    ],
)
async def test_what_is_too_complex_is_refused_at_once_or_when_it_is_met(compiler: Compiler, text: Entry) -> None:
    with pytest.raises(GrammarError):
        drawn(await compile_text(compiler, text))


async def test_what_was_compiled_lately_is_kept_and_no_more(compiler: Compiler) -> None:
    first = await compile_text(compiler, of_choice(["0"], ""))
    for i in range(2 * MAX_CACHED):
        await compile_text(compiler, of_choice([str(i)], ""))
    assert len(compiler._cache) == MAX_CACHED
    first.accept(ids("0")[0])
    assert first.finished
    assert not (await compile_text(compiler, of_choice(["0"], ""))).finished


async def test_too_many_that_wait_are_refused(compiler: Compiler) -> None:
    asked = [asyncio.ensure_future(compile_text(compiler, of_choice([str(i)], ""))) for i in range(MAX_PENDING + 5)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(answer, Refused) for answer in answers) == 5
    await compile_text(compiler, of_choice(["a"], ""))


async def test_a_tokenizer_that_cannot_be_used_fails_the_grammar_only() -> None:
    broken = Compiler(Vocabulary(lambda: "{}", SIZE, (END,)))
    with pytest.raises(GrammarError, match="tokenizer"):
        await broken.compile(grammar({"lark_grammar": "start: /a/"}), [END])
    broken.close()


@pytest.mark.parametrize("spare", [0, 37])
async def test_other_tokenizers_and_larger_vocabularies(spare: int) -> None:
    tokenizer = byte_fallback()
    size = tokenizer.get_vocab_size() + spare
    compiler = Compiler(Vocabulary(tokenizer.to_str, size, (2,)))
    matcher = await compiler.compile(grammar(of_choice(["quick brown fox", "x"], "")), [2])
    compiler.close()
    assert len(matcher.masks()) == -(-size // 32) * 4
    while not matcher.finished:
        token = max(allowed(matcher.masks()), key=lambda i: len(tokenizer.id_to_token(i) or ""))
        assert token < tokenizer.get_vocab_size()
        matcher.accept(token)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (of_choice(["yes", "no", 'a "quoted" \\ one\nof two lines', "東京都 🙂"], ""), None),
        (of_grammar('root ::= "a" b\nb ::= [0-9] | "ü" b', ""), None),
        (of_schema(ANY_OBJECT), dict),
    ],
)
async def test_what_comes_out_matches(compiler: Compiler, text: Entry, options: type | None) -> None:
    matcher = await compile_text(compiler, text)
    found = [drawn(await compile_text(compiler, text), seed) for seed in range(20)]
    assert any(found)
    for said in filter(None, found):
        if options is not None:
            assert isinstance(json.loads(said), options)
        again = await compile_text(compiler, text)
        for token in ids(said):
            again.accept(token)
    assert not matcher.finished


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Of the keywords that are enforced; everything in them is bounded."""
    scalars = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
            st.integers(-99, 99),
            st.integers(0, 999),
        ),
        st.builds(
            lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
            st.integers(0, 3),
            st.integers(0, 5),
        ),
        st.builds(
            lambda values: {"enum": values},
            st.lists(
                st.one_of(st.text(min_size=1, max_size=4), st.integers(-9, 9)), min_size=1, max_size=4, unique_by=repr
            ),
        ),
        st.just({"type": "string", "pattern": "^[a-f]{2}-\\d+é?$", "maxLength": 9}),
        st.just({"type": "string", "format": "date"}),
    )
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.builds(
                lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": least + 2},
                inner,
                st.integers(0, 2),
            ),
            st.builds(
                lambda properties, required: {
                    "type": "object",
                    "properties": properties,
                    "required": [name for name in properties if name in required],
                    "additionalProperties": False,
                },
                st.dictionaries(st.sampled_from(["a", "bé", "c d", 'q"']), inner, min_size=1, max_size=3),
                st.sets(st.sampled_from(["a", "bé", "c d", 'q"'])),
            ),
            st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        ),
        max_leaves=5,
    )


_VOCABULARY = vocabulary()


@given(schema=schemas(), seed=st.integers(0, 2**16))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_json_of_any_schema_parses_and_validates(schema: dict[str, Any], seed: int) -> None:
    async def compiled() -> Matcher:
        compiler = Compiler(_VOCABULARY)
        try:
            return await compile_text(compiler, of_schema(schema))
        finally:
            compiler.close()

    said = drawn(asyncio.run(compiled()), seed, longest=3000)
    assert said is not None, "bounded schemas come to an end"
    jsonschema.validate(json.loads(said), schema)
