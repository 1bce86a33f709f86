"""Stop strings, found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text at the first of some stop strings, wherever the pieces are cut.

    Text that may be the beginning of a stop string is held back until the next piece decides, so
    no part of a stop string is ever shown. The first stop string is the one that is
    complete first; of several that end together the longest counts.

    Args:
        stops: the stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._exempt = 0  # this many of the held characters end no stop string
        self._found: str | None = None

    @property
    def is_stopped(self) -> bool:
        """True if a stop string was found; text after it is ignored."""
        return self._found is not None

    @property
    def found(self) -> str | None:
        """Return the stop string that was found."""
        return self._found

    def is_plain(self, text: str) -> bool:
        """True if `add` would return this text as it is, and keep nothing of it in mind."""
        return not self._stops or not (
            self._found or self._held or any(stop[0] in text for stop in self._stops)
        )

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """Add a piece; return the text that became certain with it, which may be empty.

        Args:
            text: the piece.
            may_stop: whether a stop string that is complete within this piece counts; one that
                only begins in it counts by the piece that completes it.
        """
        if self._found is not None or not text:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        exempt = self._exempt if may_stop else len(pending)
        found = find_first(pending, self._stops, ends_after=exempt)
        if found is not None:
            start, self._found = found
            self._held = ""
            return pending[:start]
        certain = len(pending) - undecided(pending, self._stops)
        self._held = pending[certain:]
        self._exempt = max(0, exempt - certain)
        return pending[:certain]

    def finish(self) -> str:
        """Return the text still held back when the text has ended without a stop string."""
        held, self._held, self._exempt = self._held, "", 0
        return held


def find_first(
    pending: str, texts: Sequence[str], *, ends_after: int = 0
) -> tuple[int, str] | None:
    """Find the text that is complete first, and return where it starts and the text; of several
    that end together, the longest. Only those that end after `ends_after` characters count."""
    found = [
        (start + len(text), start, text)
        for text in texts
        if (start := pending.find(text, max(0, ends_after - len(text) + 1))) >= 0
    ]
    return min(found)[1:] if found else None


def undecided(pending: str, texts: Sequence[str]) -> int:
    """Count the characters at the end that may be the beginning of a text, but not all of it."""
    window = max(0, len(pending) - max(map(len, texts), default=0) + 1)
    longest = 0
    for text in texts:
        start = pending.find(text[0], window)
        while start >= 0:
            if len(pending) - start < len(text) and text.startswith(pending[start:]):
                longest = max(longest, len(pending) - start)
                break
            start = pending.find(text[0], start + 1)
    return longest
