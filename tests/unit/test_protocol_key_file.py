"""The file of API keys: what it keeps, who can change it, and what is no such file."""

from __future__ import annotations

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

from support.key_place import place_in


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


def test_without_a_file_there_are_none(path: Path) -> None:
    assert read_keys(path) is None
    assert not path.parent.exists()


def test_a_key_is_kept_as_a_hash_in_a_file_of_its_owner_alone(place: KeyPlace, path: Path) -> None:
    key = made(place, "laptop")
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


def test_a_file_is_its_owners_alone_whatever_the_umask_is(place: KeyPlace, path: Path) -> None:
    before = os.umask(0)
    try:
        made(place, "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_two_keys_are_alike_and_no_name_is_taken_twice(place: KeyPlace, path: Path) -> None:
    assert made(place, "a") != made(place, "b")
    before = path.read_text()
    assert add(place, "a", is_operator=True) is None
    assert path.read_text() == before


def test_a_revoked_key_is_gone_and_the_last_one_leaves_a_file(place: KeyPlace, path: Path) -> None:
    made(place, "a")
    made(place, "b")
    assert revoke_key(place, "nobody") is None
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


def test_what_a_writer_that_was_killed_has_left_is_no_obstacle(place: KeyPlace, path: Path) -> None:
    made(place, "a")
    left = path.with_name(f"{path.name}.new")
    left.write_text("half a fi")
    left.chmod(0o666)
    made(place, "b")
    assert [key.name for key in read_keys(path) or ()] == ["a", "b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_file_that_others_reach_is_refused_with_the_command_that_helps(
    place: KeyPlace, path: Path, mode: int
) -> None:
    made(place, "a")
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"has mode 0{mode:o}.*run: chmod 600 {path}"):
        read_keys(path)
    with pytest.raises(KeyFileError, match="others may read"):
        made(place, "b")


def test_a_file_of_somebody_else_is_refused(
    place: KeyPlace, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(place, "a")
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
def test_what_is_no_file_of_keys_is_refused_and_not_written_over(
    place: KeyPlace, path: Path, text: str
) -> None:
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o600)
    for use in (read_keys, lambda path: made(place, "a"), lambda path: revoke_key(place, "a")):
        with pytest.raises(KeyFileError, match="is not a whole file of keys"):
            use(path)
    assert path.read_text() == text


def test_a_folder_that_cannot_be_made_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("")
    with pytest.raises(KeyFileError, match=f"{tmp_path}/etc cannot be used"):
        made(place_in(tmp_path), "a")


def test_a_file_of_keys_may_be_as_long_as_is_read(path: Path) -> None:
    path.parent.mkdir()
    text = json.dumps({"schema_version": 1, "keys": [KEY]})
    path.write_text(text.rjust(MAX_FILE_BYTES))
    path.chmod(0o600)
    assert [key.name for key in read_keys(path) or ()] == ["a"]
    path.write_text(text.rjust(MAX_FILE_BYTES + 1))
    with pytest.raises(KeyFileError, match="is not a whole file of keys"):
        read_keys(path)


def test_a_file_that_cannot_be_read_or_written_is_an_error_with_its_name(
    place: KeyPlace, path: Path
) -> None:
    path.parent.mkdir()
    path.with_name(f"{path.name}.new").mkdir()
    with pytest.raises(KeyFileError, match=f"^{path} cannot be written: "):
        made(place, "a")
    path.write_text("")
    with pytest.raises(KeyFileError, match=f"^{path}/x cannot be read: Not a directory$"):
        read_keys(path / "x")


# ---------------------------------------------------------------- what remembers that keys count


def test_two_configurations_of_a_folder_have_two_files_and_a_link_to_one_has_the_same(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "a.toml", tmp_path / "b.toml"
    one.touch()
    link = tmp_path / "links" / "c.toml"
    link.parent.mkdir()
    link.symlink_to(one)
    files = [KeyPlace.beside(path, tmp_path / "run").file for path in (one, other, link)]
    assert files == [tmp_path / "a.keys.json", tmp_path / "b.keys.json", tmp_path / "a.keys.json"]


def test_without_a_configuration_the_keys_are_where_the_user_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    place = KeyPlace.beside(None, tmp_path / "run")
    assert place == KeyPlace.beside(tmp_path / "mlxsup" / "config.toml", tmp_path / "run")
    assert place.mark == tmp_path / "run" / MARK_NAME


def test_a_place_that_is_recorded_is_found_in_its_runtime_folder(place: KeyPlace) -> None:
    place.mark.parent.mkdir()
    assert KeyPlace.recorded(place.mark.parent) is None
    place.record()
    assert KeyPlace.recorded(place.mark.parent) == place


def test_keys_that_were_made_are_remembered_until_they_are_turned_off(place: KeyPlace) -> None:
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


def test_a_file_without_its_mark_is_marked_again_and_no_folder_is_made_for_it(
    place: KeyPlace,
) -> None:
    made(place, "a")
    place.mark.unlink()
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


def test_whatever_cuts_a_command_off_keys_that_were_in_force_stay_so(
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
    assert cuts > 20


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


def test_the_first_key_counts_only_once_its_mark_is_there(
    place: KeyPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool | None] = []
    real = Path.replace

    def replace(new: Path, target: Path) -> Path:
        if target == place.file:
            seen.append(read_mark(place.mark))
        return real(new, target)

    monkeypatch.setattr(Path, "replace", replace)
    made(place, "a")
    assert seen == [True]


def test_a_key_that_could_not_be_written_locks_nothing(place: KeyPlace) -> None:
    place.file.with_name(f"{place.file.name}.new").mkdir(parents=True)
    with pytest.raises(KeyFileError, match="cannot be written"):
        made(place, "a")
    assert not have_been_made(place)
