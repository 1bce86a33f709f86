"""What a download makes of a part that was there before, and of a disk with little room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.protocol.download import DownloadDone, DownloadProblem, DownloadProgress

from support.cli import run_cli
from support.downloads import (
    FILES,
    MIB,
    NEEDED,
    NEEDED_BYTES,
    REPO,
    WEIGHTS,
    WEIGHTS_NAME,
    Download,
    contents,
    hub_environment,
    partial,
    snapshot,
    start_download,
)
from support.local_hub import LocalHub, local_hub

SPARE_BYTES = 64 * MIB
"""What a download leaves free."""

FREE = """
import shutil
from types import SimpleNamespace
shutil.disk_usage = lambda path: SimpleNamespace(free={free_bytes})
"""
EVERY_REPORT = """
from mlxsup.downloader import progress
progress.REPORT_INTERVAL_S = 0.0
"""
DIES = """
import os, sys
if "mlxsup.downloader" in sys.orig_argv:
    print("no library of that name", flush=True)
    os._exit(3)
"""


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as hub:
        hub.add(REPO, FILES)
        yield hub


def started_after(lines: str, hub: LocalHub, home: Path) -> Download:
    """A download whose process has run these lines at its start."""
    folder = home / "first"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(lines)
    paths = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    return start_download(hub_environment(hub, home, PYTHONPATH=paths))


def test_a_part_that_is_longer_than_the_whole_is_fetched_from_the_beginning(
    hub: LocalHub, tmp_path: Path
) -> None:
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).write_bytes(WEIGHTS + b"x")
    download = start_download(hub_environment(hub, tmp_path))
    try:
        done = download.end()
    finally:
        download.close()
    assert isinstance(done, DownloadDone)
    assert done.fetched_bytes == NEEDED_BYTES
    assert hub.fetched(WEIGHTS_NAME) == [0]
    assert contents(snapshot(tmp_path)) == NEEDED


def test_what_has_arrived_in_vain_does_not_count(hub: LocalHub, tmp_path: Path) -> None:
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).write_bytes(bytes(MIB))
    download = started_after(EVERY_REPORT, hub, tmp_path)
    try:
        *progress, done = download.reports()
    finally:
        download.close()
    assert isinstance(done, DownloadDone)
    counts = [one.done_bytes for one in progress if isinstance(one, DownloadProgress)]
    assert counts[0] == MIB
    assert max(counts) == NEEDED_BYTES, "never more than there is"
    assert 0 in counts, "after the damage was noticed"


@pytest.mark.parametrize(("more_bytes", "fits"), [(-1, False), (0, True)])
def test_some_of_the_disk_stays_free(
    hub: LocalHub, tmp_path: Path, more_bytes: int, fits: bool
) -> None:
    free_bytes = NEEDED_BYTES + SPARE_BYTES + more_bytes
    download = started_after(FREE.format(free_bytes=free_bytes), hub, tmp_path)
    try:
        if fits:
            assert isinstance(download.end(), DownloadDone)
        else:
            assert download.failure().problem is DownloadProblem.DISK_FULL
    finally:
        download.close()
    assert hub.fetched(WEIGHTS_NAME) == ([0] if fits else [])


def test_a_download_that_dies_by_itself_is_told_with_its_last_words(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(DIES)
    paths = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    done = run_cli("pull", REPO, HOME=str(tmp_path), PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "error: the download ended with exit code 3",
        "hint: no library of that name",
    ]
