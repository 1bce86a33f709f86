"""Walks the header of a GGUF file before MLX reads the file.

MLX's reader trusts every length, count and offset: of 2,000 mutations of a tiny file it read 326
beyond the file's end, and died. Here the header is read as bytes, so that a file that does not
hold what it announces is refused with the place and the reason. No MLX here.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn

from ...engine import BadModelError, ModelMissingError

MAGIC = b"GGUF"
VERSIONS = (2, 3)

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 65536
MAX_DIMENSIONS = 4
MAX_SIDE = 2**31 - 1
"""MLX keeps each dimension of a shape in 32 bits."""

MAX_SHOWN = 80

MAX_HEADER_BYTES = 256 * 2**20
"""More than ten times the header of a vocabulary of 262,000 tokens: a file with holes in it may
have any size, and a header as large."""

_STRING = 8
_ARRAY = 9
_UINT32 = 4
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, _UINT32: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a metadata value, by its type; strings and arrays have their own lengths."""

_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 10: (256, 84), 12: (256, 144),
    14: (256, 210), 24: (1, 1), 25: (1, 2), 26: (1, 4), 30: (1, 2),
}  # fmt: skip
"""Weights and bytes of a block, by the tensor's type, of those that MLX reads: F32, F16, Q4_0,
Q4_1, Q8_0, Q2_K, Q4_K, Q6_K, integers and BF16."""

_MIN_ENTRY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


def check_gguf(path: Path) -> None:
    """Raise if a file is not a GGUF file that holds everything its header announces.

    Raises:
        ModelMissingError: there is no such file.
        BadModelError: it is something else; names the place and what is wrong.
        OSError: it cannot be read.
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer would wait for one.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ModelMissingError(f"{path} does not exist") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadModelError(f"{path} is not a regular file")
        _Walk(path, file, status.st_size).run()


class _Walk:
    """One pass over the header; nothing is read before its length fits into the file.

    Attributes:
        place: what is being read, for messages.

    Args:
        path: for messages.
        file: at its start.
        size: of the file, in bytes.
    """

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._end = min(size, MAX_HEADER_BYTES)
        self._position = 0
        self._alignment = DEFAULT_ALIGNMENT
        self.place = "its header"

    def run(self) -> None:
        """Raise if something in the header is wrong.

        Raises:
            BadModelError: the first thing that is.
        """
        if self._take(4) != MAGIC:
            self._refuse("does not begin with the letters GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            self._refuse(f"has version {version}; {VERSIONS[0]} and {VERSIONS[1]} can be read")
        tensors, entries = self._number("<Q"), self._number("<Q")
        self._check_count(tensors, _MIN_TENSOR_BYTES, "tensors")
        self._check_count(entries, _MIN_ENTRY_BYTES, "metadata entries")
        self._each(entries, self._entry, "metadata entry")
        ends: dict[str, tuple[str, int]] = {}
        self._each(tensors, lambda: self._tensor(ends), "tensor")
        data = -(-self._position // self._alignment) * self._alignment
        for place, end in ends.values():
            if data + end > self._size:
                self.place = place
                self._refuse(f"ends at byte {data + end}, after the end of the file")

    def _each(self, count: int, read: Callable[[], None], kind: str) -> None:
        for number in range(1, count + 1):
            self.place = f"{kind} {number} of {count}"
            read()

    def _entry(self) -> None:
        key = self._text()
        self.place = f"metadata {shown(key)}"
        kind = self._number("<I")
        if key == "general.alignment":
            alignment = self._number("<I") if kind == _UINT32 else 0
            if not 0 < alignment <= MAX_ALIGNMENT or alignment % 8:
                self._refuse(f"is no multiple of 8 up to {MAX_ALIGNMENT}")
            self._alignment = alignment
        elif kind == _ARRAY:
            self._array()
        else:
            self._value(kind)

    def _array(self) -> None:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _ARRAY:
            self._refuse("is a list of lists, which no model needs")
        if kind == _STRING:
            self._check_count(count, 8, "texts")
            for _ in range(count):
                self._text()
        elif kind in _VALUE_BYTES:
            self._check_count(count, _VALUE_BYTES[kind], "values")
            self._skip(count * _VALUE_BYTES[kind])
        else:
            self._refuse(f"is a list of values of the unknown type {kind}")

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._text()
        elif kind in _VALUE_BYTES:
            self._skip(_VALUE_BYTES[kind])
        else:
            self._refuse(f"has a value of the unknown type {kind}")

    def _tensor(self, ends: dict[str, tuple[str, int]]) -> None:
        """Read one tensor's description.

        Args:
            ends: for each name, how to call the tensor and where in the data it ends.
        """
        name = self._text()
        self.place = f"tensor {shown(name)}"
        if not name or name in ends:
            self._refuse("has no name" if not name else "is in the file twice")
        dimensions = self._number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self._refuse(f"has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} can be read")
        shape = [self._number("<Q") for _ in range(dimensions)]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in _BLOCKS:
            self._refuse(f"has weights of type {kind}, which MLX does not read")
        weights, block_bytes = _BLOCKS[kind]
        if not all(0 < side <= MAX_SIDE for side in shape) or shape[0] % weights:
            self._refuse(f"has a shape that does not fit its type: {shape}")
        if offset % self._alignment:
            self._refuse(f"begins at byte {offset}, no multiple of {self._alignment}")
        size = math.prod(shape) // weights * block_bytes
        ends[name] = (self.place, offset + size)

    def _check_count(self, count: int, each_bytes: int, what: str) -> None:
        if count > (self._end - self._position) // each_bytes:
            self._refuse(f"announces {count} {what}, more than a header has room for here")

    def _text(self) -> str:
        length = self._number("<Q")
        if length > self._end - self._position:
            self._refuse(
                f"announces a text of {length} bytes, more than a header has room for here"
            )
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            self._refuse("holds a text that is not UTF-8")

    def _number(self, form: str) -> int:
        number: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return number

    def _take(self, count: int) -> bytes:
        taken = self._file.read(count)
        self._position += count
        if len(taken) < count:
            self._refuse("is cut short: the file ends within it")
        return taken

    def _skip(self, count: int) -> None:
        """Move on by what `_check_count` allows, or a value's few bytes."""
        self._position += count
        if self._position > self._end:
            self._refuse("is cut short: the file ends within it")
        self._file.seek(count, os.SEEK_CUR)

    def _refuse(self, what: str) -> NoReturn:
        raise BadModelError(
            f"{self._path} is not a GGUF file that can be read: {self.place} {what}"
        )


def shown(name: str) -> str:
    """Return a name from the file as one short line of printable letters."""
    return name[:MAX_SHOWN] if name[:MAX_SHOWN].isprintable() else ascii(name[:MAX_SHOWN])
