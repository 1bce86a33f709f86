"""What sharing adds to `Core.handle` of a step: this tree next to one from before.

`python -m bench.handle_cost [--base COMMIT_OR_FOLDER] [--repeats N]`. Each repeat asks a fresh
process of each tree in turn; a figure is the processor time of the quickest of many batches of
steps, so that other work on the machine hurts less.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .report import machine_lines, print_table, spread

ROOT = Path(__file__).parents[1]
CHILD = ROOT / "bench" / "handle_steps.py"
BEFORE_SHARING = "24e583a"
"""The last commit before engine seconds."""

ROWS = (1, 16, 64)
REPEATS = 9
MOST = 0.10

Times = Mapping[int, Sequence[float]]
"""Microseconds of each repeat, by rows."""


class NoTreeError(Exception):
    """There is no such tree to compare with."""


@contextmanager
def tree_of(base: str) -> Iterator[Path]:
    """The folder of a base: the folder itself, or a copy of a commit's tree.

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


def step_us(tree: Path, rows: Sequence[int], child: Path = CHILD) -> dict[int, float]:
    """Microseconds of one step by the number of rows, in a fresh process.

    Raises:
        AssertionError: the process measured the code of another tree.
    """
    paths = os.pathsep.join(str(tree / part) for part in ("typings", "tests"))
    done = subprocess.run(
        [sys.executable, "-P", str(child), *map(str, rows)],
        env={**os.environ, "PYTHONPATH": paths}, cwd=tree, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert Path(answer["file"]).is_relative_to(tree), f"measured {answer['file']}"
    return {int(number): us for number, us in answer["us"].items()}


def interleaved(base: Path, repeats: int, child: Path = CHILD) -> tuple[Times, Times]:
    """The times of the base and of this tree, by rows, one for each repeat."""
    before: dict[int, list[float]] = {rows: [] for rows in ROWS}
    now: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(repeats):
        for tree, times in ((base, before), (ROOT, now)):
            for rows, us in step_us(tree, ROWS, child).items():
                times[rows].append(us)
    return before, now


def added(before: Times, now: Times) -> dict[int, list[float]]:
    """What was added in each repeat, as a part of what there was before, by rows."""
    return {
        rows: [after / first - 1 for first, after in zip(before[rows], now[rows], strict=True)]
        for rows in before
    }


def print_cost(before: Times, now: Times) -> None:
    """One row for each number of rows."""
    head = ("rows", "before sharing", "now", "added", "target")
    parts = added(before, now)
    table = []
    for rows in before:
        verdict = "" if statistics.median(parts[rows]) <= MOST else ", MISSED"
        percent = [100 * part for part in parts[rows]]
        table.append(
            [
                str(rows),
                spread(before[rows], " µs", 1),
                spread(now[rows], " µs", 1),
                spread(percent, " %", 1),
                f"≤{MOST:.0%}{verdict}",
            ]
        )
    print_table(head, table)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.handle_cost", description=__doc__)
    parser.add_argument("--base", default=BEFORE_SHARING, help="a commit, or the folder of a tree")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    given = parser.parse_args()
    print("\n".join(machine_lines()) + "\n", flush=True)
    print("## What sharing adds to a step, the core alone (fake engine)\n")
    try:
        with tree_of(given.base) as base:
            print_cost(*interleaved(base, given.repeats))
    except NoTreeError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
