"""Virtual time, links that deliver in order, and what a broken promise is called."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable


class Violation(Exception):
    """A promise is broken: the name of the check, and what was seen instead."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


def check(name: str, is_kept: object, detail: object = "") -> None:
    """Raise Violation unless `is_kept`; not an assert, so that `python -O` keeps it."""
    if not is_kept:
        raise Violation(name, str(detail))


Happening = Callable[[], None]


class Timeline:
    """What will happen, earliest first; equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Happening]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._queue)

    def at(self, when: float, happen: Happening) -> None:
        """Have something happen at this time, or now if that is past."""
        self._order += 1
        heapq.heappush(self._queue, (max(when, self.now), self._order, happen))

    def after(self, seconds: float, happen: Happening) -> None:
        self.at(self.now + seconds, happen)

    def pass_time(self, seconds: float) -> None:
        """Let everything happen that is due within these seconds."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.advance()
        self.now = until

    def advance(self) -> None:
        """Let the next thing happen."""
        self.now, _, happen = heapq.heappop(self._queue)
        happen()


class Link:
    """Delivers in order, late; what crosses another link is in no order with it.

    Args:
        timeline: of the run.
        dice: draws the delays.
        scale_s: the mean delay; 0 for none.
        longest_s: the longest one.
    """

    def __init__(
        self, timeline: Timeline, dice: random.Random, scale_s: float, longest_s: float
    ) -> None:
        self._timeline, self._dice = timeline, dice
        self._scale_s, self._longest_s = scale_s, longest_s
        self._under_way: deque[Happening] = deque()
        self._last_at = 0.0

    def send(self, deliver: Happening, *, more_s: float = 0.0) -> None:
        """Have `deliver` called after all that was sent before; `more_s` later than usual."""
        delay_s = more_s
        if self._scale_s:
            delay_s += min(self._dice.expovariate(1 / self._scale_s), self._longest_s)
        self._last_at = max(self._last_at, self._timeline.now + delay_s)
        self._under_way.append(deliver)
        self._timeline.at(self._last_at, lambda: self._under_way.popleft()())

    def lose_end(self) -> None:
        """Lose some of what is under way: from a random place on."""
        kept = self._dice.randint(0, len(self._under_way))
        for place in range(kept, len(self._under_way)):
            self._under_way[place] = lambda: None
