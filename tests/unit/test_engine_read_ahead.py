"""Weights come into the page cache while a process imports, and nothing depends on it."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlxsup.worker.engines.mlx.read_ahead import CHUNK_BYTES, read_files, reading_ahead

from support.eventually import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what it holds")

CHUNKS = 24


def cold_file(path: Path, chunks: int = CHUNKS) -> Path:
    """A file of which nothing is in memory."""
    path.write_bytes(os.urandom(chunks * CHUNK_BYTES))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(path):
        pytest.skip("this file system keeps its files in memory")
    return path


def resident_pages(path: Path) -> int:
    """How many pages of a file are in memory, as the kernel says."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        begin = ctypes.c_char.from_buffer(mapped)
        seen = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        asked = libc.mincore(ctypes.byref(begin), ctypes.c_size_t(size), seen)
        assert asked == 0, os.strerror(ctypes.get_errno())
        del begin
    return sum(page & 1 for page in seen)


def all_pages(path: Path) -> int:
    return -(-path.stat().st_size // mmap.PAGESIZE)


class Reads:
    """Notes what is read of files, and reads it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)

    def preadv(self, descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        self.sizes.append(len(buffers[0]))
        return self._preadv(descriptor, buffers, offset, flags)

    @property
    def chunks(self) -> int:
        """How many were read, and not just looked at."""
        return self.sizes.count(CHUNK_BYTES)


def test_files_are_in_memory_before_anybody_asks_for_them(tmp_path: Path) -> None:
    files = [cold_file(tmp_path / "a"), cold_file(tmp_path / "b", 3)]
    with reading_ahead(files):
        eventually(lambda: [resident_pages(one) for one in files] == [all_pages(f) for f in files])


def test_what_is_in_memory_is_looked_at_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cold_file(tmp_path / "a")
    reads = Reads(monkeypatch)
    read_files([path], threading.Event())
    # What the kernel reads ahead by itself need not be read again.
    assert 0 < reads.chunks <= CHUNKS
    assert resident_pages(path) == all_pages(path)
    reads.sizes.clear()
    read_files([path], threading.Event())
    assert reads.sizes == [1] * CHUNKS


def test_it_ends_with_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two chunks: the load has the disk from then on."""
    path = cold_file(tmp_path / "a")
    reads, is_over = Reads(monkeypatch), threading.Event()
    is_over.set()
    read_files([path], is_over)
    assert reads.sizes == []
    before = threading.active_count()
    with reading_ahead([path]):
        pass
    assert threading.active_count() == before
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())


def test_it_takes_a_part_of_the_memory_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = SimpleNamespace(available=2 * 4 * CHUNK_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    reads = Reads(monkeypatch)
    read_files([cold_file(tmp_path / name) for name in "ab"], threading.Event())
    assert reads.chunks == 4


def test_a_file_that_cannot_be_read_is_left_to_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cold_file(tmp_path / "a")
    reads = Reads(monkeypatch)
    read_files([tmp_path / "missing", path], threading.Event())
    assert reads.sizes == []


def test_a_file_system_that_cannot_say_what_it_holds_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cold_file(tmp_path / "a")
    asked: list[int] = []

    def refuse(descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        asked.append(len(buffers[0]))
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "preadv", refuse)
    read_files([path, path], threading.Event())
    assert asked == [1]


def test_a_system_that_cannot_say_what_it_holds_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cold_file(tmp_path / "a", 1)
    reads, before = Reads(monkeypatch), threading.active_count()
    monkeypatch.setattr(sys, "platform", "darwin")
    with reading_ahead([path]):
        assert threading.active_count() == before
    assert reads.sizes == []
