"""The actions that one event leads to, in order: all decisions end up in this one list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxsup.protocol.client_messages import Event as EventMessage
from mlxsup.protocol.client_messages import Failed, MessageToClient, Notice, Reply
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.flight import Entry
from mlxsup.protocol.ids import Caller, ConnectionId, RequestId
from mlxsup.protocol.states import NoticeKind
from mlxsup.protocol.worker_messages import MessageToWorker

from .actions import Action, Announce, SendToClient, SendToWorker
from .journal import Journal
from .model import Model
from .requests import Request


class Outbox:
    """Collects actions until the event has been handled.

    Attributes:
        subscriptions: connections that get every change of a model, and under which id.
        journal: the latest facts of models and requests.
    """

    def __init__(self) -> None:
        # Bounded by the connections that the shell lets in, one entry each.
        self.subscriptions: dict[ConnectionId, RequestId] = {}
        self.journal = Journal()
        self._actions: list[Action] = []
        self._now = 0.0

    def __iter__(self) -> Iterator[Action]:
        return iter(self._actions)

    def begin(self, now: float) -> None:
        """Begin the actions of an event; drop what one that raised an error has left."""
        self._actions, self._now = [], now

    def add(self, action: Action) -> None:
        """Add an action after all others."""
        self._actions.append(action)

    def record(self, entry: Entry) -> None:
        """Keep a fact in the journal, and have the shell write it."""
        self.journal.keep(entry, self._now)
        self._actions.append(entry)

    def take(self) -> list[Action]:
        """Return the actions of this event; the next one starts with none."""
        actions, self._actions = self._actions, []
        return actions

    def send(self, connection: ConnectionId, message: MessageToClient) -> None:
        """Send a message to a client."""
        self._actions.append(SendToClient(connection=connection, message=message))

    def reply(self, caller: Caller, value: dict[str, Any]) -> None:
        """Answer a command that succeeded."""
        self.send(caller.connection, Reply(id=caller.id, value=value))

    def fail(self, caller: Caller, error: RemoteError) -> None:
        """Answer a command that failed."""
        self.send(caller.connection, Failed(id=caller.id, error=error))

    def tell(self, model: Model, message: MessageToWorker) -> None:
        """Send a message to the process of a model, and count it: its heartbeats count, too."""
        if model.process.watch is not None:
            model.process.watch.was_told(self._now)
        generation = model.life.generation
        action = SendToWorker(model=model.name, generation=generation, message=message)
        self._actions.append(action)

    def notify(
        self,
        request: Request,
        kind: NoticeKind,
        detail: dict[str, Any],
        **times: float | None,
    ) -> None:
        """Send a notice to a client that wants them, unless it got the same one before.

        Args:
            times: seconds that it says besides; they alone are no news. None: not known, left out.
        """
        if request.wants_notices and request.sent.notices.get(kind) != detail:
            request.sent.notices[kind] = detail
            known = {name: seconds for name, seconds in times.items() if seconds is not None}
            notice = Notice(id=request.id, kind=kind, detail={**detail, **known})
            self.send(request.connection, notice)

    def announce(self, change: dict[str, Any]) -> None:
        """Send a change of a model to all that watch."""
        self._actions.append(Announce(change=change))
        for connection, id in self.subscriptions.items():
            self.send(connection, EventMessage(id=id, value=change))
