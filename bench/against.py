"""Processor time of a step in this tree and in another commit's, asked in turn.

A figure is the processor time of the quickest of many batches of steps in a fresh process.
"""

from __future__ import annotations

import io
import json
import os
import site
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .report import print_table, spread

ROOT = Path(__file__).parents[1]
ROWS = (1, 16, 64)
CHILDREN = {
    "`Core.handle` of a step": ROOT / "bench" / "core_steps.py",
    "the worker's loop, without the engine": ROOT / "bench" / "loop_steps.py",
}

Times = Mapping[int, Sequence[float]]
"""Microseconds of each repeat, by rows."""


class NoTreeError(Exception):
    """There is no such tree to compare with."""


@contextmanager
def tree_of(base: str) -> Iterator[Path]:
    """Yield the folder of a base: the folder itself, or a copy of a commit's tree.

    Raises:
        NoTreeError: it is neither.
    """
    if (Path(base) / "supervisor").is_dir():
        yield Path(base).resolve()
        return
    packed = subprocess.run(["git", "archive", base], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode != 0:
        said = packed.stderr.decode().strip()
        raise NoTreeError(f"{base} is no commit of this repository and no tree: {said}")
    with tempfile.TemporaryDirectory(prefix="mlxsup-base-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder).resolve()


def step_us(tree: Path, rows: Sequence[int], child: Path) -> dict[int, float]:
    """Microseconds of one step by the number of rows, in a fresh process.

    Raises:
        AssertionError: the process measured the code of another tree.
    """
    # Without `site`, which puts this checkout on the path: its `mlxsup` is a regular package, and
    # would be imported instead of the namespace package of an older tree.
    paths = os.pathsep.join([f"{tree}/typings", f"{tree}/tests", *site.getsitepackages()])
    done = subprocess.run(
        [sys.executable, "-P", "-S", str(child), *map(str, rows)],
        env={**os.environ, "PYTHONPATH": paths}, cwd=tree, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert Path(answer["file"]).is_relative_to(tree), f"measured {answer['file']}"
    return {int(number): us for number, us in answer["us"].items()}


def interleaved(base: Path, repeats: int, child: Path) -> tuple[Times, Times]:
    """Return the times of the base and of this tree in µs, by rows, one for each repeat."""
    before: dict[int, list[float]] = {rows: [] for rows in ROWS}
    now: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(repeats):
        for tree, times in ((base, before), (ROOT, now)):
            for rows, us in step_us(tree, ROWS, child).items():
                times[rows].append(us)
    return before, now


def run(base: str, repeats: int) -> None:
    """Measure both trees and print.

    Args:
        base: a commit, or the folder of a tree.
        repeats: fresh processes of each tree, in turn.

    Raises:
        NoTreeError: there is no such base.
    """
    rows = []
    with tree_of(base) as tree:
        for what, child in CHILDREN.items():
            before, now = interleaved(tree, repeats, child)
            for count in ROWS:
                ratios = [n / b for b, n in zip(before[count], now[count], strict=True)]
                sides = (spread(before[count], "", 1), spread(now[count], "", 1), spread(ratios))
                rows.append([what, str(count), *sides])
    print(f"## Processor time of a step, next to {base}\n")
    print(f"{repeats} repeats; µs, median (range)\n")
    print_table(["what", "rows", "before", "now", "now to before"], rows)
