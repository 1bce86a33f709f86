"""What a module of tests leaves behind: processes, files outside its folders, and MLX's limits.

Tests run in several processes at once, so what one of them leaves disturbs tests it never heard of.
"""

from __future__ import annotations

import os
import resource
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from support.daemon.warm import SERVER

MARK = "MLXSUP_TEST_RUN"
"""The variable that every process inherits from the tests that started it, orphans too."""

CHECKOUT = Path(__file__).resolve().parents[2]
MODELS = CHECKOUT / "models"
HOME = Path.home() / ".mlxsup"
MADE_BY_TOOLS = {"build", "dist", "models"}
"""In the checkout, beside what begins with a dot."""

GONE_TIMEOUT_S = 60.0
"""A process that was ended takes a moment to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What was written where every test can see it.

    Attributes:
        names: in the checkout's top folder, where relative paths lead, and in a user's folder.
        versions: of files that nobody changes while tests run, their change times in ns.
    """

    names: frozenset[Path]
    versions: dict[Path, int]

    @classmethod
    def now(cls, checkout: Path = CHECKOUT, models: Path = MODELS, home: Path = HOME) -> Files:
        """Looks at a checkout, which a person may edit, at its models, and at a user's folder."""
        top = (p for p in checkout.iterdir() if p.name[0] != "." and p.name not in MADE_BY_TOOLS)
        names = frozenset([*top, *_walk(home)])
        files = [*_walk(models), *_walk(home)]
        return cls(names=names, versions={path: path.stat().st_mtime_ns for path in files})

    def differences(self, before: Files) -> list[str]:
        """What is new, gone or changed since then, sorted; a model that is new is a download."""
        changed = {path for path, at in before.versions.items() if self.versions.get(path) != at}
        return sorted(map(str, (self.names ^ before.names) | changed))


def processes_of(run: str) -> list[psutil.Process]:
    """The living processes that were started, by whatever way, from tests with this mark.

    The server of warm processes is none of them: it stays for the modules to come.
    """
    others = (process for process in psutil.process_iter() if process.pid != SERVER.pid)
    return [process for process in others if _is_of(process, run)]


def mark_children() -> str:
    """Marks the processes that this one starts from now on; returns the mark."""
    run = uuid.uuid4().hex
    os.environ[MARK] = run
    return run


@pytest.fixture(scope="session")
def run_of_tests() -> str:
    """The mark of this process's children; each of pytest's processes has its own."""
    SERVER.allow()
    return mark_children()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(run_of_tests: str) -> Iterator[None]:
    """Fails a module that leaves a process, limits of MLX, or a file where others can see it."""
    before, limits, memory = Files.now(), limits_of_mlx(), limits_of_memory()
    yield
    assert limits_of_memory() == memory, "the process is left with a limit of memory"
    limits_now = limits_of_mlx()
    left = end_processes_of(run_of_tests, GONE_TIMEOUT_S)
    written = Files.now().differences(before)
    assert not left, f"processes are left: {left}"
    assert not written, f"written where every test can see it: {written}"
    assert limits is None or limits_now == limits, f"MLX is left with limits: {limits_now}"


def limits_of_memory() -> list[tuple[int, int]]:
    """Those of the system: with one that is too low, no later test can start a thread."""
    return [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]


def limits_of_mlx() -> tuple[int, int] | None:
    """Of its memory and its cache, in bytes; None if it is not imported, as no test needs it.

    Below a limit of memory that is too low, everything takes MLX three times as long.
    """
    mx = sys.modules.get("mlx.core")
    if mx is None:
        return None
    cache: int = mx.set_cache_limit(0)
    mx.set_cache_limit(cache)
    return int(mx.get_memory_limit()), cache


def end_processes_of(run: str, timeout_s: float) -> list[str]:
    """The command lines of the processes that are still there after the time; ends them."""
    _, left = psutil.wait_procs(processes_of(run), timeout_s)
    names = [words for process in left if (words := _words_of(process))]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout_s)
    return names


def _words_of(process: psutil.Process) -> str:
    """Its command line; empty if it has ended just now."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _is_of(process: psutil.Process, run: str) -> bool:
    try:
        is_marked = process.environ().get(MARK) == run
        return is_marked and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _walk(folder: Path) -> Iterator[Path]:
    for root, _, files in os.walk(folder):
        yield from (Path(root, name) for name in files)
