"""Turns what clients ask for into triggers for models, or answers at once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, assert_never

from mlxsup.protocol.client_messages import (
    AddModel,
    Attach,
    Cancel,
    CancelRequest,
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
from mlxsup.protocol.context_length import MAX_CONTEXT_LENGTH
from mlxsup.protocol.errors import RemoteError, unfit
from mlxsup.protocol.ids import Caller, ConnectionId, ModelName
from mlxsup.protocol.keep_alive import SHORTEST_LOAD_S
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import State, Wanted, Why

from .actions import (
    AdoptLaunch,
    AppraiseLaunch,
    ChangeConfiguration,
    FileMessage,
    ReadConfiguration,
    RequestRefused,
)
from .errors import (
    duplicate_id,
    shutting_down,
    slow_consumer,
    superseded,
    superseded_subscription,
    unknown_model,
)
from .events import (
    ClientEvent,
    ClientGone,
    ClientSaid,
    ClientTooSlow,
    LaunchAppraised,
    Reloaded,
    ReloadRefused,
    SettingsRead,
)
from .fleet import Fleet
from .forecasts import changed_settings, check_launch, differences, forecast, foreseen
from .model import FOR_EVER, Model
from .status import (
    Daemon,
    cancelled_map,
    find_named,
    paused_map,
    request_map,
    requests_map,
    status_map,
)
from .transitions import Reconfigured, WantDown, WantRestart, WantUp


class ClientEvents:
    """Handles every event of a client."""

    def __init__(self, fleet: Fleet, daemon: Daemon) -> None:
        self._fleet = fleet
        self._outbox = fleet.outbox
        self._daemon = daemon
        self._readers: list[Caller] = []  # who waits for files that the shell reads

    def take(self, event: ClientEvent) -> None:
        """Handle one event."""
        match event:
            case ClientSaid():
                self._said(event)
            case ClientGone():
                self._gone(event)
            case ClientTooSlow():
                self._too_slow(event)
            case LaunchAppraised():
                self._launch_appraised(event)
            case Reloaded():
                self._reloaded(event)
            case ReloadRefused(caller=caller, error=error):
                if self._has_read_for(caller):
                    self._outbox.fail(caller, error)
            case SettingsRead(caller=caller, answer=answer):
                if self._has_read_for(caller):
                    self._outbox.reply(caller, dict(answer))
            case _:
                assert_never(event)

    def _said(self, event: ClientSaid) -> None:
        """Handle a message; if it cannot be done, answers with an error and changes nothing."""
        caller = Caller(connection=event.connection, id=event.message.id)
        try:
            self._obey(caller, event.message, event.now, event.process)
        except RemoteError as error:
            self._outbox.fail(caller, error)
            if isinstance(event.message, Generate):
                said, code = event.message, error.code.value
                self._outbox.add(RequestRefused(id=said.id, model=said.model, outcome=code))

    def _gone(self, event: ClientGone) -> None:
        """Forget the commands of a closed connection, and cancel its requests.

        In this order, because it may listen to a request of its own.
        """
        self._forget_callers(event.connection)
        for request in self._fleet.ledger.of_connection(event.connection):
            self._fleet.serving.drop(self._fleet.touched_by(request), request, event.now)

    def _too_slow(self, event: ClientTooSlow) -> None:
        """Fail all that a client has open who has not read what it was sent."""
        error = slow_consumer()
        for request in self._fleet.ledger.of_connection(event.connection):
            self._fleet.serving.fail(self._fleet.touched_by(request), request, error, event.now)
        for caller in self._forget_callers(event.connection):
            self._outbox.fail(caller, error)

    def _obey(self, caller: Caller, message: ClientMessage, now: float, process: str) -> None:
        fleet, drain_s = self._fleet, self._fleet.settings.drain_timeout_s
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
                model = self._model(message.model)
                model.down_callers.append(caller)
                self._fleet.trigger(model, WantDown(why=Why.USER, drain_s=drain_s), now)
            case Restart(now=is_immediate):
                model = self._model(message.model)
                model.up_callers.append(caller)
                model.blame.lift()
                restart = WantRestart(is_immediate=is_immediate, drain_s=drain_s)
                self._fleet.trigger(model, restart, now)
            case PauseRequest():
                request = find_named(fleet.ledger, message.request)
                fleet.serving.pause(fleet.touched_by(request), request, now)
                self._outbox.reply(caller, paused_map(request))
            case ResumeRequest():
                request = find_named(fleet.ledger, message.request)
                fleet.serving.resume(fleet.touched_by(request), request, now)
                self._outbox.reply(caller, paused_map(request))
            case Attach():
                self._check_id(caller)
                request = find_named(fleet.ledger, message.request)
                fleet.attaching.attach(fleet.by_name[request.model], request, caller)
            case CancelRequest():
                request = find_named(fleet.ledger, message.request)
                self._outbox.reply(caller, cancelled_map(request))
                fleet.serving.cancel(fleet.touched_by(request), request, now)
            case RequestsQuery():
                value = requests_map(fleet, fleet.ledger, message.client, now)
                self._outbox.reply(caller, value)
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
                value = status_map(fleet, self._daemon, now)
                if message.debug:
                    value["flight"] = self._outbox.journal.entries(now)
                self._outbox.reply(caller, value)
            case Subscribe():
                self._on_subscribe(caller)
            case _:
                assert_never(message)

    # ------------------------------------------------------------ requests

    def _on_generate(self, caller: Caller, message: Generate, now: float, process: str) -> None:
        for name in ("queue_timeout_s", "first_token_timeout_s", "timeout_s"):
            value = getattr(message, name)
            if value is not None and value < 0:
                raise unfit(name, f"{name} must be 0 seconds or more, not {value:g}")
        _check_keep_alive(message.keep_alive)
        self._check_id(caller)
        if self._fleet.is_shutting_down:
            raise shutting_down()
        model, adapter = _find_adapted(self._fleet, message.model)
        self._fleet.serving.admit(
            model,
            message,
            caller.connection,
            adapter=adapter,
            process=process,
            models=len(self._fleet.by_name),
            now=now,
        )
        model.keep_alive_s = message.keep_alive
        self._fleet.touch(model)
        if model.life.wanted is not Wanted.UP:
            self._fleet.trigger(model, WantUp(why=Why.REQUEST), now)

    def _on_cancel(self, caller: Caller, message: Cancel, now: float) -> None:
        if self._outbox.subscriptions.get(caller.connection) == message.id:
            del self._outbox.subscriptions[caller.connection]
        if self._fleet.attaching.detach(caller):
            return
        request = self._fleet.ledger.find(caller.connection, message.id)
        if request is not None:  # otherwise its end is already on the way
            self._fleet.serving.cancel(self._fleet.touched_by(request), request, now)

    def _on_prioritize(self, caller: Caller, message: Prioritize, now: float) -> None:
        request = find_named(self._fleet.ledger, message.request)
        before = request.priority
        self._fleet.serving.prioritize(
            self._fleet.touched_by(request), request, message.priority, now
        )
        value = {"model": request.model, "before": before.value, **request_map(request, now)}
        self._outbox.reply(caller, {**value, "is_running": request.has_row})

    # ------------------------------------------------------------ commands

    def _on_load(self, caller: Caller, message: Load, now: float) -> None:
        model = self._model(message.model)
        if message.dry_run:
            for name in ("context_length", "keep_alive"):
                if getattr(message, name) is not None:
                    sentence = f"a dry run uses the configured settings; remove {name}"
                    raise unfit(name, sentence)
            value = forecast(model, self._fleet, self._fleet.settings, now)
            self._outbox.reply(caller, value)
            return
        _check_keep_alive(message.keep_alive, least_s=SHORTEST_LOAD_S)
        launch = _launch_asked_for(model.life.settings.launch, message.context_length)
        model.keep_alive_s = message.keep_alive
        model.idle_since = now  # however long it has been idle, it stays so long from now on
        if launch != model.life.settings.launch:
            self._readers.append(caller)
            self._outbox.add(AppraiseLaunch(model=model.name, launch=launch, caller=caller))
        else:
            self._load(caller, model, now)

    def _launch_appraised(self, event: LaunchAppraised) -> None:
        """Load a model with another launch, now that it is known what it needs then."""
        if not self._has_read_for(event.caller):
            return
        try:
            model = self._model(event.model)
            if event.launch.path != model.life.settings.launch.path:
                raise superseded(model.name, "a reload")
            settings = self._fleet.settings
            check_launch(model, event.launch, event.need, self._fleet, settings, event.now)
        except RemoteError as error:
            self._outbox.fail(event.caller, error)
            return
        self._outbox.add(AdoptLaunch(model=model.name, launch=event.launch, need=event.need))
        self._fleet.needs_now(model.name, event.need)
        model.blame.lift()
        entry = model.life.settings
        launch = replace(entry.launch, context_length=event.launch.context_length)
        changed = replace(entry, launch=launch)
        reconfigured = Reconfigured(settings=changed, drain_s=settings.drain_timeout_s)
        self._fleet.trigger(model, reconfigured, event.now)
        self._load(event.caller, model, event.now)

    def _load(self, caller: Caller, model: Model, now: float) -> None:
        model.up_callers.append(caller)
        if model.life.state is State.FAILED:
            model.blame.lift()
        self._fleet.trigger(model, WantUp(why=Why.USER), now)

    def _on_reload(self, caller: Caller, message: Reload | FileMessage) -> None:
        if self._fleet.is_shutting_down:
            raise shutting_down()
        self._readers.append(caller)
        if isinstance(message, Reload):
            self._outbox.add(ReadConfiguration(caller=caller, is_dry=message.dry_run))
        else:
            self._outbox.add(ChangeConfiguration(caller=caller, change=message))

    def _reloaded(self, event: Reloaded) -> None:
        """Take the configuration that was read again; after a dry run only say what it would do."""
        fleet, caller = self._fleet, event.caller
        if fleet.is_shutting_down:
            return  # the caller has been told
        if caller is not None:
            self._has_read_for(caller)
        answer: dict[str, Any] = {
            **differences(fleet, event.models),
            "settings": changed_settings(fleet.settings, event.settings),
            "later": list(event.later),
            "unread": dict(event.unread),
        }
        if event.is_dry and caller is not None:
            would = foreseen(fleet, event.settings, event.models, event.needs, event.now)
            self._outbox.reply(caller, {**answer, **would})
            return
        fleet.reload(event.settings, event.models, event.now)
        fleet.appraised(event.needs)
        if caller is not None:
            over_bytes = fleet.overshoot_bytes(event.now)
            answer |= {"over_budget_bytes": over_bytes, **event.answer}
            self._outbox.reply(caller, answer)

    def _on_stop(self, caller: Caller, message: Stop, now: float) -> None:
        if message.timeout_s is not None and message.timeout_s < 0:
            raise unfit("timeout_s", "timeout_s must be 0 seconds or more")
        drain_s = message.timeout_s
        if drain_s is None:
            drain_s = self._fleet.settings.drain_timeout_s
        value = {
            "pids": [m.life.pid for m in self._fleet if m.life.pid is not None]
            + self._fleet.warm_pool.pids,
            "supervisor_pid": self._daemon.facts.get("pid"),
            "drain_timeout_s": 0.0 if message.now else drain_s,
            "end_limit_s": self._fleet.end_limit_s(),
        }
        self._outbox.reply(caller, value)
        self.shut_down(now, is_immediate=message.now, drain_s=drain_s)

    def _has_read_for(self, caller: Caller) -> bool:
        """True if this caller waited until now for what the shell has read."""
        is_waiting = caller in self._readers
        if is_waiting:
            self._readers.remove(caller)
        return is_waiting

    def shut_down(self, now: float, *, is_immediate: bool, drain_s: float) -> None:
        """End every process, and refuse those who wait for files: a disk may not answer before."""
        self._fleet.shut_down(now, is_immediate=is_immediate, drain_s=drain_s)
        for caller in self._readers:
            self._outbox.fail(caller, shutting_down())
        self._readers.clear()

    def _on_subscribe(self, caller: Caller) -> None:
        subscriptions = self._outbox.subscriptions
        earlier = subscriptions.get(caller.connection)
        if earlier is not None and earlier != caller.id:
            earlier_caller = Caller(connection=caller.connection, id=earlier)
            self._outbox.fail(earlier_caller, superseded_subscription())
        subscriptions[caller.connection] = caller.id

    # ------------------------------------------------------------ inside

    def _model(self, name: ModelName) -> Model:
        """Return a model that can still be asked for something.

        Raises:
            RemoteError: `shutting_down`, `unknown_model`.
        """
        if self._fleet.is_shutting_down:
            raise shutting_down()
        return _find(self._fleet, name)

    def _check_id(self, caller: Caller) -> None:
        """Raise RemoteError if another stream comes under this id."""
        fleet = self._fleet
        is_open = fleet.ledger.find(caller.connection, caller.id) is not None
        if is_open or fleet.attaching.listens(caller):
            raise duplicate_id(caller.id)

    def _forget_callers(self, connection: ConnectionId) -> list[Caller]:
        """End the subscription of a connection, what it listens to and its waiting commands; return
        the latter two."""
        self._outbox.subscriptions.pop(connection, None)
        forgotten = self._fleet.attaching.forget(connection)
        for model in self._fleet:
            for callers in (model.up_callers, model.down_callers):
                forgotten += [c for c in callers if c.connection == connection]
                callers[:] = [c for c in callers if c.connection != connection]
        return forgotten


def _find(fleet: Fleet, name: ModelName) -> Model:
    """Find a model by its name in the configuration, or by an alias.

    Raises:
        RemoteError: `unknown_model`.
    """
    model = fleet.by_name.get(name)
    if model is None or model.life.wanted is Wanted.GONE:
        models = (m for m in fleet if m.life.wanted is not Wanted.GONE)
        model = next((m for m in models if name in m.life.settings.aliases), None)
    if model is None:
        known = [m.name for m in fleet if m.life.wanted is not Wanted.GONE]
        raise unknown_model(name, known)
    return model


def _find_adapted(fleet: Fleet, name: ModelName) -> tuple[Model, str]:
    """Find what a request names: a model, and one of its adapters if it is `NAME:ADAPTER`.

    Raises:
        RemoteError: `unknown_model`.
    """
    base, colon, adapter = name.rpartition(":")
    if not colon:
        return _find(fleet, name), ""
    try:
        model = _find(fleet, ModelName(base))
    except RemoteError:
        return _find(fleet, name), ""  # which says that there is no such model
    adapters = model.life.settings.launch.adapters
    if adapter not in adapters:
        known = [model.name, *(ModelName(f"{model.name}:{one}") for one in adapters)]
        raise unknown_model(name, known)
    return model, adapter


def _launch_asked_for(launch: LaunchSettings, context_length: int | None) -> LaunchSettings:
    """Return the launch of the configuration, or another one if the load asks for that.

    Raises:
        RemoteError: `invalid_request`.
    """
    if context_length is None:
        return launch
    if not 0 <= context_length <= MAX_CONTEXT_LENGTH:
        limits = f"an integer from 0 to {MAX_CONTEXT_LENGTH}"
        raise unfit("context_length", f"context_length must be {limits}, not {context_length}")
    return replace(launch, context_length=context_length)


def _check_keep_alive(value: float | None, *, least_s: float = 0.0) -> None:
    """Check what a request or a load says.

    Args:
        value: seconds, or `FOR_EVER`; None: nothing.
        least_s: the fewest seconds that make sense.

    Raises:
        RemoteError: `invalid_request`.
    """
    if value is None or value == FOR_EVER or least_s <= value < math.inf:
        return
    least = "above 0" if least_s else "of 0 or more"
    allowed = f"seconds {least}, or -1 to keep the model loaded"
    raise unfit("keep_alive", f"keep_alive must be {allowed}, not {value:g}")
