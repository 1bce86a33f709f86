"""Before the life of a worker: launch spec, command, log lines, prewarming; no process."""

from __future__ import annotations

import io
import logging
import os
import queue
import re
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mlxsup.protocol.codec import to_line
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.text import LOG_LEVELS
from mlxsup.worker import __main__ as worker_main
from mlxsup.worker.bootstrap import (
    ORPHANED_EXIT,
    LaunchError,
    OrphanedError,
    read_launch_spec,
    wait_for_spec,
)
from mlxsup.worker.engines.mlx import imports
from mlxsup.worker.logs import configure

from support.worker.turn_bench import make_spec

SPEC = make_spec()
WRONG = "the launch spec on standard input is wrong: the field model is missing"
NO_LINE = "the launch spec on standard input must be one line of JSON of at most 64 KiB"


# ---------------------------------------------------------------- the launch spec
def test_a_spec_may_come_in_pieces_and_nothing_behind_it_is_waited_for() -> None:
    line = to_line(SPEC)
    reader, writer = os.pipe()
    try:
        os.write(writer, line[:100])
        rest = threading.Timer(0.05, os.write, (writer, line[100:]))
        rest.start()
        assert read_launch_spec(reader) == SPEC
        rest.join()
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "there is no launch spec on standard input; `mlxsup start` starts the workers"),
        (b"{}\n", WRONG),
        (b"x" * 70_000, NO_LINE),
    ],
    ids=["nothing", "no key", "too long"],
)
def test_a_missing_or_bad_spec_is_refused_in_one_sentence(
    tmp_path: Path, line: bytes, message: str
) -> None:
    (tmp_path / "spec").write_bytes(line)
    descriptor = os.open(tmp_path / "spec", os.O_RDONLY)
    try:
        with pytest.raises(LaunchError, match=f"^{re.escape(message)}"):
            read_launch_spec(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- the command
OTHER = [["x"], ["9"], ["--prewarm"], ["--prewarm", "x"], ["--prewarm", "-1"]]


@pytest.mark.parametrize(
    ("arguments", "code"), [(["-h"], 0), (["--help"], 0), *((one, 64) for one in OTHER)]
)
def test_help_goes_to_the_output_and_what_is_wrong_to_the_errors(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    assert worker_main.main(arguments) == code
    out, err = capsys.readouterr()
    assert (out, err)[code != 0] == worker_main.USAGE
    assert (out, err)[code == 0] == ""
    assert worker_main.USAGE.startswith("usage: python -P -m mlxsup.worker < launch-spec\n")


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"isatty": True}, 64, "workers are not started by hand: use `mlxsup start`"),
        ({"spec": ImportError("no")}, 69, "MLX cannot be imported: no"),
        ({"spec": LaunchError("no spec")}, 64, "no spec"),
        ({"parent": OrphanedError("gone")}, 1, "gone"),
    ],
    ids=["terminal", "imports", "spec", "parent"],
)
def test_a_worker_that_must_not_live_says_why(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    code: int,
    message: str,
) -> None:
    for name in ("prepare_process", "die_with_parent"):
        monkeypatch.setattr(worker_main, name, lambda: None)
    monkeypatch.setattr(os, "isatty", lambda descriptor: changes.get("isatty", False))
    monkeypatch.setattr(
        worker_main, "read_launch_spec", Mock(side_effect=[changes.get("spec", SPEC)])
    )
    monkeypatch.setattr(worker_main, "check_parent", Mock(side_effect=changes.get("parent")))
    assert worker_main.main([]) == code
    assert capsys.readouterr() == ("", f"mlxsup worker: {message}\n")


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
    ("level", "heard"), [(level, list(LOG_LEVELS)[at:]) for at, level in enumerate(LOG_LEVELS)]
)
@pytest.mark.usefixtures("restored_logging")
def test_our_lines_have_the_level_asked_for_and_others_warn(level: str, heard: list[str]) -> None:
    stream = io.StringIO()
    logging.getLogger().setLevel(logging.DEBUG)
    configure(level, stream)
    configure(level, stream)
    assert not logging.raiseExceptions
    for number, name in enumerate(LOG_LEVELS, 1):
        logging.getLogger("mlxsup.worker.x").log(10 * number, name)
        logging.getLogger("other").log(10 * number, "other %s", name)
    words = [said.split(" ", 2)[2] for said in stream.getvalue().splitlines()]
    assert [word for word in words if not word.startswith("other")] == heard
    assert [word for word in words if word.startswith("other")] == ["other warning", "other error"]


# ---------------------------------------------------------------- prewarmed workers
class Prewarmed:
    """A prewarmed worker on this thread, whose imports and whose end are only noted."""

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
        """Return True if its end of the pipe has said or closed something."""
        return bool(select.select([self.ready], [], [], 0)[0])

    def end_supervisor(self) -> None:
        """Close the supervisor's end, and check that the prewarmed ends with it."""
        os.close(self.supervisor)
        assert self.ended.get(timeout=60) == ORPHANED_EXIT == 1


@pytest.fixture
def prewarmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prewarmed]:
    made = Prewarmed(monkeypatch)
    yield made
    os.close(made.spec_pipe)
    os.close(made.ready)


def test_it_is_ready_when_everything_is_imported_and_gets_its_spec_E6(
    prewarmed: Prewarmed,
) -> None:
    seen: list[object] = []

    def look() -> None:
        seen.extend([threading.get_ident(), prewarmed.is_ready()])
        seen.extend(one.daemon for one in threading.enumerate() if one.name == "parent-watch")

    prewarmed.imports = look
    os.write(prewarmed.supervisor, to_line(SPEC))
    assert prewarmed.wait_for_spec() == SPEC
    assert seen == [threading.get_ident(), False, True], "MLX belongs to the thread that loads"
    assert os.read(prewarmed.ready, 16) == b"\0"
    assert os.read(prewarmed.ready, 16) == b"", "the pipe is still open"
    os.write(prewarmed.supervisor, b"input behind the spec is ignored")
    with pytest.raises(queue.Empty):
        prewarmed.ended.get(timeout=0.05)
    prewarmed.end_supervisor()


def test_a_wrong_spec_is_refused_once_a_prewarmed_worker_is_ready(prewarmed: Prewarmed) -> None:
    os.write(prewarmed.supervisor, b"nonsense\n")
    with pytest.raises(LaunchError, match=NO_LINE):
        prewarmed.wait_for_spec()
    assert os.read(prewarmed.ready, 16) == b"\0"
    prewarmed.end_supervisor()


@pytest.mark.parametrize("ends_in_imports", [False, True])
def test_a_failed_import_makes_it_never_ready_and_it_ends_with_its_supervisor_E6(
    prewarmed: Prewarmed, ends_in_imports: bool
) -> None:
    def fail() -> None:
        if ends_in_imports:
            prewarmed.end_supervisor()
        raise ImportError("no MLX")

    prewarmed.imports = fail
    with pytest.raises(ImportError, match="no MLX"):
        prewarmed.wait_for_spec()
    assert not prewarmed.is_ready()
    os.close(prewarmed.ready_pipe)
    if not ends_in_imports:
        prewarmed.end_supervisor()
