"""The logs and the flight recorder: what is written, bounded, renamed, lost on a bad disk."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxsup.cli.why.recording import read_recording
from mlxsup.cli.why.stories import of_daemon
from mlxsup.protocol.flight import (
    MODELS_FILE_NAME,
    REQUESTS_FILE_NAME,
    DaemonEnded,
    DaemonStarted,
    Entry,
    ModelChanged,
    RequestEnded,
    read_line,
)
from mlxsup.supervisor import log_files
from mlxsup.supervisor.core.actions import Outbox
from mlxsup.supervisor.log_files import (
    MAX_WAITING_BYTES,
    STUCK_S,
    LogFile,
    LogWriter,
    RotatingFile,
)
from mlxsup.supervisor.logs import (
    ALIVE_INTERVAL_S,
    DaemonLog,
    FlightRecorder,
    ModelLog,
    json_line,
)
from mlxsup.supervisor.runtime_folder import RuntimeFolderError, held_log_folder, record_log_folder

from support.daemon.full_disk import full_disk
from support.eventually import eventually

PIECE = 4096
TAIL = 50 * PIECE
MOMENT = 86_400.0 + 3661.0996
STAMP = "1970-01-02T01:01:01.099Z"


class Sheet(LogFile):
    """A file that keeps what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def write(self, data: bytes) -> None:
        self.calls.append(("write", data))

    def skip(self, lost_bytes: int) -> None:
        self.calls.append(("skip", lost_bytes))

    def call(self, function: Callable[[RotatingFile], None]) -> None:
        self.calls.append(("call", function))

    def end(self, tail: bytes) -> None:
        self.calls.append(("end", tail))

    def close(self) -> None:
        self.calls.append(("close", None))


class Paper(LogWriter):
    """A writer without a thread: what is handed over to its one file is kept in order."""

    def __init__(self) -> None:
        self.path = Path()
        self.sheet = Sheet()
        self.calls = self.sheet.calls
        self.writes_since = None

    def open(self, path: Path, max_bytes: int = 0) -> LogFile:
        self.path = path
        return self.sheet

    async def flushed(self, file: LogFile, limit_s: float) -> bool:
        assert file is self.sheet
        self.calls.append(("flushed", limit_s))
        return True

    def taken(self) -> list[tuple[str, object]]:
        """Return what was handed over since the last time."""
        calls = list(self.calls)
        self.calls.clear()
        return calls


def tail_of(log: ModelLog, paper: Paper) -> bytes:
    paper.calls.clear()
    asyncio.run(log.ended(3.0))
    (end, tail), flushed = paper.taken()
    assert (end, flushed) == ("end", ("flushed", 3.0))
    assert isinstance(tail, bytes)
    return tail


# ---------------------------------------------------------------- a model's log


def test_a_rule_begins_each_life_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        time, "gmtime", lambda moment: time.struct_time((2031, 2, 3, 4, 5, 6, 0, 0, 0))
    )
    paper = Paper()
    log = ModelLog(Path("/logs"), "m", paper)
    assert paper.path == Path("/logs/m.log")
    log.begin(1, 100)
    log.write(b"half a line")
    log.begin(2, 101)
    log.write(b"a line\n")
    log.begin(3, 102)
    rule = b"--- generation %d pid %d 2031-02-03T04:05:06Z\n"
    assert paper.taken() == [
        ("write", rule % (1, 100)),
        ("write", b"half a line"),
        ("write", b"\n" + rule % (2, 101)),
        ("write", b"a line\n"),
        ("write", rule % (3, 102)),
    ]
    log.close()
    assert paper.taken() == [("close", None)]


def test_the_last_lines_are_a_thousand_readable_ones_of_this_life() -> None:
    log = ModelLog(Path("/logs"), "m", Paper())
    assert log.last_lines == ()
    log.write(b"of the life before\n")
    log.begin(2, 7)
    assert log.last_lines == ()
    log.write(b"".join(b"%d\r\n" % n for n in range(1010)))
    assert log.last_lines == tuple(str(n) for n in range(10, 1010))
    log.write(b"\n\xff" + b"x" * 3000)
    assert log.last_lines == (*(str(n) for n in range(12, 1010)), "", "\ufffd" + "x" * 2047)


def test_a_bounded_tail_of_the_output_is_kept_in_whole_pieces() -> None:
    paper = Paper()
    log = ModelLog(Path("/logs"), "m", paper)
    pieces = [bytes([n]) * PIECE for n in range(60)]
    for piece in pieces:
        log.write(piece)
    assert tail_of(log, paper) == b"".join(pieces[10:])
    log.write(b"z" * (PIECE - 1))  # one byte short of what the oldest piece may go for
    assert len(tail_of(log, paper)) == TAIL + PIECE - 1
    log.write(b"z")
    assert tail_of(log, paper) == b"".join(pieces[11:]) + b"z" * PIECE
    log.write(b"y")
    log.write(b"x")
    assert [len(piece) for piece in log.tail] == [PIECE] * 50 + [2], "small pieces become one"
    log.begin(2, 7)
    log.write(b"a" * PIECE)
    log.write(b"b")
    assert tail_of(log, paper) == b"a" * PIECE + b"b"
    assert len(log.tail) == 2


def test_eight_mebibytes_are_written_in_a_second_and_no_more() -> None:
    paper = Paper()
    now = [100.0]
    log = ModelLog(Path("/logs"), "m", paper, clock=lambda: now[0])
    most = b"x" * (8 * 2**20)

    def what(data: bytes) -> list[tuple[str, object]]:
        log.write(data)
        return [(name, len(d) if isinstance(d, bytes) else d) for name, d in paper.taken()]

    assert what(most) == [("write", len(most))]
    assert what(b"12") == [("skip", 2)]
    now[0] = 100.99
    assert what(b"3") == [("skip", 1)]
    now[0] = 101.0
    assert what(b"1") == [("write", 1)]
    now[0] = 101.5
    assert what(most[2:]) == [("write", len(most) - 2)]
    assert what(b"1") == [("write", 1)]
    assert what(b"1") == [("skip", 1)]
    now[0] = 102.0
    assert what(most + b"1") == [("skip", len(most) + 1)]


# ---------------------------------------------------------------- the daemon's own


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["DEBUG", "INFO", "WARNING", "ERROR"]),
        ("info", ["INFO", "WARNING", "ERROR"]),
        ("warning", ["WARNING", "ERROR"]),
        ("error", ["ERROR"]),
    ],
)
def test_each_level_shows_itself_and_what_is_graver(level: str, shown: list[str]) -> None:
    paper = Paper()
    log = DaemonLog(Path("/logs"), level, paper)
    assert paper.path == Path("/logs/mlxsup.log")
    for one in ("debug", "info", "warning", "error"):
        log.write(one, "m")
    lines = [data for _, data in paper.taken() if isinstance(data, bytes)]
    assert [line.decode().split()[1] for line in lines] == shown


def test_a_line_has_its_moment_its_level_its_message_and_its_facts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: MOMENT)
    paper = Paper()
    log = DaemonLog(Path("/logs"), "info", paper)
    log.write("warning", "worker exited", n=3, f=0.12345, plain="é", empty="", none=None)
    log.write("info", "m", blank="a b", tab="a\tb", quote='a"b', equals="a=é")
    log.block("one\n  two\n\nthree")
    log.close()
    assert paper.taken() == [
        (
            "write",
            f'{STAMP} WARNING worker exited n=3 f=0.123 plain=é empty="" none=None\n'.encode(),
        ),
        (
            "write",
            f'{STAMP} INFO m blank="a b" tab="a\\tb" quote="a\\"b" equals="a=é"\n'.encode(),
        ),
        ("write", b"  one\n    two\n  \n  three\n"),
        ("close", None),
    ]


# ---------------------------------------------------------------- files


def test_partial_writes_are_completed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:2]))
    file = RotatingFile(tmp_path / "m.log", pytest.fail, max_bytes=8)
    for data in (b"12345", b"678", b"9"):
        file.write(data)
    monkeypatch.undo()
    file.close()
    file.close()
    assert (tmp_path / "m.log.1").read_bytes() == b"12345678"
    assert (tmp_path / "m.log").read_bytes() == b"9"


def test_trouble_is_named_with_its_reason_and_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    now = [500.0]
    path = tmp_path / "m.log"
    file = RotatingFile(path, reports.append, clock=lambda: now[0])
    file.write(b"kept\n")
    opened = len(os.listdir("/dev/fd"))

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "write", fail)
        for moment in (500.0, 559.9, 560.0, 560.1, 619.9, 620.0):
            now[0] = moment
            file.write(b"12345")
    assert reports == [f"cannot write to {path}, so lines are lost: No space left on device"] * 3
    assert len(os.listdir("/dev/fd")) == opened - 1
    file.skip(4)
    file.write(b"again\n")
    file.write(b"and again\n")
    file.close()
    assert path.read_bytes() == b"kept\n--- 34 bytes lost here\nagain\nand again\n"


@pytest.mark.parametrize("is_renamed", [False, True], ids=["removed", "renamed"])
def test_file_that_is_gone_is_made_again_by_the_next_write(
    tmp_path: Path, is_renamed: bool
) -> None:
    path, moved = tmp_path / "m.log", tmp_path / "m.log-1"
    file = RotatingFile(path, pytest.fail)
    file.write(b"before\n")
    opened = len(os.listdir("/dev/fd"))
    path.rename(moved)
    if not is_renamed:
        moved.unlink()
    file.write(b"after\n")
    assert path.read_bytes() == b"after\n"
    assert len(os.listdir("/dev/fd")) == opened
    file.close()


def test_folder_that_is_removed_is_made_again_by_the_next_write(tmp_path: Path) -> None:
    (folder := tmp_path / "logs").mkdir()
    file = RotatingFile(folder / "m.log", pytest.fail)
    file.write(b"before\n")
    (folder / "m.log").unlink()
    folder.rmdir()
    file.write(b"after\n")
    file.close()
    assert (folder / "m.log").read_bytes() == b"after\n"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def stuck(tmp_path: Path) -> tuple[LogWriter, LogFile]:
    """A writer that hangs in its first write until the file is read."""
    os.mkfifo(tmp_path / "hangs.log")
    writer = LogWriter(pytest.fail)
    file = writer.open(tmp_path / "hangs.log")
    file.write(b"first\n")
    eventually(lambda: writer.writes_since is not None and not file.waiting_bytes)
    return writer, file


def read(tmp_path: Path, writer: LogWriter, file: LogFile) -> bytes:
    """Return all that a writer that hung writes once it is read; its thread ends then."""
    (thread,) = [one for one in threading.enumerate() if one.name == "mlxsup-logs"]
    assert thread.daemon, "it holds up no end of the process"
    file.close()
    with (tmp_path / "hangs.log").open("rb") as reader:
        assert not writer.close(0.0)
        text = reader.read()
    assert writer.close(60.0)
    assert not thread.is_alive()
    return text


@pytest.mark.parametrize(
    ("tail", "written"),
    [
        (b"567", b"--- 6 bytes lost here\n567"),
        (b"..123456789", b"123456789"),
        (b"123456789", b"123456789"),
    ],
)
def test_the_end_of_dropped_output_is_written(tail: bytes, written: bytes, tmp_path: Path) -> None:
    writer = LogWriter(pytest.fail)
    file = writer.open(tmp_path / "m.log")
    file.write(b"kept ")
    file.end(b"nothing was dropped")
    file.skip(4)
    file.skip(5)
    file.end(tail)
    file.end(tail)
    assert writer.close(60.0)
    assert (tmp_path / "m.log").read_bytes() == b"kept " + written


def test_what_waits_is_written_in_order_and_called_in_between(tmp_path: Path) -> None:
    writer, file = stuck(tmp_path)
    other = writer.open(tmp_path / "m.log")
    called: list[bytes] = []
    path = tmp_path / "m.log"
    for text in (b"one ", b"two ", b"three"):
        other.write(text)
        file.write(text)
    other.call(lambda _: called.append(path.read_bytes()))
    other.write(b" four")
    assert read(tmp_path, writer, file) == b"first\none two three"
    assert path.read_bytes() == b"one two three four"
    assert called == [b"one two three"]


def test_flushed_returns_whether_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, file = stuck(tmp_path)

    def ask(limit_s: float) -> Callable[[], bool]:
        return lambda: asyncio.run(writer.flushed(file, limit_s))

    assert ask(0.0)() is False
    began_at = writer.writes_since
    assert began_at is not None
    just_begun = SimpleNamespace(monotonic=lambda: began_at)
    monkeypatch.setattr(log_files, "time", just_begun)
    assert ask(0.01)() is False
    monkeypatch.undo()
    text = read(tmp_path, writer, file)
    assert text == b"first\n"
    other = LogWriter(pytest.fail)
    file = other.open(tmp_path / "m.log")
    file.write(b"x")
    assert asyncio.run(other.flushed(file, 60.0)) is True
    assert (tmp_path / "m.log").read_bytes() == b"x"
    assert other.close(60.0) is True


def test_a_file_that_has_grown_is_renamed_and_three_private_ones_are_kept(tmp_path: Path) -> None:
    (tmp_path / "m.log").write_bytes(b"1234\n")
    (tmp_path / "m.log").chmod(0o600)
    before = os.umask(0)
    try:
        file = RotatingFile(tmp_path / "m.log", pytest.fail, max_bytes=10)
        for text in (b"56", b"78\n", *(b"line %d\n" % number for number in range(3))):
            file.write(text)
        file.close()
        contents = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert contents == {"m.log": "line 2\n", "m.log.1": "line 1\n", "m.log.2": "line 0\n"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
        file.write(b"78\n")
        file.write(b"!")
        file.close()
    finally:
        os.umask(before)
    assert (tmp_path / "m.log.1").read_text() == "line 2\n78\n"


def test_a_file_system_that_hangs_blocks_only_the_writer(tmp_path: Path) -> None:
    writer, file = stuck(tmp_path)
    piece = b"x" * (MAX_WAITING_BYTES // 4)
    for _ in range(6):
        file.write(piece)
    assert file.waiting_bytes <= MAX_WAITING_BYTES
    assert file.lost_bytes == 2 * len(piece)
    file.end(b"last words\n")
    other = writer.open(tmp_path / "m.log")
    other.write(b"kept\n")
    assert not writer.close(0.01)
    assert not (tmp_path / "m.log").exists()
    note = b"--- %d bytes lost here\n" % (2 * len(piece) - len(b"last words\n"))
    assert read(tmp_path, writer, file) == b"first\n" + 4 * piece + note + b"last words\n"
    assert (tmp_path / "m.log").read_bytes() == b"kept\n"


def test_flushed_does_not_wait_for_a_write_that_hangs_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, file = stuck(tmp_path)
    stuck_at = time.monotonic() + STUCK_S
    monkeypatch.setattr(log_files, "time", SimpleNamespace(monotonic=lambda: stuck_at))

    async def is_flushed() -> bool:
        async with asyncio.timeout(60.0):
            return await writer.flushed(file, 1e6)

    assert not asyncio.run(is_flushed())
    with (tmp_path / "hangs.log").open("rb"):
        eventually(lambda: writer.writes_since is None)
        assert asyncio.run(is_flushed())
        assert writer.close(60.0)


@pytest.mark.parametrize("how", ["close", "replace", "open"])
def test_a_file_system_that_fails_is_reported_and_never_raised(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    file = RotatingFile(tmp_path / "m.log", reports.append, max_bytes=10)
    file.write(b"12345678\n")

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as context:
        context.setattr(os, how, fail)
        file.write(b"12345678\n")
        file.close()
    assert [os.strerror(errno.EROFS) in report for report in reports] == [True]
    file.write(b"again\n")
    file.close()
    assert (tmp_path / "m.log").read_text().endswith("again\n")


def test_json_line_is_one_object_on_one_line() -> None:
    facts = {"n": 3, "f": 0.25, "text": 'é "x"\n', "none": None, "path": Path("/a"), "yes": True}
    line = json_line(MOMENT, "warning", "worker exited", facts).decode()
    assert line.count("\n") == 1
    assert json.loads(line) == {
        "at": STAMP, "level": "warning", "message": "worker exited", "n": 3, "f": 0.25,
        "text": 'é "x"\n', "none": None, "path": "/a", "yes": True,
    }  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_json_line_turns_other_values_into_text(value: object) -> None:
    line = json_line(MOMENT, "info", "m", {"value": value})
    assert isinstance(json.loads(line.decode())["value"], str)


def test_a_block_is_one_line_and_levels_apply(tmp_path: Path) -> None:
    writer = LogWriter(print)
    log = DaemonLog(tmp_path, "info", writer, is_json=True)
    log.write("debug", "left out")
    log.write("info", "reload refused", problems=2)
    log.block("one\n  two")
    log.change_level("debug")
    assert log.level == "debug"
    log.write("debug", "not left out")
    log.close()
    assert writer.close(60.0)
    lines = [json.loads(line) for line in (tmp_path / "mlxsup.log").read_text().splitlines()]
    assert [line["message"] for line in lines] == ["reload refused", "details", "not left out"]
    assert (lines[0]["problems"], lines[1]["text"]) == (2, "one\n  two")
    assert all(line["at"] <= time.strftime("%Y-%m-%dT%H:%M:%SZ~", time.gmtime()) for line in lines)


EVIL = "\x1b[2J\x9b31m\u202e\udc80"


@pytest.mark.parametrize("is_json", [False, True])
def test_the_log_holds_no_control_character(tmp_path: Path, is_json: bool) -> None:
    writer = LogWriter(print)
    log = DaemonLog(tmp_path, "debug", writer, is_json=is_json)
    log.write("error", EVIL, model=EVIL, cause=EVIL)
    log.block(f"one {EVIL}\ntwo")
    log.close()
    assert writer.close(60.0)
    lines = (tmp_path / "mlxsup.log").read_text().split("\n")
    assert len(lines) == (3 if is_json else 4)
    assert all(line.isprintable() for line in lines)


def test_a_second_daemon_is_kept_out_until_the_first_has_ended(tmp_path: Path) -> None:
    logs = tmp_path / "above" / "logs"
    files = len(os.listdir("/dev/fd"))
    with held_log_folder(logs):
        assert logs.is_dir()
        with pytest.raises(RuntimeFolderError) as caught, held_log_folder(logs):
            pass
        assert (str(caught.value), caught.value.hint, caught.value.exit_code) == (
            f"another daemon writes its logs to {logs}",
            "set log_dir to another folder; without log_dir, each daemon has its own",
            73,
        )
        assert len(os.listdir("/dev/fd")) == files + 1
    assert len(os.listdir("/dev/fd")) == files
    with held_log_folder(logs):
        pass


def test_a_disk_that_locks_no_folders_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    entered = []
    with held_log_folder(tmp_path):
        entered.append(tmp_path)
    assert entered == [tmp_path]


@pytest.mark.parametrize("name", ["file", "file/logs"])
def test_held_log_folder_refuses_a_file_with_a_hint(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeFolderError) as caught, held_log_folder(tmp_path / name):
        pass
    assert str(caught.value).startswith(f"the log folder {tmp_path / name} cannot be created: ")
    assert caught.value.hint == "set log_dir to a writable folder"


def test_the_place_is_noted_whatever_bytes_it_has_and_the_last_one_counts(tmp_path: Path) -> None:
    for logs in (b"/some/where/else", b"/a\xff/b"):
        record_log_folder(tmp_path, Path(os.fsdecode(logs)))
        assert (tmp_path / "log_dir").read_bytes() == logs
        assert [path.name for path in tmp_path.iterdir()] == ["log_dir"]


CHANGE = ModelChanged(model="m", generation=1, before="READY", after="STOPPED")
END = RequestEnded(id="r", number=1, model="m", outcome="stop")


def live(folder: Path, pid: int, code: int | None) -> None:
    """A daemon that writes its recorder; without a code, it is killed."""
    writer = LogWriter(pytest.fail)
    files = FlightRecorder(folder, writer)
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
    with full_disk(9):
        file.write(b"cut off\n")
    assert len(reports) == 1
    file.write(b"again\n")
    file.write(b"and again\n")
    file.close()
    kept, cut_off, lost, *rest = path.read_bytes().splitlines()
    assert (kept, cut_off) == (b"whole", b"cut")
    assert lost == b"--- 8 bytes lost here"
    assert rest == [b"again", b"and again"]


@pytest.mark.parametrize("before", [b"", b"line\n"])
def test_a_file_is_continued_after_a_line_and_after_what_others_append(
    before: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.log"
    path.write_bytes(before)
    file = RotatingFile(path, pytest.fail)
    file.write(b"one ")
    with path.open("ab") as other:
        other.write(b"two ")
    file.write(b"three")
    file.close()
    file.write(b" four\n")
    file.close()
    assert path.read_bytes() == before + b"one two three four\n"


@pytest.fixture
def writer() -> Iterator[LogWriter]:
    reports: list[str] = []
    writer = LogWriter(reports.append)
    yield writer
    assert writer.close(60.0)
    assert reports == []


def lines_in(path: Path) -> list[object]:
    return [read_line(line).entry for line in path.read_text().splitlines()]


def test_models_and_requests_have_a_file_each_which_only_their_owner_reads(
    tmp_path: Path, writer: LogWriter
) -> None:
    files = FlightRecorder(tmp_path, writer)
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


def test_kept_and_written_entries_have_the_same_numbers(tmp_path: Path, writer: LogWriter) -> None:
    """`why` lays both together by them."""
    outbox, files = Outbox(), FlightRecorder(tmp_path, writer)
    files.started(7)
    for entry in (CHANGE, END, END, CHANGE):
        outbox.record(entry)
    for action in outbox.take():
        assert isinstance(action, Entry)
        files.write(action)
    assert writer.close(60.0)
    [run] = read_recording(tmp_path, None, 0.0).runs
    kept = [(one["n"], one["kind"]) for one in outbox.journal.entries(1.0)]
    assert [(one.number, one.entry.KIND) for one in run.entries] == kept
    assert [number for number, _ in kept] == [1, 2, 3, 4]


def test_the_file_is_touched_every_few_seconds_unless_its_disk_hangs(tmp_path: Path) -> None:
    now, paper = [1_700_000_000.0], Paper()
    files = FlightRecorder(tmp_path, paper, lambda: now[0])
    for _ in range(4):  # the first and the last of them count
        files.alive()
        now[0] += ALIVE_INTERVAL_S / 3
    assert len(paper.taken()) == 2
    now[0] -= 3600.0  # the clock was set back
    files.alive()
    assert len(paper.taken()) == 1
    paper.writes_since = 1.0
    for _ in range(4):
        now[0] += ALIVE_INTERVAL_S
        files.alive()
    assert paper.taken() == []


def test_the_next_daemon_notes_when_the_one_before_it_was_last_alive(
    tmp_path: Path, writer: LogWriter
) -> None:
    path = tmp_path / MODELS_FILE_NAME
    path.touch()
    os.utime(path, (1000.0, 1000.0))
    recorder = FlightRecorder(tmp_path, writer)
    recorder.started(8)
    eventually(lambda: path.stat().st_size)
    os.utime(path, (1000.0, 1000.0))
    recorder.alive()
    assert writer.close(60.0)
    [begun] = lines_in(path)
    assert isinstance(begun, DaemonStarted)
    assert begun.before_alive_at == 1000.0
    assert path.stat().st_mtime > 1000.0, "it is touched while the daemon lives"


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
