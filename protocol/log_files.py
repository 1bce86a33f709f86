"""The log files of models: reads their ends and follows them, across rotation."""

from __future__ import annotations

import itertools
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .folders import rotated

BLOCK_BYTES = 64 * 1024
MAX_ROTATED = 9
"""The highest number of a rotated file to look for; the supervisor keeps fewer."""

ESCAPES = re.compile(r"(\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[@-_]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Sequences that could move a reader's cursor; a worker's libraries may well print them."""


def tail(path: Path, count: int, end: int | None = None) -> list[str]:
    """Return the last lines of a log, taking from its rotated files if it needs them.

    Args:
        path: the newest file.
        count: how many lines at most.
        end: bytes of the newest file to look at; None for all.
    """
    lines: deque[str] = deque()
    for number in itertools.count():
        file = _open(rotated(path, number))
        if file is None:
            # The newest may be missing for a moment while it is being rotated.
            if number > 0:
                break
            continue
        with file:
            found = _tail_of(file, count - len(lines), end if number == 0 else None)
        lines.extendleft(reversed(found))
        if len(lines) >= count:
            break
    return list(lines)


def all_lines(path: Path) -> list[str]:
    """Return every line that is still kept, oldest first; rotation bounds them."""
    lines: list[str] = []
    for number in range(MAX_ROTATED, -1, -1):
        if (file := _open(rotated(path, number))) is not None:
            with file:
                lines += [clean(line.removesuffix(b"\n")) for line in file]
    return lines


def written_at(path: Path) -> float:
    """Return when a log was last written to; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return 0.0


def _tail_of(file: BinaryIO, count: int, end: int | None) -> list[str]:
    if count <= 0:
        return []
    position = file.seek(0, os.SEEK_END) if end is None else end
    data = b""
    while position > 0 and data.count(b"\n") <= count:
        size = min(BLOCK_BYTES, position)
        position -= size
        file.seek(position)
        data = file.read(size) + data
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return [clean(line) for line in lines[-count:]]


def clean(line: bytes) -> str:
    """Return a line as text, without anything that a terminal would act on."""
    return ESCAPES.sub("", line.decode("utf-8", "replace")).expandtabs()


class FollowedFile:
    """A log that is being written, followed even when the file is replaced.

    Args:
        path: the newest file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        self._file = _open(path)
        self.start: int = 0 if self._file is None else self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read_lines(self) -> Iterator[str]:
        """Yield the lines that were finished since the last call."""
        if self._file is None:
            self._file = _open(self._path)
        if self._file is None:
            return
        # Checked before reading: what the old file got before it was replaced is read below.
        is_replaced = self._is_replaced(self._file)
        yield from self._read(self._file)
        if is_replaced:
            self._file.close()
            if self._rest:
                yield clean(self._rest)
                self._rest = b""
            self._file = _open(self._path)
            if self._file is not None:
                yield from self._read(self._file)

    def _read(self, file: BinaryIO) -> Iterator[str]:
        while block := file.read(BLOCK_BYTES):
            *lines, self._rest = (self._rest + block).split(b"\n")
            for line in lines:
                yield clean(line)
            if len(self._rest) > BLOCK_BYTES:  # longer lines are shown in parts
                yield clean(self._rest)
                self._rest = b""

    def _is_replaced(self, file: BinaryIO) -> bool:
        try:
            now = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            # Renamed, and the new file does not exist yet: keep reading the old one until it does.
            return False
        opened = os.fstat(file.fileno())
        is_cut = now.st_size < file.tell()
        return (now.st_ino, now.st_dev) != (opened.st_ino, opened.st_dev) or is_cut


def _open(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return None
