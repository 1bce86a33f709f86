"""What was typed in earlier chats: one JSON string per line, readable by its owner alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

MAX_ENTRIES = 1000


class History:
    """Keeps the latest entries in a file; a file that cannot be written is no reason to stop.

    Args:
        path: the file; its folder is created when needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[str]:
        """The latest entries, oldest first; shortens a file that has grown."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        entries = [entry for line in lines if (entry := _parse(line))]
        if len(lines) > 2 * MAX_ENTRIES:
            shorter = self._path.with_name(f"{self._path.name}.new")
            shorter.unlink(missing_ok=True)
            _append(shorter, entries[-MAX_ENTRIES:])
            shorter.replace(self._path)
        return entries[-MAX_ENTRIES:]

    def add(self, entry: str) -> bool:
        """Appends one entry; False if it could not be kept."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _append(self._path, [entry])
        except OSError:
            return False
        return True


def _append(path: Path, entries: list[str]) -> None:
    data = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, data.encode("utf-8", "replace"))
    finally:
        os.close(descriptor)


def _parse(line: str) -> str | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, str) else None
