"""What a peer may send that is almost a message: hypothesis strategies over the encoding of a right one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st

Path = tuple[Any, ...]
Change = Callable[[Any], Any]

_LEAVES = (
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from(["", "*", ">", "a b", "x\r\nPUB y 0\r\n", "é" * 70, "00" * 16])
    | st.text(max_size=40)
    | st.binary(max_size=80)
)
_VALUES = _LEAVES | st.lists(_LEAVES, max_size=4) | st.just([0] * 20_000) | st.just([b""] * 2_000) | st.just({})


def encoded(right: msgspec.Struct) -> st.SearchStrategy[bytes]:
    """`right` with some of its values, at any depth, replaced (half of them by others of their type), left out or doubled;
    sometimes cut short."""
    whole = msgspec.to_builtins(right, builtin_types=(bytes,))
    paths = st.sampled_from(_paths(whole))
    near = st.tuples(paths, st.integers(0, 255).map(_near))
    far = st.tuples(paths, _VALUES.map(lambda value: lambda _: value) | st.just(None))
    changes = st.lists(near, min_size=1, max_size=3) | st.lists(near | far, min_size=1, max_size=2)
    changed = changes.map(lambda made: msgspec.msgpack.encode(_apply(whole, made)))
    cut = st.tuples(changed, st.integers(0, 400)).map(lambda pair: pair[0][: pair[1]])
    return changed | changed | changed | cut | st.binary(max_size=200)


def _near(seed: int) -> Change:
    """Another value of the same type."""

    def change(value: Any) -> Any:
        match value:
            case bool() | None:
                return not value
            case int():
                return max(-(2**63), min((value + 1, value - 1, 0, 2**31, value * 1000 + seed)[seed % 5], 2**63))
            case float():
                return (0.0, value / 2, -value, 1e6)[seed % 4]
            case str():
                return value.replace(value[:1], "0123456789abcdef"[seed % 16]) if value else "a"
            case bytes():
                at = seed % max(1, len(value))
                flipped = bytes([value[at] ^ (seed | 1)]) if value else b""
                return (value[:at] + flipped + value[at + 1 :], value[:at], value + b"\0")[seed % 3]
            case list():
                return (value[::-1], value[1:], value * 2, [])[seed % 4]
            case _:
                return {}

    return change


def _paths(value: Any, at: Path = ()) -> list[Path]:
    found: list[Path] = [at] if at else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _paths(inner, (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:3]):
            found += _paths(inner, (*at, index))
    return found


def _apply(whole: Any, changes: list[tuple[Path, Change | None]]) -> Any:
    """None for a change: it is left out of its struct, or doubled in its list."""
    made = copy.deepcopy(whole)
    for path, change in changes:
        holder = made
        try:
            for step in path[:-1]:
                holder = holder[step]
            if change is not None:
                holder[path[-1]] = change(holder[path[-1]])
            elif isinstance(holder, list):
                holder.append(holder[path[-1]])
            else:
                del holder[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took what was there
    return made
