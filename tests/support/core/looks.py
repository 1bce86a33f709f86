"""What tests see of the pure core: its status, and what the latest event has led to."""

from __future__ import annotations

from typing import Any, TypeVar

from mlxsup.protocol.client_messages import Done, Failed, Reply
from mlxsup.protocol.ids import ConnectionId, Generation, ModelName, RequestKey
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import State
from mlxsup.protocol.worker_messages import Dispatch
from mlxsup.supervisor.core.actions import (
    Action,
    Announce,
    SendToClient,
    SendToWorker,
    SignalWorker,
    Spawn,
    WorkerSignal,
)
from mlxsup.supervisor.core.core import Core
from mlxsup.supervisor.core.model import Model

ALICE = ConnectionId(b"alice")
BOB = ConnectionId(b"bob")

A = TypeVar("A", bound=Action)
M = TypeVar("M", bound=Message)

End = Done | Failed
"""A terminal message."""


class Looks:
    """What to look at in a core under test.

    Attributes:
        core: the core.
        now: monotonic seconds.
        actions: what came of the latest event.
        terminals: every terminal message so far, by connection and id.
    """

    core: Core
    now: float
    actions: list[Action]
    terminals: dict[tuple[bytes, str], list[End]]

    def model(self, name: str = "m") -> Model:
        """The model itself."""
        return self.core.fleet.by_name[ModelName(name)]

    def row(self, model: str = "m") -> dict[str, Any]:
        """The model's status row."""
        rows: list[dict[str, Any]] = self.core.status(self.now)["models"]
        [found] = [row for row in rows if row["name"] == model]
        return found

    def line(self, model: str = "m") -> list[str]:
        """The ids of those who wait for the model, in the order of its line."""
        return [shown["id"] for shown in self.row(model)["line"]]

    def state(self, model: str = "m") -> State:
        """The model's state."""
        return self.model(model).life.state

    def generation(self, model: str = "m") -> Generation:
        """The model's generation."""
        return self.model(model).life.generation

    def of(self, kind: type[A]) -> list[A]:
        """The latest actions of one kind."""
        return [action for action in self.actions if isinstance(action, kind)]

    def spawns(self) -> list[str]:
        """The models that were spawned by the latest event."""
        return [spawn.model for spawn in self.of(Spawn)]

    def signals(self) -> list[WorkerSignal]:
        """The signals that the latest event sent."""
        return [action.signal for action in self.of(SignalWorker)]

    def told(self, kind: type[M]) -> list[M]:
        """What the latest event told workers, of one kind."""
        sent = (action.message for action in self.of(SendToWorker))
        return [message for message in sent if isinstance(message, kind)]

    def dispatched(self) -> list[RequestKey]:
        """Keys that the latest event dispatched."""
        return [message.key for message in self.told(Dispatch)]

    def sent(self, kind: type[M], connection: ConnectionId = ALICE) -> list[M]:
        """What the latest event sent to a client, of one kind."""
        return [
            action.message
            for action in self.of(SendToClient)
            if action.connection == connection and isinstance(action.message, kind)
        ]

    def sent_in_order(self, connection: ConnectionId = ALICE) -> list[Message]:
        """All that the latest event sent to a client."""
        return [a.message for a in self.of(SendToClient) if a.connection == connection]

    def announced(self) -> list[str]:
        """The notes of the changes that the latest event told watchers."""
        return [str(action.change["note"]) for action in self.of(Announce)]

    def errors(self, connection: ConnectionId = ALICE) -> dict[str, str]:
        """The error codes that the latest event sent to a client, by id."""
        return {failed.id: failed.error.code for failed in self.sent(Failed, connection)}

    def replies(self, connection: ConnectionId = ALICE) -> list[str]:
        """The commands that the latest event answered well."""
        return [reply.id for reply in self.sent(Reply, connection)]

    def end_of(self, id: str = "r1", connection: ConnectionId = ALICE) -> End:
        """The one terminal message of a request or a command."""
        [end] = self.terminals[connection, id]
        return end

    def failure_of(self, id: str = "r1", connection: ConnectionId = ALICE) -> Failed:
        """The same, of one that has failed."""
        end = self.end_of(id, connection)
        assert isinstance(end, Failed), end
        return end

    def result_of(self, id: str = "r1", connection: ConnectionId = ALICE) -> Done:
        """The same, of one that has an answer."""
        end = self.end_of(id, connection)
        assert isinstance(end, Done), end
        return end
