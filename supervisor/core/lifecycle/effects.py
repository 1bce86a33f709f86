"""What a transition brings about besides actions: for requests, for callers, for those who watch.

A life knows nothing of requests, so `fleet.py` carries these out.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxsup.protocol.errors import RemoteError

from ..actions import Abandon, SendToWorker, SignalWorker, Spawn
from ..health.blame import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEnds:
    """Every request that waits for this model is answered."""

    error: RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEnds:
    """Every request that runs is answered, though the process still lives."""

    error: RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLost:
    """The process is gone with what ran in it: answer it, or let it wait again."""

    text: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class UpWaitersEnd:
    """Callers of load and restart are answered: well, or with an error."""

    error: RemoteError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DownWaitersEnd:
    """Callers of unload are answered: well, or with an error."""

    error: RemoteError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The state changed: tell those who watch."""

    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """The model was removed and its process is gone: forget it."""


Effect = QueueEnds | RunningEnds | RunningLost | UpWaitersEnd | DownWaitersEnd | Changed | Erased

Outcome = Effect | Spawn | SendToWorker | SignalWorker | Abandon
"""What a transition brings about, in order."""
