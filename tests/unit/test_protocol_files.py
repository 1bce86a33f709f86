"""Files that several processes know: logs, models, folders and sockets."""

from __future__ import annotations

import errno
import fcntl
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
    BLOCK_BYTES,
    FollowedFile,
    all_lines,
    clean,
    tail,
    written_at,
)
from mlxsup.protocol.model_files import (
    is_pointer,
    is_tokenizer_file,
    is_weight_file,
    pointer_problem,
)
from mlxsup.protocol.regular_file import MIB, lock, new_file, read_regular
from mlxsup.protocol.text import timestamp


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return log_path(tmp_path, "m")


@pytest.mark.parametrize(
    ("newest", "count", "lines"),
    [
        ("e\nf\n", 1, ["f"]),
        ("e\nf\n", 3, ["d", "e", "f"]),
        ("e\nf\n", 100, ["a", "b", "c", "d", "e", "f"]),
        ("e\nf\n", 0, []),
        ("e\nf", 2, ["e", "f"]),  # unfinished
        (None, 1, ["d"]),  # it is being rotated
        (f"e\n{'x' * 100_000}\ng\n", 2, ["x" * 100_000, "g"]),
        ("".join(f"{n} {'x' * 100}\n" for n in range(5000)), 1, [f"4999 {'x' * 100}"]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_tail_reaches_into_rotated_files(
    log: Path, newest: str | None, count: int, lines: list[str]
) -> None:
    assert (tail(log, 5), all_lines(log), written_at(log)) == ([], [], 0.0)
    if newest is not None:
        log.write_text(newest)
    log.with_name("m.log.1").write_text("c\nd\n")
    log.with_name("m.log.2").write_text("a\nb\n")
    assert tail(log, count) == lines


def test_all_lines_come_oldest_first_out_of_the_rotated_files(log: Path) -> None:
    for number, text in ((10, "the ninth is the last\n"), (9, "a\n"), (1, "b\n\n")):
        log.with_name(f"m.log.{number}").write_text(text)
    log.write_text("c\nunfinished")
    assert all_lines(log) == ["a", "b", "", "c", "unfinished"]
    log.write_text("")
    assert all_lines(log) == ["a", "b", ""]
    os.utime(log, (5.0, 77.5))
    assert written_at(log) == 77.5


def test_clean_removes_what_acts_on_a_terminal() -> None:
    assert clean(b"a\tb") == "a       b"
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
    assert list(follower.read_lines()) == []
    follower.close()
    follower.close()
    assert list(follower.read_lines()) == ["a", "bc"], "it is opened again"
    follower.close()


def test_follower_begins_at_the_end_and_says_where(log: Path) -> None:
    log.write_text("a\nb\n")
    follower = FollowedFile(log)
    with log.open("a") as file:
        file.write("c\n")
    log.with_name("m.log.1").write_text("longer than the newest\n")
    assert tail(log, 10, end=follower.start) == ["longer than the newest", "a", "b"]
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


def test_follower_gives_a_very_long_line_in_parts(log: Path) -> None:
    follower = FollowedFile(log)
    log.write_text("x" * (BLOCK_BYTES + 1))
    assert list(follower.read_lines()) == ["x" * (BLOCK_BYTES + 1)]
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


def test_socket_path_that_is_no_utf_8_is_refused_by_this_reason() -> None:
    with pytest.raises(ValueError, match=r"^the socket path '/h\\udcf6me/x' is not UTF-8$"):
        check_socket_path(os.fsdecode(b"/h\xf6me/x"))


def test_regular_file_is_read_up_to_its_limit_and_leaves_nothing_open(tmp_path: Path) -> None:
    file, pipe, before = tmp_path / "file", tmp_path / "pipe", os.listdir("/dev/fd")
    file.write_bytes(bytes(MIB))
    assert len(read_regular(file, MIB)) == MIB
    file.write_bytes(bytes(MIB + 1))
    os.mkfifo(pipe)
    for path, number in ((file, errno.EFBIG), (pipe, errno.EINVAL), (tmp_path, errno.EINVAL)):
        with pytest.raises(OSError) as caught:
            read_regular(path, MIB)
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert os.listdir("/dev/fd") == before


def test_new_file_is_there_whole_or_not_at_all_and_never_in_the_place_of_another(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"

    def fill_the_disk() -> None:
        with new_file(path) as file:
            file.write(b"half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fill_the_disk()
    assert not path.exists()
    with new_file(path) as file:
        file.write(b"whole")
    with pytest.raises(FileExistsError), new_file(path):
        pass
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"whole", 0o600)


def test_lock_that_another_holds_is_waited_for_unless_the_caller_refuses(tmp_path: Path) -> None:
    class Refused(Exception):
        pass

    def refuse() -> None:
        raise Refused

    with (tmp_path / "f").open("w") as first, (tmp_path / "f").open("w") as second:
        lock(first.fileno(), refuse)
        with pytest.raises(Refused):
            lock(second.fileno(), refuse)
        first.close()
        lock(second.fileno(), refuse)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_disk_without_locks_is_used_without_one(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, kind: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    with (tmp_path / "f").open("w") as file:
        lock(file.fileno())


def test_other_errors_of_a_lock_are_raised(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as file:
        descriptor = file.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        lock(descriptor)
