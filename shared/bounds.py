"""What a field of a message may hold. `msgspec` checks it where a message is decoded, so that nothing behind that place meets a
number that is none, a list index out of range, or a name that would be another subject. What is built here is not checked."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""How many of something there are."""

Size = Annotated[int, Meta(ge=1, le=2**24)]
"""One dimension of a layout or a model: at least one, and no product of a few of them overflows 128 bits."""

Ranks = Annotated[int, Meta(ge=1, le=1024)]
"""Of one kind of parallelism."""

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""A page, a token or an immediate, as the native side takes it."""

Incarnation = Annotated[int, Meta(ge=0)]

Number = Annotated[float, Meta(ge=-1e9, le=1e9)]
"""Any that one can count with: neither infinite nor no number."""

Positive = Annotated[float, Meta(ge=0, le=1e12)]
"""The same, not below 0."""

Share = Annotated[float, Meta(ge=0, le=1)]

Name = Annotated[str, Meta(pattern=r"\A[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")]
"""Stands in a subject: see `shared.subjects`."""

GrammarText = Annotated[str, Meta(min_length=1, max_length=1 << 18)]
"""Characters of what an output must match."""

AttemptId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
