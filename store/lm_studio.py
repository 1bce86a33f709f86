"""Where LM Studio keeps its models: PUBLISHER/NAME below one folder."""

from __future__ import annotations

import json
from pathlib import Path

POINTER = ".lmstudio-home-pointer"
"""In the user's home: the folder that LM Studio uses, if it is another than the usual one."""

USUAL_HOME = ".lmstudio"
OLD_HOME = ".cache/lm-studio"
SETTINGS = "settings.json"
FOLDER_SETTING = "downloadsFolder"
MODELS = "models"


def model_folders(home: Path | None = None) -> list[Path]:
    """The folders with publishers in them, as far as they exist.

    Args:
        home: the user's home; None: that of this process.
    """
    user = Path.home() if home is None else home
    homes = [_pointed_to(user / POINTER), user / USUAL_HOME, user / OLD_HOME]
    folders: list[Path] = []
    for one in homes:
        if one is None:
            continue
        for folder in (_chosen(one / SETTINGS), one / MODELS):
            if folder is not None and folder.is_dir() and folder not in folders:
                folders.append(folder)
    return folders


def _pointed_to(pointer: Path) -> Path | None:
    try:
        text = pointer.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return Path(text) if text else None


def _chosen(settings: Path) -> Path | None:
    """The folder that a user has chosen for downloads."""
    try:
        value = json.loads(settings.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    folder = value.get(FOLDER_SETTING) if isinstance(value, dict) else None
    return Path(folder) if isinstance(folder, str) and folder else None
