"""What the status says about the daemon itself, as the shell knows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mlxsup.protocol.version import VERSION

from .config.load import DaemonConfig


def daemon_facts(config: DaemonConfig, client_socket: Path) -> dict[str, Any]:
    """Return version, pid and places of a daemon that runs with this configuration."""
    return {
        "version": VERSION,
        "pid": os.getpid(),
        "endpoint": f"ipc://{_text(client_socket)}",
        "config_path": _text(config.config_path) if config.config_path else None,
        "log_dir": _text(config.log_dir),
    }


def _text(path: Path) -> str:
    """Return a path as text that can be encoded, whatever bytes its name has."""
    return os.fsencode(path).decode("utf-8", "replace")
