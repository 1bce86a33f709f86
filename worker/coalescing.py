"""Whether prompts that are ready wait a moment for others, so that one pass reads them all; pure.

The requests of a burst arrive over some milliseconds. If the first of them begins alone, the others
wait until its pass is over, and the passes that follow have a new shape each, which a GPU pays for.
So while nothing runs, the rows that are ready wait while another request is about to come: for a
short time if a pass costs much more than that, and not at all if it does not. Once several have
come at short intervals, more are likely, and a longer pause is no end yet: a supervisor that others
keep from a processor for some milliseconds would otherwise cut a burst in two.

The pause that ends a burst is 2 ms, which a lone request hardly notices, and the whole wait is at
most 50 ms, because 64 requests that are sent at once arrive over that long on a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable

QUIET_S = 0.002
"""If no request has come for this long, the burst is over."""

BURST = 4
"""From this many on, at intervals of at most `BURST_QUIET_S`, requests are a burst."""

BURST_QUIET_S = 0.006
"""The same for a burst, unless a pass costs less. Between two of 64 that were sent at once
there are up to 2 ms, and 3 to 11 where other processes want the same two cores."""

MOST_S = 0.05
"""No row waits longer, whatever comes: the last of 64 that were sent at once arrives 20 to 25 ms
after the first, and its prompt has yet to be prepared. Only others that keep coming, or one whose
preparation takes long, make a row wait for all of it."""

DEAR = 2.0
"""A pass must cost this many times `QUIET_S`, which a request that comes alone waits in vain."""


class Coalescing:
    """How long the rows wait that are ready while nothing runs.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrived_at = float("-inf")
        self._arrivals = 0
        self._since: float | None = None
        self._until: float | None = None

    def arrived(self) -> None:
        """Note that a request has come."""
        now = self._clock()
        is_soon = now - self._arrived_at <= BURST_QUIET_S
        self._arrivals = self._arrivals + 1 if is_soon else 1
        self._arrived_at = now

    def is_on(self, *, pass_s: float, is_preparing: bool) -> bool:
        """True if the rows that are ready still wait.

        Args:
            pass_s: what they save by sharing a pass (`Engine.shared_pass_s`).
            is_preparing: whether the prompt of another request is being prepared.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        until = self._since + MOST_S
        if not is_preparing:
            quiet_s = min(BURST_QUIET_S, pass_s) if self._arrivals >= BURST else QUIET_S
            until = min(until, self._arrived_at + quiet_s)
        if pass_s < DEAR * QUIET_S or now >= until:
            self.ends()
            return False
        self._until = until
        return True

    def ends(self) -> None:
        """Note that no row waits any longer: they have begun, or have left."""
        self._since = self._until = None

    @property
    def left_s(self) -> float | None:
        """Return the seconds that rows still wait if nothing else happens; None if none does."""
        return None if self._until is None else max(0.0, self._until - self._clock())
