"""What a transition causes besides actions: for requests, for callers, for watchers.

A life knows nothing about requests, so `fleet.py` carries these out.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import PauseReason

from ..actions import Abandon, LookAtFiles, SendToWorker, SignalWorker, Spawn
from ..health.blame import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEnds:
    """Answer every request that waits for this model."""

    error: RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEnds:
    """Answer every running request, though the process is still alive."""

    error: RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLost:
    """The process is gone with what ran in it: answer those requests, or let them wait again."""

    text: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLeave:
    """Rows are to leave the batch without an end; what they have computed is dropped.

    Attributes:
        reason: what for.
        keys: whose rows; None: all of them.
    """

    reason: PauseReason
    keys: tuple[RequestKey, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpWaitersEnd:
    """Answer callers of load and restart: with success, or with an error."""

    error: RemoteError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DownWaitersEnd:
    """Answer callers of unload: with success, or with an error."""

    error: RemoteError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The state changed: notify the watchers."""

    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """The model was removed and its process is gone: forget it."""


Effect = (
    QueueEnds
    | RunningEnds
    | RunningLost
    | RowsLeave
    | UpWaitersEnd
    | DownWaitersEnd
    | Changed
    | Erased
)

Outcome = Effect | Spawn | LookAtFiles | SendToWorker | SignalWorker | Abandon
"""Everything that a transition can cause."""
