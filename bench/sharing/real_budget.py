"""Ten looks a second: is more reserved than the budget, or more held than is reserved?

What is reserved is what `status` says; what is held is read from the system, process by process, so
that what the daemon believes is not asked for the judgement.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import psutil

from mlxsup.client import Client

from ..claim import Range
from .figures import Figure, figure, load
from .real_place import tell
from promises.results import UncleanTreeError, clean_commit

OVER, GIVES_BACK = "over_budget", "gives_back"
INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look.

    Attributes:
        at_s: when.
        budget_bytes: what may be reserved.
        reserved: bytes by model, of those that hold a part.
        held: bytes by model, of those with a process.
    """

    at_s: float
    budget_bytes: int
    reserved: Mapping[str, int]
    held: Mapping[str, int]

    @property
    def is_over(self) -> bool:
        """Whether more is reserved than the budget."""
        return sum(self.reserved.values()) > self.budget_bytes

    @property
    def in_excess(self) -> frozenset[str]:
        """The models that hold more than is reserved for them."""
        return frozenset(m for m, size in self.held.items() if size > self.reserved.get(m, 0))


def longest_excess_s(looks: Sequence[Look]) -> float:
    """The longest time for which one model held more than is reserved for it."""
    longest = 0.0
    since: dict[str, float] = {}
    for look in looks:
        since = {model: since.get(model, look.at_s) for model in look.in_excess}
        longest = max([longest, *(look.at_s - begin for begin in since.values())])
    return longest


def held_bytes(pid: int) -> int:
    """What a process holds, its part of shared pages included if the system says that; 0: gone."""
    try:
        found = psutil.Process(pid).memory_full_info()
    except psutil.Error:
        return 0
    return int(getattr(found, "pss", found.uss))


def look_at(status: Mapping[str, Any], at_s: float) -> Look:
    """Reads the processes that a status names."""
    rows = status["models"]
    return Look(
        at_s=at_s,
        budget_bytes=status["memory"]["budget_bytes"],
        reserved={row["name"]: row["reserved_bytes"] for row in rows if row["reserved_bytes"]},
        held={row["name"]: size for row in rows if row["pid"] and (size := held_bytes(row["pid"]))},
    )


@dataclass(slots=True)
class BudgetWatch:
    """Looks in a separate thread, with a separate connection, while its block runs.

    Attributes:
        endpoint: of the daemon.
        looks: so far.
    """

    endpoint: str
    looks: list[Look] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._look, name="budget")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        with Client(self.endpoint) as client:
            while not self._end.wait(INTERVAL_S):
                self.looks.append(look_at(client.status(), time.monotonic()))

    def figures(self, during: str) -> list[Figure]:
        """Both figures.

        Args:
            during: what happened meanwhile, for people.
        """
        over = sum(look.is_over for look in self.looks)
        excess_s = longest_excess_s(self.looks)
        most = max(sum(look.reserved.values()) / look.budget_bytes for look in self.looks)
        tell(f"{len(self.looks)} looks during {during}; reserved at most {most:.0%} of the budget")
        return [
            figure(claim, [value], runs=len(self.looks), note=f"during {during}")
            for claim, value in ((OVER, float(over)), (GIVES_BACK, excess_s))
        ]


def with_kept(figures: Sequence[Figure]) -> list[Figure]:
    """The same, with what other measures have kept of the budget for this commit."""
    kept = load()
    if not kept:
        return list(figures)
    try:
        commit = clean_commit()
    except UncleanTreeError:
        return list(figures)
    return [
        worse(kept[new.claim], new)
        if new.claim in (OVER, GIVES_BACK)
        and new.claim in kept
        and kept[new.claim].commit == commit
        else new
        for new in figures
    ]


def worse(kept: Figure, new: Figure) -> Figure:
    """What two measures have seen of the same claim, which is about the worst."""
    low = min(new.found.low, kept.found.low)
    high = max(new.found.high, kept.found.high)
    return replace(
        new,
        found=Range(value=high, low=low, high=high),
        runs=new.runs + kept.runs,
        note=kept.note if new.note in kept.note else f"{kept.note}, and {new.note}",
    )
