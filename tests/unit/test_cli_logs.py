"""Reading and following log files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.protocol.folders import generation_header, log_path
from mlxsup.protocol.log_files import FollowedFile, clean, last_line, tail


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return log_path(tmp_path, "m")


def test_tail_reaches_into_the_rotated_files(log: Path) -> None:
    log.write_text("e\nf\n")
    log.with_name("m.log.1").write_text("c\nd\n")
    log.with_name("m.log.2").write_text("a\nb\n")
    assert tail(log, 1) == ["f"]
    assert tail(log, 3) == ["d", "e", "f"]
    assert tail(log, 100) == ["a", "b", "c", "d", "e", "f"]
    assert tail(log, 0) == []


def test_tail_of_a_long_file_reads_its_end(log: Path) -> None:
    log.write_text("".join(f"line {n} {'x' * 100}\n" for n in range(5000)))
    assert [line.split()[1] for line in tail(log, 3)] == ["4997", "4998", "4999"]
    assert len(tail(log, 2000)) == 2000


def test_tail_takes_an_unfinished_line_and_a_missing_file(log: Path) -> None:
    assert tail(log, 5) == []
    log.write_text("a\nb")
    assert tail(log, 5) == ["a", "b"]
    assert last_line(log) == "b"
    log.write_text("a\n\n")
    assert last_line(log) == "a"


STARTED = "2026-01-01T00:00:00.000Z INFO it is loaded"


def test_the_last_line_is_one_of_the_latest_life(log: Path) -> None:
    first, second = (generation_header(number, 7, "2026-01-01T00:00:00Z") for number in (1, 2))
    log.write_text("\n".join([first, "MemoryError", second, STARTED]))
    assert last_line(log) == STARTED
    log.write_text("\n".join([first, "MemoryError", second, "no device", STARTED]))
    assert last_line(log) == "no device"
    log.write_text("\n".join([first, "MemoryError", STARTED]))
    assert last_line(log) == "MemoryError"


def test_clean_takes_out_what_acts_on_a_terminal() -> None:
    assert clean(b"\x1b[31mred\x1b[0m \x07bell\r \xff") == "red bell \ufffd"
    assert "\x1b" not in clean(b"\x1b]0;title\x07\x1b")


def test_follower_gives_lines_once_they_are_whole(log: Path) -> None:
    follower = FollowedFile(log)
    assert list(follower.read_lines()) == []
    with log.open("w") as file:
        file.write("a\nb")
        file.flush()
        assert list(follower.read_lines()) == ["a"]
        file.write("c\n")
        file.flush()
        assert list(follower.read_lines()) == ["bc"]
    follower.close()


def test_follower_begins_at_the_end_and_says_where(log: Path) -> None:
    log.write_text("a\nb\n")
    follower = FollowedFile(log)
    with log.open("a") as file:
        file.write("c\n")
    assert tail(log, 10, end=follower.start) == ["a", "b"]
    assert list(follower.read_lines()) == ["c"]
    follower.close()


def test_follower_loses_nothing_when_the_file_is_rotated(log: Path) -> None:
    log.write_text("a\n")
    follower = FollowedFile(log)
    with log.open("a") as file:
        file.write("b\n")
        file.flush()
        log.rename(log.with_name("m.log.1"))
        assert list(follower.read_lines()) == ["b"]
        file.write("c\n")
    log.write_text("--- generation 2\n")
    assert list(follower.read_lines()) == ["c", "--- generation 2"]
    with log.open("a") as file:
        file.write("d\n")
    assert list(follower.read_lines()) == ["d"]
    follower.close()


def test_follower_begins_again_when_the_file_is_cut(log: Path) -> None:
    log.write_text("a long line\n")
    follower = FollowedFile(log)
    log.write_text("b\n")
    assert list(follower.read_lines()) == ["b"]
    follower.close()
