"""Whether prompts that are ready wait a moment for others, so that one pass reads them all; pure.

The requests of a burst arrive over some milliseconds. If the first of them begins alone, the others
wait until its pass is over, and the passes that follow have a new shape each, which a GPU pays for.
So while nothing runs, the rows that are ready wait while another request is about to come: for a
short time if a pass costs much more than that, and not at all if it does not.
"""

from __future__ import annotations

from collections.abc import Callable

QUIET_S = 0.002
"""If no request has come for this long, the burst is over."""

MOST_S = 0.025
"""No row waits longer, whatever comes: a burst of 64 arrives over as long. Only others
that keep coming, or one whose preparation takes long, make a row wait for all of it."""

DEAR = 2.0
"""A pass must cost this many times `QUIET_S`, which a request that comes alone waits in vain."""


class Gathering:
    """How long the rows wait that are ready while nothing runs.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrived_at = float("-inf")
        self._since: float | None = None
        self._until: float | None = None

    def arrived(self) -> None:
        """A request has come."""
        self._arrived_at = self._clock()

    def is_on(self, *, pass_s: float, is_preparing: bool) -> bool:
        """Whether the rows that are ready still wait.

        Args:
            pass_s: what they save by sharing a pass (`Engine.shared_pass_s`).
            is_preparing: whether the prompt of another request is being prepared.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        until = self._since + MOST_S
        if not is_preparing:
            until = min(until, self._arrived_at + QUIET_S)
        if pass_s < DEAR * QUIET_S or now >= until:
            self.ends()
            return False
        self._until = until
        return True

    def ends(self) -> None:
        """No row waits any longer: they have begun, or have left."""
        self._since = self._until = None

    @property
    def left_s(self) -> float | None:
        """How long they still wait if nothing else happens; None if none does."""
        return None if self._until is None else max(0.0, self._until - self._clock())
