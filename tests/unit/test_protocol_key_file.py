"""The file of API keys: what it keeps, who can change it, and what is no such file."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from mlxsup.protocol.key_file import (
    KEYS_NAME,
    MAX_FILE_BYTES,
    KeyFileError,
    add_key,
    digest_of,
    read_keys,
    revoke_key,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """In a folder that is not there yet."""
    return tmp_path / "run" / KEYS_NAME


def add(path: Path, name: str, *, is_operator: bool = False) -> str | None:
    return add_key(path, name=name, account="a", is_operator=is_operator, created="now")


def made(path: Path, name: str) -> str:
    key = add(path, name)
    assert key is not None
    return key


def test_without_a_file_there_are_none(path: Path) -> None:
    assert read_keys(path) is None
    assert not path.parent.exists()


def test_a_key_is_kept_as_a_hash_in_a_file_of_its_owner_alone(path: Path) -> None:
    key = made(path, "laptop")
    assert key.startswith("sk-mlxsup-")
    assert len(key) >= 50
    text = path.read_text()
    assert key not in text
    assert key.removeprefix("sk-mlxsup-") not in text
    (kept,) = read_keys(path) or ()
    assert (kept.name, kept.account, kept.digest) == ("laptop", "a", digest_of(key))
    assert (kept.is_operator, kept.created) == (False, "now")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [KEYS_NAME]


def test_a_file_is_its_owners_alone_whatever_the_umask_is(path: Path) -> None:
    before = os.umask(0)
    try:
        made(path, "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_two_keys_are_alike_and_no_name_is_taken_twice(path: Path) -> None:
    assert made(path, "a") != made(path, "b")
    before = path.read_text()
    assert add(path, "a", is_operator=True) is None
    assert path.read_text() == before


def test_a_revoked_key_is_gone_and_the_last_one_leaves_a_file(path: Path) -> None:
    made(path, "a")
    made(path, "b")
    assert revoke_key(path, "nobody") is None
    assert [key.name for key in revoke_key(path, "a") or ()] == ["b"]
    assert revoke_key(path, "b") == ()
    assert read_keys(path) == ()


def test_writers_at_once_lose_no_key(path: Path) -> None:
    threads = [threading.Thread(target=made, args=(path, f"k{n}")) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.name for key in read_keys(path) or ()) == [f"k{n}" for n in range(8)]


def test_what_a_writer_that_was_killed_has_left_is_no_obstacle(path: Path) -> None:
    made(path, "a")
    left = path.with_suffix(".new")
    left.write_text("half a fi")
    left.chmod(0o666)
    made(path, "b")
    assert [key.name for key in read_keys(path) or ()] == ["a", "b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_file_that_others_reach_is_refused_with_the_command_that_helps(
    path: Path, mode: int
) -> None:
    made(path, "a")
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"has mode 0{mode:o}.*run: chmod 600 {path}"):
        read_keys(path)
    with pytest.raises(KeyFileError, match="others may read"):
        made(path, "b")


def test_a_file_of_somebody_else_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(path, "a")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(KeyFileError, match="belongs to another user"):
        read_keys(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_refused_at_once(path: Path, make: object) -> None:
    path.parent.mkdir()
    assert callable(make)
    make(path)
    with pytest.raises(KeyFileError, match="is not a file"):
        read_keys(path)


KEY = {"name": "a", "digest": "0", "account": "a", "is_operator": False, "created": ""}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[" * 100_000, '{"schema_version": 2, "keys": []}', '{"schema_version": 1}',
     json.dumps({"schema_version": 1, "keys": [3]}),
     json.dumps({"schema_version": 1, "keys": [{**KEY, "is_operator": 1}]}),
     json.dumps({"schema_version": 1, "keys": [{**KEY, "more": ""}]}),
     json.dumps({"schema_version": 1, "keys": [{"name": "a"}]}),
     " " * MAX_FILE_BYTES + "{}"],
)  # fmt: skip
def test_what_is_no_file_of_keys_is_refused_and_not_written_over(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o600)
    for use in (read_keys, lambda path: made(path, "a"), lambda path: revoke_key(path, "a")):
        with pytest.raises(KeyFileError, match="is not a file of keys"):
            use(path)
    assert path.read_text() == text


def test_a_folder_that_cannot_be_made_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(KeyFileError, match=f"{tmp_path}/run cannot be used"):
        made(tmp_path / "run" / KEYS_NAME, "a")


def test_a_file_of_keys_may_be_as_long_as_is_read(path: Path) -> None:
    path.parent.mkdir()
    text = json.dumps({"schema_version": 1, "keys": [KEY]})
    path.write_text(text.rjust(MAX_FILE_BYTES))
    path.chmod(0o600)
    assert [key.name for key in read_keys(path) or ()] == ["a"]
    path.write_text(text.rjust(MAX_FILE_BYTES + 1))
    with pytest.raises(KeyFileError, match="is not a file of keys"):
        read_keys(path)


def test_a_file_that_cannot_be_read_or_written_is_an_error_with_its_name(path: Path) -> None:
    path.parent.mkdir()
    path.with_suffix(".new").mkdir()
    with pytest.raises(KeyFileError, match=f"^{path} cannot be written: "):
        made(path, "a")
    path.write_text("")
    with pytest.raises(KeyFileError, match=f"^{path}/x cannot be read: Not a directory$"):
        read_keys(path / "x")
