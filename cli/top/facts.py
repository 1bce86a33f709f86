"""What `mlxsup top` knows of a daemon, and what follows from news of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..exit_status import CliError
from ..terminal.change_printer import change_line
from ..terminal.status_table import table_rows
from .keys import Item

if TYPE_CHECKING:
    from mlxsup.client import Client

    from ..terminal.table import Row

MAX_EVENTS = 200
"""How many of the latest events are kept; more fit on no screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What a daemon answered to the questions for its status and its requests.

    Attributes:
        at: seconds since the epoch.
        status: as `mlxsup status --json` prints it.
        requests: as `mlxsup requests --json` prints it.
    """

    at: float
    status: Mapping[str, Any]
    requests: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A model's state changed.

    Attributes:
        change: as `mlxsup events --json` prints it.
    """

    change: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """No daemon answers.

    Attributes:
        at: seconds since the epoch.
        error: why, as a command would end with it.
    """

    at: float
    error: CliError


News = Looked | Changed | Lost


def look(client: Client) -> Looked:
    """Asks the daemon.

    Raises:
        RequestError, ConnectionLost: it does not answer.
    """
    return Looked(at=time.time(), status=client.status(), requests=client.requests())


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that is shown.

    Attributes:
        looked: the latest answers.
        rows: the table's rows of the models.
        events: lines about what happened, the newest last.
        lost_at: since when no daemon answers, in seconds since the epoch; None while one does.
        lost: why not; empty while one does.
    """

    looked: Looked
    rows: tuple[Row, ...]
    events: tuple[str, ...] = ()
    lost_at: float | None = None
    lost: str = ""

    @classmethod
    def first(cls, looked: Looked) -> Facts:
        """What is known after the first look."""
        rows = table_rows(looked.status, looked.status["models"])
        return cls(looked=looked, rows=tuple(rows))

    def after(self, news: News) -> Facts:
        """What is known once these news have come."""
        match news:
            case Looked():
                return self._after_look(news)
            case Changed(change=change):
                return self._with_event(change_line(change))
            case Lost(at=at, error=error) if self.lost_at is None:
                lost = replace(self, lost_at=at, lost=error.message)
                return lost._with_event(f"{clock(at)} no daemon answers")
            case Lost(error=error):
                return replace(self, lost=error.message)

    def is_same_daemon(self, other: Facts) -> bool:
        """Whether numbers of requests mean the same in both."""
        return bool(self.looked.status["pid"] == other.looked.status["pid"])

    def items(self) -> tuple[Item, ...]:
        """What can be selected, in the order of the screen; nothing while no daemon answers."""
        return tuple(_items(self.looked)) if self.lost_at is None else ()

    def _after_look(self, looked: Looked) -> Facts:
        now = replace(Facts.first(looked), events=self.events)
        pid = now.looked.status["pid"]
        if not self.is_same_daemon(now):
            return now._with_event(f"{clock(looked.at)} another daemon answers (pid {pid})")
        if self.lost_at is not None:
            return now._with_event(f"{clock(looked.at)} the daemon answers again (pid {pid})")
        return now

    def _with_event(self, line: str) -> Facts:
        return replace(self, events=(*self.events, line)[-MAX_EVENTS:])


def clock(at: float) -> str:
    """A time of the day in UTC, as in the lines of changes: `12:03:04Z`."""
    return time.strftime("%H:%M:%SZ", time.gmtime(at))


def _items(looked: Looked) -> Iterator[Item]:
    for model in looked.status["models"]:
        name = str(model["name"])
        yield Item(kind="model", name=name, title=name, state=str(model["state"]))
    listed = looked.requests["requests"]
    ids = Counter(one["id"] for one in listed)
    for one in listed:
        # A number means another request once another daemon answers, an id never does; but two
        # connections may use the same one.
        name = str(one["id"] if ids[one["id"]] == 1 else one["number"])
        yield Item(kind="request", name=name, title=str(one["id"]), state=str(one["state"]))
