"""Creates folders that nobody else may enter."""

from __future__ import annotations

from pathlib import Path


def make_private_folder(path: Path) -> None:
    """Creates a folder and the missing ones above it, each with mode 0700: one of those may be the
    runtime folder, which a daemon refuses with any other mode. What exists stays as it is.

    Raises:
        OSError: a folder cannot be created.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in (*reversed(missing), path):
        folder.mkdir(mode=0o700, exist_ok=True)
