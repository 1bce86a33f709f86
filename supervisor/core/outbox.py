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
from .lifecycle.life import Life
from .requests.ledger import Request


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

    def __iter__(self) -> Iterator[Action]:
        return iter(self._actions)

    def add(self, action: Action) -> None:
        """Add an action after all others."""
        self._actions.append(action)

    def record(self, entry: Entry, now: float) -> None:
        """Keep a fact in the journal, and have the shell write it."""
        self.journal.keep(entry, now)
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

    def tell(self, life: Life, message: MessageToWorker) -> None:
        """Send a message to the process of a model."""
        self._actions.append(
            SendToWorker(model=life.name, generation=life.generation, message=message)
        )

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
