"""`prevent_sleep`, with a process that plays caffeinate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxsup.supervisor.core.outline import Outline
from mlxsup.supervisor.sleep import KEPT_LOOKS, SleepGuard, awake_argv

from support.eventually import eventually
from support.played_app import Log

BUSY = Outline(states=(), is_busy=True, is_ending=False)
IDLE = Outline(states=(), is_busy=False, is_ending=False)


class Held:
    """A guard and the processes that it has."""

    def __init__(self, folder: Path, mode: str = "busy") -> None:
        self.mark = str(folder)
        self.log = Log()
        argv = ["/bin/sh", "-c", "exec sleep 600", self.mark]
        self.guard = SleepGuard(mode, self.log, argv)

    def processes(self) -> list[psutil.Process]:
        """Its living processes."""
        children = psutil.Process(os.getpid()).children()
        return [one for one in children if one.status() != psutil.STATUS_ZOMBIE
                and {self.mark, "600"} & set(one.cmdline())]  # fmt: skip


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path)
    yield held
    held.guard.close()
    assert held.processes() == []


def test_one_process_is_held_while_there_is_work_and_for_a_while_after_it(held: Held) -> None:
    held.guard.pulse(IDLE)
    assert held.processes() == []
    for outline in (BUSY, BUSY, *[IDLE] * KEPT_LOOKS, BUSY, *[IDLE] * KEPT_LOOKS):
        held.guard.pulse(outline)
        assert len(held.processes()) == 1
    first = held.processes()
    held.guard.pulse(IDLE)
    assert held.processes() == []
    held.guard.pulse(BUSY)
    assert len(held.processes()) == 1
    assert held.processes() != first


def test_one_that_somebody_has_ended_is_replaced(held: Held) -> None:
    held.guard.pulse(BUSY)
    [process] = held.processes()
    process.kill()
    eventually(lambda: not held.processes())
    held.guard.pulse(BUSY)
    assert len(held.processes()) == 1
    assert held.log.lines == []


def test_without_the_key_the_machine_may_sleep(tmp_path: Path) -> None:
    held = Held(tmp_path, "off")
    held.guard.pulse(BUSY)
    assert (held.processes(), held.log.lines) == ([], [])


@pytest.mark.parametrize(
    ("argv", "cause"),
    [([], "only a Mac has caffeinate"), (["/nowhere/caffeinate"], "No such file or directory")],
)
def test_what_is_in_the_way_is_logged_once(argv: list[str], cause: str) -> None:
    log = Log()
    guard = SleepGuard("busy", log, argv)
    for _ in range(3):
        guard.pulse(BUSY)
    assert log.lines == [("warning", "sleep not prevented", {"cause": cause})]


def test_a_mac_is_kept_awake_for_as_long_as_the_daemon_lives() -> None:
    assert awake_argv("darwin", 7) == ["/usr/bin/caffeinate", "-i", "-w", "7"]
    assert awake_argv("linux", 7) == []
