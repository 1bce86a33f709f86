"""What a download makes of a part that was there before, and of a disk with little room."""

from __future__ import annotations

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
    disk_full_at,
    hub_environment,
    partial,
    runs_first,
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
SENT_AT_ONCE = 1_500_000
LIMITED = """
from huggingface_hub import constants
constants.MAX_HTTP_DOWNLOAD_SIZE = {limit_bytes}
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


def started_after(lines: str, hub: LocalHub, home: Path, **others: str) -> Download:
    """A download whose process has run these lines at its start."""
    given = {"PYTHONPATH": runs_first(lines, home), **others}
    return start_download(hub_environment(hub, home, **given))


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


def test_a_disk_that_fills_up_keeps_what_has_arrived(hub: LocalHub, tmp_path: Path) -> None:
    full_at = len(WEIGHTS) * 9 // 10
    download = started_after(disk_full_at(full_at), hub, tmp_path)
    try:
        failed = download.failure()
    finally:
        download.close()
    assert failed.problem is DownloadProblem.DISK_FULL
    assert failed.message == f"the disk is full: {REPO} is not complete"
    assert failed.hint.endswith("what has arrived is kept")
    assert not failed.is_passing
    assert partial(tmp_path).stat().st_size == full_at


@pytest.mark.parametrize("before_bytes", [0, 1000, 2 * SENT_AT_ONCE])
def test_a_file_that_is_too_large_for_one_answer_is_fetched_in_pieces(
    hub: LocalHub, tmp_path: Path, before_bytes: int
) -> None:
    """More than 50 GB cannot be asked for at once, huggingface_hub says."""
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).write_bytes(WEIGHTS[:before_bytes])
    lines = LIMITED.format(limit_bytes=SENT_AT_ONCE)
    download = started_after(lines, hub, tmp_path, HF_HUB_DISABLE_XET="1")
    try:
        done = download.end()
    finally:
        download.close()
    assert isinstance(done, DownloadDone), done
    begins = list(range(before_bytes, len(WEIGHTS), SENT_AT_ONCE))
    asked = [one for one in hub.asked if one.method == "GET" and one.path.endswith(WEIGHTS_NAME)]
    assert [one.begins_at for one in asked] == begins
    assert [one.ends_at for one in asked] == [*begins[1:], None]
    assert done.fetched_bytes == NEEDED_BYTES - before_bytes
    assert contents(snapshot(tmp_path)) == NEEDED


def test_a_download_that_dies_by_itself_is_told_with_its_last_words(tmp_path: Path) -> None:
    paths = runs_first(DIES, tmp_path)
    done = run_cli("pull", REPO, HOME=str(tmp_path), PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "error: the download ended with exit code 3",
        "hint: no library of that name",
    ]
