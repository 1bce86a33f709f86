"""Downloads of large files in this process: parts, damage, pieces, and the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from mlxsup.downloader import large_file, progress, snapshot
from mlxsup.downloader.failures import DamagedError, DiskFullError
from mlxsup.downloader.large_file import LargeFile, fetch_large
from mlxsup.downloader.progress import Meter
from mlxsup.protocol.download import DownloadProgress, DownloadReport, Repository

CONTENT = bytes(range(256)) * 64
HALF = len(CONTENT) // 2
RESERVE = 64 * 2**20
"""What a download leaves free on the disk."""


class Hub:
    """What `http_get` asks, and the content that it sends.

    Attributes:
        content: of the file.
        asked: where each answer begins, and where it ends.
    """

    def __init__(self) -> None:
        self.content = CONTENT
        self.asked: list[tuple[int, int]] = []

    def get(self, url: str, out: Any, *, resume_size: int, headers: dict[str, str],
            expected_size: int, displayed_filename: str) -> None:  # fmt: skip
        end = expected_size if "Range" in headers else len(self.content)
        self.asked.append((resume_size, end))
        out.write(self.content[resume_size:end])
        if end < expected_size:
            raise OSError("the file is shorter than expected")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(large_file, "http_get", made.get)
    monkeypatch.setattr(progress, "REPORT_INTERVAL_S", 0.0)
    return made


class Fetched:
    """A file that is fetched into a folder, and what was reported."""

    def __init__(self, folder: Path, *, digest: str = "", size_bytes: int = len(CONTENT)) -> None:
        self.reports: list[int] = []
        digest = digest or sha256(CONTENT).hexdigest()
        self.file = LargeFile(
            repo="org/m", commit="c" * 40, path="model.safetensors", size_bytes=size_bytes,
            digest=digest, blob=folder / "blobs" / digest,
        )  # fmt: skip

    def begin_with(self, part: bytes) -> None:
        self.file.partial.parent.mkdir(parents=True)
        self.file.partial.write_bytes(part)

    def run(self) -> None:
        def note(report: DownloadReport) -> None:
            assert isinstance(report, DownloadProgress)
            self.reports.append(report.done_bytes)

        fetch_large(self.file, Meter(self.file.size_bytes, self.file.done_bytes, note))


@pytest.mark.parametrize(
    ("part", "asked"),
    [
        (b"", [(0, len(CONTENT))]),
        (CONTENT[:HALF], [(HALF, len(CONTENT))]),
        (CONTENT, []),
        (CONTENT + b"x", [(0, len(CONTENT))]),
        (bytes(HALF), [(HALF, len(CONTENT)), (0, len(CONTENT))]),
    ],
    ids=["nothing", "half", "whole", "too long", "damaged"],
)
def test_part_is_continued_or_fetched_anew(
    part: bytes, asked: list[tuple[int, int]], hub: Hub, tmp_path: Path
) -> None:
    fetched = Fetched(tmp_path)
    fetched.begin_with(part)
    fetched.run()
    assert fetched.file.blob.read_bytes() == CONTENT
    assert (hub.asked, fetched.file.partial.exists()) == (asked, False)
    assert max(fetched.reports) == len(CONTENT), "never more than there is"
    assert (0 in fetched.reports[1:]) == (len(asked) == 2), "damage counts as nothing"
    fetched.run()
    assert hub.asked == asked, "nothing is fetched twice"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"digest": "0" * 64}, "has another digest than was announced"),
        ({"size_bytes": len(CONTENT) - 1}, "is longer than the 16383 bytes announced"),
        ({"size_bytes": len(CONTENT) + 1}, "is shorter than the 16385 bytes announced"),
    ],
)
def test_wrong_content_is_fetched_twice_and_nothing_is_kept(
    change: dict[str, Any], words: str, hub: Hub, tmp_path: Path
) -> None:
    fetched = Fetched(tmp_path, **change)
    with pytest.raises(DamagedError, match=words):
        fetched.run()
    assert [begin for begin, _ in hub.asked] == [0, 0]
    assert os.listdir(fetched.file.blob.parent) == []


@pytest.mark.parametrize("before", [0, 100, 9_000])
def test_file_that_is_too_large_for_one_answer_comes_in_pieces(
    before: int, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 6_000)
    fetched = Fetched(tmp_path)
    fetched.begin_with(CONTENT[:before])
    fetched.run()
    begins = list(range(before, len(CONTENT), 6_000))
    assert hub.asked == list(zip(begins, [*begins[1:], len(CONTENT)], strict=True))
    assert fetched.file.blob.read_bytes() == CONTENT


def test_file_is_on_the_disk_before_it_gets_its_name(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = Fetched(tmp_path)
    done: list[tuple[str, int]] = []
    noted: list[tuple[Any, str, Callable[..., Any]]] = [
        (os, "fsync", os.fsync), (os, "replace", os.replace),
    ]  # fmt: skip

    def note(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            done.append((name, fetched.file.partial.stat().st_size))
            return real(*given)

        return call

    for owner, name, real in noted:
        monkeypatch.setattr(owner, name, note(name, real))
    fetched.run()
    assert done == [("fsync", len(CONTENT)), ("replace", len(CONTENT))]


@pytest.mark.parametrize(("more_bytes", "fits"), [(-1, False), (0, True)])
def test_some_of_the_disk_stays_free(
    more_bytes: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=1000 + RESERVE + more_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    def check(missing_bytes: int) -> None:
        snapshot._check_disk(tmp_path / "m", missing_bytes, Repository("org/m"))

    if fits:
        check(1000)
    else:
        with pytest.raises(DiskFullError, match="org/m needs 1000 B more on the disk of"):
            check(1000)
    check(0)
