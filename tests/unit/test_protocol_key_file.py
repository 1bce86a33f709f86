"""The file of API keys: what it keeps, who can change it, and what is no such file."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.key_file import (
    MARK_NAME,
    MAX_FILE_BYTES,
    KeyFileError,
    KeyPlace,
    add_key,
    digest_of,
    find_trouble,
    have_been_made,
    read_keys,
    read_mark,
    remember,
    revoke_key,
    turn_off,
)

from support.daemon.full_disk import full_disk
from support.gateway.key_place import place_in


@pytest.fixture
def place(tmp_path: Path) -> KeyPlace:
    """In folders that are not there yet."""
    return place_in(tmp_path)


@pytest.fixture
def path(place: KeyPlace) -> Path:
    """The file of the keys."""
    return place.file


def add(place: KeyPlace, name: str, *, is_operator: bool = False) -> str | None:
    return add_key(place, name=name, account="a", is_operator=is_operator, created="now")


def made(place: KeyPlace, name: str) -> str:
    key = add(place, name)
    assert key is not None
    return key


def test_key_is_kept_as_a_digest_in_a_private_file(place: KeyPlace, path: Path) -> None:
    assert read_keys(path) is None
    assert not path.parent.exists()
    before = os.umask(0)
    try:
        key = made(place, "laptop")
    finally:
        os.umask(before)
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
    assert os.listdir(path.parent) == [path.name]


def test_name_is_not_taken_twice(place: KeyPlace, path: Path) -> None:
    assert made(place, "a") != made(place, "b")
    before = path.read_text()
    assert add(place, "a", is_operator=True) is None
    assert path.read_text() == before


def test_revoking_the_last_key_leaves_a_file(place: KeyPlace, path: Path) -> None:
    made(place, "a")
    made(place, "b")
    assert revoke_key(place, "other") is None
    assert [key.name for key in revoke_key(place, "a") or ()] == ["b"]
    assert revoke_key(place, "b") == ()
    assert read_keys(path) == ()


def test_writers_at_once_lose_no_key(place: KeyPlace, path: Path) -> None:
    threads = [threading.Thread(target=made, args=(place, f"k{n}")) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.name for key in read_keys(path) or ()) == [f"k{n}" for n in range(8)]


def test_leftover_of_a_killed_writer_is_no_obstacle(place: KeyPlace, path: Path) -> None:
    made(place, "a")
    left = path.with_name(f"{path.name}.new")
    left.write_text("half a fi")
    left.chmod(0o666)
    made(place, "b")
    assert [key.name for key in read_keys(path) or ()] == ["a", "b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_file_that_others_reach_is_refused(place: KeyPlace, path: Path, mode: int) -> None:
    made(place, "a")
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"has mode 0{mode:o}.*run: chmod 600 {path}"):
        read_keys(path)
    with pytest.raises(KeyFileError, match="others may read"):
        made(place, "b")


def test_file_of_another_user_is_refused(
    place: KeyPlace, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(place, "a")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(KeyFileError, match="belongs to another user"):
        read_keys(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_folder_or_pipe_is_refused(path: Path, make: object) -> None:
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
def test_other_text_is_refused_and_not_written_over(place: KeyPlace, path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o600)
    for use in (read_keys, lambda path: made(place, "a"), lambda path: revoke_key(place, "a")):
        with pytest.raises(KeyFileError, match="is not a whole file of keys"):
            use(path)
    assert path.read_text() == text


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("")
    with pytest.raises(KeyFileError, match=f"{tmp_path}/etc cannot be used"):
        made(place_in(tmp_path), "a")


def test_longest_file_is_read(path: Path) -> None:
    path.parent.mkdir()
    text = json.dumps({"schema_version": 1, "keys": [KEY]})
    path.write_text(text.rjust(MAX_FILE_BYTES))
    path.chmod(0o600)
    assert [key.name for key in read_keys(path) or ()] == ["a"]
    path.write_text(text.rjust(MAX_FILE_BYTES + 1))
    with pytest.raises(KeyFileError, match="is not a whole file of keys"):
        read_keys(path)


def test_file_that_cannot_be_read_or_written_is_named(place: KeyPlace, path: Path) -> None:
    path.parent.mkdir()
    path.with_name(f"{path.name}.new").mkdir()
    with pytest.raises(KeyFileError, match=f"^{path} cannot be written: "):
        made(place, "a")
    path.write_text("")
    with pytest.raises(KeyFileError, match=f"^{path}/x cannot be read: Not a directory$"):
        read_keys(path / "x")


def test_full_disk_is_named_and_leaves_what_was_there(place: KeyPlace, path: Path) -> None:
    made(place, "a")
    for change in (lambda: made(place, "b"), lambda: turn_off(place)):
        with full_disk(0), pytest.raises(KeyFileError, match="cannot be written") as caught:
            change()
        assert caught.value.hint.startswith("free some space, or ")
    assert [key.name for key in read_keys(path) or ()] == ["a"]
    assert os.listdir(path.parent) == [path.name]


def test_key_is_revoked_although_the_disk_of_the_mark_is_full(
    place: KeyPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(place, "a")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mlxsup.protocol.key_file.replace_file", fail)
    assert revoke_key(place, "a") == ()
    assert read_keys(place.file) == ()


# ---------------------------------------------------------------- what remembers that keys count


def test_each_configuration_has_its_file_of_keys(tmp_path: Path) -> None:
    one, other = tmp_path / "a.toml", tmp_path / "b.toml"
    one.touch()
    link = tmp_path / "links" / "c.toml"
    link.parent.mkdir()
    link.symlink_to(one)
    files = [KeyPlace.beside(path, tmp_path / "run").file for path in (one, other, link)]
    assert files == [tmp_path / "a.keys.json", tmp_path / "b.keys.json", tmp_path / "a.keys.json"]


def test_keys_without_a_configuration_are_in_the_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    place = KeyPlace.beside(None, tmp_path / "run")
    assert place == KeyPlace.beside(tmp_path / ".mlxsup" / "config.toml", tmp_path / "run")
    assert place.mark == tmp_path / "run" / MARK_NAME
    place.mark.parent.mkdir()
    assert KeyPlace.recorded(place.mark.parent) is None
    place.record()
    assert KeyPlace.recorded(place.mark.parent) == place


def test_keys_are_remembered_until_they_are_turned_off(place: KeyPlace) -> None:
    assert (read_mark(place.mark), have_been_made(place), find_trouble(place)) == (None, False, "")
    made(place, "a")
    assert (read_mark(place.mark), have_been_made(place), find_trouble(place)) == (True, True, "")
    revoke_key(place, "a")
    assert have_been_made(place)
    assert "the last one was revoked" in find_trouble(place)
    place.file.unlink()
    assert have_been_made(place)
    assert "is gone, and keys were in force" in find_trouble(place)
    turn_off(place)
    assert (read_mark(place.mark), have_been_made(place), find_trouble(place)) == (False, False, "")
    made(place, "b")
    turn_off(place)
    assert not place.file.exists()
    assert not have_been_made(place)


def test_keys_that_cannot_be_removed_stay_in_force(place: KeyPlace) -> None:
    place.file.mkdir(parents=True)
    with pytest.raises(KeyFileError, match="is a folder; move it away"):
        turn_off(place)
    assert read_mark(place.mark)


def test_key_whose_mark_cannot_be_written_leaves_no_file(place: KeyPlace) -> None:
    place.mark.mkdir(parents=True)
    with pytest.raises(KeyFileError, match=f"^{place.mark} cannot be written: "):
        add(place, "laptop")
    assert list(place.file.parent.glob(f"{place.file.name}*")) == []


def test_lost_mark_is_written_again(place: KeyPlace) -> None:
    made(place, "a")
    off = b"off\n"  # as a `key off` leaves it that was killed before the file was gone
    for lost in (None, off):
        place.mark.unlink()
        if lost is not None:
            place.mark.write_bytes(lost)
            place.mark.chmod(0o600)
        remember(place)
        assert read_mark(place.mark)
    place.mark.unlink()
    place.mark.parent.rmdir()
    with pytest.raises(KeyFileError, match="cannot be written: No such file"):
        remember(place)
    assert not place.mark.parent.exists()
    turn_off(place)
    remember(place)
    assert read_mark(place.mark) is False


def test_power_cut_at_any_call_leaves_keys_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that changes the disk is the last one in turn, as if the power went."""
    left = [sys.maxsize]
    for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "fsync")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), left))
    cuts = 0
    while True:
        place = place_in(tmp_path / str(cuts))
        left[0] = sys.maxsize
        made(place, "first")
        left[0] = cuts
        try:
            made(place, "second")
            revoke_key(place, "first")
            revoke_key(place, "second")
            turn_off(place)
            break
        except PowerCutError:
            cuts += 1
            assert have_been_made(place)
            read_keys(place.file)  # it is whole, or gone
    assert not have_been_made(place)
    assert cuts > 12


def test_files_reach_the_disk_before_they_replace_others(
    place: KeyPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, a power cut after the rename leaves an empty file of keys."""
    synced: dict[int, int] = {}
    replaced: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    def check_replace(new: Path, target: Path) -> Path:
        status = new.stat()
        assert status.st_size > 0
        assert synced.get(status.st_ino) == status.st_size, f"{new} is not on the disk yet"
        assert target != place.file or read_mark(place.mark), "the mark comes before the keys"
        replaced.append(target.name)
        return replace(new, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", check_replace)
    made(place, "a")
    made(place, "b")
    revoke_key(place, "a")
    turn_off(place)
    assert replaced.count(place.file.name) == 3
    assert replaced.count(place.mark.name) == 2, "with the first key, and at the end"


class PowerCutError(Exception):
    """The process is gone before this call."""


def counted(real: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    """The call, as long as any are left."""

    def call(*arguments: Any, **named: Any) -> Any:
        if left[0] == 0:
            raise PowerCutError
        left[0] -= 1
        return real(*arguments, **named)

    return call


def test_keys_count_as_made_where_the_mark_cannot_be_read(place: KeyPlace) -> None:
    place.mark.parent.mkdir(parents=True)
    assert not have_been_made(place)
    place.mark.parent.rmdir()
    place.mark.parent.write_text("no folder")
    assert have_been_made(place)


def test_key_that_could_not_be_written_locks_nothing(place: KeyPlace) -> None:
    place.file.with_name(f"{place.file.name}.new").mkdir(parents=True)
    with pytest.raises(KeyFileError, match="cannot be written"):
        made(place, "a")
    assert not have_been_made(place)
