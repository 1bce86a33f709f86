"""Tables and figures of benchmarks, and what they need of the machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from support.machine import machine_facts


def machine_lines() -> list[str]:
    """Return the machine and the versions, for the head of a report."""
    facts = machine_facts()
    packages = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return [
        f"machine: {facts['system']} {facts['architecture']}, {facts['cores']} cores, "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB, Python {facts['python']}",
        f"versions: {packages}",
    ]


def spread(values: Sequence[float], unit: str = "", digits: int = 2) -> str:
    """Median and range of repeated measurements."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f}){unit}"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown, so that a report can be pasted into docs/benchmarks.md."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(head, *rows, strict=True)]
    for number, cells in enumerate([head, *rows]):
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print("| " + " | ".join(padded) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print(flush=True)


class NotMeasured(Exception):
    """A run could not do what its figure needs."""


def order_in_round(sides: Sequence[str], repeat: int) -> Sequence[str]:
    """Return the sides so that each comes first, second and last equally often.

    Args:
        sides: what is measured in each round.
        repeat: the number of the round.
    """
    place = repeat % len(sides)
    return (*sides[place:], *sides[:place])


def thread_ns(pid: int, thread: int | None = None) -> int:
    """Return the processor time of a thread of another process; by default, of its first.

    Raises:
        NotMeasured: this system does not tell.
    """
    try:
        times = Path(f"/proc/{pid}/task/{thread or pid}/schedstat").read_text()
    except FileNotFoundError:
        raise NotMeasured("the processor time of a thread is read from /proc, on Linux") from None
    return int(times.split()[0])


def threads_ns(pid: int) -> dict[int, int]:
    """Return that of every thread of a process, by its number; the first one's is the pid.

    Raises:
        NotMeasured: this system does not tell.
    """
    folder = Path(f"/proc/{pid}/task")
    threads = [int(one.name) for one in folder.iterdir()] if folder.exists() else [pid]
    return {thread: thread_ns(pid, thread) for thread in threads}
