"""Folders that a command creates before its daemon does."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.cli.private_folders import make_private_folder


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_each_folder_that_it_creates_is_private_and_others_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    make_private_folder(tmp_path / "home" / "run" / "logs")
    modes = [
        stat.S_IMODE((tmp_path / name).stat().st_mode)
        for name in ("home", "home/run", "home/run/logs")
    ]
    assert modes == [0o755, 0o700, 0o700]
    (tmp_path / "home" / "run").chmod(0o750)
    make_private_folder(tmp_path / "home" / "run" / "logs")
    assert stat.S_IMODE((tmp_path / "home" / "run").stat().st_mode) == 0o750


def test_what_is_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "logs"):
        with pytest.raises(OSError):
            make_private_folder(path)
