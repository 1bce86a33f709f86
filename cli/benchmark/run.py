"""What has been measured so far, so that an interrupted run is worth something. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .burst import Burst
from .figures import Values, add_burst, summaries
from .sizes import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The daemon at one moment, as a request finds it that is sent for that alone.

    Attributes:
        number: of that request; the daemon numbers all requests that it takes.
        open_others: requests of others that were open.
        steps: of each model's engine so far.
        generation: of the model's process.
    """

    number: int
    open_others: int
    steps: Mapping[str, int]
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Who else used the daemon while it was measured.

    Attributes:
        requests: how many requests of others there were.
        models: other models that answered some of them.
        has_new_process: whether the model got a new process.
    """

    requests: int
    models: tuple[str, ...]
    has_new_process: bool


@dataclass(slots=True, kw_only=True)
class Run:
    """Repeats of all sizes, in turn.

    Attributes:
        model: its name.
        cells: the sizes.
        repeats: how often each is measured.
        values: figures by size, of the repeats so far.
        took_s: how long the latest repeat of each size took.
        interrupted: answers that were paused, or continued after a crash.
        waited: answers that waited in the queue.
        cached_tokens: tokens of prompts that needed no prefill.
        others: who else used the daemon; None before the first repeat is complete.
    """

    model: str
    cells: Sequence[Cell]
    repeats: int
    values: dict[Cell, Values] = field(default_factory=dict)
    took_s: dict[Cell, float] = field(default_factory=dict)
    interrupted: int = 0
    waited: int = 0
    cached_tokens: int = 0
    others: Others | None = None
    done: int = 0
    sent: int = 0
    first: Look | None = None

    @property
    def bursts(self) -> int:
        """How many bursts are measured in all, without those that warm up."""
        return len(self.cells) * self.repeats

    @property
    def is_complete(self) -> bool:
        """Whether every repeat of every size has been measured."""
        return self.done == self.bursts

    @property
    def left_s(self) -> float | None:
        """How long the rest should take; None if a size has not been measured yet."""
        if len(self.took_s) < len(self.cells):
            return None
        return sum(self.took_s.values()) / len(self.cells) * (self.bursts - self.done)

    def take(self, cell: Cell, burst: Burst, took_s: float, memory_bytes: int) -> None:
        """Adds a repeat of a size.

        Args:
            cell: the size.
            burst: what it has shown.
            took_s: how long it took.
            memory_bytes: the most that the model's process took meanwhile.
        """
        add_burst(self.values.setdefault(cell, {}), burst, memory_bytes)
        self.took_s[cell] = took_s
        self.interrupted += burst.interrupted
        self.waited += burst.waited
        self.cached_tokens += burst.cached_tokens
        self.sent += cell.concurrency
        self.done += 1

    def look(self, now: Look) -> None:
        """Compares the daemon with how it was before the first repeat, which the first look shows.

        The daemon numbers requests in their order, so whatever numbers are not those of this run
        belong to others.
        """
        if self.first is None:
            self.first = now
            return
        self.sent += 1  # the look itself
        begin = self.first
        before = begin.steps
        grown = [name for name, steps in now.steps.items() if steps > before.get(name, 0)]
        self.others = Others(
            requests=now.number - begin.number - self.sent + begin.open_others,
            models=tuple(name for name in grown if name != self.model),
            has_new_process=now.generation != begin.generation,
        )

    def cell_maps(self) -> list[dict[str, Any]]:
        """The sizes that have been measured, with their figures, as `--json` prints them."""
        return [
            {
                "prompt_tokens": cell.prompt_tokens,
                "output_tokens": cell.output_tokens,
                "concurrency": cell.concurrency,
                "repeats": max(map(len, values.values())),
                "figures": summaries(values),
            }
            for cell in self.cells
            if (values := self.values.get(cell))
        ]
