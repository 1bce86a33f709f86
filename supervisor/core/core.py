"""The supervisor's decisions: one event in, a list of actions out, and nothing else.

`Core` is the only owner of supervisor state. It reads no clock and touches no socket: tests and
simulations drive it with plain values.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from mlxsup.protocol.gateway import Address
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import State

from . import workers
from .actions import Action, BudgetChanged, Finish, Outbox, WakeAt
from .client_events import ClientEvents
from .deadlines import Deadlines, Housekeeping
from .events import (
    Appraised,
    ClientGone,
    ClientSaid,
    ClientTooSlow,
    DownloadSaid,
    Event,
    GatewayBeat,
    GatewayEnded,
    GatewayListening,
    LaunchAppraised,
    OfWorker,
    PrewarmedEnded,
    PrewarmedReady,
    Reloaded,
    ReloadRefused,
    Sampled,
    SettingsRead,
    ShutdownAsked,
    Started,
    Tick,
)
from .fleet import Fleet
from .forecasts import changed_settings, differences, ends_process, foreseen
from .gateway import Gateway
from .memory import Pressure, Reading
from .memory_view import overshoot_bytes
from .requests import Stage
from .settings import CoreSettings, ModelSettings
from .states import Pending, Phase
from .status import Daemon, status_map

POOL_EVENTS = (
    PrewarmedEnded,
    PrewarmedReady,
    Reloaded,
    Sampled,
    ShutdownAsked,
    Started,
    Tick,
)
"""After these the core looks whether the warm pool is as it should be: it need not after each
token, and `Sampled` comes every second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The daemon at one moment.

    Attributes:
        states: each model's state, in the order of the configuration.
        is_busy: whether there is an answer that is not paused, a load or a download, all of
            which would stand still if the machine fell asleep.
        is_ending: whether the daemon was asked to end.
    """

    states: tuple[tuple[ModelName, State], ...]
    is_busy: bool
    is_ending: bool


def _is_coming_up(phase: Phase) -> bool:
    """True if its process loads, or its files arrive; it may wait for memory for ever."""
    if isinstance(phase, Pending):
        return phase.fetching is not None
    return phase.STATE is State.LOADING


class Core:
    """The pure core.

    Args:
        models: every entry, in the order of the file.
        facts: what the status reply shows besides the core's own facts (version, pid, endpoint, …).
        random: draws the jitter of restarts.
        is_strict: raise at an impossible transition (tests) instead of ending that one life.
        gateway: where the gateway listens; None: there is none.

    Attributes:
        outbox: the actions of the event being handled.
    """

    def __init__(
        self,
        settings: CoreSettings,
        models: Sequence[ModelSettings],
        *,
        facts: Mapping[str, Any],
        random: random.Random,
        is_strict: bool,
        gateway: Address | None = None,
    ) -> None:
        self.outbox = Outbox()
        self._deadlines = Deadlines()
        self._gateway = Gateway(gateway, self._deadlines, self.outbox)
        self._daemon = Daemon(facts=facts, gateway=self._gateway)
        self.fleet = Fleet(
            settings,
            models,
            deadlines=self._deadlines,
            outbox=self.outbox,
            random=random,
            is_strict=is_strict,
        )
        self.ledger = self.fleet.ledger
        self._clients = ClientEvents(self.fleet, self.outbox, self._daemon)
        self._pressure = Pressure()
        self._has_finished = False
        self._woken_at: float | None = None

    def handle(self, event: Event) -> list[Action]:
        """Handle one event and return what to do about it, in order.

        Raises:
            ImpossibleTransitionError: a bug in the transitions, only if the core is strict.
        """
        self.outbox.begin(event.now)
        self._take(event)
        if isinstance(event, POOL_EVENTS):
            self.fleet.warm_pool.settle(
                self.fleet, self.fleet.settings, event.now, is_ending=self.fleet.is_shutting_down
            )
        self.fleet.run_policies(event.now)
        self._wake_in_time()
        self._finish_if_done()
        return self.outbox.take()

    def status(self, now: float) -> dict[str, Any]:
        """Return what `status --json` prints."""
        return status_map(self.fleet, self._daemon, now)

    def left_to_finish(self, is_immediate: bool) -> tuple[int, float]:
        """Return how many requests run, and how many seconds a shutdown gives them.

        Args:
            is_immediate: whether it cuts them off.
        """
        running = sum(len(model.batch.running) for model in self.fleet)
        return running, 0.0 if is_immediate else self.fleet.settings.drain_timeout_s

    def ended_by(self, entries: Sequence[ModelSettings]) -> bool:
        """True if a reload with these entries would end a process that serves."""
        return ends_process(self.fleet, entries)

    def outline(self) -> Outline:
        """Return what the machine around the daemon wants to know of it."""
        return Outline(
            states=tuple((model.name, model.life.state) for model in self.fleet),
            is_busy=any(request.stage is not Stage.PAUSED for request in self.ledger)
            or any(_is_coming_up(model.life.phase) for model in self.fleet),
            is_ending=self.fleet.is_shutting_down,
        )

    def stories(self) -> dict[str, tuple[str, ...]]:
        """Return the latest events of each model's life and what they led to."""
        return {model.name: tuple(model.life.story) for model in self.fleet}

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself; for tests, after each event."""
        self.ledger.check_invariants()
        self.fleet.check_invariants()
        self.fleet.attaching.check_invariants([request.key for request in self.ledger])

    # ------------------------------------------------------------ events

    def _take(self, event: Event) -> None:
        match event:
            case OfWorker():
                workers.take(self.fleet, event)
            case ClientSaid():
                self._clients.said(event)
            case ClientGone():
                self._clients.gone(event)
            case ClientTooSlow():
                self._clients.too_slow(event)
            case Tick():
                self._on_tick(event.now)
            case PrewarmedReady(number=number, pid=pid):
                self.fleet.warm_pool.is_ready(number, pid, event.now)
            case PrewarmedEnded(number=number):
                self.fleet.warm_pool.ended(number, event.now)
                self.fleet.memory_changed()
                self.fleet.look_at_all()
            case DownloadSaid():
                for model, trigger in self.fleet.downloads.said(event, self.fleet):
                    self.fleet.trigger(model, trigger, event.now)
            case GatewayListening(number=number, pid=pid, address=address):
                self._gateway.listening(number, pid, address, event.now)
                self.ledger.terms.gateway_pid = pid
            case GatewayBeat(number=number):
                self._gateway.beat(number, event.now)
            case GatewayEnded(number=number, cause=cause, is_crash=is_crash):
                is_ending = self.fleet.is_shutting_down
                self._gateway.ended(
                    number, cause, event.now, is_crash=is_crash, is_ending=is_ending
                )
            case Sampled():
                self._on_sampled(event)
            case Appraised(needs=needs):
                self.fleet.appraised(needs)
            case LaunchAppraised():
                self._clients.launch_appraised(event)
            case Started():
                self._daemon.started_at = event.now
                self.fleet.preload(event.now)
                self._gateway.start(event.now)
            case ShutdownAsked(is_immediate=is_immediate):
                self.fleet.shut_down(event.now, is_immediate=is_immediate, drain_s=None)
            case Reloaded():
                self._on_reloaded(event)
            case ReloadRefused(caller=caller, error=error):
                if self._clients.has_read_for(caller):
                    self.outbox.fail(caller, error)
            case SettingsRead(caller=caller, answer=answer):
                if self._clients.has_read_for(caller):
                    self.outbox.reply(caller, dict(answer))
            case _:
                assert_never(event)

    def _on_tick(self, now: float) -> None:
        self._woken_at = None
        for subject in self._deadlines.take_due(now):
            if isinstance(subject, str):
                workers.due(self.fleet, subject, now)
            elif isinstance(subject, int):
                request = self.ledger.get(subject)
                if request is not None:
                    self.fleet.serving.due(self.fleet.touched_by(request), request, now)
            elif subject is Housekeeping.GATEWAY and not self.fleet.is_shutting_down:
                self._gateway.due(now)

    def _on_sampled(self, event: Sampled) -> None:
        self._daemon.machine_bytes = event.machine_bytes
        workers.measured(self.fleet, event)
        self._squeeze(event.reading, event.now)
        if self.fleet.warm_pool.measured(event.footprint_bytes, self.fleet.settings):
            self.fleet.look_at_all()

    def _squeeze(self, reading: Reading | None, now: float) -> None:
        """Give the models what the other programs leave of the budget."""
        before = self.fleet.settings.budget
        if before is None:
            return
        held_bytes = sum(model.held_bytes for model in self.fleet)
        budget = self._pressure.sampled(before, reading, held_bytes, now)
        if budget != before:
            self.fleet.settings = replace(self.fleet.settings, budget=budget)
            self.fleet.look_at_all()
        if budget.size_bytes != before.size_bytes:
            self.outbox.add(BudgetChanged(budget=budget))

    def _on_reloaded(self, event: Reloaded) -> None:
        if self.fleet.is_shutting_down:
            return  # the caller has been told
        if event.caller is not None:
            self._clients.has_read_for(event.caller)
        changes = differences(self.fleet, event.models)
        changes["settings"] = changed_settings(self.fleet.settings, event.settings)
        if event.is_dry and event.caller is not None:
            answer = {
                **changes,
                "later": list(event.later),
                "unread": dict(event.unread),
                **foreseen(self.fleet, event.settings, event.models, event.needs, event.now),
            }
            self.outbox.reply(event.caller, answer)
            return
        before = self.fleet.settings.budget
        budget = self._pressure.after_reload(before, event.settings.budget)
        settings = replace(event.settings, budget=budget)
        self.fleet.reload(settings, event.models, event.now)
        self.fleet.appraised(event.needs)
        over_bytes = overshoot_bytes(self.fleet, settings, event.now)
        if event.caller is not None:
            answer = {
                **changes,
                "later": list(event.later),
                "over_budget_bytes": over_bytes,
                "unread": dict(event.unread),
                **event.answer,
            }
            self.outbox.reply(event.caller, answer)

    # ------------------------------------------------------------ after every event

    def _wake_in_time(self) -> None:
        when = self._deadlines.earliest()
        if when is not None and (self._woken_at is None or when < self._woken_at):
            self._woken_at = when
            self.outbox.add(WakeAt(when=when))

    def _finish_if_done(self) -> None:
        if not self.fleet.is_shutting_down or self._has_finished:
            return
        self._clients.refuse_readers()
        if not self.fleet.has_processes():
            self._has_finished = True
            self.outbox.add(Finish())
