"""What may be wrong with a played process that lives, and how processes die."""

from __future__ import annotations

from dataclasses import dataclass

SIGNAL_NUMBERS = {"SIGKILL": 9, "SIGTERM": 15, "SIGSEGV": 11, "SIGABRT": 6, "SIGBUS": 7}
ACCUSING = ("SIGSEGV", "SIGABRT", "SIGBUS")
HANGS = ("stall", "gil", "blocked", "waits_on", "stop", "load_stalls", "load_stops")
MUTE_HANGS = ("gil", "stop", "load_stops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with a process that lives.

    Attributes:
        name: which fault of the plan.
        since: virtual seconds.
    """

    name: str
    since: float
