"""Before the life of a worker: launch spec, exit codes, log lines, signals, spares."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import SPARE_OPTION, LaunchSpec
from mlxsup.protocol.text import log_line
from mlxsup.worker import __main__ as worker_main
from mlxsup.worker.__main__ import main
from mlxsup.worker.bootstrap import LaunchError, check_spec, read_launch_spec
from mlxsup.worker.engine import (
    BadLaunchError,
    BadModelError,
    GpuFaultElsewhereError,
    ModelMissingError,
    NoDeviceError,
)
from mlxsup.worker.engines.mlx import imports
from mlxsup.worker.link import Link, LinkBrokenError
from mlxsup.worker.logs import LEVELS, LineFormatter, configure
from mlxsup.worker.parent_watch import (
    ORPHANED_EXIT,
    OrphanedError,
)
from mlxsup.worker.preparing import StuckPreprocessingError
from mlxsup.worker.process import TerminatedError, TerminationHandler, judge
from mlxsup.worker.spare import wait_for_spec

SPEC = LaunchSpec(
    model=ModelName("m"),
    generation=Generation(1),
    token="t",
    endpoint="ipc:///tmp/x.sock",
    supervisor_pid=1,
    engine="fake",
    path="/x",
    max_concurrency=4,
    step_timeout_s=30.0,
    decode_stall_target_ms=250,
)


def spec(**changes: Any) -> LaunchSpec:
    """A launch spec as it should be, but for the changes."""
    values: dict[str, Any] = {
        "model": "m",
        "generation": 1,
        "token": "t",
        "endpoint": "ipc:///tmp/x.sock",
        "supervisor_pid": 1,
        "engine": "fake",
        "path": "/x",
        "max_concurrency": 4,
        "step_timeout_s": 30.0,
        "decode_stall_target_ms": 250,
    }
    return LaunchSpec(**(values | changes))


def read(written: bytes) -> LaunchSpec:
    """What a worker reads from a pipe that stays open."""
    reader, writer = os.pipe()
    try:
        os.write(writer, written)
        return read_launch_spec(reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_spec_may_come_in_pieces_and_nothing_behind_it_is_waited_for() -> None:
    line = spec().to_line()
    reader, writer = os.pipe()
    try:
        os.write(writer, line[:100])
        rest = threading.Timer(0.05, os.write, (writer, line[100:]))
        rest.start()
        assert read_launch_spec(reader) == spec()
        rest.join()
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    ("error", "code", "is_expected"),
    [
        (ModelMissingError("gone"), 66, True),
        (BadModelError("bad"), 65, True),
        (BadLaunchError("more than fits"), 64, True),
        (NoDeviceError("none"), 69, True),
        (GpuFaultElsewhereError("innocent"), 72, True),
        (MemoryError(), 75, True),
        (StuckPreprocessingError("too long"), 73, True),
        (LinkBrokenError("odd"), 76, True),
        (TerminatedError("term"), 143, True),
        (ValueError("odd"), 70, False),
        (RecursionError(), 70, False),
        (SystemExit(0), 70, False),
    ],
)
def test_every_exception_has_an_exit_code(
    error: BaseException, code: int, is_expected: bool
) -> None:
    death = judge(error)
    assert (death.code, death.is_expected) == (code, is_expected)
    assert death.message


def test_a_sigterm_before_the_load_still_interrupts_it_B9() -> None:
    link = Link("ipc:///tmp/mlxsup-nobody-listens")
    handler = TerminationHandler(link)
    handler(signal.SIGTERM, None)
    assert handler.has_come()
    with pytest.raises(TerminatedError):
        handler.interrupt_from_now_on()
    handler(signal.SIGTERM, None)  # the death under way is not interrupted by a second one
    link.close(0.0)


# ---------------------------------------------------------------- the process


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


# ---------------------------------------------------------------- the log
@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("mlxsup")
    before = (root.handlers[:], root.level, ours.level, logging.raiseExceptions)
    yield
    root.handlers[:], level, our_level, logging.raiseExceptions = before
    root.setLevel(level)
    ours.setLevel(our_level)


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
@pytest.mark.usefixtures("restored_logging")
def test_our_lines_have_the_level_asked_for_and_others_warn(level: str, heard: list[str]) -> None:
    stream = io.StringIO()
    logging.getLogger().setLevel(logging.DEBUG)
    configure(level, stream)
    configure(level, stream)
    assert not logging.raiseExceptions
    for name in LEVELS:
        logging.getLogger("mlxsup.worker.x").log(LEVELS[name], name)
        logging.getLogger("other").log(LEVELS[name], "other %s", name)
    words = [said.split(" ", 2)[2] for said in stream.getvalue().splitlines()]
    assert [word for word in words if not word.startswith("other")] == heard
    assert [word for word in words if word.startswith("other")] == ["other warning", "other error"]


def test_the_time_of_a_line_is_utc_to_the_millisecond() -> None:
    record = logging.makeLogRecord(
        {"created": 1e9 + 0.0429, "msecs": 42.9, "levelname": "INFO", "msg": "said"}
    )
    assert LineFormatter().format(record) == "2001-09-09T01:46:40.042Z INFO said"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("word", "word"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a\tb", '"a\\tb"'),
        ('say "x"', '"say \\"x\\""'),
        ('"', '"\\""'),
        ("a=b", '"a=b"'),
        ("é x", '"é x"'),
        (1.23456, "1.235"),
        (3, "3"),
        (None, "None"),
    ],
)
def test_facts_are_quoted_if_they_have_to_be(value: object, shown: str) -> None:
    assert log_line("said", fact=value, n=1) == f"said fact={shown} n=1"
    assert log_line("said") == "said"


# ---------------------------------------------------------------- the launch spec
@pytest.mark.parametrize(
    ("name", "expected", "wrong", "right"),
    [
        ("model", "a name", ("", 3), ("m",)),
        ("generation", "an integer from 1", (0, True, 1.0), (1,)),
        ("token", "text", ("", None), ("t",)),
        ("endpoint", "an ipc:// endpoint", ("ipc://", "tcp://x", 3), ("ipc://x",)),
        ("supervisor_pid", "a process id", (0, "1"), (1,)),
        ("engine", "mlx or fake", ("torch",), ("mlx", "fake")),
        ("path", "a folder", (None,), ("",)),
        ("max_concurrency", "an integer from 1", (0,), (1,)),
        ("step_timeout_s", "a number above 0",
         (0, -1.0, float("inf"), float("nan"), True, "1"), (1, 0.001, 1e300)),
        ("decode_stall_target_ms", "a number above 0", (0,), (1, 0.5)),
        ("context_length", "an integer from 0", (-1, None), (0, 1)),
        ("deterministic", "true or false", (0, None), (True, False)),
        ("memory_limit_bytes", "bytes or null", (-1, 0.5), (0, None)),
        ("cache_limit_bytes", "bytes or null", (-1,), (0, None)),
        ("wired_limit_bytes", "bytes or null", (-1,), (0, None)),
        ("prefix_cache_bytes", "bytes or null", (-1,), (0, None)),
        ("known_batching", "a map of text or null",
         ([], "x", {"a": 1}, {"a": "x", "b": None}), (None, {}, {"a": "x"})),
        ("learned_dir", "a folder or null", (1, []), (None, "", "/x")),
        ("sampling", "a map of parameters in their ranges",
         (None, [], {"seed": 1}, {"top_p": 0}, {"top_p": 1.5, "top_k": 1}, {"top_k": 1, "x": 1}),
         ({}, {"top_p": 1.0, "top_k": 0})),
        ("log_level", "debug, info, warning, error", ("loud", None), tuple(LEVELS)),
        ("fake", "a map", (None, []), ({}, {"x": 1})),
    ],
)  # fmt: skip
def test_each_key_takes_what_it_says(
    name: str, expected: str, wrong: tuple[Any, ...], right: tuple[Any, ...]
) -> None:
    for value in right:
        check_spec(dataclasses.replace(SPEC, **{name: value}))
    for value in wrong:
        with pytest.raises(LaunchError) as caught:
            check_spec(dataclasses.replace(SPEC, **{name: value}))
        assert str(caught.value) == f"the launch spec is wrong: {name} takes {expected}"


@pytest.mark.parametrize("arguments", [["--spare"], ["--spare", "x"], ["--spare", "-1"], ["9"]])
def test_other_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 64
    assert "usage" in capsys.readouterr().err


class Spare:
    """A spare worker on this thread, whose imports and whose end are only noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec_pipe, self.supervisor = os.pipe()
        self.ready, self.ready_pipe = os.pipe()
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.imports: Callable[[], None] = lambda: None
        monkeypatch.setattr(os, "_exit", self.ended.put)
        monkeypatch.setattr(imports, "import_everything", lambda: self.imports())

    def wait_for_spec(self) -> LaunchSpec:
        return wait_for_spec(self.spec_pipe, self.ready_pipe)

    def is_ready(self) -> bool:
        """Whether its end of the pipe has said or closed something."""
        return bool(select.select([self.ready], [], [], 0)[0])

    def outlived_by_nobody(self) -> None:
        """Its supervisor ends, and it with it."""
        os.close(self.supervisor)
        assert self.ended.get(timeout=10) == ORPHANED_EXIT == 1


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spare]:
    made = Spare(monkeypatch)
    yield made
    os.close(made.spec_pipe)
    os.close(made.ready)


def test_it_is_ready_when_everything_is_imported(spare: Spare) -> None:
    seen: list[object] = []
    spare.imports = lambda: seen.extend([threading.get_ident(), spare.is_ready()])
    os.write(spare.supervisor, SPEC.to_line())
    assert spare.wait_for_spec() == SPEC
    assert seen == [threading.get_ident(), False], "MLX belongs to the thread that loads"
    assert os.read(spare.ready, 16) == b"\0"
    assert os.read(spare.ready, 16) == b"", "the pipe is still open"
    spare.outlived_by_nobody()


def test_a_wrong_spec_is_refused_once_it_is_ready(spare: Spare) -> None:
    os.write(spare.supervisor, b"nonsense\n")
    with pytest.raises(LaunchError, match="the launch spec on standard input is wrong"):
        spare.wait_for_spec()
    assert os.read(spare.ready, 16) == b"\0"
    spare.outlived_by_nobody()


def test_a_failed_import_makes_no_ready_spare(spare: Spare) -> None:
    def imports() -> None:
        raise ImportError("no MLX")

    spare.imports = imports
    with pytest.raises(ImportError, match="no MLX"):
        spare.wait_for_spec()
    assert not spare.is_ready()
    os.close(spare.ready_pipe)
    spare.outlived_by_nobody()


def test_it_ends_with_its_supervisor_while_it_imports_E6(spare: Spare) -> None:
    def imports() -> None:
        spare.outlived_by_nobody()
        raise ImportError("it is gone by now")

    spare.imports = imports
    with pytest.raises(ImportError, match="gone by now"):
        spare.wait_for_spec()
    os.close(spare.ready_pipe)


def test_the_thread_that_waits_keeps_no_process_alive(spare: Spare) -> None:
    seen: list[bool] = []
    spare.imports = lambda: seen.extend(
        one.daemon for one in threading.enumerate() if one.name == "parent-watch"
    )
    os.write(spare.supervisor, SPEC.to_line())
    spare.wait_for_spec()
    assert seen == [True]
    spare.outlived_by_nobody()


def test_a_spare_ignores_input_behind_its_spec_E6(spare: Spare) -> None:
    os.write(spare.supervisor, SPEC.to_line())
    assert spare.wait_for_spec() == SPEC
    os.write(spare.supervisor, b"more")
    with pytest.raises(queue.Empty):
        spare.ended.get(timeout=0.05)
    spare.outlived_by_nobody()
