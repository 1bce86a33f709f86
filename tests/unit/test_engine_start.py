"""Before and during a load: imports, progress, weights read ahead, known faults of mlx-lm."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlxsup.protocol.states import LoadPhase, State
from mlxsup.protocol.worker_messages import LoadProgress
from mlxsup.worker.engines.mlx.engine import HALF, MOST, LoadSteps
from mlxsup.worker.engines.mlx.folder import CHUNK_BYTES, read_files, reading_ahead
from mlxsup.worker.engines.mlx.imports import (
    LIBRARIES,
    MODULES,
    OWN_MODULES,
    import_everything,
    importing_libraries,
)
from mlxsup.worker.engines.mlx.quirks import (
    KNOWN_FAULTS,
    KnownFault,
    find_fault,
    find_warnings,
)

from support.core.driver import Driver, entry
from support.eventually import eventually


def test_the_libraries_come_first_and_then_our_own_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(importlib, "import_module", lambda *names: asked.append(names))
    import_everything()
    package = "mlxsup.worker.engines.mlx"
    ours = [(f".{name}", package) for name in OWN_MODULES]
    assert asked == [*((name,) for name in (*MODULES, *LIBRARIES)), *ours]


def test_imports_beside_the_readers_end_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """If both threads import, Python may give one of them half of a module."""
    is_waited_for, imported = threading.Event(), list[str]()
    join = threading.Thread.join

    def wait(thread: threading.Thread, timeout_s: float | None = None) -> None:
        is_waited_for.set()
        join(thread, timeout_s)

    def load(name: str) -> None:
        assert is_waited_for.wait(10.0)
        imported.append(name)

    monkeypatch.setattr(threading.Thread, "join", wait)
    monkeypatch.setattr(importlib, "import_module", load)
    with importing_libraries():
        assert imported == []
    assert imported == list(LIBRARIES)


BEGIN = 0.9


def shown(calls: int) -> list[float]:
    """The progress that so many steps show."""
    shares: list[float] = []
    steps = LoadSteps(shares.append, BEGIN)
    for _ in range(calls):
        steps()
    return shares


def test_each_step_is_further_than_the_one_before_and_those_without_an_end_are_no_progress() -> (
    None
):
    shares = shown(MOST + 20)
    assert (shares[0], shares[HALF]) == (BEGIN, (BEGIN + 1.0) / 2)
    assert all(before < after for before, after in pairwise(shares[:MOST]))
    assert len(set(shares[MOST:])) == 1
    assert shares[-1] < 1.0


def test_a_load_whose_steps_take_as_long_as_the_limit_together_does_not_stall() -> None:
    """With CUDA each of them may compile a kernel for half a minute."""
    driver = Driver([entry()])
    driver.load()
    driver.spawned()
    driver.hello()
    for share in shown(9):
        driver.worker(LoadProgress(phase=LoadPhase.WARMUP, progress=share))
        driver.pass_time(entry().load_stall_timeout_s / 3)
    assert driver.state() is State.LOADING
    driver.pass_time(entry().load_stall_timeout_s)
    assert driver.state() is State.STOPPING, "no step takes that long"


CHUNKS = 6


def make_file(path: Path, chunks: int = CHUNKS) -> Path:
    path.write_bytes(bytes(chunks * CHUNK_BYTES))
    return path


class Disk:
    """Plays which chunks of files are in memory: those that were read, and no others.

    The kernel's own answer would depend on how quickly the disk is, and on what else it reads.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        self.read: list[tuple[int, int]] = []
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)

    def preadv(self, descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        chunk = (os.fstat(descriptor).st_ino, offset // CHUNK_BYTES)
        if flags & os.RWF_NOWAIT:
            self.looks += 1
            if chunk not in self.read:
                raise BlockingIOError
            return len(buffers[0])
        self.read.append(chunk)
        return self._preadv(descriptor, buffers, offset, flags)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Beside as much memory as it takes to read eight chunks ahead, of which half are free."""
    if sys.platform != "linux":
        pytest.skip("only Linux says what it holds")
    available = SimpleNamespace(available=2 * 9 * CHUNK_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    return Disk(monkeypatch)


def test_files_come_into_memory_while_the_block_runs(tmp_path: Path, disk: Disk) -> None:
    before = threading.active_count()
    with reading_ahead([make_file(tmp_path / "a"), make_file(tmp_path / "b", 3)]):
        eventually(lambda: len(set(disk.read)) == CHUNKS + 3)
    assert threading.active_count() == before


def test_resident_files_are_not_read_again_and_nothing_beyond_half_of_the_memory(
    tmp_path: Path, disk: Disk
) -> None:
    path = make_file(tmp_path / "a")
    for _ in range(2):
        read_files([path], threading.Event())
    assert (len(disk.read), disk.looks) == (CHUNKS, 2 * CHUNKS)
    read_files([make_file(tmp_path / name) for name in "bc"], threading.Event())
    assert len(disk.read) == CHUNKS + 9


def test_reading_ends_with_its_block_and_at_a_file_that_is_left_to_the_load(
    tmp_path: Path, disk: Disk
) -> None:
    """Between two chunks: the load has the disk from then on."""
    path, is_over = make_file(tmp_path / "a"), threading.Event()
    read_files([tmp_path / "missing", path], is_over)
    is_over.set()
    read_files([path], is_over)
    assert (disk.read, disk.looks) == ([], 0)


@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda fault: fault.model_type)
def test_a_fault_is_still_at_its_line_of_mlx_lm(fault: KnownFault) -> None:
    spec = importlib.util.find_spec("mlx_lm")  # without importing it
    if spec is None or spec.origin is None:
        pytest.skip("mlx-lm is not installed")
    lines = (Path(spec.origin).parent / "models" / fault.file).read_text().splitlines()
    assert fault.symbol in lines[fault.line - 1]


@pytest.mark.parametrize(
    ("config", "is_concerned"),
    [
        ({"model_type": "plamo3"}, True),
        ({"model_type": "plamo3", "sliding_window_pattern": 4}, True),
        ({"model_type": "plamo3", "sliding_window_pattern": 1}, False),
        ({"model_type": "plamo3", "num_hidden_layers": 1}, True),
        ({"model_type": "plamo3", "num_hidden_layers": 0}, False),
        ({"model_type": "plamo2"}, False),
        ({"model_type": "phi3small"}, True),
        ({"model_type": "olmo"}, True),
        ({"model_type": "olmo2"}, False),
        ({}, False),
    ],
)
def test_a_fault_concerns_the_configurations_that_have_it(
    config: dict[str, object], is_concerned: bool
) -> None:
    fault = find_fault(config)
    assert (fault is not None) is is_concerned
    assert fault is None or fault.model_type == config["model_type"]


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_model.safetensors"])
def test_an_adapter_among_the_files_of_a_model_is_named(tmp_path: Path, name: str) -> None:
    config = {"model_type": "llama"}
    assert find_warnings(tmp_path, config) == ()
    (tmp_path / name).touch()
    (warning,) = find_warnings(tmp_path, config)
    assert warning == (
        f"{name} is ignored unless a request names it; add its folder to the model's adapters in "
        "the configuration"
    )
