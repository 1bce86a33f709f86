"""What is known of the files that a process has loaded: whether its model could be loaded again."""

from __future__ import annotations

from dataclasses import dataclass, replace

COUNTS_FOR_S = 5.0
"""What was found is believed for so long; no folder is looked at more often than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What the latest look at them has found.

    Attributes:
        is_being_seen: whether the shell is looking at them now.
        seen_at: when the latest answer came, monotonic seconds; None before the first.
        change: what had changed since they were loaded, a phrase; empty if nothing had.
    """

    is_being_seen: bool = False
    seen_at: float | None = None
    change: str = ""

    def being_seen(self) -> Files:
        """The shell was asked to look; what was found before is still believed."""
        return replace(self, is_being_seen=True)

    def may_be_asked(self, now: float) -> bool:
        """Whether what was found is too old, and nobody is looking."""
        return not self.is_being_seen and not self.is_fresh(now)

    def is_fresh(self, now: float) -> bool:
        """Whether what was found last may be believed."""
        return self.seen_at is not None and now < self.seen_at + COUNTS_FOR_S


UNSEEN = Files()
"""Nobody has looked at them since the process was started."""
