"""What a request's output may be: grammars, compiled, and matched token by token.

The engine is llguidance (Rust, MIT, one 3 MB abi3 wheel without dependencies). The other one considered, xgrammar, installs
torch, transformers and triton, which no main process may import. llguidance takes a `tokenizer.json` as it is, compiles in
about a millisecond because it walks the vocabulary lazily (a mask: tens of microseconds, see `MASK_LIMITS`), rolls back for
speculation, refuses JSON Schema keywords that it cannot enforce instead of ignoring them, and counts its work: every compile
and every mask has a budget (`LIMITS`), so that no schema holds up a router or a decoder.

A grammar travels as text (`messages.Grammar`); router and decoder compile it with the same limits, so that what the router
took the decoder takes as well.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

import llguidance

from shared.errors import GrammarError, Refused
from shared.messages import Grammar

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Compiling: some 10 ms. One mask: some 10 ms at the very most. Memory: some 30 MB a matcher at the most. Where a limit is met
while the grammar is matched, the request ends with an error."""

TRIED_STEPS = 4
"""Tokens, of any output that matches, that are tried when a grammar is compiled."""

MAX_CACHED = 32
"""Compiled grammars kept."""

MAX_PENDING = 256
"""Grammars that may wait to be compiled."""

COMPILE_S = 5.0
"""Longest wait for a compiled grammar, the work for which is bounded: it says that the machine is too slow."""


class Matcher:
    """One output under a grammar. Not for several threads at once."""

    def __init__(
        self, native: llguidance.LLMatcher, vocab_size: int, disallowed: Sequence[int], ends: Collection[int] = ()
    ) -> None:
        """`disallowed`: tokens that must not come although the grammar could end with them. `ends`: all it could end with."""
        self._native = native
        self._mask_bytes = -(-vocab_size // 32) * 4
        self._disallowed, self._ends = tuple(disallowed), frozenset(ends)

    @property
    def finished(self) -> bool:
        """The output is complete, and nothing can be added to it."""
        return self._native.is_stopped()

    def accept(self, token: int) -> None:
        """The output grows by `token`. Raises `GrammarError` where the grammar does not allow it, or meets a limit."""
        if not self._native.consume_token(token):
            raise _error(self._native)

    def admissible(self, drafts: Sequence[int]) -> int:
        """How many of `drafts`, from the first, the grammar allows one after the other. Changes nothing."""
        return self._native.validate_tokens(list(drafts))

    def before_end(self, drafts: Sequence[int]) -> list[int]:
        """Those that are admissible and after which there is something to say: what `masks` takes."""
        going_on = list(takewhile(lambda draft: draft not in self._ends, drafts))
        return going_on[: self.admissible(going_on)]

    def masks(self, drafts: Sequence[int] = ()) -> bytes:
        """Which tokens may come now, and after each of `drafts`: len(drafts) + 1 masks, one after the other, each of
        ceil(vocab / 32) * 4 bytes; bit t of a mask (little-endian) is set where token t may come. Tokens that end the output
        may come exactly where the grammar can end.

        All drafts must be `before_end`. The matcher stands where it stood, also where this raises `GrammarError`: for a draft
        that is not, or at a limit.
        """
        masks = [self._mask()]
        for i, draft in enumerate(drafts):
            if not self._native.try_consume_tokens([draft]):
                self._native.rollback(i)
                raise GrammarError(f"draft {i}, token {draft}, is not allowed")
            masks.append(self._mask())
        if drafts:
            self._native.rollback(len(drafts))
        return b"".join(masks)

    def _mask(self) -> bytes:
        found = self._native.compute_bitmask()[: self._mask_bytes]
        if self._native.is_error():
            raise _error(self._native)
        return _without(found, self._disallowed) if self._disallowed else found


class Vocabulary:
    """A model's tokens as the engine wants them, made when first needed: some tenths of a second."""

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer` gives the content of `tokenizer.json`; it is called in a thread."""
        self._tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        self._native: llguidance.LLTokenizer | None = None

    @property
    def ready(self) -> bool:
        """`native` gives at once."""
        return self._native is not None

    def native(self) -> llguidance.LLTokenizer:
        """Blocks. Raises `GrammarError` where the engine cannot use this tokenizer."""
        if self._native is None:
            self._native = self._read()
        return self._native

    def _read(self) -> llguidance.LLTokenizer:
        try:
            text = self._tokenizer()
            eos = list(self.eos_token_ids) or None
            slices = llguidance.LLTokenizer.json_slices()
            native = llguidance.LLTokenizer(text, eos_token=eos, slices=slices)
            if native.vocab_size < self.vocab_size:
                native = llguidance.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos, slices=slices)
        except (OSError, ValueError) as error:
            raise GrammarError(f"this model's tokenizer cannot be used with grammars: {error}") from None
        return native


class Compiler:
    """Grammars to matchers, in a thread of its own; what was compiled lately is kept."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._cache: OrderedDict[bytes, llguidance.LLMatcher] = OrderedDict()
        self._pending = 0

    async def compile(self, grammar: Grammar, end_tokens: Collection[int]) -> Matcher:
        """A matcher at the beginning of an output that `end_tokens` end: of the model's own tokens for that only those of them
        may come. Raises `GrammarError` where the text is no grammar, is too complex, or matches nothing; `Refused` where too
        many wait, or the machine is too slow."""
        if self._pending >= MAX_PENDING:
            raise Refused("too many grammars wait to be compiled", status=429)
        self._pending += 1
        try:
            loop = asyncio.get_running_loop()
            if not self._vocabulary.ready:
                await loop.run_in_executor(self._thread, self._vocabulary.native)
            async with asyncio.timeout(COMPILE_S):
                native = await loop.run_in_executor(self._thread, self._compiled, grammar)
        except TimeoutError:
            raise Refused(f"the grammar was not compiled within {COMPILE_S:g} s") from None
        finally:
            self._pending -= 1
        disallowed = [token for token in self._vocabulary.eos_token_ids if token not in end_tokens]
        return Matcher(native, self._vocabulary.vocab_size, disallowed, self._vocabulary.eos_token_ids)

    def close(self) -> None:
        """What waits is given up; idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, grammar: Grammar) -> llguidance.LLMatcher:
        """In the thread."""
        digest = hashlib.sha256(grammar.text.encode()).digest()
        found = self._cache.get(digest)
        if found is None:
            found = self._cache[digest] = _sound(grammar.text, self._vocabulary)
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(digest)
        return found.deep_copy()


def _sound(text: str, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    """A panic of the engine's is no `Exception`, and must end nothing but this grammar."""
    try:
        return _build(text, vocabulary)
    except GrammarError:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the engine raises
        raise GrammarError(f"the engine failed: {error}") from None


def _build(text: str, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    """Its first steps are taken as well: most grammars that are too complex show only there that they are."""
    native = llguidance.LLMatcher(vocabulary.native(), text, log_level=0, limits=LIMITS)
    steps = native.deep_copy()
    for step in range(TRIED_STEPS):
        mask = b"" if steps.is_error() else _without(steps.compute_bitmask(), vocabulary.eos_token_ids)
        if steps.is_error():
            raise _error(steps)
        if not any(mask):
            if not step:
                raise GrammarError("no text but the empty one matches it")
            break
        steps.consume_token(_first(mask))
    return native


def _first(mask: bytes) -> int:
    """The smallest token that it has."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def _without(mask: bytes, tokens: Sequence[int]) -> bytes:
    rest = bytearray(mask)
    for token in tokens:
        rest[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return bytes(rest)


def _error(native: llguidance.LLMatcher) -> GrammarError:
    return GrammarError(native.get_error().removesuffix("<non-verbose/>").strip())
