"""A folder with a short name, for the sockets of commands and clients."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.client import Client

from support.daemon.daemon import Daemon
from support.wheels import builder, built, built_client, installed

__all__ = ["builder", "built", "built_client", "installed"]


@pytest.fixture
def folder() -> Iterator[Path]:
    # A socket's path has at most 103 bytes, and pytest's own folders are longer than that.
    with tempfile.TemporaryDirectory(prefix="mlxsup-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def home(folder: Path) -> Path:
    """The home of a command's user, in which sockets may be, too."""
    return folder


@pytest.fixture
def path(folder: Path) -> Path:
    """The socket that a client connects to."""
    return folder / "client.sock"


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A client of the daemon of a test's file."""
    with daemon.client() as client:
        yield client
