"""Log files: rotation, rules, the last lines, and a disk that is full."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxsup.supervisor import log_files
from mlxsup.supervisor.log_files import MAX_WAITING_BYTES, STUCK_S, LogWriter, RotatingFile
from mlxsup.supervisor.logs import (
    LAST_LINES,
    MAX_LOG_BYTES_PER_S,
    TAIL_BYTES,
    DaemonLog,
    ModelLog,
)

from support.eventually import eventually


def no_report(text: str) -> None:
    raise AssertionError(text)


def test_a_file_that_has_grown_is_renamed_and_three_are_kept(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "m.log", no_report, max_bytes=10)
    for number in range(6):
        file.write(f"line {number}\n".encode())
    file.close()
    contents = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert contents == {"m.log": "line 5\n", "m.log.1": "line 4\n", "m.log.2": "line 3\n"}


def test_an_existing_file_is_continued(tmp_path: Path) -> None:
    (tmp_path / "m.log").write_bytes(b"12345678\n")
    file = RotatingFile(tmp_path / "m.log", no_report, max_bytes=10)
    file.write(b"a")
    file.write(b"b")
    file.close()
    assert (tmp_path / "m.log.1").read_bytes() == b"12345678\na"
    assert (tmp_path / "m.log").read_bytes() == b"b"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_full_disk_drops_lines_and_says_so_once_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.symlink_to("/dev/full")
    reports: list[str] = []
    moments = iter((0.0, 1.0, 59.0, 60.0, 61.0))
    file = RotatingFile(path, reports.append, clock=lambda: next(moments))
    for _ in range(5):
        file.write(b"12345\n")
    assert len(reports) == 2
    assert os.strerror(errno.ENOSPC) in reports[0]
    path.unlink()
    file.write(b"room again\n")
    file.close()
    assert path.read_text() == "--- 30 bytes lost here\nroom again\n"


def test_a_rule_line_separates_generations_even_after_half_a_line(tmp_path: Path) -> None:
    writer = LogWriter(no_report)
    log = ModelLog(tmp_path, "m", writer)
    log.begin(1, 100)
    log.write(b"one\nha")
    log.write(b"lf")
    assert log.last_lines == ("one", "half")
    log.begin(2, 101)
    log.write(b"two\n")
    log.close()
    assert writer.close(60.0)
    last_lines: tuple[str, ...] = log.last_lines
    assert last_lines == ("two",)
    lines = (tmp_path / "m.log").read_text().splitlines()
    rule = r"--- generation %d pid %d \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert re.fullmatch(rule % (1, 100), lines[0])
    assert lines[1:3] == ["one", "half"]
    assert re.fullmatch(rule % (2, 101), lines[3])
    assert lines[4:] == ["two"]


def test_the_last_lines_are_bounded_whatever_is_printed(tmp_path: Path) -> None:
    writer = LogWriter(no_report)
    log = ModelLog(tmp_path, "m", writer)
    log.write(b"x" * 1_000_000)
    assert sum(map(len, log.last_lines)) <= 2048
    log.write(b"\n" + b"".join(b"%d\n" % n for n in range(1000)) + b"\xff\xfe rest")
    assert len(log.last_lines) == LAST_LINES
    assert log.last_lines[-2] == "999"
    assert log.last_lines[-1].endswith(" rest")
    log.close()
    assert writer.close(60.0)


def test_the_daemon_log_keeps_to_its_level_and_quotes_what_has_blanks(tmp_path: Path) -> None:
    writer = LogWriter(no_report)
    log = DaemonLog(tmp_path, "info", writer)
    log.write("debug", "not shown")
    log.write("info", "worker exited", model="m", generation=3, signal="SIGKILL", note="a b")
    log.close()
    assert writer.close(60.0)
    (line,) = (tmp_path / "mlxsup.log").read_text().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO ", line)
    assert line.endswith('worker exited model=m generation=3 signal=SIGKILL note="a b"')


def test_a_file_system_that_hangs_holds_up_nobody_but_the_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hangs.log")  # opened for writing, it waits for a reader
    writer = LogWriter(no_report)
    hanging, other = (ModelLog(tmp_path, name, writer) for name in ("hangs", "m"))
    hanging.write(b"first\n")
    eventually(lambda: not hanging.file.pieces)
    piece = b"x" * (MAX_WAITING_BYTES // 4)
    for _ in range(6):
        hanging.file.write(piece)
    assert hanging.file.waiting_bytes <= MAX_WAITING_BYTES
    lost_bytes = hanging.file.lost_bytes
    assert lost_bytes == 2 * len(piece)
    hanging.file.end(b"last words\n")
    hanging.close()
    other.write(b"kept\n")
    assert not writer.close(0.01)
    assert not (tmp_path / "m.log").exists()
    with (tmp_path / "hangs.log").open("rb") as reader:  # it continues
        text = reader.read()
    note = b"--- %d bytes lost here\n" % (lost_bytes - len(b"last words\n"))
    assert text == b"first\n" + 4 * piece + note + b"last words\n"
    assert writer.close(60.0)
    assert (tmp_path / "m.log").read_bytes() == b"kept\n"


def test_a_write_that_hangs_already_is_not_waited_for_and_one_that_ended_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "hangs.log")
    writer = LogWriter(no_report)
    log = ModelLog(tmp_path, "hangs", writer)
    log.write(b"first\n")
    eventually(lambda: writer.writes_since is not None)
    stuck_at = time.monotonic() + STUCK_S
    monkeypatch.setattr(log_files, "time", SimpleNamespace(monotonic=lambda: stuck_at))

    async def is_flushed() -> bool:
        async with asyncio.timeout(60.0):
            return await writer.flushed(log.file, 1e6)

    assert not asyncio.run(is_flushed())
    with (tmp_path / "hangs.log").open("rb"):
        eventually(lambda: writer.writes_since is None)
        assert asyncio.run(is_flushed())
        assert writer.close(60.0)


def test_of_what_was_dropped_last_only_the_dropped_is_written_at_the_end(tmp_path: Path) -> None:
    writer = LogWriter(no_report)
    file = writer.open(tmp_path / "m.log")
    file.write(b"written ")
    file.skip(len(b"dropped"))
    file.end(b"written dropped")
    assert writer.close(60.0)
    assert (tmp_path / "m.log").read_bytes() == b"written dropped"


def test_logs_are_for_their_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = RotatingFile(tmp_path / "m.log", no_report, max_bytes=10)
        for _ in range(3):
            file.write(b"a line\n")
        file.close()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"m.log": 0o600, "m.log.1": 0o600, "m.log.2": 0o600}


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


def test_who_prints_too_much_is_cut_and_its_last_words_are_kept(tmp_path: Path) -> None:
    moments = [0.0]
    writer = LogWriter(no_report)
    log = ModelLog(tmp_path, "m", writer, clock=lambda: moments[0])
    piece = b"%063d\n" % 0 * 1024
    for _ in range(2 * MAX_LOG_BYTES_PER_S // len(piece)):
        log.write(piece)
        eventually(lambda: not log.file.waiting_bytes)
    log.write(b"cause of death\n")
    assert log.last_lines[-1] == "cause of death"
    asyncio.run(log.ended(60.0))
    text = b"".join((tmp_path / name).read_bytes() for name in ("m.log",))
    assert text.endswith(b"cause of death\n")
    lost = re.findall(rb"--- (\d+) bytes lost here\n", text)
    assert len(lost) == 1
    assert len(text) <= MAX_LOG_BYTES_PER_S + 2 * TAIL_BYTES
    moments[0] = 1.0
    log.write(b"the next second\n")
    log.close()
    assert writer.close(60.0)
    assert (tmp_path / "m.log").read_bytes().endswith(b"cause of death\nthe next second\n")
