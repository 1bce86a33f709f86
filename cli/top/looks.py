"""What `mlxsup top` knows of a daemon: looks at it, and the changes that were heard in between."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..state_changes import state_changes

if TYPE_CHECKING:
    from mlxsup.client import Client

MAX_CHANGES = 200
"""How many changes wait for a reader that is held up; more fit on no screen."""


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

    It also ends if changes are no longer heard, although the daemon answers: connect again.

    Raises:
        RequestError, ConnectionLost: the daemon does not answer.
    """
    heard: deque[Mapping[str, Any]] = deque(maxlen=MAX_CHANGES)
    changes = state_changes(client)
    # It ends with the client.
    hearing = threading.Thread(
        target=_hear, args=(changes, heard), name="mlxsup-changes", daemon=True
    )
    hearing.start()
    while hearing.is_alive() and not has_ended.is_set():
        status, requests = client.status(), client.requests()
        taken = [heard.popleft() for _ in range(len(heard))]
        yield Look(at=time.time(), status=status, requests=requests, changes=taken)
        has_ended.wait(interval_s)


def _hear(changes: Iterator[Mapping[str, Any]], heard: deque[Mapping[str, Any]]) -> None:
    from mlxsup.client import ConnectionLost, RequestError

    try:
        heard.extend(changes)
    except (ConnectionLost, RequestError):
        # The next look meets the same error and reports it, or else a new connection follows.
        return


def clock(at: float) -> str:
    """Return a time of the day in UTC, as in the lines of changes: `12:03:04Z`."""
    return time.strftime("%H:%M:%SZ", time.gmtime(at))
