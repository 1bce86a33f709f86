"""Bytes that a terminal sends for keys, as the names of the keys."""

from __future__ import annotations

import re

NAMES = {
    b"\x1b[A": "up", b"\x1bOA": "up",
    b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[7~": "home",
    b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end", b"\x1b[8~": "end",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b": "escape",
    b"\x04": "ctrl-d",
}  # fmt: skip

KEY = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[@-~]|\x1b[^\x1b\[O]|[^\x1b]|\x1b")
"""A sequence of a terminal, Alt with another key, one byte, or the key Escape."""

UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)\Z")
MAX_UNFINISHED = 32
"""Bytes; no key has a longer sequence."""


class KeyReader:
    """Splits what was read into keys; a sequence may come in two parts."""

    def __init__(self) -> None:
        self._unfinished = b""

    def feed(self, block: bytes) -> list[str]:
        """The keys in order: characters as they are, others by name.

        What stands for no key that has a name here is left out as a whole: its last byte is often
        a letter, which nobody has typed.
        """
        block = self._unfinished + block
        found = UNFINISHED.search(block)
        is_kept = found is not None and len(block) - found.start() <= MAX_UNFINISHED
        end = found.start() if found is not None and is_kept else len(block)
        self._unfinished = block[end:]
        return [name for data in KEY.findall(block[:end]) if (name := _name(data))]


def _name(data: bytes) -> str:
    """Empty for a key without a name."""
    if data in NAMES:
        return NAMES[data]
    is_character = len(data) == 1 and 0x20 <= data[0] < 0x7F
    return data.decode() if is_character else ""
