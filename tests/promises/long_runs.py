"""The runs that count instead of timing: simulation, fuzz, chaos; each a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """One run that has ended.

    Attributes:
        lines: what it printed; of one that failed, the end of its complaint.
    """

    promise: str
    what: str
    lines: list[str]
    is_kept: bool


def counts(scale: float) -> list[tuple[str, str, list[str]]]:
    """Each run: its promises, what it is, its arguments."""

    def times(count: int) -> str:
        return str(max(1, int(count * scale)))

    return [
        ("P22", "simulation of the core", ["simulation", "--seeds", times(10_000)]),
        ("P22", "planted bugs that it sees", ["simulation.mutants"]),
        ("P17", "hostile bytes", ["fuzz", "--decoder", times(1_000_000),
                                  "--socket", times(100_000)]),
        ("P1", "chaos", ["chaos", "--real", "--requests", times(500)]),
        ("P1", "chaos", ["chaos", "--requests", times(100_000)]),
    ]  # fmt: skip


def long_runs(scale: float) -> Iterator[LongRun]:
    """Runs them, one after the other."""
    for promise, what, arguments in counts(scale):
        print(f"{promise}: {' '.join(arguments)}", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=TESTS,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        lines = done.stdout.splitlines()
        is_kept = done.returncode == 0
        yield LongRun(
            promise=promise, what=what, lines=lines if is_kept else lines[-20:], is_kept=is_kept
        )
