"""The tensors of a Hugging Face directory: one safetensors file, or several with an index."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError
from shared.models.config import FP8_BLOCK

StoredDtype = Literal["float32", "bfloat16", "float16"]

_DTYPES: dict[str, StoredDtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_FP8 = "F8_E4M3"
_FP8_SCALES = "_scale_inv"
"""After a weight's name: what its blocks' values are to be multiplied by."""


class Stored(NamedTuple):
    """A tensor as stored: float32 values, or the raw 16 bits of bfloat16 and float16 as uint16."""

    values: npt.NDArray[Any]
    dtype: StoredDtype

    def as_float32(self) -> npt.NDArray[np.float32]:
        if self.dtype == "float32":
            return self.values
        if self.dtype == "float16":
            return self.values.view(np.float16).astype(np.float32)
        return (self.values.astype(np.uint32) << np.uint32(16)).view(np.float32)


class _Entry(NamedTuple):
    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """Reads tensors by name, one at a time, into memory of their own; nothing stays mapped."""

    def __init__(self, directory: Path) -> None:
        """Raises `ModelError` where there is no safetensors file or a header is not sound."""
        self.directory = directory
        self._entries: dict[str, _Entry] = {}
        for path in _files(directory):
            self._entries |= _read_header(path)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, name: str, shape: tuple[int, ...]) -> Stored:
        """The tensor `name`; one of fp8 blocks (`<name>_scale_inv` has their scales) as float32. Raises `ModelError`
        where it is missing, has another shape or an unsupported dtype."""
        entry = self._entry(name, shape)
        if entry.dtype == _FP8 and len(shape) == 2 and name + _FP8_SCALES in self:
            blocks = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
            scales = self.read(name + _FP8_SCALES, blocks).as_float32()
            return Stored(_dequantised(_load(entry, np.dtype(np.uint8), name), scales), "float32")
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelError(f"{entry.path}: {name} has dtype {entry.dtype}; supported is {', '.join(_DTYPES)}")
        return Stored(_load(entry, np.dtype(np.float32 if dtype == "float32" else np.uint16), name), dtype)

    def _entry(self, name: str, shape: tuple[int, ...]) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"{self.directory}: no tensor {name!r}")
        if entry.shape != shape:
            raise ModelError(
                f"{entry.path}: {name} has shape {list(entry.shape)}, the configuration wants {list(shape)}"
            )
        return entry


def _load(entry: _Entry, kind: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    values = np.fromfile(entry.path, dtype=kind, count=math.prod(entry.shape), offset=entry.offset)
    if values.size != math.prod(entry.shape):
        raise ModelError(f"{entry.path}: {name} is cut short")
    return values.reshape(entry.shape)


def e4m3_values() -> npt.NDArray[np.float32]:
    """What each of the 256 bytes stands for: sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinity, and NaN
    where all but the sign are ones (OCP FP8, E4M3)."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    magnitude[(byte & 127) == 127] = np.nan
    return np.where(byte & 128, -magnitude, magnitude).astype(np.float32)


def _dequantised(stored: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    values = e4m3_values()[stored]
    for i, row in enumerate(scales):
        wide = np.repeat(row, FP8_BLOCK)[: values.shape[1]]
        values[i * FP8_BLOCK : (i + 1) * FP8_BLOCK] *= wide
    return values


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: not an index of safetensors files") from error
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ModelError(f"{directory}: no model.safetensors and no model.safetensors.index.json")
    return [single]


def _read_header(path: Path) -> dict[str, _Entry]:
    """safetensors: 8 bytes little-endian length, that much JSON, then the tensors' bytes at offsets from there."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ModelError(f"{path}: its header is cut short")
            header: dict[str, Any] = json.loads(file.read(length))
        return {
            name: _Entry(path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: not a safetensors file: {error}") from error
