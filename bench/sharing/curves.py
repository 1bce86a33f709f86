"""What the plots are drawn from: the latest run of each measure, in build/sharing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "build" / "sharing"


def save(name: str, found: Any, folder: Path = FOLDER) -> None:
    """Keeps what a measure has found; anything that JSON can hold."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found))


def saved(name: str, folder: Path = FOLDER) -> Any | None:
    """What it found last; None if it has not run here."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None
