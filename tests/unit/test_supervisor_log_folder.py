"""The folder for logs: for one daemon at a time, and found again without one."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from mlxsup.supervisor.log_folder import held_log_folder, record_log_folder
from mlxsup.supervisor.runtime_folder import RuntimeFolderError


def test_a_second_daemon_is_kept_out_until_the_first_has_ended(tmp_path: Path) -> None:
    logs = tmp_path / "above" / "logs"
    files = len(os.listdir("/dev/fd"))
    with held_log_folder(logs):
        assert logs.is_dir()
        with pytest.raises(RuntimeFolderError) as caught, held_log_folder(logs):
            pass
        assert (str(caught.value), caught.value.hint, caught.value.exit_code) == (
            f"another daemon writes its logs to {logs}",
            "set log_dir to another folder; without log_dir, each daemon has its own",
            73,
        )
        assert len(os.listdir("/dev/fd")) == files + 1
    assert len(os.listdir("/dev/fd")) == files
    with held_log_folder(logs):
        pass


def test_a_disk_that_locks_no_folders_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    entered = []
    with held_log_folder(tmp_path):
        entered.append(tmp_path)
    assert entered == [tmp_path]


@pytest.mark.parametrize("name", ["file", "file/logs"])
def test_what_is_no_folder_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeFolderError) as caught, held_log_folder(tmp_path / name):
        pass
    assert str(caught.value).startswith(f"the log folder {tmp_path / name} cannot be created: ")
    assert caught.value.hint == "set log_dir to a folder that you can write to"


def test_the_place_is_noted_whatever_bytes_it_has_and_the_last_one_counts(tmp_path: Path) -> None:
    for logs in (b"/some/where/else", b"/a\xff/b"):
        record_log_folder(tmp_path, Path(os.fsdecode(logs)))
        assert (tmp_path / "log_dir").read_bytes() == logs
        assert [path.name for path in tmp_path.iterdir()] == ["log_dir"]
