"""The files of the flight recorder: written beside the loop, bounded, and dated while it lives."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxsup.cli.flight.recording import read_recording
from mlxsup.protocol.flight import (
    MODELS_FILE_NAME,
    REQUESTS_FILE_NAME,
    DaemonEnded,
    DaemonStarted,
    Entry,
    ModelChanged,
    Recorded,
    RequestEnded,
    read_line,
)
from mlxsup.supervisor.core.outbox import Outbox
from mlxsup.supervisor.flight_files import ALIVE_INTERVAL_S, REQUEST_BYTES, FlightFiles
from mlxsup.supervisor.log_files import MAX_WAITING_BYTES, LogFile, LogWriter, RotatingFile

from support.eventually import eventually

CHANGE = ModelChanged(model="m", generation=1, before="READY", after="STOPPED")
END = RequestEnded(id="r", number=1, model="m", outcome="stop")


@pytest.fixture
def writer() -> Iterator[LogWriter]:
    reports: list[str] = []
    writer = LogWriter(reports.append)
    yield writer
    assert writer.close(60.0)
    assert reports == []


class Sheet(LogFile):
    """Keeps what the writer would be asked to call."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.calls: list[Callable[[RotatingFile], None]] = []

    def call(self, function: Callable[[RotatingFile], None]) -> None:
        self.calls.append(function)


class Paper(LogWriter):
    """A writer without a thread."""

    def __init__(self) -> None:
        self.sheets: dict[str, Sheet] = {}
        self.writes_since = None

    def open(self, path: Path, max_bytes: int = 0) -> LogFile:
        return self.sheets.setdefault(path.name, Sheet(max_bytes))


class Wall:
    """Seconds since the epoch, as a test says."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def lines_in(path: Path) -> list[object]:
    return [read_line(line).entry for line in path.read_text().splitlines()]


def test_models_and_requests_have_a_file_each_which_only_their_owner_reads(
    tmp_path: Path, writer: LogWriter
) -> None:
    files = FlightFiles(tmp_path, writer)
    files.started(7)
    files.write(CHANGE)
    files.write(END)
    files.ended(0)
    assert writer.close(60.0)
    models, requests = tmp_path / MODELS_FILE_NAME, tmp_path / REQUESTS_FILE_NAME
    begun, change, ended = lines_in(models)
    assert isinstance(begun, DaemonStarted)
    assert (begun.pid, begun.before_alive_at) == (7, None)
    assert (change, ended) == (CHANGE, DaemonEnded(code=0))
    assert lines_in(requests) == [begun, END]
    [run] = read_recording(tmp_path, None, 0.0).runs
    assert [one.entry for one in run.entries] == [CHANGE, END]
    assert run.ended is not None
    assert run.ended.number == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in (models, requests)} == {0o600}


def test_what_is_kept_and_what_is_written_have_the_same_numbers(
    tmp_path: Path, writer: LogWriter
) -> None:
    """`why` lays both together by them."""
    outbox, files = Outbox(), FlightFiles(tmp_path, writer)
    files.started(7)
    for entry in (CHANGE, END, END, CHANGE):
        outbox.record(entry, 1.0)
    for action in outbox.take():
        assert isinstance(action, Entry)
        files.write(action)
    assert writer.close(60.0)
    [run] = read_recording(tmp_path, None, 0.0).runs
    kept = [(one["n"], one["kind"]) for one in outbox.flight.entries(1.0)]
    assert [(one.number, one.entry.KIND) for one in run.entries] == kept
    assert [number for number, _ in kept] == [1, 2, 3, 4]


def test_the_lines_of_requests_are_made_by_the_thread_that_writes_them(
    tmp_path: Path, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come often, so the loop must not; what a death says is handed over as it was."""
    makers: dict[type[Entry], set[str]] = {}
    to_line = Recorded.to_line

    def noted(recorded: Recorded) -> bytes:
        makers.setdefault(type(recorded.entry), set()).add(threading.current_thread().name)
        return to_line(recorded)

    monkeypatch.setattr(Recorded, "to_line", noted)
    files = FlightFiles(tmp_path, writer)
    for entry in (CHANGE, END, END):
        files.write(entry)
    assert writer.close(60.0)
    here = threading.current_thread().name
    assert makers == {ModelChanged: {here}, RequestEnded: {"mlxsup-logs"}}
    assert lines_in(tmp_path / REQUESTS_FILE_NAME) == [END, END]


def test_entries_that_wait_for_a_disk_that_hangs_are_bounded(
    tmp_path: Path, writer: LogWriter
) -> None:
    path = tmp_path / REQUESTS_FILE_NAME
    os.mkfifo(path)  # opened for writing, it waits for a reader
    files = FlightFiles(tmp_path, writer)
    files.write(END)
    eventually(lambda: writer.writes_since is not None and not writer.files)
    most = MAX_WAITING_BYTES // REQUEST_BYTES
    for _ in range(most + 2):
        files.write(END)
    files.ended(0)
    with path.open() as reader:  # it continues
        assert len(reader.readlines()) == 1 + most


def test_the_time_of_the_file_says_until_when_the_daemon_lived(
    tmp_path: Path, writer: LogWriter
) -> None:
    path = tmp_path / MODELS_FILE_NAME
    path.touch()
    os.utime(path, (1000.0, 1000.0))
    FlightFiles(tmp_path, writer).alive()
    assert writer.close(60.0)
    assert path.stat().st_mtime > 1000.0


def test_the_file_is_touched_every_few_seconds_unless_its_disk_hangs(tmp_path: Path) -> None:
    wall, paper = Wall(), Paper()
    files = FlightFiles(tmp_path, paper, wall)
    touched = paper.sheets[MODELS_FILE_NAME].calls
    for _ in range(4):  # the first and the last of them count
        files.alive()
        wall.now += ALIVE_INTERVAL_S / 3
    assert len(touched) == 2
    wall.now -= 3600.0  # somebody has set the clock back
    files.alive()
    assert len(touched) == 3
    paper.writes_since = 1.0
    for _ in range(4):
        wall.now += ALIVE_INTERVAL_S
        files.alive()
    assert len(touched) == 3


def test_the_next_daemon_notes_when_the_one_before_it_was_last_alive(
    tmp_path: Path, writer: LogWriter
) -> None:
    path = tmp_path / MODELS_FILE_NAME
    path.touch()
    os.utime(path, (1000.0, 1000.0))
    FlightFiles(tmp_path, writer).started(8)
    assert writer.close(60.0)
    [begun] = lines_in(path)
    assert isinstance(begun, DaemonStarted)
    assert begun.before_alive_at == 1000.0


def test_the_files_are_renamed_at_their_own_sizes(tmp_path: Path) -> None:
    paper = Paper()
    FlightFiles(tmp_path, paper)
    assert {name: sheet.max_bytes for name, sheet in paper.sheets.items()} == {
        MODELS_FILE_NAME: 2**20,
        REQUESTS_FILE_NAME: 2 * 2**20,
    }


@pytest.mark.parametrize(("max_bytes", "files"), [(1000, 2), (10, 3)])
def test_a_file_is_renamed_at_the_size_that_it_was_opened_with(
    tmp_path: Path, writer: LogWriter, max_bytes: int, files: int
) -> None:
    file = writer.open(tmp_path / "f", max_bytes)
    for _ in range(3):
        file.write(b"x" * 400)
        file.call(lambda file: None)  # so that each write is a separate one
    assert writer.close(60.0)
    assert len(list(tmp_path.iterdir())) == files
