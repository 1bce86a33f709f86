"""Stop strings, found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text at the first of some stop strings, wherever the pieces are cut.

    Text that may be the beginning of a stop string is held back until the next piece decides, so
    no part of a stop string is ever shown. The first stop string is the one that is complete
    first; of several that end together the longest counts.

    Args:
        stops: the stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found; what comes after it is not looked at."""
        return self._is_stopped

    def add(self, text: str) -> str:
        """The text that became certain with this piece; may be empty."""
        if self._is_stopped or not text:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        cut = self._find(pending)
        if cut is not None:
            self._is_stopped = True
            self._held = ""
            return pending[:cut]
        certain = len(pending) - self._undecided(pending)
        self._held = pending[certain:]
        return pending[:certain]

    def finish(self) -> str:
        """What was still held back, when the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, pending: str) -> int | None:
        found = [
            (start + len(stop), start) for stop in self._stops if (start := pending.find(stop)) >= 0
        ]
        return min(found)[1] if found else None

    def _undecided(self, pending: str) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        window = max(0, len(pending) - self._longest + 1)
        longest = 0
        for stop in self._stops:
            start = pending.find(stop[0], window)
            while start >= 0:
                if stop.startswith(pending[start:]):
                    longest = max(longest, len(pending) - start)
                    break
                start = pending.find(stop[0], start + 1)
        return longest
