"""The places of mlxsup by default, and the names of its files, for daemon, clients and commands."""

from __future__ import annotations

import os
import re
from pathlib import Path

DEFAULT_RUNTIME_DIR = "~/.mlxsup/run"
DEFAULT_LOG_DIR = "~/.mlxsup/logs"
DEFAULT_CONFIG = "~/.mlxsup/config.toml"
DEFAULT_LISTEN = "127.0.0.1:8484"
"""The address of the gateway."""
HISTORY_FILE = "~/.mlxsup/history"
MODELS_DIR = "~/.mlxsup/models"
"""Contains the models that mlxsup has converted, a folder each."""
DEMO_MODEL_FOLDER = f"{MODELS_DIR}/smollm2-135m"

CLIENT_SOCKET_NAME = "client.sock"
LOCK_NAME = "lock"
LEARNED_NAME = "learned"
"""Contains a folder for each model, with the kernels that its workers have compiled."""
LOGS_NAME = "logs"
"""The folder for logs in a runtime folder other than the default one."""
LOG_DIR_NAME = "log_dir"
"""The file in a runtime folder that says where its latest daemon wrote its logs."""
BEAT_SUFFIX = ".beat"
"""Added to the name of a worker's socket for the one that its heartbeats come through."""
DAEMON_LOG_NAME = "mlxsup"
"""Names the daemon's log; a model's log has the model's name, and no model has this one."""
GATEWAY_LOG_NAME = "mlxsup-gateway"
"""Names the log of what the gateway prints; no model has this name either."""

MAX_SPAWNS = 9_999_999
"""Only used for the length of a worker's socket path."""

MAX_SOCKET_PATH_BYTES = 103
"""The longest path of a Unix socket on macOS, without the closing zero."""

GENERATION_HEADER = re.compile(r"--- generation (\d+) pid \d+ ")
"""Begins the line above the output of a new process in its model's log; the time in UTC follows."""


def absolute(path: str, folder: Path) -> Path:
    """Return a path of a configuration, in which relative ones are relative to `folder`."""
    # `..` is resolved without following links: people see the path as they wrote it.
    # `~name` of a user that does not exist stays as it is, as in a shell.
    return Path(os.path.normpath(folder / os.path.expanduser(path)))


def default_log_dir(runtime_dir: Path) -> Path:
    """Return where the logs are by default: no two daemons share a folder."""
    if runtime_dir == Path(DEFAULT_RUNTIME_DIR).expanduser():
        return Path(DEFAULT_LOG_DIR).expanduser()
    return runtime_dir / LOGS_NAME


def recorded_log_dir(runtime_dir: Path) -> Path | None:
    """Return where the latest daemon of a runtime folder wrote its logs; None if not known."""
    try:
        return Path(os.fsdecode((runtime_dir / LOG_DIR_NAME).read_bytes()))
    except OSError:
        return None


def log_path(log_dir: Path, name: str) -> Path:
    """Return the file of a model's output, or of the daemon's own log."""
    return log_dir / f"{name}.log"


def rotated(path: Path, number: int) -> Path:
    """Return the older file of a log that was renamed so many times; 0 for the log itself."""
    return path.with_name(f"{path.name}.{number}") if number else path


def generation_header(generation: int, pid: int, started: str) -> str:
    """Return the line above the output of a process; `started` is as of `text.timestamp`."""
    return f"--- generation {generation} pid {pid} {started}"


def check_socket_path(path: str) -> None:
    """Refuse a socket path that some supported system cannot bind.

    Raises:
        ValueError: the path is longer than 103 bytes, or is not UTF-8, which ZeroMQ takes.
    """
    try:
        length = len(path.encode())
    except UnicodeEncodeError:
        raise ValueError(f"the socket path {path!r} is not UTF-8") from None
    if length > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"the socket path {path} has {length} bytes; "
            f"at most {MAX_SOCKET_PATH_BYTES} work on every system"
        )


def worker_socket_name(spawn: int) -> str:
    """Return the name of the socket for the worker that is started as number `spawn`."""
    return f"w{spawn}.sock"


def check_runtime_dir(path: Path) -> None:
    """Refuse a runtime folder whose sockets some supported system cannot bind.

    Raises:
        ValueError: the path of a socket in it is longer than 103 bytes, or is not UTF-8.
    """
    for name in (CLIENT_SOCKET_NAME, worker_socket_name(MAX_SPAWNS) + BEAT_SUFFIX):
        check_socket_path(str(path / name))
