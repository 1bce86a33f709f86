"""A scripted supervisor in a folder of a short name, for the tests of commands."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli_daemon import Daemon
from support.scripted_supervisor import ScriptedSupervisor, scripted_supervisor


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mlxsup-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def daemon(folder: Path) -> Daemon:
    return Daemon(folder)


@pytest.fixture
def supervisor(folder: Path, daemon: Daemon) -> Iterator[ScriptedSupervisor]:
    with scripted_supervisor(folder / "client.sock", daemon) as running:
        yield running
