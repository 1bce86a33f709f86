"""What `mlxsup top` knows of a daemon: looks at it, and the changes that were heard in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..changes import Changes, is_step

if TYPE_CHECKING:
    from mlxsup.client import Client


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A daemon's answers to the questions for its status and its requests.

    Attributes:
        at: seconds since the epoch.
        status: as `mlxsup status --json` prints it.
        requests: as `mlxsup requests --json` prints it.
        changes: of models' states since the look before, as `mlxsup events --json` prints them.
    """

    at: float
    status: Mapping[str, Any]
    requests: Mapping[str, Any]
    changes: Sequence[Mapping[str, Any]] = ()


def looks(client: Client, interval_s: float, has_ended: threading.Event) -> Iterator[Look]:
    """Yield a look at once and after each interval, until the event is set.

    Raises:
        RequestError, ConnectionLost: the daemon does not answer, or reports no changes any more.
    """
    changes = Changes(client)
    while not has_ended.is_set():
        status, requests = client.status(), client.requests()
        heard = [change for change in changes.wait(0.0) if is_step(change)]
        yield Look(at=time.time(), status=status, requests=requests, changes=heard)
        has_ended.wait(interval_s)


def clock(at: float) -> str:
    """Return a time of the day in UTC, as in the lines of changes: `12:03:04Z`."""
    return time.strftime("%H:%M:%SZ", time.gmtime(at))
