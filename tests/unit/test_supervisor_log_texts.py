"""What the logs hand over to be written: each text, each limit, each border."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxsup.supervisor import log_files
from mlxsup.supervisor.log_files import LogFile, LogWriter, RotatingFile, Unmade
from mlxsup.supervisor.logs import DaemonLog, ModelLog

from support.eventually import eventually

PIECE = 4096
TAIL = 50 * PIECE


class Sheet(LogFile):
    """The file of such a writer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def write(self, data: bytes | Unmade) -> None:
        self.calls.append(("write", data))

    def skip(self, lost_bytes: int) -> None:
        self.calls.append(("skip", lost_bytes))

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

    def open(self, path: Path, max_bytes: int = 0) -> LogFile:
        self.path = path
        return self.sheet

    async def flushed(self, file: LogFile, limit_s: float) -> bool:
        assert file is self.sheet
        self.calls.append(("flushed", limit_s))
        return True

    def taken(self) -> list[tuple[str, object]]:
        """What was handed over since the last time."""
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


def test_the_last_lines_are_fifty_readable_ones_of_this_life() -> None:
    log = ModelLog(Path("/logs"), "m", Paper())
    assert log.last_lines == ()
    log.write(b"of the life before\n")
    log.begin(2, 7)
    assert log.last_lines == ()
    log.write(b"".join(b"%d\r\n" % n for n in range(60)))
    assert log.last_lines == tuple(str(n) for n in range(10, 60))
    log.write(b"\n\xff" + b"x" * 3000)
    assert log.last_lines == (*(str(n) for n in range(12, 60)), "", "\ufffd" + "x" * 2047)


def test_of_what_is_printed_a_bounded_tail_is_kept_in_whole_pieces() -> None:
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
    monkeypatch.setattr(time, "time", lambda: 86_400.0 + 3661.0996)
    paper = Paper()
    log = DaemonLog(Path("/logs"), "info", paper)
    log.write("warning", "worker exited", n=3, f=0.12345, plain="é", empty="", none=None)
    log.write("info", "m", blank="a b", tab="a\tb", quote='a"b', equals="a=é")
    stamp = "1970-01-02T01:01:01.099Z"
    assert [data.decode() for _, data in paper.taken() if isinstance(data, bytes)] == [
        f'{stamp} WARNING worker exited n=3 f=0.123 plain=é empty="" none=None\n',
        f'{stamp} INFO m blank="a b" tab="a\\tb" quote="a\\"b" equals="a=é"\n',
    ]
    log.block("one\n  two\n\nthree")
    log.close()
    assert paper.taken() == [("write", b"  one\n    two\n  \n  three\n"), ("close", None)]


# ---------------------------------------------------------------- files


def test_a_log_is_renamed_at_ten_mebibytes(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    file = RotatingFile(path, pytest.fail)
    file.write(b"x" * (10 * 2**20 - 1))
    file.write(b"y")
    assert [p.name for p in tmp_path.iterdir()] == ["m.log"]
    file.write(b"z")
    file.close()
    assert path.read_bytes() == b"z"
    assert (tmp_path / "m.log.1").stat().st_size == 10 * 2**20


def test_what_is_written_in_parts_is_whole_and_counted(
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


def test_what_somebody_else_appends_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    file = RotatingFile(path, pytest.fail)
    file.write(b"one ")
    with path.open("ab") as other:
        other.write(b"two ")
    file.write(b"three")
    file.close()
    assert path.read_bytes() == b"one two three"


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
    assert reports == [f"{path} cannot be written, lines are lost: No space left on device"] * 3
    assert len(os.listdir("/dev/fd")) == opened - 1
    file.skip(4)
    file.write(b"again\n")
    file.write(b"and again\n")
    file.close()
    assert path.read_bytes() == b"kept\n--- 34 bytes lost here\nagain\nand again\n"


def stuck(tmp_path: Path) -> tuple[LogWriter, LogFile]:
    """A writer that hangs in its first write until somebody reads the file."""
    os.mkfifo(tmp_path / "hangs.log")
    writer = LogWriter(pytest.fail)
    file = writer.open(tmp_path / "hangs.log")
    file.write(b"first\n")
    eventually(lambda: writer.writes_since is not None and not file.pieces)
    return writer, file


def read(tmp_path: Path, writer: LogWriter, file: LogFile) -> bytes:
    """All that the writer that hung writes."""
    file.close()
    with (tmp_path / "hangs.log").open("rb") as reader:
        assert not writer.close(0.0)
        text = reader.read()
    assert writer.close(60.0)
    return text


def test_four_mebibytes_wait_and_what_follows_is_counted(tmp_path: Path) -> None:
    writer, file = stuck(tmp_path)
    half = b"x" * (2 * 2**20)
    file.write(half)
    file.write(half)
    assert file.waiting_bytes == 4 * 2**20
    file.write(b"1")
    file.skip(4)
    text = read(tmp_path, writer, file)
    assert text == b"first\n" + half + half


@pytest.mark.parametrize(
    ("tail", "written"),
    [
        (b"567", b"--- 6 bytes lost here\n567"),
        (b"..123456789", b"123456789"),
        (b"123456789", b"123456789"),
    ],
)
def test_of_what_was_dropped_the_end_is_written(
    tail: bytes, written: bytes, tmp_path: Path
) -> None:
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


def test_a_file_waits_once_however_much_it_is_owed(tmp_path: Path) -> None:
    writer, file = stuck(tmp_path)
    other = writer.open(tmp_path / "m.log")
    called: list[bytes] = []
    path = tmp_path / "m.log"
    for text in (b"one ", b"two ", b"three"):
        other.write(text)
        file.write(text)
    other.call(lambda _: called.append(path.read_bytes()))
    other.write(b" four")
    assert list(writer.files) == [other, file]
    assert read(tmp_path, writer, file) == b"first\none two three"
    assert path.read_bytes() == b"one two three four"
    assert called == [b"one two three"]


def test_the_thread_that_hangs_holds_up_no_end_of_the_process(tmp_path: Path) -> None:
    writer, file = stuck(tmp_path)
    (thread,) = [one for one in threading.enumerate() if one.name == "mlxsup-logs"]
    assert thread.daemon
    assert read(tmp_path, writer, file) == b"first\n"
    assert not thread.is_alive()


def test_whether_all_is_written_is_said_after_a_limit(
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
