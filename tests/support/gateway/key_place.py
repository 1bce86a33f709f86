"""The place of keys in tests."""

from __future__ import annotations

from pathlib import Path

from mlxsup.protocol.key_file import MARK_NAME, KeyPlace


def place_in(folder: Path) -> KeyPlace:
    """Return a place below a folder; neither of its own folders is there yet."""
    return KeyPlace(folder / "etc" / "mlxsup.keys.json", folder / "run" / MARK_NAME)
