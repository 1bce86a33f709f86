"""The weight files of a model folder: whether each is whole, and what its arrays take.

A safetensors file says in its header, at its beginning, how long it must be: its data is not read.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

from mlxsup.protocol.estimate import MAX_BYTES
from mlxsup.protocol.regular_file import MIB, open_regular

MAX_HEADERS_BYTES = 64 * MIB
"""Of all weight files together; a model of 90,000 arrays has 10 MiB of headers."""


class FolderError(Exception):
    """A folder that is missing or damaged; the message names the file."""


def read_header(path: Path, max_bytes: int) -> tuple[int, bytes]:
    """Return the size of a weight file and its header.

    Raises:
        FolderError: it is no safetensors file, or has more of a header than that.
        OSError: it cannot be read.
    """
    descriptor = open_regular(path)
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADERS_BYTES + 1
        if length > MAX_HEADERS_BYTES:
            raise FolderError(f"{path} is not a safetensors file")
        if length > max_bytes:
            raise FolderError(
                f"{path.parent}: the headers of its weight files have more than the"
                f" {MAX_HEADERS_BYTES // MIB} MiB that are read of a model"
            )
        return size, file.read(length)


def array_bytes(path: Path, size: int, header: bytes) -> int:
    """Return what the arrays of a weight file take in it, from its header alone.

    Args:
        path: the file, as errors call it.
        size: of the file, in bytes.
        header: as it was read.

    Raises:
        FolderError: the file is cut short or too long, or has no header of a safetensors file.
    """
    total_bytes, last = 0, 0
    try:
        values = json.loads(header)
        values.pop("__metadata__", None)
        for value in values.values():
            begin, end = (int(place) for place in value["data_offsets"])
            if begin > end or math.prod(map(int, value["shape"])) > MAX_BYTES:
                raise FolderError(f"{path}: its header has impossible sizes")
            last = max(last, end)
            total_bytes += end - begin
    except (
        ValueError, ArithmeticError, AttributeError, LookupError, TypeError, RecursionError
    ) as error:  # fmt: skip
        raise FolderError(f"cannot read the header of {path}: {error}") from error
    end = 8 + len(header) + last
    if size < end:
        raise FolderError(f"{path} is incomplete: {size} of {end} bytes")
    if size > end:
        raise FolderError(f"{path} is damaged: it has {size} bytes, and {end} by its header")
    return total_bytes
