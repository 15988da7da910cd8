"""The grammars of a decoder's attempts: compiled from admission on, so while the KV comes in; and the masks of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Rows

from services.decode.attempts import Attempt
from services.decode.scheduler import PlannedRow
from services.decode.sequence import Sequence
from shared.errors import AttemptFailed, GrammarError, Refused
from shared.grammar import Compiler, Vocabulary
from shared.instance import Instance
from shared.messages import Grammar

STAGE = "grammar"


class Grammars:
    def __init__(self, instance: Instance, tasks: asyncio.TaskGroup) -> None:
        self._compiler = _compiler(instance)
        self._tasks = tasks

    def begin(self, attempt: Attempt, grammar: Grammar | None) -> None:
        """Compiles what the attempt asks for, which fails with it. `attempt.compiling` is done when it is settled."""
        if grammar is not None:
            attempt.compiling = self._tasks.create_task(self._compile(attempt, grammar))

    async def settled(self, attempt: Attempt) -> None:
        """Until the grammar is compiled, or nobody needs it any more."""
        if attempt.compiling is None:
            return
        left = attempt.sequence.deadline - asyncio.get_running_loop().time()
        wanted = {attempt.compiling, attempt.failure}
        await asyncio.wait(wanted, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        self._compiler.close()

    async def _compile(self, attempt: Attempt, grammar: Grammar) -> None:
        try:
            attempt.sequence.matcher = await self._compiler.compile(grammar, attempt.sequence.stop_token_ids)
        except GrammarError as error:
            attempt.fail(AttemptFailed(STAGE, str(error), retryable=False))
        except Refused as refused:
            attempt.fail(AttemptFailed(STAGE, refused.reason))


def lacking(attempt: Attempt) -> AttemptFailed | None:
    """Why it cannot run, where it has no matcher for its grammar."""
    if attempt.compiling is None or attempt.sequence.matcher is not None:
        return None
    error = attempt.end()
    if isinstance(error, AttemptFailed):
        return error
    return AttemptFailed(STAGE, "it was not compiled by the request's deadline", retryable=False)


async def fill_masks(plans: Rows[Rows[PlannedRow]]) -> list[tuple[Sequence, GrammarError]]:
    """Sets `mask` of the rows that sample under a grammar, and takes away drafts that it does not allow. In a thread: some tens
    of microseconds each, of which the interpreter is held for a few. Those for which there is none are given back."""
    rows = [row for plan in plans for row in plan if row.samples and row.sequence.matcher is not None]
    return await asyncio.to_thread(_fill, rows) if rows else []


def _fill(rows: Rows[PlannedRow]) -> list[tuple[Sequence, GrammarError]]:
    failed = []
    for row in rows:
        matcher = row.sequence.matcher
        assert matcher is not None, "only rows with one are here"
        try:
            allowed = matcher.before_end(row.drafts.tokens)
            row.drafts = row.drafts._replace(tokens=allowed)
            row.mask = matcher.masks(allowed)
        except GrammarError as error:
            failed.append((row.sequence, error))
    return failed


def _compiler(instance: Instance) -> Compiler:
    path = instance.directory / "tokenizer.json"
    return Compiler(
        Vocabulary(lambda: path.read_text(encoding="utf-8"), instance.identity.vocab_size, instance.eos_token_ids)
    )
