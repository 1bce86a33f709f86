"""The supervisor's decisions: one event in, a list of actions out, and nothing else.

`Core` is the only owner of supervisor state. It reads no clock and touches no socket: tests and
simulations drive it with plain values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import ModelName, RequestId, RequestKey
from mlxsup.protocol.messages import (
    Cancel,
    Failed,
    Generate,
    Load,
    Message,
    Ping,
    Reload,
    Reply,
    Restart,
    StatusQuery,
    Stop,
    Subscribe,
    Unload,
)
from mlxsup.protocol.messages import Event as EventMessage
from mlxsup.protocol.states import State, Wanted, Why

from .actions import (
    Action,
    Announce,
    Finish,
    ReadConfiguration,
    SendToClient,
    SendToWorker,
    WakeAt,
)
from .deadlines import Deadlines
from .errors import (
    bad_configuration,
    shutting_down,
    slow_consumer,
    superseded_subscription,
    unknown_model,
)
from .events import (
    Caller,
    ClientGone,
    ClientSaid,
    ClientTooSlow,
    ConnectionId,
    Event,
    Exited,
    Reloaded,
    ReloadRefused,
    Sampled,
    ShutdownAsked,
    Spawned,
    SpawnFailed,
    Started,
    Tick,
    WorkerBroke,
    WorkerSaid,
    WorkerSeen,
    WorkerUnlinked,
)
from .fleet import Models
from .lifecycle.states import Ready as ReadyPhase
from .lifecycle.states import Stopping as StoppingPhase
from .lifecycle.triggers import Due, Hurry, Reconfigured, Removed, WantDown, WantRestart, WantUp
from .model import Model
from .requests.ledger import Request
from .serving import Serving
from .settings import CoreSettings, ModelSettings
from .status import status_map
from .worker_events import WorkerEvent, WorkerEvents


class Core:
    """The pure core.

    Args:
        settings: the `[supervisor]` table.
        models: every entry, in the order of the file.
        facts: what the status reply shows beside the core's own (version, pid, endpoint, …).
        random: draws the jitter of restarts.
        is_strict: raise where the table has no rule (tests) instead of ending that one life.
    """

    def __init__(
        self,
        settings: CoreSettings,
        models: Sequence[ModelSettings],
        *,
        facts: Mapping[str, Any],
        random: random.Random,
        is_strict: bool,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._actions: list[Action] = []
        self._deadlines = Deadlines()
        self._serving = Serving(settings, self._deadlines, self._do)
        self._models = Models(
            serving=self._serving,
            deadlines=self._deadlines,
            do=self._do,
            announce=self._announce,
            random=random,
            exit_grace_s=settings.exit_grace_s,
            is_strict=is_strict,
        )
        self._worker_events = WorkerEvents(self._models, self._serving)
        for entry in models:
            self._models.add(entry)
        # Bounded by the connections that the transport lets in, one entry each.
        self._subscriptions: dict[ConnectionId, RequestId] = {}
        self._is_shutting_down = False
        self._has_finished = False
        self._started_at = 0.0
        self._machine_bytes = 0
        self._woken_at: float | None = None

    # ------------------------------------------------------------ what the shell calls

    def handle(self, event: Event) -> list[Action]:
        """Takes one event and returns what is to be done about it, in order.

        Raises:
            ImpossibleTransitionError: a bug in the table, only where the core is strict.
        """
        self._actions = []
        _HANDLERS[type(event)](self, event)
        self._models.settle(event.now)
        for action in self._actions:
            if isinstance(action, SendToWorker):
                self._models.was_told(action, event.now)
        self._wake_in_time()
        self._finish_if_done()
        return self._actions

    def status(self, now: float) -> dict[str, Any]:
        """What `status --json` prints."""
        return status_map(
            self._models,
            self._serving.ledger,
            facts=self._facts,
            started_at=self._started_at,
            machine_bytes=self._machine_bytes,
            now=now,
        )

    def stories(self) -> dict[str, tuple[str, ...]]:
        """The latest events of each model's life and what they led to."""
        return {name: tuple(model.story) for name, model in self._models.by_name.items()}

    def check_invariants(self) -> None:
        """Raises AssertionError where the state contradicts itself; for tests, after each event."""
        self._serving.ledger.check_invariants()
        self._models.check_invariants()
        if self._is_shutting_down:
            assert all(model.life.wanted is not Wanted.UP for model in self._models)
            assert self._serving.ledger.waiting == 0

    # ------------------------------------------------------------ clients

    def _on_client_said(self, event: ClientSaid) -> None:
        message: Any = event.message  # each of CLIENT_MESSAGES has an id
        try:
            _CLIENT_HANDLERS[type(message)](self, event, message)
        except RemoteError as error:
            self._send(event.connection, Failed(id=message.id, error=error.to_wire()))

    def _on_generate(self, event: ClientSaid, message: Generate) -> None:
        for name in ("queue_timeout_s", "first_token_timeout_s", "timeout_s"):
            value = getattr(message, name)
            if value is not None and value < 0:
                raise RemoteError(
                    ErrorCode.INVALID_REQUEST,
                    f"{name} takes seconds from 0, not {value:g}",
                    detail={"parameter": name},
                )
        if self._is_shutting_down:
            raise shutting_down()
        model = self._models.find(message.model)
        refusal = self._serving.admit(
            model,
            message,
            event.connection,
            models=len(self._models.by_name),
            now=event.now,
        )
        if refusal is not None:
            raise refusal
        self._models.touch(model)
        if model.life.wanted is not Wanted.UP:
            self._models.trigger(model, WantUp(why=Why.REQUEST), event.now)

    def _on_cancel(self, event: ClientSaid, message: Cancel) -> None:
        if self._subscriptions.get(event.connection) == message.id:
            del self._subscriptions[event.connection]
        request = self._serving.ledger.find(event.connection, message.id)
        if request is not None:  # else its end is already on the way
            self._serving.cancel(self._touched(request), request, event.now)

    def _on_ping(self, event: ClientSaid, message: Ping) -> None:
        self._send(event.connection, Reply(id=message.id, value={}))

    def _on_status(self, event: ClientSaid, message: StatusQuery) -> None:
        value = self.status(event.now)
        if message.debug:
            value["stories"] = self.stories()
        self._send(event.connection, Reply(id=message.id, value=value))

    def _on_load(self, event: ClientSaid, message: Load) -> None:
        model = self._model_for_command(message.model)
        model.up_callers.append(Caller(connection=event.connection, id=message.id))
        if model.life.state is State.FAILED:
            model.recovery.lift()
        self._models.trigger(model, WantUp(why=Why.USER), event.now)

    def _on_unload(self, event: ClientSaid, message: Unload) -> None:
        model = self._model_for_command(message.model)
        model.down_callers.append(Caller(connection=event.connection, id=message.id))
        drain_s = self._settings.drain_timeout_s
        self._models.trigger(model, WantDown(why=Why.USER, drain_s=drain_s), event.now)

    def _on_restart(self, event: ClientSaid, message: Restart) -> None:
        model = self._model_for_command(message.model)
        model.up_callers.append(Caller(connection=event.connection, id=message.id))
        model.recovery.lift()
        drain_s = self._settings.drain_timeout_s
        self._models.trigger(
            model, WantRestart(is_immediate=message.now, drain_s=drain_s), event.now
        )

    def _on_stop(self, event: ClientSaid, message: Stop) -> None:
        if message.timeout_s is not None and message.timeout_s < 0:
            raise RemoteError(
                ErrorCode.INVALID_REQUEST,
                "timeout_s takes seconds from 0",
                detail={"parameter": "timeout_s"},
            )
        pids = [m.life.pid for m in self._models if m.life.pid is not None]
        limit_s = self._settings.drain_timeout_s if message.timeout_s is None else message.timeout_s
        value = {
            "pids": pids,
            "supervisor_pid": self._facts.get("pid"),
            "drain_timeout_s": 0.0 if message.now else limit_s,
            "end_limit_s": self._models.end_limit_s(),
        }
        self._send(event.connection, Reply(id=message.id, value=value))
        self._shut_down(event.now, is_immediate=message.now, drain_s=message.timeout_s)

    def _on_subscribe(self, event: ClientSaid, message: Subscribe) -> None:
        earlier = self._subscriptions.get(event.connection)
        if earlier is not None and earlier != message.id:
            self._send(
                event.connection, Failed(id=earlier, error=superseded_subscription().to_wire())
            )
        self._subscriptions[event.connection] = message.id

    def _on_reload(self, event: ClientSaid, message: Reload) -> None:
        if self._is_shutting_down:
            raise shutting_down()
        caller = Caller(connection=event.connection, id=message.id)
        self._do(ReadConfiguration(caller=caller))

    def _on_client_gone(self, event: ClientGone) -> None:
        for request in self._serving.ledger.of_connection(event.connection):
            self._serving.drop(self._touched(request), request)
        self._forget_callers(event.connection)

    def _on_client_too_slow(self, event: ClientTooSlow) -> None:
        error = slow_consumer()
        for request in self._serving.ledger.of_connection(event.connection):
            self._serving.fail(self._touched(request), request, error)
        for caller in self._forget_callers(event.connection):
            self._send(caller.connection, Failed(id=caller.id, error=error.to_wire()))

    def _forget_callers(self, connection: ConnectionId) -> list[Caller]:
        """Ends the subscription and the waiting commands of a connection; returns those."""
        self._subscriptions.pop(connection, None)
        forgotten = []
        for model in self._models:
            for callers in (model.up_callers, model.down_callers):
                forgotten += [c for c in callers if c.connection == connection]
                callers[:] = [c for c in callers if c.connection != connection]
        return forgotten

    # ------------------------------------------------------------ the supervisor itself

    def _on_worker_event(self, event: WorkerEvent) -> None:
        self._worker_events.take(event)

    def _on_sampled(self, event: Sampled) -> None:
        self._machine_bytes = event.machine_bytes
        for model in self._models:
            pid = model.life.pid
            model.life.footprint_bytes = event.footprint_bytes.get(pid, 0) if pid else 0
            model.machine_bytes = event.machine_bytes
            model.sample_rate(event.now)

    def _on_started(self, event: Started) -> None:
        self._started_at = event.now
        for model in self._models:
            if model.life.settings.preload:
                self._models.trigger(model, WantUp(why=Why.USER), event.now)

    def _on_tick(self, event: Tick) -> None:
        self._woken_at = None
        for subject in self._deadlines.take_due(event.now):
            if isinstance(subject, str):
                model = self._models.by_name.get(subject)
                if model is not None:
                    self._model_due(model, event.now)
            else:
                self._request_due(subject, event.now)

    def _model_due(self, model: Model, now: float) -> None:
        self._models.look_after(model, now)
        when = model.state_deadline()
        if when is None or now < when:
            return
        phase = model.life.phase
        if isinstance(phase, StoppingPhase) and phase.is_last and model.life.pid is not None:
            self._models.give_up(model, now)
        elif isinstance(phase, ReadyPhase):
            drain_s = self._settings.drain_timeout_s
            self._models.trigger(model, WantDown(why=Why.IDLE, drain_s=drain_s), now)
        else:
            self._models.trigger(model, Due(), now)

    def _request_due(self, key: RequestKey, now: float) -> None:
        request = self._serving.ledger.get(key)
        if request is not None:
            self._serving.due(self._touched(request), request, now)

    def _on_shutdown_asked(self, event: ShutdownAsked) -> None:
        self._shut_down(event.now, is_immediate=event.is_immediate, drain_s=None)

    def _shut_down(self, now: float, *, is_immediate: bool, drain_s: float | None) -> None:
        limit_s = self._settings.drain_timeout_s if drain_s is None else drain_s
        self._is_shutting_down = True
        for model in self._models:
            was_stopping = model.life.state is State.STOPPING
            # One that a reload is removing, too: its drain may have a longer limit.
            self._models.trigger(model, WantDown(why=Why.SHUTDOWN, drain_s=limit_s), now)
            if is_immediate and (was_stopping or model.life.state is State.DRAINING):
                self._models.trigger(model, Hurry(), now)

    def _on_reloaded(self, event: Reloaded) -> None:
        if self._is_shutting_down:
            if event.caller is not None:
                self._fail_caller(event.caller, shutting_down())
            return
        self._settings = self._serving.settings = event.settings
        if event.caller is not None:
            value = {**self._differences(event.models), "later": list(event.later)}
            self._send(event.caller.connection, Reply(id=event.caller.id, value=value))
        drain_s = self._settings.drain_timeout_s
        names = {entry.name for entry in event.models}
        for model in self._models:
            if model.name not in names and model.life.wanted is not Wanted.GONE:
                error = unknown_model(model.name, names)
                self._models.trigger(model, Removed(drain_s=drain_s, error=error), event.now)
        for entry in event.models:
            known = self._models.by_name.get(entry.name)
            if known is not None:
                if known.life.settings != entry:
                    known.recovery.lift()
                self._models.trigger(
                    known, Reconfigured(settings=entry, drain_s=drain_s), event.now
                )
            else:
                added = self._models.add(entry)
                if entry.preload:
                    self._models.trigger(added, WantUp(why=Why.RELOAD), event.now)

    def _on_reload_refused(self, event: ReloadRefused) -> None:
        self._fail_caller(event.caller, bad_configuration(event.problems))

    def _differences(self, entries: Sequence[ModelSettings]) -> dict[str, list[str]]:
        """The names of the models that a reload adds, changes and removes."""
        old = {m.name: m.life.settings for m in self._models if m.life.wanted is not Wanted.GONE}
        new = {entry.name: entry for entry in entries}
        return {
            "added": [name for name in new if name not in old],
            "changed": [name for name in new if name in old and new[name] != old[name]],
            "removed": [name for name in old if name not in new],
        }

    def _fail_caller(self, caller: Caller, error: RemoteError) -> None:
        self._send(caller.connection, Failed(id=caller.id, error=error.to_wire()))

    def _wake_in_time(self) -> None:
        when = self._deadlines.earliest()
        if when is not None and (self._woken_at is None or when < self._woken_at):
            self._woken_at = when
            self._do(WakeAt(when=when))

    def _finish_if_done(self) -> None:
        if not self._is_shutting_down or self._has_finished:
            return
        if not self._models.has_processes():
            self._has_finished = True
            self._do(Finish())

    # ------------------------------------------------------------ small things

    def _announce(self, change: dict[str, Any]) -> None:
        self._do(Announce(change=change))
        for connection, id in self._subscriptions.items():
            self._send(connection, EventMessage(id=id, value=change))

    def _touched(self, request: Request) -> Model:
        """The model of a request that something is done about."""
        model = self._models.by_name[request.model]
        self._models.touch(model)
        return model

    def _model_for_command(self, name: ModelName) -> Model:
        if self._is_shutting_down:
            raise shutting_down()
        return self._models.find(name)

    def _send(self, connection: ConnectionId, message: Message) -> None:
        self._do(SendToClient(connection=connection, message=message))

    def _do(self, action: Action) -> None:
        self._actions.append(action)


_HANDLERS: dict[type[Event], Callable[[Core, Any], None]] = {
    ClientSaid: Core._on_client_said,
    ClientGone: Core._on_client_gone,
    ClientTooSlow: Core._on_client_too_slow,
    WorkerSaid: Core._on_worker_event,
    WorkerSeen: Core._on_worker_event,
    Spawned: Core._on_worker_event,
    SpawnFailed: Core._on_worker_event,
    WorkerBroke: Core._on_worker_event,
    WorkerUnlinked: Core._on_worker_event,
    Exited: Core._on_worker_event,
    Sampled: Core._on_sampled,
    Started: Core._on_started,
    Tick: Core._on_tick,
    ShutdownAsked: Core._on_shutdown_asked,
    Reloaded: Core._on_reloaded,
    ReloadRefused: Core._on_reload_refused,
}

_CLIENT_HANDLERS: dict[type[Message], Callable[[Core, ClientSaid, Any], None]] = {
    Generate: Core._on_generate,
    Cancel: Core._on_cancel,
    Ping: Core._on_ping,
    StatusQuery: Core._on_status,
    Load: Core._on_load,
    Unload: Core._on_unload,
    Restart: Core._on_restart,
    Stop: Core._on_stop,
    Subscribe: Core._on_subscribe,
    Reload: Core._on_reload,
}
