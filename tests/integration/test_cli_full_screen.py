"""A terminal is afterwards what it was before, whatever ends a command that has all of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from support.cli import command
from support.daemon import Daemon, fake, wait_for_state
from support.eventually import eventually
from support.full_screen import FullScreen, Script, Shell

RAISES = """
from mlxsup.cli.terminal.full_screen import FullScreen
with FullScreen(has_colour=True) as screen:
    screen.show(["hello"])
    screen.wait()
    raise RuntimeError("boom")
"""

ENTERS_AND_RAISES = """
import rich.live
from mlxsup.cli.terminal.full_screen import FullScreen
def start(self, *_):
    raise RuntimeError("boom")
rich.live.Live.start = start
with FullScreen(has_colour=True) as screen:
    pass
"""


LEAVES_WHAT_WAS_TYPED = """
import select, sys
from mlxsup.cli.terminal.full_screen import FullScreen
with FullScreen(has_colour=True) as screen:
    screen.show(["hello"])
    select.select([sys.stdin], [], [])
unread, _, _ = select.select([sys.stdin], [], [], 0)
print("left" if unread else "nothing")
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon({"alpha": fake()}) as daemon, daemon.client() as client:
        wait_for_state(client, "alpha", "READY")
        yield daemon


def top(daemon: Daemon) -> FullScreen:
    return FullScreen("top", "--interval", "0.2s", "--endpoint", daemon.endpoint)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGHUP, -signal.SIGHUP),
    ],
)
def test_a_signal_ends_it_as_any_program_once_the_terminal_is_what_it_was(
    daemon: Daemon, number: signal.Signals, code: int
) -> None:
    with top(daemon) as screen:
        screen.wait_for("alpha", "READY")
        assert screen.mode != screen.mode_before, "keys come one by one"
        screen.process.send_signal(number)
        screen.end()
        assert screen.process.returncode == code
        screen.check_nothing_left()


@pytest.mark.parametrize("key", ["q", "\x04", "\x03"])
def test_a_key_ends_it_with_0(daemon: Daemon, key: str) -> None:
    with top(daemon) as screen:
        screen.wait_for("alpha", "READY")
        screen.type(key)
        screen.end()
        assert screen.process.returncode == 0
        screen.check_nothing_left()


def test_a_closed_window_ends_it(daemon: Daemon) -> None:
    with top(daemon) as screen:
        screen.wait_for("alpha", "READY")
        screen.hang_up()
        assert screen.process.wait(120) != 0


@pytest.mark.parametrize("code", [RAISES, ENTERS_AND_RAISES], ids=["shown", "entering"])
def test_after_an_exception_the_terminal_is_what_it_was_and_shows_it(code: str) -> None:
    with Script(code) as screen:
        if code is RAISES:
            screen.wait_for("hello")
            screen.type("x")
        shown = screen.end()
        assert screen.process.returncode == 1
        assert screen.mode == screen.mode_before
        assert "RuntimeError: boom" in shown.rpartition("\x1b[?1049l")[2]
        assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l")


def test_what_was_typed_for_it_and_not_read_does_not_reach_the_shell() -> None:
    with Script(LEAVES_WHAT_WAS_TYPED) as screen:
        screen.wait_for("hello")
        screen.type("rm -r everything\n")
        shown = screen.end()
        assert screen.process.returncode == 0
        assert shown.rpartition("\x1b[?1049l")[2].split()[-1] == "nothing"


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(daemon: Daemon) -> None:
    line = " ".join(command("top", "--interval", "0.2s", "--endpoint", daemon.endpoint))
    with Shell(PS1="$ ") as screen:
        screen.type(f"{line}\n")
        screen.wait_for("alpha", "READY")
        for _ in range(2):
            screen.type("\x1a")
            screen.expect("\x1b[?1049l")
            screen.expect("Stopped")
            eventually(lambda: screen.mode == screen.mode_before)
            screen.type("fg\n")
            screen.expect("\x1b[?1049h")
            screen.wait_for("alpha", "READY")
        screen.type("q")
        screen.expect("\x1b[?1049l")
        screen.expect("$ ")
        screen.type("exit\n")
        screen.end()
        assert screen.seen.count("\x1b[?1049h") == screen.seen.count("\x1b[?1049l") == 3
        assert screen.mode == screen.mode_before


def test_a_stop_without_notice_is_healed_when_it_continues(daemon: Daemon) -> None:
    with top(daemon) as screen:
        screen.wait_for("alpha", "READY")
        own_mode = screen.mode
        process = psutil.Process(screen.process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: process.status() == psutil.STATUS_STOPPED)
        screen.set_mode(screen.mode_before)  # as a shell does meanwhile
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: screen.mode == own_mode)
        screen.wait_for("alpha", "READY")
        screen.type("q")
        screen.end()
        screen.check_nothing_left()


def test_it_is_left_at_once_although_the_daemon_is_silent() -> None:
    daemon = Daemon({"alpha": fake()})
    where = ("--endpoint", daemon.endpoint)
    with daemon, FullScreen("top", "--interval", "0.2s", *where, columns=200) as screen:
        screen.wait_for("alpha", "READY")
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGSTOP)
        screen.wait_for("no daemon since ", "does not answer", "it is stopped")
        screen.type("q")
        screen.end()
        assert screen.process.returncode == 0
        screen.check_nothing_left()
        daemon.process.send_signal(signal.SIGCONT)
