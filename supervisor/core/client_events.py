"""Turns what clients ask for into triggers for models, or answers at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, assert_never

from mlxsup.protocol.client_messages import (
    AddModel,
    Attach,
    Cancel,
    CancelRequest,
    ChangeLogLevel,
    ClientMessage,
    Configure,
    Generate,
    Load,
    PauseRequest,
    Ping,
    Prioritize,
    Reload,
    RemoveModel,
    RequestsQuery,
    Restart,
    ResumeRequest,
    SettingsQuery,
    StatusQuery,
    Stop,
    Subscribe,
    Unload,
)
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.keep_alive import SHORTEST_LOAD_S
from mlxsup.protocol.states import State, Wanted, Why

from .actions import (
    AdoptLaunch,
    AppraiseLaunch,
    ChangeConfiguration,
    FileMessage,
    ReadConfiguration,
    RequestRefused,
)
from .attaching import Attaching
from .endings import Endings
from .errors import (
    duplicate_id,
    shutting_down,
    slow_consumer,
    superseded,
    superseded_subscription,
)
from .events import (
    Caller,
    ClientGone,
    ClientSaid,
    ClientTooSlow,
    ConnectionId,
    LaunchAppraised,
)
from .fleet import Fleet
from .lifecycle.triggers import Reconfigured, WantDown, WantRestart, WantUp
from .loading import check_context, check_room, forecast, launch_asked_for, refuse_dry
from .model import Model, check_keep_alive
from .outbox import Outbox
from .pausing import Pausing
from .request_status import cancelled_map, find_named, paused_map, request_map, requests_map
from .serving import Serving
from .status import Daemon, status_map


class ClientEvents:
    """Handles every event of a client.

    Args:
        fleet: the models.
        serving: queues their requests.
        endings: ends their requests.
        pausing: pauses and resumes them.
        attaching: lets others join them.
        outbox: takes what they are sent.
        daemon: what the status says about the daemon itself.

    Attributes:
        readers: those who wait for files that the shell reads.
    """

    def __init__(
        self,
        fleet: Fleet,
        serving: Serving,
        endings: Endings,
        pausing: Pausing,
        attaching: Attaching,
        outbox: Outbox,
        daemon: Daemon,
    ) -> None:
        self._fleet = fleet
        self._serving = serving
        self._endings = endings
        self._pausing = pausing
        self._attaching = attaching
        self._outbox = outbox
        self._daemon = daemon
        self.readers: list[Caller] = []

    def said(self, event: ClientSaid) -> None:
        """Handle a message; if it cannot be done, answers with an error and changes nothing."""
        caller = Caller(connection=event.connection, id=event.message.id)
        try:
            self._obey(caller, event.message, event.now, event.process)
        except RemoteError as error:
            self._outbox.fail(caller, error)
            if isinstance(event.message, Generate):
                said, code = event.message, error.code.value
                self._outbox.add(RequestRefused(id=said.id, model=said.model, outcome=code))

    def gone(self, event: ClientGone) -> None:
        """A connection is closed: its commands are forgotten, its requests cancelled.

        In this order, because it may listen to a request of its own.
        """
        self._forget_callers(event.connection)
        for request in self._serving.ledger.of_connection(event.connection):
            self._endings.drop(self._fleet.touched_by(request), request, event.now)

    def too_slow(self, event: ClientTooSlow) -> None:
        """A client has not read what it was sent: all that it has open fails."""
        error = slow_consumer()
        for request in self._serving.ledger.of_connection(event.connection):
            self._endings.fail(self._fleet.touched_by(request), request, error, event.now)
        for caller in self._forget_callers(event.connection):
            self._outbox.fail(caller, error)

    def _obey(self, caller: Caller, message: ClientMessage, now: float, process: str) -> None:
        match message:
            case Generate():
                self._on_generate(caller, message, now, process)
            case Prioritize():
                self._on_prioritize(caller, message, now)
            case Cancel():
                self._on_cancel(caller, message, now)
            case Load():
                self._on_load(caller, message, now)
            case Unload():
                self._on_unload(caller, message, now)
            case Restart():
                self._on_restart(caller, message, now)
            case PauseRequest():
                self._on_pause(caller, message, now)
            case ResumeRequest():
                self._on_resume(caller, message, now)
            case Attach():
                self._on_attach(caller, message)
            case CancelRequest():
                self._on_cancel_request(caller, message, now)
            case RequestsQuery():
                ledger = self._serving.ledger
                self._outbox.reply(caller, requests_map(self._fleet, ledger, message.client, now))
            case ChangeLogLevel():
                self._fleet.change_log_level(message.level)
                self._outbox.reply(caller, {"level": message.level})
            case SettingsQuery():
                name = self._model(message.model).name  # it may be named by an alias
                self._on_reload(caller, replace(message, model=name))
            case Reload() | AddModel() | RemoveModel() | Configure():
                self._on_reload(caller, message)
            case Stop():
                self._on_stop(caller, message, now)
            case Ping():
                self._outbox.reply(caller, {})
            case StatusQuery():
                self._on_status(caller, message, now)
            case Subscribe():
                self._on_subscribe(caller)
            case _:
                assert_never(message)

    # ------------------------------------------------------------ requests

    def _on_generate(self, caller: Caller, message: Generate, now: float, process: str) -> None:
        for name in ("queue_timeout_s", "first_token_timeout_s", "timeout_s"):
            value = getattr(message, name)
            if value is not None and value < 0:
                raise RemoteError(
                    ErrorCode.INVALID_REQUEST,
                    f"{name} must be 0 seconds or more, not {value:g}",
                    detail={"parameter": name},
                )
        check_keep_alive(message.keep_alive)
        if self._attaching.listens(caller):
            raise duplicate_id(caller.id)
        if self._fleet.is_shutting_down:
            raise shutting_down()
        model, adapter = self._fleet.find_adapted(message.model)
        refusal = self._serving.admit(
            model,
            message,
            caller.connection,
            adapter=adapter,
            process=process,
            settings=self._fleet.settings,
            models=len(self._fleet.by_name),
            now=now,
        )
        if refusal is not None:
            raise refusal
        model.keep_alive_s = message.keep_alive
        self._fleet.touch(model)
        if model.life.wanted is not Wanted.UP:
            self._fleet.trigger(model, WantUp(why=Why.REQUEST), now)

    def _on_cancel(self, caller: Caller, message: Cancel, now: float) -> None:
        if self._outbox.subscriptions.get(caller.connection) == message.id:
            del self._outbox.subscriptions[caller.connection]
        if self._attaching.detach(caller):
            return
        request = self._serving.ledger.find(caller.connection, message.id)
        if request is not None:  # otherwise its end is already on the way
            self._endings.cancel(self._fleet.touched_by(request), request, now)

    def _on_prioritize(self, caller: Caller, message: Prioritize, now: float) -> None:
        request = find_named(self._serving.ledger, message.request)
        before = request.priority
        self._serving.prioritize(self._fleet.touched_by(request), request, message.priority, now)
        value = {"model": request.model, "before": before.value, **request_map(request, now)}
        self._outbox.reply(caller, {**value, "is_running": request.has_row})

    def _on_pause(self, caller: Caller, message: PauseRequest, now: float) -> None:
        request = find_named(self._serving.ledger, message.request)
        self._pausing.pause(self._fleet.touched_by(request), request, now)
        self._outbox.reply(caller, paused_map(request))

    def _on_resume(self, caller: Caller, message: ResumeRequest, now: float) -> None:
        request = find_named(self._serving.ledger, message.request)
        self._pausing.resume(self._fleet.touched_by(request), request, now)
        self._outbox.reply(caller, paused_map(request))

    def _on_attach(self, caller: Caller, message: Attach) -> None:
        if self._serving.ledger.find(caller.connection, caller.id) is not None:
            raise duplicate_id(caller.id)
        request = find_named(self._serving.ledger, message.request)
        self._attaching.attach(self._fleet.by_name[request.model], request, caller)

    def _on_cancel_request(self, caller: Caller, message: CancelRequest, now: float) -> None:
        request = find_named(self._serving.ledger, message.request)
        self._outbox.reply(caller, cancelled_map(request))
        self._endings.cancel(self._fleet.touched_by(request), request, now)

    # ------------------------------------------------------------ commands

    def _on_load(self, caller: Caller, message: Load, now: float) -> None:
        model = self._model(message.model)
        if message.dry_run:
            refuse_dry(message)
            value = forecast(model, self._fleet, self._fleet.settings, now)
            self._outbox.reply(caller, value)
            return
        check_keep_alive(message.keep_alive, least_s=SHORTEST_LOAD_S)
        launch = launch_asked_for(model.life.settings.launch, message.context_length)
        model.keep_alive_s = message.keep_alive
        model.idle_since = now  # however long it has been idle, it stays so long from now on
        if launch != model.life.settings.launch:
            self.readers.append(caller)
            self._outbox.add(AppraiseLaunch(model=model.name, launch=launch, caller=caller))
        else:
            self._load(caller, model, now)

    def launch_appraised(self, event: LaunchAppraised) -> None:
        """A load with another launch is asked for, and what the model needs then is known."""
        if not self.has_read_for(event.caller):
            return
        try:
            model = self._model(event.model)
            if event.launch.path != model.life.settings.launch.path:
                raise superseded(model.name, "a reload")
            check_context(model, event.need, event.launch)
            check_room(model, event.need, self._fleet, self._fleet.settings, event.now)
        except RemoteError as error:
            self._outbox.fail(event.caller, error)
            return
        self._outbox.add(AdoptLaunch(model=model.name, launch=event.launch, need=event.need))
        self._fleet.relaunched(model.name, event.need)
        model.blame.lift()
        entry = model.life.settings
        launch = replace(entry.launch, context_length=event.launch.context_length)
        settings = replace(entry, launch=launch)
        drain_s = self._fleet.settings.drain_timeout_s
        self._fleet.trigger(model, Reconfigured(settings=settings, drain_s=drain_s), event.now)
        self._load(event.caller, model, event.now)

    def _load(self, caller: Caller, model: Model, now: float) -> None:
        model.up_callers.append(caller)
        if model.life.state is State.FAILED:
            model.blame.lift()
        self._fleet.trigger(model, WantUp(why=Why.USER), now)

    def _on_unload(self, caller: Caller, message: Unload, now: float) -> None:
        model = self._model(message.model)
        model.down_callers.append(caller)
        drain_s = self._fleet.settings.drain_timeout_s
        self._fleet.trigger(model, WantDown(why=Why.USER, drain_s=drain_s), now)

    def _on_restart(self, caller: Caller, message: Restart, now: float) -> None:
        model = self._model(message.model)
        model.up_callers.append(caller)
        model.blame.lift()
        drain_s = self._fleet.settings.drain_timeout_s
        self._fleet.trigger(model, WantRestart(is_immediate=message.now, drain_s=drain_s), now)

    def _on_reload(self, caller: Caller, message: Reload | FileMessage) -> None:
        if self._fleet.is_shutting_down:
            raise shutting_down()
        self.readers.append(caller)
        if isinstance(message, Reload):
            self._outbox.add(ReadConfiguration(caller=caller, is_dry=message.dry_run))
        else:
            self._outbox.add(ChangeConfiguration(caller=caller, change=message))

    def _on_stop(self, caller: Caller, message: Stop, now: float) -> None:
        if message.timeout_s is not None and message.timeout_s < 0:
            raise RemoteError(
                ErrorCode.INVALID_REQUEST,
                "timeout_s must be 0 seconds or more",
                detail={"parameter": "timeout_s"},
            )
        limit_s = message.timeout_s
        if limit_s is None:
            limit_s = self._fleet.settings.drain_timeout_s
        value = {
            "pids": [m.life.pid for m in self._fleet if m.life.pid is not None]
            + self._fleet.warm_pool.pids,
            "supervisor_pid": self._daemon.facts.get("pid"),
            "drain_timeout_s": 0.0 if message.now else limit_s,
            "end_limit_s": self._fleet.end_limit_s(),
        }
        self._outbox.reply(caller, value)
        self._fleet.shut_down(now, is_immediate=message.now, drain_s=message.timeout_s)

    def has_read_for(self, caller: Caller) -> bool:
        """True if this caller waited until now for what the shell has read."""
        is_waiting = caller in self.readers
        if is_waiting:
            self.readers.remove(caller)
        return is_waiting

    def refuse_readers(self) -> None:
        """Tell those who wait for files that the daemon ends; a disk may not answer before."""
        for caller in self.readers:
            self._outbox.fail(caller, shutting_down())
        self.readers.clear()

    # ------------------------------------------------------------ questions

    def status(self, now: float) -> dict[str, Any]:
        """Return what `status --json` prints."""
        settings = self._fleet.settings
        warm_pool = self._fleet.warm_pool.status(settings, now)
        ledger = self._serving.ledger
        return status_map(
            self._fleet,
            ledger,
            self._daemon,
            settings.budget,
            now,
            warm_pool=warm_pool,
            is_ending=self._fleet.is_shutting_down,
        )

    def _on_status(self, caller: Caller, message: StatusQuery, now: float) -> None:
        value = self.status(now)
        if message.debug:
            value["flight"] = self._outbox.journal.entries(now)
        self._outbox.reply(caller, value)

    def _on_subscribe(self, caller: Caller) -> None:
        subscriptions = self._outbox.subscriptions
        earlier = subscriptions.get(caller.connection)
        if earlier is not None and earlier != caller.id:
            earlier_caller = Caller(connection=caller.connection, id=earlier)
            self._outbox.fail(earlier_caller, superseded_subscription())
        subscriptions[caller.connection] = caller.id

    # ------------------------------------------------------------ inside

    def _model(self, name: ModelName) -> Model:
        """A model that can still be asked for something.

        Raises:
            RemoteError: `shutting_down`, `unknown_model`.
        """
        if self._fleet.is_shutting_down:
            raise shutting_down()
        return self._fleet.find(name)

    def _forget_callers(self, connection: ConnectionId) -> list[Caller]:
        """Ends the subscription of a connection, what it listens to and its waiting commands; the
        latter two are returned."""
        self._outbox.subscriptions.pop(connection, None)
        forgotten = self._attaching.forget(connection)
        for model in self._fleet:
            for callers in (model.up_callers, model.down_callers):
                forgotten += [c for c in callers if c.connection == connection]
                callers[:] = [c for c in callers if c.connection != connection]
        return forgotten
