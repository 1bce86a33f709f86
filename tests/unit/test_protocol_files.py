"""Files that several processes know: logs, models, folders and sockets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxsup.protocol.folders import (
    GENERATION_HEADER,
    check_runtime_dir,
    check_socket_path,
    generation_header,
    log_path,
)
from mlxsup.protocol.log_files import (
    MAX_LINE_BYTES,
    FollowedFile,
    all_lines,
    clean,
    last_line,
    tail,
    written_at,
)
from mlxsup.protocol.model_files import (
    is_pointer,
    is_tokenizer_file,
    is_weight_file,
    pointer_problem,
)
from mlxsup.protocol.text import timestamp


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return log_path(tmp_path, "m")


def test_tail_reaches_into_rotated_files(log: Path) -> None:
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


def test_last_line_is_one_of_the_latest_life(log: Path) -> None:
    first, second = (generation_header(number, 7, "2026-01-01T00:00:00Z") for number in (1, 2))
    log.write_text("\n".join([first, "MemoryError", second, STARTED]))
    assert last_line(log) == STARTED
    log.write_text("\n".join([first, "MemoryError", second, "no device", STARTED]))
    assert last_line(log) == "no device"
    log.write_text("\n".join([first, "MemoryError", STARTED]))
    assert last_line(log) == "MemoryError"


def test_clean_removes_what_acts_on_a_terminal() -> None:
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


def test_all_lines_come_oldest_first_out_of_the_rotated_files(tmp_path: Path) -> None:
    log = log_path(tmp_path, "m")
    assert (all_lines(log), written_at(log)) == ([], 0.0)
    log.with_name("m.log.2").write_text("a\n")
    log.with_name("m.log.1").write_text("b\n\n")
    log.write_text("c\nunfinished")
    assert all_lines(log) == ["a", "b", "", "c", "unfinished"]
    log.write_text("")
    assert all_lines(log) == ["a", "b", ""]


def test_tail_of_a_log_that_is_being_rotated(log: Path) -> None:
    log.with_name("m.log.1").write_text("a\nb\n")
    assert tail(log, 1) == ["b"]
    assert tail(log, 5) == ["a", "b"]


def test_ninth_rotated_file_is_the_last(log: Path) -> None:
    for number in (9, 10):
        log.with_name(f"m.log.{number}").write_text(f"{number}\n")
    assert all_lines(log) == ["9"]


def test_written_at_is_the_time_of_the_log(log: Path) -> None:
    log.write_text("a\n")
    os.utime(log, (5.0, 77.5))
    assert written_at(log) == 77.5


def test_last_line_of_a_log_without_a_word(log: Path) -> None:
    assert last_line(log) == ""
    log.write_text(f"{STARTED}\n\n")
    assert last_line(log) == STARTED
    assert clean(b"a\tb") == "a       b"


def test_follower_gives_a_very_long_line_in_parts(log: Path) -> None:
    follower = FollowedFile(log)
    log.write_text("x" * (MAX_LINE_BYTES + 1))
    assert list(follower.read_lines()) == ["x" * (MAX_LINE_BYTES + 1)]
    with log.open("a") as file:
        file.write("y\n")
    assert list(follower.read_lines()) == ["y"]
    follower.close()


def test_follower_gives_the_rest_of_a_replaced_file(log: Path) -> None:
    log.write_text("")
    follower = FollowedFile(log)
    log.write_text("half")
    assert list(follower.read_lines()) == []
    log.rename(log.with_name("m.log.1"))
    assert list(follower.read_lines()) == [], "the next file does not exist yet"
    log.write_text("next\n")
    assert list(follower.read_lines()) == ["half", "next"]
    follower.close()


def test_tail_gives_a_very_long_line_whole(
    log: Path,
) -> None:
    log.write_text(f"a\n{'x' * 100_000}\nb\n")
    assert tail(log, 2) == ["x" * 100_000, "b"]


def test_follower_gives_nothing_twice(log: Path) -> None:
    log.write_text("")
    follower = FollowedFile(log)
    log.write_text("a\n")
    assert list(follower.read_lines()) == ["a"]
    assert list(follower.read_lines()) == []
    follower.close()
    follower.close()


def test_closed_follower_opens_its_file_again(log: Path) -> None:
    log.write_text("a\n")
    follower = FollowedFile(log)
    follower.close()
    assert list(follower.read_lines()) == ["a"]
    follower.close()


# ---------------------------------------------------------------- files of a model


@pytest.mark.parametrize(
    ("is_kind", "names", "others"),
    [
        (
            is_tokenizer_file,
            "config.json tokenizer.json chat_template.jinja qwen.tiktoken tokenizer.model"
            " merges.txt rules.jsonl",
            "model.safetensors model.safetensors.index.json README.md json a.py",
        ),
        (
            is_weight_file,
            "model.safetensors model-00001-of-00002.safetensors",
            "model.safetensors.index.json adapters.safetensors model.bin",
        ),
    ],
)
def test_kind_of_a_file_is_known_by_its_name(
    is_kind: Callable[[str], bool], names: str, others: str
) -> None:
    assert [name for name in f"{names} {others}".split() if is_kind(name)] == names.split()


def test_pointer_of_git_lfs_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert is_pointer(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec")
    assert not is_pointer(file)
    file.write_bytes(b"")
    assert not is_pointer(file)
    with pytest.raises(OSError, match="No such file"):
        is_pointer(tmp_path / "missing")


def test_pointer_problem_names_the_command() -> None:
    assert pointer_problem(Path("/my models/m/model.safetensors")) == (
        "/my models/m/model.safetensors is a Git LFS pointer, not the file itself",
        "fetch the files with `git -C '/my models/m' lfs pull`",
    )


# ---------------------------------------------------------------- folders and sockets


def test_generation_header_is_read_as_it_was_written() -> None:
    line = generation_header(12, 345, timestamp(0.0))
    assert line == "--- generation 12 pid 345 1970-01-01T00:00:00Z"
    match = GENERATION_HEADER.match(line)
    assert match is not None
    assert match.group(1) == "12"
    for other in (f" {line}", "--- generation x pid 345 ", "--- generation 12 pid 345"):
        assert GENERATION_HEADER.match(other) is None


def test_long_socket_path_is_refused() -> None:
    path = "/" + "ö" * 51
    check_socket_path(path)
    with pytest.raises(ValueError, match=r"^the socket path ") as caught:
        check_socket_path(path + "x")
    assert str(caught.value) == (
        f"the socket path {path}x has 104 bytes; at most 103 work on every system"
    )


def test_runtime_folder_has_room_for_the_longest_socket_name() -> None:
    longest = "/w9999999.sock.beat"
    folder = "/" + "x" * (103 - len(longest) - 1)
    check_runtime_dir(Path(folder))
    with pytest.raises(ValueError, match=rf"^the socket path {folder}x{longest} has 104 bytes; "):
        check_runtime_dir(Path(folder + "x"))
