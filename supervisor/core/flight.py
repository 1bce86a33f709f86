"""The latest entries of the flight recorder, for whoever asks while the daemon lives.

Only what is rare is recorded (changes of state, deaths, and the start, pauses and end of each
request), as facts and not as sentences: a better sentence then explains an old death, too.
Requests that are refused on arrival are left out, because a flood of them would push out what
others ask for.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any

from mlxsup.protocol.flight import Entry, ModelChanged, WorkerDied
from mlxsup.protocol.plain import to_map

CHANGES_OF_A_MODEL = 40
DEATHS_OF_A_MODEL = 8
OF_REQUESTS = 256
MOST_MODELS = 1024
"""Those that changed last; a configuration has far fewer."""

Kept = tuple[int, float, Entry]
"""An entry with its number, which counts as that in its file does, and its time, monotonic
seconds."""


class Flight:
    """Keeps entries in memory; the shell writes all of them to files."""

    def __init__(self) -> None:
        self._last_number = 0
        # Bounded by the four numbers above.
        self._changes: dict[str, deque[Kept]] = {}
        self._deaths: dict[str, deque[Kept]] = {}
        self._requests: deque[Kept] = deque(maxlen=OF_REQUESTS)

    def keep(self, entry: Entry, now: float) -> None:
        """Keeps an entry."""
        self._last_number += 1
        kept = (self._last_number, now, entry)
        match entry:
            case WorkerDied(model=model):
                _ring(self._deaths, model, DEATHS_OF_A_MODEL).append(kept)
            case ModelChanged(model=model):
                _ring(self._changes, model, CHANGES_OF_A_MODEL).append(kept)
            case _:
                self._requests.append(kept)

    def entries(self, now: float) -> list[dict[str, Any]]:
        """What is kept, oldest first: `n`, `kind`, the entry's fields, and `ago_s`."""
        kept = heapq.merge(*self._changes.values(), *self._deaths.values(), self._requests)
        return [
            {"n": number, "ago_s": now - at, "kind": entry.KIND, **to_map(entry)}
            for number, at, entry in kept
        ]


def _ring(rings: dict[str, deque[Kept]], model: str, length: int) -> deque[Kept]:
    ring = rings.pop(model, None)
    if ring is None:
        ring = deque(maxlen=length)
    rings[model] = ring  # the latest is the last
    while len(rings) > MOST_MODELS:
        del rings[next(iter(rings))]
    return ring
