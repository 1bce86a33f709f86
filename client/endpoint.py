"""Finds the daemon's endpoint; the command line uses the same rules."""

from __future__ import annotations

import os
from pathlib import Path

from mlxsup.protocol.folders import CLIENT_SOCKET_NAME, DEFAULT_RUNTIME_DIR, check_socket_path

ENDPOINT_VARIABLE = "MLXSUP_ENDPOINT"


def find_endpoint(explicit: str | None = None) -> str:
    """The given endpoint, or else that of the environment, or else the default one.

    Raises:
        ValueError: it is not an `ipc://` endpoint that a client can connect to.
    """
    if explicit is not None:
        return check_endpoint(explicit)
    named = os.environ.get(ENDPOINT_VARIABLE)
    return check_endpoint(named) if named else endpoint_in(DEFAULT_RUNTIME_DIR)


def endpoint_in(runtime_dir: str | Path) -> str:
    """The endpoint of the daemon with this runtime folder."""
    path = Path(runtime_dir).expanduser() / CLIENT_SOCKET_NAME
    return check_endpoint(f"ipc://{path}")


def check_endpoint(endpoint: str) -> str:
    """Returns the endpoint if a client can connect to it.

    Raises:
        ValueError: it is not `ipc://` and a path of at most 103 bytes.
    """
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or not path:
        raise ValueError(f"an endpoint is ipc:// and the path of a socket, not {endpoint!r}")
    check_socket_path(path)
    return endpoint
