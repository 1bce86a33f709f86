"""A line of a log that was cut off costs itself alone: what follows it begins a line."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxsup.cli.flight.of_daemon import of_daemon
from mlxsup.cli.flight.recording import read_recording
from mlxsup.protocol.flight import MODELS_FILE_NAME, REQUESTS_FILE_NAME, ModelChanged, RequestEnded
from mlxsup.supervisor.flight_files import FlightFiles
from mlxsup.supervisor.log_files import LogWriter, RotatingFile

CHANGE = ModelChanged(model="m", generation=1, before="READY", after="STOPPED")
END = RequestEnded(id="r", number=1, model="m", outcome="stop")


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Within it, a write beyond that size is cut off there, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def live(folder: Path, pid: int, code: int | None) -> None:
    """A daemon that writes its recorder; without a code, it is killed."""
    writer = LogWriter(pytest.fail)
    files = FlightFiles(folder, writer)
    files.started(pid)
    files.write(CHANGE)
    files.write(END)
    if code is not None:
        files.ended(code)
    assert writer.close(60.0)


@pytest.mark.parametrize("name", [MODELS_FILE_NAME, REQUESTS_FILE_NAME])
def test_a_recorder_that_ends_within_a_line_loses_nothing_of_the_next_daemon(
    name: str, tmp_path: Path
) -> None:
    live(tmp_path, 7, None)
    path = tmp_path / name
    os.truncate(path, path.stat().st_size - 5)
    live(tmp_path, 8, 0)
    recording = read_recording(tmp_path, None, 0.0)
    assert [run.pid for run in recording.runs] == [7, 8]
    assert [run.has_died for run in recording.runs] == [True, False]
    assert [one.entry for one in recording.runs[1].entries] == [CHANGE, END]
    assert recording.damage.startswith("1 line of the flight recorder cannot be read")
    told = of_daemon(recording, 0.0).sentences
    assert told[0].startswith("the daemon (pid 8) ended at ")


def test_a_line_that_a_full_disk_cut_off_is_ended_before_it_says_how_much_is_lost(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.log"
    reports: list[str] = []
    file = RotatingFile(path, reports.append)
    file.write(b"whole\n")
    with files_no_larger_than(9):
        file.write(b"cut off\n")
    assert len(reports) == 1
    file.write(b"again\n")
    file.write(b"and again\n")
    file.close()
    kept, cut_off, lost, *rest = path.read_bytes().splitlines()
    assert (kept, cut_off) == (b"whole", b"cut")
    assert lost == b"--- 8 bytes lost here"
    assert rest == [b"again", b"and again"]


def test_a_file_that_was_closed_within_a_line_continues_it(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "m.log", pytest.fail)
    for piece in (b"ha", b"lf"):
        file.write(piece)
        file.close()
    assert (tmp_path / "m.log").read_bytes() == b"half"


@pytest.mark.parametrize("before", [b"", b"line\n"])
def test_nothing_is_added_to_a_file_that_ends_with_a_line(before: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.write_bytes(before)
    file = RotatingFile(path, pytest.fail)
    file.write(b"next\n")
    file.close()
    assert path.read_bytes() == before + b"next\n"
