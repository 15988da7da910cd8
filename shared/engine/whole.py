"""The whole model in one process: the reference for what the mesh must answer, and the engine alone for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from shared.engine.protocol import Row
from shared.layout import KvDtype
from shared.messages import Sampling
from shared.models.attention import BatchRow
from shared.models.config import load_config
from shared.models.model import Model, ModelOptions

GREEDY = Sampling(temperature=0.0)


class WholeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_tokens`: of the KV pool, over all prompts that run at once. `chunk_tokens`: of one prefill forward."""

    options: ModelOptions = ModelOptions()
    kv_dtype: KvDtype = "float32"
    page_size: int = 64
    kv_tokens: int = 8192
    chunk_tokens: int = 512


class Whole:
    """Prefill in chunks and batched decode, over pages that are handed out in order and all free again after a call."""

    def __init__(self, directory: Path, config: WholeConfig | None = None) -> None:
        self.config = config = config or WholeConfig()
        options = config.options
        self.layout = load_config(directory).layout(
            page_size=config.page_size,
            dtype=config.kv_dtype,
            mtp=options.drafter == "mtp",
            draft=load_config(Path(options.draft_model)) if options.drafter == "model" else None,
        )
        self.num_pages = self.layout.pages_for(config.kv_tokens)
        kv = np.zeros(self.layout.region_bytes(self.num_pages), np.uint8)
        self.model = Model(directory, config.options, self.layout, self.num_pages, kv)

    def generate(self, prompts: Sequence[list[int]], max_tokens: int, sampling: Sampling = GREEDY) -> list[list[int]]:
        """`max_tokens` tokens after each prompt of at least one token, decoded together; no token ends an output.

        As in the mesh, a prompt's last token is not prefilled: the first decode step runs it. Raises `ValueError` where
        the pool is too small.
        """
        tables = self.page_tables([len(prompt) + max_tokens for prompt in prompts])
        for prompt, pages in zip(prompts, tables, strict=True):
            self.prefill(prompt[:-1], pages)
        outputs: list[list[int]] = [[] for _ in prompts]
        for count in range(max_tokens):
            rows: list[BatchRow] = [
                Row(
                    tokens=[output[-1] if output else prompt[-1]],
                    start=len(prompt) - 1 + count,
                    pages=pages,
                    sample=sampling,
                )
                for prompt, output, pages in zip(prompts, outputs, tables, strict=True)
            ]
            for output, token in zip(outputs, self.model.step(rows), strict=True):
                assert token is not None
                output.append(token)
        return outputs

    def prefill(self, tokens: list[int], pages: bytes, *, start: int = 0) -> None:
        """K and V of `tokens` at positions start, start + 1, ... into `pages`, a chunk at a time."""
        for first in range(0, len(tokens), self.config.chunk_tokens):
            chunk = tokens[first : first + self.config.chunk_tokens]
            self.model.step([Row(tokens=chunk, start=start + first, pages=pages)])

    def page_tables(self, lengths: Sequence[int]) -> list[bytes]:
        """Page tables for sequences of so many tokens, as `Row.pages` wants them."""
        tables, first = [], 0
        for length in lengths:
            count = self.layout.pages_for(length)
            tables.append(np.arange(first, first + count, dtype="<i4").tobytes())
            first += count
        if first > self.num_pages:
            raise ValueError(f"{sum(lengths)} tokens need {first} pages, the pool has {self.num_pages}")
        return tables
