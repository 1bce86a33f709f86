"""Log files: rotation, rules, the last lines, and a disk that is full."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from mlxsup.supervisor.logs import LAST_LINES, DaemonLog, ModelLog, RotatingFile


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
    (tmp_path / "m.log").write_bytes(b"123456789")
    file = RotatingFile(tmp_path / "m.log", no_report, max_bytes=10)
    file.write(b"a")
    file.write(b"b")
    file.close()
    assert (tmp_path / "m.log.1").read_bytes() == b"123456789a"
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
    log = ModelLog(tmp_path, "m", no_report)
    log.begin(1, 100)
    log.write(b"one\nha")
    log.write(b"lf")
    assert log.last_lines == ("one", "half")
    log.begin(2, 101)
    log.write(b"two\n")
    log.close()
    assert log.last_lines == ("two",)
    lines = (tmp_path / "m.log").read_text().splitlines()
    rule = r"--- generation %d pid %d \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert re.fullmatch(rule % (1, 100), lines[0])
    assert lines[1:3] == ["one", "half"]
    assert re.fullmatch(rule % (2, 101), lines[3])
    assert lines[4:] == ["two"]


def test_the_last_lines_are_bounded_whatever_is_printed(tmp_path: Path) -> None:
    log = ModelLog(tmp_path, "m", no_report)
    log.write(b"x" * 1_000_000)
    assert sum(map(len, log.last_lines)) <= 2048
    log.write(b"\n" + b"".join(b"%d\n" % n for n in range(1000)) + b"\xff\xfe rest")
    assert len(log.last_lines) == LAST_LINES
    assert log.last_lines[-2] == "999"
    assert log.last_lines[-1].endswith(" rest")
    log.close()


def test_the_daemon_log_keeps_to_its_level_and_quotes_what_has_blanks(tmp_path: Path) -> None:
    log = DaemonLog(tmp_path, "info", no_report)
    log.write("debug", "not shown")
    log.write("info", "worker exited", model="m", generation=3, signal="SIGKILL", note="a b")
    log.close()
    (line,) = (tmp_path / "mlxsup.log").read_text().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO ", line)
    assert line.endswith('worker exited model=m generation=3 signal=SIGKILL note="a b"')
