"""Reads logs for the page: a part at a time, of limited length, and never one file whole.

Everything here blocks, and is called in threads.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mlxsup.protocol.folders import (
    DAEMON_LOG_NAME,
    GATEWAY_LOG_NAME,
    GENERATION_HEADER,
)
from mlxsup.protocol.log_files import clean, tail
from mlxsup.protocol.regular_file import open_regular

OWN_LOGS = (DAEMON_LOG_NAME, GATEWAY_LOG_NAME)
"""Logs that are no model's."""

MOST_PART_BYTES = 256 * 1024
MOST_FILE_BYTES = 4 * 1024 * 1024
"""What a download has at most: the end of the log."""

MOST_LINE_CHARACTERS = 4096
"""A longer line is cut for the page; the download has all of it."""

MOST_LINES = 60
MOST_READ_LINES = 5000
"""How far back in a log a process is looked for."""

CURSOR = re.compile(r"(\d{1,20})-(\d{1,18})")


class Part(NamedTuple):
    """Whole lines of a log.

    Attributes:
        lines: oldest first.
        cursor: where the next part begins: the inode of the file, and an offset in it.
        has_gap: true if lines between the cursor that was given and these are left out.
    """

    lines: list[str]
    cursor: str
    has_gap: bool


def read_part(path: Path, cursor: str) -> Part:
    """Return what a log has after a cursor, or its end without one.

    A file that was renamed since is read to its end first. No more than `MOST_PART_BYTES` of the
    newest lines are returned, and no line before its end was written.

    Args:
        path: the newest file; it may not exist.
        cursor: of an earlier part; empty for the first.

    Raises:
        OSError: the file cannot be read.
    """
    found = CURSOR.fullmatch(cursor)
    inode, offset = (int(found[1]), int(found[2])) if found else (0, 0)
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return Part([], cursor, has_gap=False)
    before, is_cut = b"", False
    with open(descriptor, "rb") as file:
        own, size = _inode(file), file.seek(0, os.SEEK_END)
        is_same = own == inode and offset <= size
        if inode and not is_same:
            before, is_cut = _rest_of_renamed(path, inode, offset)
        data, is_left_out = _read(file, offset if is_same else 0, size)
    end = data.rfind(b"\n") + 1
    if not end and len(data) >= MOST_PART_BYTES:
        end = len(data)  # a line without an end is shown in pieces
    whole = before + data[:end]
    lines = whole.removesuffix(b"\n").split(b"\n") if whole else []
    return Part(
        [_shortened(clean(line)) for line in lines],
        f"{own}-{size - len(data) + end}",
        has_gap=bool(inode) and (is_cut or is_left_out),
    )


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino


def _read(file: BinaryIO, start: int, end: int) -> tuple[bytes, bool]:
    """Return the bytes between two places, and whether their beginning is left out."""
    first = max(start, end - MOST_PART_BYTES)
    file.seek(first)
    data = file.read(end - first)
    if first > start:
        data = data[data.find(b"\n") + 1 :]
    return data, first > start


def _rest_of_renamed(path: Path, inode: int, offset: int) -> tuple[bytes, bool]:
    """Return the lines that the file before has after an offset, and whether any is left out."""
    try:
        with open(open_regular(path.with_name(f"{path.name}.1")), "rb") as file:
            if _inode(file) != inode:
                return b"", True
            data, is_cut = _read(file, offset, file.seek(0, os.SEEK_END))
    except FileNotFoundError:
        return b"", True
    return data + b"\n" if data and not data.endswith(b"\n") else data, is_cut


def _shortened(line: str) -> str:
    left = len(line) - MOST_LINE_CHARACTERS
    return line if left <= 0 else f"{line[:MOST_LINE_CHARACTERS]}… ({left:,} more characters)"


def end_of(path: Path) -> bytes:
    """Return the end of a log, at most `MOST_FILE_BYTES`, without what a terminal would act on;
    nothing if there is no such file.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return b""
    with open(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MOST_FILE_BYTES))
        lines = file.read(MOST_FILE_BYTES).split(b"\n")
    if size > MOST_FILE_BYTES:
        del lines[0]
    # Line by line: other threads get their turns between.
    return b"\n".join(clean(line).encode() for line in lines)


def lines_of(path: Path, generation: int) -> list[str]:
    """Return the last lines in a model's log that one of its processes has printed; none if the log
    no longer has them."""
    lines = tail(path, MOST_READ_LINES)
    found: list[str] = []
    is_inside = False
    for line in lines:
        rule = GENERATION_HEADER.match(line)
        if rule is not None:
            is_inside = int(rule.group(1)) == generation
            found = [] if is_inside else found
        elif is_inside:
            found.append(line)
    return found[-MOST_LINES:]
