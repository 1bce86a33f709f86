"""A daemon whose first worker fails as a bug in its loop, or in mlx-lm, would make it fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from support.daemon.daemon import Daemon

SABOTAGE = Path(__file__).parents[1] / "sabotage"


class LossyDaemon(Daemon):
    """See `sabotage/sitecustomize.py`; there is one such worker in a daemon's life.

    Args:
        what: happens: a key of its `WAYS`.
        models, supervisor: as for `Daemon`.
    """

    def __init__(
        self, what: str, models: dict[str, dict[str, Any]], supervisor: dict[str, Any] | None = None
    ) -> None:
        super().__init__(models, supervisor)
        self.struck = self.folder / "struck"
        """A file that is there once it has happened."""
        self._what = what

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        """See `Daemon.start`."""
        paths = f"{SABOTAGE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        lossy = {"MLXSUP_SABOTAGE": f"{self._what}:{self.struck}", "PYTHONPATH": paths}
        super().start(environment=lossy | (environment or {}))
