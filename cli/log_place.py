"""Where the logs of a daemon are that does not answer."""

from __future__ import annotations

from pathlib import Path

from mlxsup.protocol.folders import default_log_dir, recorded_log_dir
from mlxsup.protocol.places import log_dir_of

from .connection import Target


def log_dir_left_by(target: Target) -> Path | None:
    """Return the folder in which the latest daemon there wrote its logs; None if there is none.

    Raises:
        CliError: what says where the daemon is cannot be read.
    """
    place = target.find()
    runtime_dir = Path(place.endpoint.removeprefix("ipc://")).parent
    path = recorded_log_dir(runtime_dir)
    if path is None and place.config is not None:
        path = log_dir_of(place.config)
    path = path or default_log_dir(runtime_dir)
    return path if path.is_dir() else None
