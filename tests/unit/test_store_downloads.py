"""Parts of a download in this process: the disk, silence of the library, progress, the lock."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.downloader import snapshot
from mlxsup.downloader.failures import DownloadError
from mlxsup.downloader.snapshot import SPARE_DISK_BYTES
from mlxsup.protocol.download import DownloadProblem, DownloadProgress, DownloadReport, Repository
from mlxsup.store.hub_cache import commit_of, write_reference

MODEL = Repository("org/m")


@pytest.mark.parametrize(("more_bytes", "fits"), [(-1, False), (0, True)])
def test_some_of_the_disk_stays_free(
    more_bytes: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SPARE_DISK_BYTES == 64 * 2**20
    usage = SimpleNamespace(free=1000 + SPARE_DISK_BYTES + more_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    snapshot._check_disk(tmp_path / "m", 0, MODEL)
    if fits:
        snapshot._check_disk(tmp_path / "m", 1000, MODEL)
        return
    with pytest.raises(DownloadError, match="org/m needs 1000 B more on the disk of"):
        snapshot._check_disk(tmp_path / "m", 1000, MODEL)


def test_snapshot_that_the_library_calls_complete_and_is_not_is_no_model(tmp_path: Path) -> None:
    file: Any = SimpleNamespace(path="config.json", lfs=None)
    with pytest.raises(DownloadError, match=r"config\.json is missing") as raised:
        snapshot._check_files(MODEL, [file], tmp_path)
    assert raised.value.report.problem is DownloadProblem.NETWORK


def test_files_are_on_the_disk_before_the_reference_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_ino))
    (tmp_path / "config.json").write_bytes(b"{}")
    file: Any = SimpleNamespace(path="config.json", lfs=None)
    snapshot._check_files(MODEL, [file], tmp_path)
    assert flushed == [(tmp_path / "config.json").stat().st_ino]


def test_progress_is_that_of_the_bar_that_is_ahead() -> None:
    told: list[DownloadReport] = []
    progress = snapshot._Progress(10, 100, told.append)
    bar_class = progress.bar_class()
    received, written, files = (
        bar_class(unit="B", total=0), bar_class(unit="B", total=0), bar_class(total=3),
    )  # fmt: skip

    def tell() -> int:
        progress._reported_at = float("-inf")
        received.update(0)
        assert isinstance(told[-1], DownloadProgress)
        return told[-1].done_bytes

    assert tell() == 10
    received.update(30)
    written.update(20)
    files.update(1)
    assert tell() == 40
    received.update(-30)
    assert tell() == 30, "the hub sends a file from its beginning"
    written.update(500)
    assert tell() == 100
    seen = len(told)
    written.update(1)
    assert len(told) == seen, "not after each chunk"


def test_reference_of_a_branch_is_replaced_and_of_a_commit_not_written(tmp_path: Path) -> None:
    write_reference(tmp_path, "refs/pr/1", "a" * 40)
    write_reference(tmp_path, "refs/pr/1", "b" * 40)
    assert commit_of(tmp_path, "refs/pr/1") == "b" * 40
    assert [path.name for path in (tmp_path / "refs/refs/pr").iterdir()] == ["1"]
    write_reference(tmp_path, "c" * 40, "c" * 40)
    assert not (tmp_path / "refs" / ("c" * 40)).exists()
