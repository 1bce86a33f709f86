"""What is sent to a service manager, and `prevent_sleep`, by a played clock."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.status import Outline
from mlxsup.supervisor.service_manager import MAX_NAMES, ServiceManager, summary
from mlxsup.supervisor.sleep import KEPT_LOOKS, SleepGuard, awake_argv

from support.cli.notify_socket import NotifySocket
from support.daemon.noted_log import Log
from support.eventually import eventually


def outline(*states: tuple[str, State], is_ending: bool = False) -> Outline:
    named = tuple((ModelName(name), state) for name, state in states)
    return Outline(states=named, is_busy=False, is_ending=is_ending)


READY = outline(("a", State.READY))


@pytest.mark.parametrize("is_abstract", [False, True])
def test_messages_reach_a_path_and_an_abstract_name(tmp_path: Path, is_abstract: bool) -> None:
    with NotifySocket(None if is_abstract else tmp_path) as played:
        ServiceManager.from_environment(played.variables()).ready()
        assert played.take() == ["READY=1", "STATUS=ready"]


def test_the_watchdog_is_fed_at_half_of_its_interval(tmp_path: Path) -> None:
    now = 100.0
    with NotifySocket(tmp_path) as played:
        manager = ServiceManager(played.address, 10.0, lambda: now)
        fed = []
        for _ in range(21):
            manager.pulse(READY)
            fed.append(["WATCHDOG=1"] in played.take_all())
            now += 1.0
        assert [second for second, is_fed in enumerate(fed) if is_fed] == [0, 5, 10, 15, 20]


@pytest.mark.parametrize(
    ("changes", "is_fed"),
    [
        ({}, True),
        ({"WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_PID": str(os.getpid() + 1)}, False),
        ({"WATCHDOG_PID": "x"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({"WATCHDOG_USEC": "-5"}, False),
        ({"WATCHDOG_USEC": "9" * 5000}, False),
    ],
)
def test_only_a_watchdog_of_this_process_is_fed(
    tmp_path: Path, changes: dict[str, str], is_fed: bool
) -> None:
    with NotifySocket(tmp_path) as played:
        variables = played.variables(watchdog_s=2.0) | changes
        manager = ServiceManager.from_environment(variables)
        manager.pulse(READY)
        assert (["WATCHDOG=1"] in played.take_all()) == is_fed


@pytest.mark.parametrize(
    ("changes", "is_fed", "words"),
    [
        ({"WATCHDOG_PID": "1"}, False, "WATCHDOG_PID names process 1, this is "),
        ({"WATCHDOG_USEC": "soon"}, False, "WATCHDOG_USEC is 'soon'"),
        ({"WATCHDOG_USEC": "9" * 5000}, False, f"WATCHDOG_USEC is '{'9' * 40}'"),
        ({"NOTIFY_SOCKET": ""}, False, "NOTIFY_SOCKET is not set to a socket"),
        ({"WATCHDOG_USEC": "1999999"}, True, "it would end the daemon after 2 s"),
    ],
)
def test_a_watchdog_that_may_end_a_daemon_that_is_well_is_named_with_the_next_step(
    tmp_path: Path, changes: dict[str, str], is_fed: bool, words: str
) -> None:
    with NotifySocket(tmp_path) as played:
        manager = ServiceManager.from_environment(played.variables(watchdog_s=4.0) | changes)
        assert manager.trouble is not None
        assert manager.trouble.is_fed == is_fed
        assert manager.trouble.cause.startswith(words)
        assert manager.trouble.hint
        manager.pulse(READY)
        assert (["WATCHDOG=1"] in played.take_all()) == is_fed


def test_the_status_is_sent_when_it_changes(tmp_path: Path) -> None:
    with NotifySocket(tmp_path) as played:
        manager = ServiceManager(played.address)
        for one in (READY, READY, outline(("a", State.READY), ("b", State.FAILED)), outline()):
            manager.pulse(one)
        assert played.take_all() == [
            ["STATUS=1 READY"],
            ["STATUS=1 READY, 1 FAILED (b)"],
            ["STATUS=no models"],
        ]


def test_a_status_names_a_few_models_however_many_have_failed() -> None:
    states = [(f"{'m' * 60}{number}", State.FAILED) for number in range(500)]
    text = summary(outline(*states).states)
    assert text.startswith("500 FAILED (")
    assert text.count("m" * 60) == MAX_NAMES
    assert text.endswith(", …)")
    assert len(text.encode()) < 4096 - len("STATUS=")


def test_a_reload_begins_with_the_time_and_ends_with_ready_also_if_it_was_refused(
    tmp_path: Path,
) -> None:
    with NotifySocket(tmp_path) as played:
        manager = ServiceManager(played.address, monotonic=lambda: 12.5)
        manager.reloading()
        manager.reloaded(2)
        manager.pulse(READY)
        manager.reloading()
        manager.reloaded(0)
        manager.pulse(READY)
        begins = ["RELOADING=1", "MONOTONIC_USEC=12500000"]
        refusal = "reload refused: the configuration has 2 mistakes"
        assert played.take_all() == [
            begins,
            ["READY=1", f"STATUS={refusal}"],
            [f"STATUS=1 READY; {refusal}"],
            begins,
            ["READY=1", "STATUS=reloaded"],
            ["STATUS=1 READY"],
        ]


def test_stopping_is_sent_once_and_the_timeout_extended_each_second(tmp_path: Path) -> None:
    with NotifySocket(tmp_path) as played:
        manager = ServiceManager(played.address)
        for _ in range(3):
            manager.pulse(outline(("a", State.DRAINING), is_ending=True))
        manager.reloading()  # no state follows the last one
        manager.reloaded(0)
        heard = played.take_all()
        assert heard == [["STOPPING=1", "STATUS=stopping"], *[["EXTEND_TIMEOUT_USEC=60000000"]] * 3]


def test_after_the_end_was_said_no_status_says_otherwise(tmp_path: Path) -> None:
    """A daemon that ends because of a bug was asked by nobody, so its outline does not say so."""
    with NotifySocket(tmp_path) as played:
        manager = ServiceManager(played.address)
        manager.pulse(READY)
        manager.stopping()
        for _ in range(2):
            manager.pulse(outline(("a", State.STOPPED)))
        assert played.take_all() == [
            ["STATUS=1 READY"],
            ["STOPPING=1", "STATUS=stopping"],
            *[["EXTEND_TIMEOUT_USEC=60000000"]] * 3,
        ]


def test_an_absent_or_unread_socket_is_harmless(tmp_path: Path) -> None:
    for address in ("", "relative", "/nowhere/at/all", "@nobody-at-all", "/" + "a" * 300):
        ServiceManager.from_environment({"NOTIFY_SOCKET": address}).ready()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unread:
        unread.bind(str(tmp_path / "s"))
        manager = ServiceManager(str(tmp_path / "s"))
        for _ in range(5000):  # more than any system keeps; a sender that waits would stay here
            manager.ready()


def test_without_a_free_file_nothing_is_sent_and_nothing_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    manager = ServiceManager(str(tmp_path / "s"), watchdog_s=10.0)
    monkeypatch.setattr(socket, "socket", refuse)
    manager.pulse(BUSY)
    manager.stopping()


BUSY = Outline(states=(), is_busy=True, is_ending=False)
IDLE = Outline(states=(), is_busy=False, is_ending=False)


class Held:
    """A guard and the processes that it has."""

    def __init__(self, mode: str = "busy") -> None:
        self.log = Log()
        self.guard = SleepGuard(mode, self.log, ["sleep", "600"])
        self._others = psutil.Process().children()

    def processes(self) -> list[psutil.Process]:
        """Its living processes."""
        own = set(psutil.Process().children()) - set(self._others)
        return [one for one in own if one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
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


def test_an_ended_guard_process_is_replaced(held: Held) -> None:
    held.guard.pulse(BUSY)
    [process] = held.processes()
    process.kill()
    eventually(lambda: not held.processes())
    held.guard.pulse(BUSY)
    assert len(held.processes()) == 1
    assert held.log.lines == []


def test_without_the_key_the_machine_may_sleep() -> None:
    held = Held("off")
    held.guard.pulse(BUSY)
    assert (held.processes(), held.log.lines) == ([], [])


@pytest.mark.parametrize(
    ("argv", "cause"),
    [([], "only a Mac has caffeinate"), (["/nowhere/caffeinate"], "No such file or directory")],
)
def test_a_sleep_guard_that_fails_is_logged_once(argv: list[str], cause: str) -> None:
    log = Log()
    guard = SleepGuard("busy", log, argv)
    for _ in range(3):
        guard.pulse(BUSY)
    assert log.lines == [("warning", "sleep not prevented", {"cause": cause})]


def test_a_mac_is_kept_awake_for_as_long_as_the_daemon_lives() -> None:
    assert awake_argv("darwin", 7) == ["/usr/bin/caffeinate", "-i", "-w", "7"]
    assert awake_argv("linux", 7) == []
