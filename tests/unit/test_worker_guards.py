"""How a worker guards itself and its user: signals, orphans, and its command line."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.protocol.launch import SPARE_OPTION, LaunchSpec
from mlxsup.worker import __main__ as worker_main
from mlxsup.worker import bootstrap
from mlxsup.worker.bootstrap import LaunchError, prepare_process
from mlxsup.worker.parent_watch import OrphanedError, check_parent, die_with_parent, watch_pipe

from support.launch_specs import SPEC

# ---------------------------------------------------------------- the process


def test_a_worker_leaves_the_terminals_signals_and_prints_its_stacks_F5(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda *given: done.append(given))
    monkeypatch.setattr(faulthandler, "enable", lambda **given: done.append(("enable", given)))
    monkeypatch.setattr(
        faulthandler, "register", lambda number, **given: done.append((number, given))
    )
    monkeypatch.setattr(sys, "setswitchinterval", done.append)
    prepare_process()
    everything = {"file": sys.stderr, "all_threads": True}
    assert done == [
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGINT, signal.SIG_IGN),
        ("enable", everything),
        (signal.SIGUSR1, everything),
        0.001,
    ]
    assert bootstrap.SWITCH_INTERVAL_S == 0.001


def test_an_orphan_names_both_processes_E6() -> None:
    with pytest.raises(OrphanedError) as caught:
        check_parent(1 << 30)
    assert str(caught.value) == f"the supervisor {1 << 30} is gone: the parent is {os.getppid()}"


class Libc:
    """A C library whose prctl gives this."""

    def __init__(self, result: int) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.result = result

    def prctl(self, *given: int) -> int:
        self.calls.append(given)
        return self.result


@pytest.mark.parametrize(("platform", "calls"), [("linux", [(1, 9, 0, 0, 0)]), ("darwin", [])])
def test_the_kernel_kills_a_worker_with_its_parent_where_it_can_E6(
    monkeypatch: pytest.MonkeyPatch, platform: str, calls: list[tuple[int, ...]]
) -> None:
    libc = Libc(0)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: libc)
    die_with_parent()
    assert libc.calls == calls


def test_a_kernel_that_refuses_is_an_error_E6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: Libc(-1))
    monkeypatch.setattr(ctypes, "get_errno", lambda: 22)
    with pytest.raises(OSError, match="PDEATHSIG") as caught:
        die_with_parent()
    assert caught.value.errno == 22


def test_the_end_of_the_pipe_ends_the_process_E6(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        """In place of the end."""

    threads, codes = [], []

    class Thread:
        def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
            threads.append((target, name, daemon))

        def start(self) -> None:
            pass

    def end(code: int) -> None:
        codes.append(code)
        raise Ended

    reader, writer = os.pipe()
    monkeypatch.setattr(threading, "Thread", Thread)
    watch_pipe(reader)
    [(watch, name, is_daemon)] = threads
    assert (name, is_daemon) == ("parent-watch", True)
    monkeypatch.setattr(os, "_exit", end)
    os.write(writer, b"x")
    os.close(writer)
    with pytest.raises(Ended):
        watch()
    assert codes == [1]
    os.close(reader)


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(("argument", "code"), [("-h", 0), ("--help", 0), ("x", 64)])
def test_help_goes_to_the_output_and_what_is_wrong_to_the_errors(
    capsys: pytest.CaptureFixture[str], argument: str, code: int
) -> None:
    assert worker_main.main([argument]) == code
    out, err = capsys.readouterr()
    assert (out, err)[code != 0] == worker_main.USAGE
    assert (out, err)[code == 0] == ""
    assert worker_main.USAGE.startswith("usage: python -P -m mlxsup.worker < launch-spec\n")


class Started:
    """A process whose parts are replaced, and what was done in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[object] = []
        self.is_terminal = False
        self.spec: LaunchSpec | Exception = SPEC
        self.parent: Exception | None = None
        for name in ("prepare_process", "die_with_parent"):
            monkeypatch.setattr(worker_main, name, lambda name=name: self.done.append(name))
        monkeypatch.setattr(os, "isatty", lambda descriptor: self.is_terminal)
        monkeypatch.setattr(worker_main, "read_launch_spec", self.read)
        monkeypatch.setattr(worker_main, "wait_for_spec", self.wait)
        monkeypatch.setattr(worker_main, "check_parent", self.check)
        monkeypatch.setattr(
            worker_main, "watch_pipe", lambda descriptor: self.done.append(("watch", descriptor))
        )
        monkeypatch.setattr(
            worker_main, "configure", lambda level, stream: self.done.append((level, stream))
        )
        monkeypatch.setattr(worker_main, "Life", self.live)

    def read(self, descriptor: int) -> LaunchSpec:
        self.done.append(("read", descriptor))
        if isinstance(self.spec, Exception):
            raise self.spec
        return self.spec

    def wait(self, spec_pipe: int, ready_pipe: int) -> LaunchSpec:
        self.done.append(("spare", ready_pipe))
        return self.read(spec_pipe)

    def check(self, pid: int) -> None:
        self.done.append(("parent", pid))
        if self.parent is not None:
            raise self.parent

    def live(self, spec: LaunchSpec) -> SimpleNamespace:
        self.done.append(("life", spec))
        return SimpleNamespace(run=lambda: 7)


BEFORE = ["prepare_process", "die_with_parent"]


def test_a_worker_guards_itself_before_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    assert worker_main.main([]) == 7
    assert started.done == [
        *BEFORE,
        ("read", 0),
        ("parent", 1),
        ("watch", 0),
        ("info", sys.stderr),
        ("life", SPEC),
    ]


def test_a_spare_worker_watches_its_input_already_when_it_gets_its_spec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = Started(monkeypatch)
    assert worker_main.main([SPARE_OPTION, "9"]) == 7
    assert started.done == [
        *BEFORE,
        ("spare", 9),
        ("read", 0),
        ("parent", 1),
        ("info", sys.stderr),
        ("life", SPEC),
    ]


def test_a_spare_worker_without_mlx_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = Started(monkeypatch)
    started.spec = ImportError("no module named mlx")
    assert worker_main.main([SPARE_OPTION, "9"]) == 69
    said = "mlxsup worker: MLX cannot be imported: no module named mlx\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("changes", "code", "message", "count"),
    [
        ({"is_terminal": True}, 64, "workers are not started by hand: use `mlxsup start`", 2),
        ({"spec": LaunchError("no spec")}, 64, "no spec", 3),
        ({"parent": OrphanedError("gone")}, 1, "gone", 4),
    ],
)
def test_a_worker_that_must_not_live_says_why(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    code: int,
    message: str,
    count: int,
) -> None:
    started = Started(monkeypatch)
    for name, value in changes.items():
        setattr(started, name, value)
    assert worker_main.main([]) == code
    assert capsys.readouterr() == ("", f"mlxsup worker: {message}\n")
    assert started.done == [*BEFORE, ("read", 0), ("parent", 1)][:count]


def test_a_worker_leaves_without_a_teardown(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(sys.stdout, "flush", lambda: done.append("out"))
    monkeypatch.setattr(sys.stderr, "flush", lambda: done.append("err"))
    monkeypatch.setattr(os, "_exit", done.append)
    worker_main.leave(5)
    assert done == ["out", "err", 5]
