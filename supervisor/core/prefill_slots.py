"""The turns of models that read long prompts: prefill slots that go round, one chunk each.

Models whose prompts take several chunks share one device: that of their backend. While there are
more of them than may read at the same time, each chunk takes a lease. A model that has given its
lease back asks again for the next chunk, and then stands behind all that have waited meanwhile, so
they read in turns.

On a GPU two readers gain nothing by reading at once, and each chunk takes as long as both. Nothing
is taken away from a worker: a lease that is over four seconds old only no longer keeps others
waiting. A model takes part while its worker serves and can be reached; `settle` sees when that has
ended, and the lease is free at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import CLASSES, SERVES
from mlxsup.protocol.worker_messages import Lease, Leases, Step

from .accounting import Meter
from .actions import Outbox
from .model import Model
from .settings import CoreSettings

LEASE_S = 4.0
"""A lease ends after this long: twice what a chunk should take at most (`IDLE_TARGET_S` in
worker/engines/mlx/prefill.py). A chunk that takes longer ends, too, but no model waits for it."""


class Stage(Enum):
    """The stages of a model that takes part."""

    READS = auto()
    """It has a long prompt to read, and has asked for nothing."""
    WAITS = auto()
    """It has asked for a lease."""
    HOLDS = auto()
    """It has a lease."""
    OUTLASTS = auto()
    """Its lease is over, and its chunk is not."""


@dataclass(slots=True)
class _Part:
    """The part of one model.

    Attributes:
        stage: what it does.
        order: of its asking; a lower number asked earlier.
        until: when its lease ends, in monotonic seconds.
    """

    stage: Stage
    order: int = 0
    until: float = 0.0


GPUS = frozenset({"cuda", "metal"})
"""Backends on which, unless the configuration says otherwise, one model reads at a time."""


class Device:
    """The leases of one device, which the models of a backend share.

    Attributes:
        members: the models whose workers serve on it, and whether each was last told that leases
            are needed.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        # Bounded by the configuration: models leave with their processes.
        self.members: dict[ModelName, bool] = {}
        self._parts: dict[ModelName, _Part] = {}
        self._asked = 0

    def leave(self, name: ModelName) -> None:
        """Let a model take no part any longer: its process ends."""
        del self.members[name]
        self._parts.pop(name, None)

    def limit(self, settings: CoreSettings) -> int | None:
        """Return how many models may read long prompts at the same time; None: any number."""
        if settings.max_parallel_prefills is not None:
            return settings.max_parallel_prefills
        return 1 if self.backend in GPUS else None

    def until(self, name: ModelName) -> float | None:
        """Return when the lease of this model ends; None if it has none."""
        part = self._parts.get(name)
        return part.until if part is not None and part.stage is Stage.HOLDS else None

    def is_over(self, name: ModelName, now: float) -> bool:
        """True if this model has a lease that has lasted long enough."""
        until = self.until(name)
        return until is not None and until <= now

    def are_needed(self, limit: int | None) -> bool:
        """True if more models have a long prompt to read than may do so at the same time."""
        return limit is not None and len(self._parts) > limit

    def reads(self, name: ModelName, *, is_reading: bool) -> bool:
        """Note that a model has a long prompt left to read, or none; return whether that changes
        anything.

        One that has asked takes part until it has given its lease back.
        """
        part = self._parts.get(name)
        if part is None and is_reading:
            self._parts[name] = _Part(Stage.READS)
        elif part is not None and part.stage is Stage.READS and not is_reading:
            del self._parts[name]
        else:
            return False
        return True

    def ask(self, name: ModelName) -> bool:
        """Let a model ask for a lease; return whether it may."""
        part = self._parts.get(name)
        if part is not None and part.stage is not Stage.READS:
            return False
        self._asked += 1
        self._parts[name] = _Part(Stage.WAITS, order=self._asked)
        return True

    def give_back(self, name: ModelName) -> bool:
        """Let a model give its lease back; return whether it had one."""
        part = self._parts.get(name)
        if part is None or part.stage not in (Stage.HOLDS, Stage.OUTLASTS):
            return False
        part.stage = Stage.READS
        return True

    def expire(self, now: float) -> None:
        """End the leases that have lasted long enough."""
        for name in self._in(Stage.HOLDS):
            if self.is_over(name, now):
                self._parts[name].stage = Stage.OUTLASTS

    def grant(
        self, limit: int | None, rank: Callable[[ModelName], int], now: float
    ) -> list[ModelName]:
        """Grant the leases that are free.

        Args:
            limit: how many there may be; None: any number.
            rank: of a model's turn; lower ones are first, and equal ones in the order of asking.

        Returns:
            The models that have one from now on, in order.
        """
        granted = self._in(Stage.WAITS)
        granted.sort(key=lambda name: (rank(name), self._parts[name].order))
        if limit is not None:
            del granted[max(limit - len(self._in(Stage.HOLDS)), 0) :]
        for name in granted:
            part = self._parts[name]
            part.stage, part.until = Stage.HOLDS, now + LEASE_S
        return granted

    def check_invariants(self, limit: int | None) -> None:
        """Raise AssertionError if others than members take part, or one waits though a lease is
        free."""
        assert self._parts.keys() <= self.members.keys()
        if self._in(Stage.WAITS):
            assert limit is not None, "leases are granted without a limit"
            assert len(self._in(Stage.HOLDS)) >= limit, "a model waits for a lease that is free"

    def _in(self, stage: Stage) -> list[ModelName]:
        return [name for name, part in self._parts.items() if part.stage is stage]


class PrefillSlots:
    """Grants leases for chunks of long prompts.

    Attributes:
        changed: the models whose workers have said anything since the last `settle`.
    """

    def __init__(self, outbox: Outbox, meter: Meter) -> None:
        self._outbox = outbox
        self._meter = meter
        self._devices: dict[str, Device] = {}  # by backend, of which there are four
        self._device_of: dict[ModelName, Device] = {}  # of each member
        self.changed: dict[ModelName, None] = {}
        self._most_readers: int | None = None  # as the settings said then

    # ------------------------------------------------------------ what workers say

    def stepped(self, model: Model, message: Step) -> str:
        """Take a step that a worker has made; return what is wrong with it, or nothing."""
        device = self._device_of.get(model.name)
        if device is None:
            return ""  # its process is about to end
        if message.returns_lease and not device.give_back(model.name):
            return "gave back a lease that it had not got"
        has_changed = device.reads(model.name, is_reading=message.reads_on)
        if message.wants_lease:
            if not device.ask(model.name):
                return "asked for a lease before its last one was over"
            if model.process.watch is not None:
                model.process.watch.asked_for_lease()
        if has_changed or message.returns_lease or message.wants_lease:
            self.changed[model.name] = None
        return ""

    # ------------------------------------------------------------ after every event

    def settle(
        self,
        models: Mapping[ModelName, Model],
        touched: Collection[ModelName],
        settings: CoreSettings,
        now: float,
    ) -> list[Model]:
        """Free the leases of models that no longer take part, and grant those that are free.

        Args:
            touched: those that anything has happened to.

        Returns:
            The models whose deadline may have changed.
        """
        if not (touched or self.changed):
            return []
        changed = {name: None for name in self.changed if name in models}
        self.changed.clear()
        is_new_limit = settings.max_parallel_prefills != self._most_readers
        self._most_readers = settings.max_parallel_prefills
        devices = dict(self._devices) if is_new_limit else {}
        for name in [*touched, *changed]:
            before = self._device_of.get(name)
            device = self._place(models.get(name), before)
            if device is not before:
                self._move(name, before, device)
            elif device is None or not (name in changed or device.is_over(name, now)):
                continue  # a request came or went, which is no reason to grant anything
            devices |= {one.backend: one for one in (before, device) if one is not None}
        stirred = dict.fromkeys(changed)
        for device in devices.values():
            stirred |= dict.fromkeys(self._grant(device, models, settings, now))
        return [models[name] for name in stirred]

    def _place(self, model: Model | None, before: Device | None) -> Device | None:
        """Return where a model takes part now; a process stays on its device."""
        if model is None or model.process.ready is None or model.process.is_unlinked:
            return None
        if model.life.state not in SERVES:
            return None
        if before is not None:
            return before
        backend = model.process.ready.backend
        return self._devices.setdefault(backend, Device(backend))

    def _move(self, name: ModelName, before: Device | None, after: Device | None) -> None:
        if before is not None:
            before.leave(name)
            del self._device_of[name]
        if after is not None:
            after.members[name] = False
            self._device_of[name] = after

    def _grant(
        self,
        device: Device,
        models: Mapping[ModelName, Model],
        settings: CoreSettings,
        now: float,
    ) -> list[ModelName]:
        """Tell the members whether leases are needed, if that has changed, and grant leases."""
        limit = device.limit(settings)
        device.expire(now)
        are_needed = device.are_needed(limit)
        for name, was_told in device.members.items():
            if was_told != are_needed:
                device.members[name] = are_needed
                self._outbox.tell(models[name], Leases(are_needed=are_needed))
        granted = device.grant(limit, lambda name: turn_rank(models[name]), now)
        for name in granted:
            model = models[name]
            self._outbox.tell(model, Lease())
            if model.batch.only_waits:
                model.batch.only_waits = False
                self._meter.works(model, now)
            if model.process.watch is not None:
                model.process.watch.got_lease(now)
        return granted

    def deadline(self, model: Model) -> float | None:
        """Return when something is due for this model, or its lease ends."""
        when = model.deadline()
        device = self._device_of.get(model.name)
        until = None if device is None else device.until(model.name)
        if when is None or until is None:
            return when if until is None else until
        return min(when, until)

    def check_invariants(self, models: Iterable[Model], settings: CoreSettings) -> None:
        """Raise AssertionError if a model takes part that must not, or waits without need."""
        for model in models:
            before = self._device_of.get(model.name)
            assert self._place(model, before) is before, f"{model.name} takes part wrongly"
        for device in self._devices.values():
            device.check_invariants(device.limit(settings))


def turn_rank(model: Model) -> int:
    """Return the class of a model's turn, lower ones first: the highest of its requests that wait
    for a first token, or for one since an interruption or a pause; if none does, the highest of
    all."""
    running = model.batch.running.values()
    reading = [
        one
        for one in running
        if one.cost.first_token_at is None or one.crashes.is_interrupted or one.pauses.is_paused
    ]
    ranks = (one.waiting.standing.rank for one in reading or running)
    return min(ranks, default=len(CLASSES))
