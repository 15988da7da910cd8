"""A JSON object of a model directory, whose fields are read with their types checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import ModelError


class Fields:
    """`path`: the file, for messages. Every reader raises `ModelError` with the field, its value and what it takes; a
    field that is null counts as missing."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Raises `ModelError` where there is no JSON object at `path`."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise ModelError(f"{path}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ModelError(f"{path}: not a JSON object")
        return cls(value, path)

    def refuse(self, field: str, value: object, supported: str) -> ModelError:
        return ModelError(f"{self.path}: {field}={value!r} is not supported: {supported}")

    def positive(self, field: str, default: int | None = None) -> int:
        value = self.values.get(field)
        if value is None and default is not None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(field, value, "a whole number of at least 1")
        return value

    def count(self, field: str, default: int) -> int:
        """A whole number that may be 0."""
        value = self.values[field] if self.has(field) else default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.refuse(field, value, "a whole number, 0 or more")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.refuse(field, value, "a number above 0")
        return float(value)

    def flag(self, field: str, *, default: bool = False) -> bool:
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(field, value, "true or false")
        return value

    def ids(self, field: str) -> list[int]:
        value = self.values.get(field)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise self.refuse(field, value, "a token id or a list of them")
        return ids

    def one_of(self, field: str, default: object, *supported: object) -> None:
        """Refuses any other value."""
        value = self.values[field] if self.has(field) else default
        if value not in supported:
            raise self.refuse(field, value, " or ".join(str(s) for s in supported))

    def has(self, field: str) -> bool:
        return self.values.get(field) is not None

    def inner(self, field: str) -> Fields:
        """The object in `field`; an empty one where there is none."""
        value = self.values.get(field)
        if not isinstance(value, dict | None):
            raise self.refuse(field, value, "an object")
        return Fields(value or {}, self.path)
