"""The place of keys in tests."""

from __future__ import annotations

from pathlib import Path

from mlxsup.protocol.key_file import MARK_NAME, KeyPlace, add_key


def place_in(folder: Path) -> KeyPlace:
    """Return a place below a folder; neither of its own folders is there yet."""
    return KeyPlace(folder / "etc" / "mlxsup.keys.json", folder / "run" / MARK_NAME)


def new_key(place: KeyPlace, name: str, *, account: str = "", is_operator: bool = False) -> str:
    """Make a key, and return it; its account has the same name unless it says otherwise."""
    key = add_key(place, name=name, account=account or name, is_operator=is_operator, created="")
    assert key is not None
    return key
