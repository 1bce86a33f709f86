"""Whether the flight recorder has what really happened: who ran when a process died, what became of
each, and how each request ended."""

from __future__ import annotations

from mlxsup.protocol.client_messages import Done
from mlxsup.protocol.flight import CONTINUES, PAUSED, Entry, RequestEnded, WorkerDied

from .asks import Ask, Place
from .violation import check


class Flight:
    """What was recorded about the event at hand, and what should have been."""

    def __init__(self) -> None:
        self._ended: set[int] = set()
        self._lost: list[Ask] = []
        self._closed: list[Ask] = []
        self._deaths: list[WorkerDied] = []
        self._ends: dict[int, str] = {}

    def begin(self) -> None:
        """Another event comes."""
        self._lost, self._closed, self._deaths, self._ends = [], [], [], {}

    def loses(self, asks: list[Ask]) -> None:
        """A process has died that ran these."""
        self._lost += asks

    def closes(self, ask: Ask) -> None:
        """A request is over."""
        self._closed.append(ask)

    def take(self, entry: Entry) -> None:
        """The core has recorded something."""
        match entry:
            case WorkerDied() as died:
                self._deaths.append(died)
            case RequestEnded(number=number, outcome=outcome):
                check("flight: ended twice", number not in self._ended, entry)
                self._ended.add(number)
                self._ends[number] = outcome

    def look(self) -> None:
        """The core has said all that it has to say of the event."""
        rows = {row.number: row for died in self._deaths for row in died.rows}
        lost = {ask.key: ask for ask in self._lost if ask.key is not None}
        check("flight: who ran", set(rows) == set(lost), f"{sorted(rows)} {sorted(lost)}")
        for key, ask in lost.items():
            row = rows[key]
            check("flight: tokens", row.tokens == ask.tokens, f"{ask}: {row}")
            if row.fate in (CONTINUES, PAUSED):
                is_true = ask.is_open and (row.fate == PAUSED) == (ask.place is Place.PAUSED)
            else:
                is_true = not ask.is_open and row.fate == ask.code
            check("flight: fate", is_true, f"{ask}: {row}")
        for ask in self._closed:
            if ask.key is not None:
                outcome = ask.end.finish_reason if isinstance(ask.end, Done) else ask.code
                is_true = self._ends.get(ask.key) == (outcome or "gone")
                check("flight: outcome", is_true, f"{ask}: {self._ends.get(ask.key)}")
