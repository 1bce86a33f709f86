"""A daemon under a service manager that a test plays: what it says, and when it says nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.cli.notify_socket import NotifySocket
from support.cli.scripted_daemon import ScriptedDaemon
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake
from support.eventually import eventually

WATCHDOG_S = 2.0
SILENCE_S = 3 * WATCHDOG_S
"""A watchdog would have ended the daemon three times over."""

WEDGED = """
import threading
from mlxsup.supervisor.core import core as core_module
handle = core_module.Core.handle
def wedge(core, event):
    if Path({file!r}).exists():
        Path({file!r} + ".wedged").touch()
        threading.Event().wait()
    return handle(core, event)
core_module.Core.handle = wedge
"""


@contextmanager
def serving(daemon: Daemon, variables: dict[str, str]) -> Iterator[Daemon]:
    """A daemon that was started with these variables."""
    try:
        daemon.start(environment=variables)
        yield daemon
    except BaseException as error:
        daemon.__exit__(type(error), error, None)
        raise
    daemon.__exit__(None, None, None)


@pytest.fixture
def played(tmp_path: Path) -> Iterator[NotifySocket]:
    with NotifySocket(tmp_path) as played:
        yield played


def test_a_service_manager_sees_the_whole_life(played: NotifySocket) -> None:
    daemon = Daemon({"m": fake(fake={"step_s": 0.02})}, {"drain_timeout_s": 300.0})
    with serving(daemon, played.variables(watchdog_s=WATCHDOG_S)), daemon.client() as client:
        assert daemon.process is not None
        assert played.until_line("READY=1")
        played.until_line("STATUS=1 READY")
        played.until_line("WATCHDOG=1")
        assert not any("RELOADING=1" in message for message in played.heard)
        client.reload()
        began_at_us = int(played.until_line("MONOTONIC_USEC=").partition("=")[2])
        assert "RELOADING=1" in played.heard[-1]
        assert 0 < began_at_us <= time.monotonic() * 1e6
        played.until_line("READY=1")
        sound = daemon.config.read_text()
        daemon.config.write_text("nonsense = 1\n")
        daemon.process.send_signal(signal.SIGHUP)
        played.until_line("RELOADING=1")
        played.until_line("READY=1")
        assert played.heard[-1][1].startswith("STATUS=reload refused: ")
        daemon.config.write_text(sound)
        running = Reader(client, "m", "runs", max_tokens=300).started()
        daemon.process.send_signal(signal.SIGTERM)
        played.until_line("STOPPING=1")
        for _ in range(3):
            played.until_line("EXTEND_TIMEOUT_USEC=")
        running.join(60.0)
        assert daemon.process.wait(60.0) == 0
    played.take_all()
    assert sum("STOPPING=1" in message for message in played.heard) == 1


def test_a_loop_that_is_wedged_says_nothing(played: NotifySocket, tmp_path: Path) -> None:
    file = str(tmp_path / "now")
    daemon = ScriptedDaemon({"m": fake()}).scripted(WEDGED.format(file=file))
    with serving(daemon, played.variables(watchdog_s=WATCHDOG_S)):
        for _ in range(2):
            played.until_line("WATCHDOG=1")
        Path(file).touch()
        eventually(Path(f"{file}.wedged").exists)
        played.take_all()
        assert played.take(SILENCE_S) is None
        daemon.kill()
