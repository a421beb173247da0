"""Reads what a GGUF file says about itself: metadata, and names, shapes and places of its tensors.

The weights are not read. Vocabulary and merges run to hundreds of thousands of strings, which is why this takes a
third of a second where the `gguf` package takes several. Format: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
FLOAT32_TENSOR = 0
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class NotGgufError(Exception):
    """The file is no GGUF, a damaged one, or one of an unknown version; the message says which."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Shape in torch's order, ggml's number for its type, and bytes from the start of the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by their keys (arrays as lists), and tensors by their names."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]

    @property
    def architecture(self) -> str:
        """The family of the model, in llama.cpp's naming; empty if the file does not say."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def parameters(self) -> int:
        """Numbers in all tensors together."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> GgufHeader:
    """All that stands before the weights.

    Raises:
        NotGgufError: see there.
        OSError: unreadable.
    """
    if not is_gguf(path):
        raise NotGgufError("it does not begin as a GGUF file does")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            return _Reader(content).header()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise NotGgufError("it is cut off or damaged") from error


def read_float32(path: Path, place: TensorPlace) -> list[float]:
    """The numbers of a small tensor that is stored as float32."""
    count = math.prod(place.shape)
    with path.open("rb") as file:
        file.seek(place.offset)
        return list(struct.unpack(f"<{count}f", file.read(4 * count)))


class _Reader:
    """Walks through the header; `struct.error` tells that the file ends too early."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = len(MAGIC)

    def header(self) -> GgufHeader:
        version = self._take("I")
        if version not in _VERSIONS:
            raise NotGgufError(f"it is GGUF version {version & 0xFFFF}, or big-endian; versions 2 and 3 are read")
        tensor_count, entries = self._take("Q"), self._take("Q")
        metadata = {self._string(): self._value(self._take("I")) for _ in range(entries)}
        tensors = {self._string(): self._tensor() for _ in range(tensor_count)}
        alignment = int(metadata.get("general.alignment", 32))
        data = math.ceil(self._at / alignment) * alignment
        placed = {name: TensorPlace(t.shape, t.kind, data + t.offset) for name, t in tensors.items()}
        return GgufHeader(metadata, placed)

    def _tensor(self) -> TensorPlace:
        dimensions = self._take("I")
        shape = tuple(self._take("Q") for _ in range(dimensions))
        # ggml names the fastest dimension first.
        return TensorPlace(shape[::-1], self._take("I"), self._take("Q"))

    def _take(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._content, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._take("Q")
        end = self._at + length
        if end > len(self._content):
            raise struct.error("a string runs over the end")
        text = self._content[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise NotGgufError(f"it holds a value of the unknown type {kind}")
        element, count = self._take("I"), self._take("Q")
        if element in _SCALARS:
            code = f"<{count}{_SCALARS[element]}"
            values = struct.unpack_from(code, self._content, self._at)
            self._at += struct.calcsize(code)
            return list(values)
        return [self._value(element) for _ in range(count)]
