"""The supervisor's decisions: one event in, a list of actions out, and nothing else.

`Core` is the only owner of supervisor state. It reads no clock and touches no socket: tests and
simulations drive it with plain values.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from mlxsup.protocol.gateway import Address

from . import workers
from .actions import Action, Finish, Housekeeping, SignsOf
from .client_events import ClientEvents
from .events import (
    Appraised,
    DownloadSaid,
    Event,
    GatewayBeat,
    GatewayEnded,
    GatewayListening,
    OfClient,
    OfWorker,
    PrewarmedEnded,
    PrewarmedReady,
    Reloaded,
    Sampled,
    ShutdownAsked,
    Started,
    Tick,
)
from .fleet import Fleet
from .gateway import Gateway
from .settings import CoreSettings, ModelSettings
from .status import Daemon, Outline, outline_of, status_map

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
        self.fleet = Fleet(settings, models, random=random, is_strict=is_strict)
        self.outbox = self.fleet.outbox
        self.ledger = self.fleet.ledger
        self._gateway = Gateway(gateway, self.ledger.terms, self.outbox)
        self._daemon = Daemon(facts=facts, gateway=self._gateway)
        self._clients = ClientEvents(self.fleet, self._daemon)
        self._has_finished = False

    def handle(self, event: Event) -> list[Action]:
        """Handle one event and return what to do about it, in order.

        Raises:
            ImpossibleTransitionError: a bug in the transitions, only if the core is strict.
        """
        self.outbox.begin(event.now)
        self._take(event)
        if isinstance(event, POOL_EVENTS):
            self.fleet.settle_warm_pool(event.now)
        self.fleet.run_policies(event.now)
        self.outbox.wake_in_time()
        if self.fleet.is_shutting_down:
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
        return self.fleet.ended_by(entries)

    def outline(self) -> Outline:
        """Return what the machine around the daemon wants to know of it."""
        return outline_of(self.fleet)

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
            case OfClient():
                self._clients.take(event)
            case Tick():
                self._on_tick(event.now)
            case PrewarmedReady(number=number, pid=pid):
                self.fleet.warm_pool.is_ready(number, pid, event.now)
            case PrewarmedEnded(number=number):
                self.fleet.warm_pool.ended(number, event.now)
                self.fleet.memory_changed()
                self.fleet.look_at_all()
            case DownloadSaid(number=number, report=report):
                lives = [model.life for model in self.fleet]
                for name in self.fleet.downloads.said(number, report, lives):
                    self.fleet.trigger(self.fleet.by_name[name], report, event.now)
            case GatewayListening(number=number, pid=pid, address=address):
                self._gateway.listening(number, pid, address, event.now)
            case GatewayBeat(number=number):
                self._gateway.beat(number, event.now)
            case GatewayEnded(number=number, cause=cause, is_crash=is_crash):
                is_ending = self.fleet.is_shutting_down
                self._gateway.ended(
                    number, cause, event.now, is_crash=is_crash, is_ending=is_ending
                )
            case Sampled():
                workers.measured(self.fleet, event)
            case Appraised(needs=needs):
                self.fleet.appraised(needs)
            case Started():
                self._daemon.started_at = event.now
                self.fleet.preload(event.now)
                self._gateway.start(event.now)
            case ShutdownAsked(is_immediate=is_immediate):
                drain_s = self.fleet.settings.drain_timeout_s
                self._clients.shut_down(event.now, is_immediate=is_immediate, drain_s=drain_s)
            case _:
                assert_never(event)

    def _on_tick(self, now: float) -> None:
        for subject in self.outbox.take_due(now):
            if isinstance(subject, str) and subject in self.fleet.by_name:
                workers.due(self.fleet, self.fleet.by_name[subject], now)
            elif isinstance(subject, SignsOf) and subject.model in self.fleet.by_name:
                workers.look_after(self.fleet, self.fleet.by_name[subject.model], now)
            elif isinstance(subject, int):
                request = self.ledger.get(subject)
                if request is not None:
                    self.fleet.serving.due(self.fleet.touched_by(request), request, now)
            elif subject is Housekeeping.GATEWAY and not self.fleet.is_shutting_down:
                self._gateway.due(now)

    # ------------------------------------------------------------ after every event

    def _finish_if_done(self) -> None:
        if not self._has_finished and not self.fleet.has_processes():
            self._has_finished = True
            self.outbox.add(Finish())
