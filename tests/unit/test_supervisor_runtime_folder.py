"""The runtime folder and the limits of open files: values, texts and borders."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mlxsup.supervisor.config.load import ConfigError
from mlxsup.supervisor.log_files import LogWriter
from mlxsup.supervisor.logs import DaemonLog
from mlxsup.supervisor.process_identity import process_identity as identity_of
from mlxsup.supervisor.runtime_folder import (
    AlreadyRunningError,
    RuntimeFolder,
    RuntimeFolderError,
    connections_within,
    raise_open_file_limit,
    room_for,
)
from mlxsup.supervisor.runtime_watch import FolderWatch
from mlxsup.supervisor.signals import has_terminal
from mlxsup.supervisor.sockets.listener import Listener
from mlxsup.supervisor.workers.orphans import WorkerRecord


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path that is not there yet: pytest's own are too long for sockets."""
    parent = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
    yield parent / "deep" / "run"
    shutil.rmtree(parent)


def refusal_of(path: Path) -> tuple[str, str]:
    """What is said of a folder that cannot be used, and what to do about it."""
    with pytest.raises(RuntimeFolderError) as caught:
        RuntimeFolder.claim(path)
    assert caught.value.exit_code == 73
    return str(caught.value), caught.value.hint


# ---------------------------------------------------------------- the folder


def test_a_claimed_folder_is_private_and_its_lock_names_the_holder(folder: Path) -> None:
    claimed = RuntimeFolder.claim(folder)
    try:
        assert claimed.path == folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "lock").stat().st_mode) == 0o600
        assert (folder / "lock").read_text() == f"{os.getpid()} {identity_of(os.getpid())}\n"
        assert claimed.client_socket == folder / "client.sock"
        assert claimed.worker_socket(12) == folder / "w12.sock"
    finally:
        claimed.close()


def test_only_stale_sockets_go_and_a_shorter_holder_replaces_a_longer_one(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True)
    (folder / "lock").write_text("9" * 200)
    for name in ("client.sock", "w1.sock", "w1.sock.beat", "other", "x.beat", "a.sock.old"):
        (folder / name).touch()
    claimed = RuntimeFolder.claim(folder)
    assert {path.name for path in folder.iterdir()} == {"lock", "other", "x.beat", "a.sock.old"}
    assert (folder / "lock").read_text() == f"{os.getpid()} {identity_of(os.getpid())}\n"
    claimed.close()
    assert (folder / "lock").exists()


def test_a_second_claim_names_the_first_and_leaves_everything_as_it_was_P19(folder: Path) -> None:
    claimed = RuntimeFolder.claim(folder)
    (folder / "client.sock").touch()
    files = len(os.listdir("/dev/fd"))
    for content, pid, who in (
        (None, os.getpid(), f"with pid {os.getpid()}"),
        ("", None, "with an unknown pid"),
    ):
        if content is not None:
            (folder / "lock").write_text(content)
        with pytest.raises(AlreadyRunningError) as caught:
            RuntimeFolder.claim(folder)
        assert caught.value.exit_code == 75
        assert caught.value.pid == pid
        assert str(caught.value) == f"a daemon {who} is already running in {folder}"
    assert (folder / "client.sock").exists()
    assert len(os.listdir("/dev/fd")) == files
    claimed.close()
    assert len(os.listdir("/dev/fd")) == files - 1
    RuntimeFolder.claim(folder).close()


def test_a_folder_that_was_removed_is_held_again_by_one_lock_P19(folder: Path) -> None:
    claimed = RuntimeFolder.claim(folder)
    files = len(os.listdir("/dev/fd"))
    shutil.rmtree(folder)
    assert not claimed.is_held
    claimed.hold_again()
    assert (claimed.is_held, len(os.listdir("/dev/fd"))) == (True, files)
    with pytest.raises(AlreadyRunningError):
        RuntimeFolder.claim(folder)
    claimed.close()


@pytest.mark.timeout(10)
def test_holding_again_waits_for_no_other_start(folder: Path) -> None:
    """It runs in the event loop of a daemon that serves."""
    claimed = RuntimeFolder.claim(folder)
    (folder / "lock").unlink()
    gate = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(gate, fcntl.LOCK_EX)
    with pytest.raises(RuntimeFolderError, match="cannot be used"):
        claimed.hold_again()
    os.close(gate)
    claimed.hold_again()
    claimed.close()


def test_a_folder_that_is_lost_is_reported_once_each_time(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claimed = RuntimeFolder.claim(folder)
    log = folder.parent / "logs"
    writer = LogWriter(lambda text: None)
    watch = FolderWatch(
        claimed,
        cast(Listener, SimpleNamespace(is_reachable=True)),
        WorkerRecord(folder),
        DaemonLog(log, "info", writer),
        log,
    )
    for _ in range(2):
        shutil.rmtree(folder)
        other = RuntimeFolder.claim(folder)
        watch.look()
        watch.look()
        other.close()
        watch.look()
        assert claimed.is_held
    assert capsys.readouterr().err.count("is already running") == 2
    claimed.close()
    assert writer.close(60.0)


def test_of_many_claims_at_once_one_succeeds_P19(folder: Path) -> None:
    held: list[RuntimeFolder] = []
    refused: list[int | None] = []

    def claim(_: int) -> None:
        try:
            held.append(RuntimeFolder.claim(folder))
        except AlreadyRunningError as error:
            refused.append(error.pid)

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(claim, range(20)))
    assert (len(held), refused) == (1, [os.getpid()] * 19)
    held[0].close()


def test_a_lock_that_fails_is_refused_and_nothing_stays_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RuntimeFolder.claim(folder).close()
    files = len(os.listdir("/dev/fd"))

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    said = refusal_of(folder)
    assert said == (
        f"the runtime folder {folder} cannot be used: No space left on device",
        "free some space, or set runtime_dir to a writable folder",
    )
    assert len(os.listdir("/dev/fd")) == files
    monkeypatch.undo()
    (folder / "lock").unlink()
    (folder / "lock").mkdir()
    assert refusal_of(folder)[0] == (
        f"the runtime folder {folder} cannot be used: Is a directory ({folder}/lock)"
    )
    assert len(os.listdir("/dev/fd")) == files


def test_the_folder_itself_is_locked_while_the_lock_is_taken_P19(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[bool, int]] = []

    def flock(descriptor: int, kind: int) -> None:
        taken.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), kind))

    monkeypatch.setattr(fcntl, "flock", flock)
    RuntimeFolder.claim(folder).close()
    assert taken == [(True, fcntl.LOCK_EX), (False, fcntl.LOCK_EX | fcntl.LOCK_NB)]


def test_each_folder_that_cannot_be_used_is_refused_with_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.mkdir()
    folder.touch()
    assert refusal_of(folder) == (
        f"the runtime folder {folder} is not a folder",
        "remove it or set another runtime_dir",
    )
    assert refusal_of(folder / "below") == (
        f"the runtime folder {folder}/below cannot be created: Not a directory",
        "set runtime_dir to a writable folder",
    )
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o770)
    assert refusal_of(folder) == (
        f"the runtime folder {folder} has mode 0770, so other users may access its sockets",
        f"run: chmod 0700 {folder}",
    )
    folder.chmod(0o700)
    (folder / "w1.sock").mkdir()
    said, hint = refusal_of(folder)
    assert re.fullmatch(rf"cannot remove {folder}/w1\.sock, which is in the way: \w.*", said)
    assert hint == "remove it, or set another runtime_dir"
    (folder / "w1.sock").rmdir()
    RuntimeFolder.claim(folder).close()  # the refused claim has let go of the lock
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert refusal_of(folder) == (
        f"the runtime folder {folder} belongs to another user (uid {uid})",
        "set runtime_dir to a folder that you own",
    )


def test_chmod_is_not_advised_for_a_folder_with_foreign_files_or_an_unreadable_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = "set runtime_dir to a new folder; mlxsup creates it with mode 0700"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    own = "client.sock w1.sock w1.sock.beat lock learned log_dir logs keys_in_force key_file"
    for name in f"{own} workers.json measured.json".split():
        (folder / name).touch()
    assert refusal_of(folder)[1] == f"run: chmod 0700 {folder}"
    (folder / "mail").touch()
    assert refusal_of(folder)[1] == elsewhere
    (folder / "mail").unlink()

    def fail(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "scandir", fail)
    assert refusal_of(folder)[1] == elsewhere
    monkeypatch.undo()  # the folder is removed afterwards


def test_the_longest_socket_decides_whether_a_path_is_too_long(folder: Path) -> None:
    folder.parent.mkdir()
    limit = 103 if sys.platform == "darwin" else 107
    length = min(limit, 103) - len("/w9999999.sock.beat")
    taken = Path(f"{folder.parent}/{'x' * (length - len(str(folder.parent)) - 1)}")
    too_long = taken.with_name(taken.name + "x" * 5)
    RuntimeFolder.claim(taken).close()
    said, hint = refusal_of(too_long)
    assert said.startswith("the runtime folder cannot hold a socket: ")
    assert "w9999999.sock.beat" in said
    assert hint == "set another runtime_dir"
    assert not too_long.exists()


# ---------------------------------------------------------------- open files


def test_connections_get_what_models_and_storms_leave_P24() -> None:
    found = [connections_within(open_files, 2) for open_files in (416, 1311, 1312, 9999)]
    assert found == [128, 1023, 1024, 1024]


def test_a_new_configuration_must_leave_room_for_the_connections_there_are_P24() -> None:
    assert room_for(1, 400, 0) == 128
    assert room_for(1, 400, 128) == 128
    assert room_for(1, 772, 500) == 500
    for models, open_files, connected in ((1, 399, 0), (2, 400, 0), (1, 771, 500)):
        with pytest.raises(ConfigError) as caught:
            room_for(models, open_files, connected)
        assert caught.value.problems == [
            f"models: {models} are too many for {open_files} open files"
            f" and {connected} client connections"
        ]


Limits = tuple[int, int]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[Limits]]]:
    """What becomes of limits of open files: the result, and what was set."""

    def of(soft: int, hard: int, error: Exception | None = None) -> tuple[int, list[Limits]]:
        given: list[Limits] = []

        def set_limits(kind: int, limits: Limits) -> None:
            assert kind == resource.RLIMIT_NOFILE
            given.append(limits)
            if error is not None:
                raise error

        monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", set_limits)
        return raise_open_file_limit(1), given

    return of


def test_the_limit_of_open_files_is_raised_as_far_as_is_sensible(
    limited: Callable[..., tuple[int, list[Limits]]],
) -> None:
    no_limit = resource.RLIM_INFINITY
    assert limited(1024, 65_535) == (65_535, [(65_535, 65_535)])
    assert limited(1024, 65_537) == (65_536, [(65_536, 65_537)])
    assert limited(1024, no_limit) == (10_240, [(10_240, no_limit)])
    assert limited(no_limit, no_limit) == (10_240, [(10_240, no_limit)])
    assert limited(10_240, no_limit) == (10_240, [])
    assert limited(70_000, 80_000) == (70_000, [])
    assert limited(4096, 4096) == (4096, [])
    for error in (OSError(), ValueError()):
        assert limited(3000, 9000, error) == (3000, [(9000, 9000)])


def test_too_few_open_files_are_refused_with_what_to_do(
    limited: Callable[..., tuple[int, list[Limits]]],
) -> None:
    assert limited(400, 400) == (400, [])
    with pytest.raises(RuntimeFolderError) as caught:
        limited(300, 399)
    assert str(caught.value) == (
        "only 399 files may be open at once, but the daemon needs 400 for its models (1)"
    )
    assert caught.value.hint == (
        "raise the hard limit of open files (`ulimit -Hn`, or LimitNOFILE of systemd)"
    )
    with pytest.raises(RuntimeFolderError, match="only 300 files"):
        limited(300, 9000, OSError())


def test_the_terminal_is_looked_for_without_taking_one_and_left_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []

    def open_(path: str, flags: int) -> int:
        done.append((path, flags))
        if len(done) > 1:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return 77

    with monkeypatch.context() as played:
        played.setattr(os, "open", open_)
        played.setattr(os, "close", done.append)
        has = [has_terminal(), has_terminal()]
    assert has == [True, False]
    looked = ("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    assert done == [looked, 77, looked]
