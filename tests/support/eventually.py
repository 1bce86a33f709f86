"""Waiting for something to become true, instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeVar

T = TypeVar("T")

INTERVAL_S = 0.01
LONGEST_INTERVAL_S = 0.05
"""Most predicates ask a daemon, which costs both sides a millisecond of a processor."""

TIMEOUT_S = 60.0
"""What takes a second on a quiet machine takes six where eight others want each core."""


def eventually(
    predicate: Callable[[], T | Literal[False] | None],
    timeout_s: float = TIMEOUT_S,
    what: str = "",
) -> T:
    """The first truthy value of the predicate.

    Args:
        predicate: asked again and again.
        timeout_s: ten times what is expected on a busy machine.
        what: for the failure's message.

    Raises:
        AssertionError: the time is over; the last value is named.
    """
    until = time.monotonic() + timeout_s
    interval_s = INTERVAL_S
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > until:
            name = what or getattr(predicate, "__name__", "the predicate")
            raise AssertionError(f"{name} was still {value!r} after {timeout_s:g} s")
        time.sleep(interval_s)
        interval_s = min(1.2 * interval_s, LONGEST_INTERVAL_S)
