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

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import CLASSES, SERVES
from mlxsup.protocol.worker_messages import Lease, Leases, Step

from .actions import Outbox
from .model import Model

LEASE_S = 4.0
"""A lease ends after this long: twice what a chunk should take at most (`IDLE_TARGET_S` in
worker/engines/mlx/prefill.py). A chunk that takes longer ends, too, but no model waits for it."""


GPUS = frozenset({"cuda", "metal"})
"""Backends on which, unless the configuration says otherwise, one model reads at a time."""


class Stage(Enum):
    """The stages of a model that takes part."""

    RESTS = auto()
    """It has no long prompt to read."""
    READS = auto()
    """It has one, and has asked for nothing."""
    WAITS = auto()
    """It has asked for a lease."""
    HOLDS = auto()
    """It has a lease."""
    OUTLASTS = auto()
    """Its lease is over, and its chunk is not."""


@dataclass(slots=True)
class _Member:
    """A model whose worker serves.

    Attributes:
        backend: of its process, which shares a device with the others of that backend.
        stage: what it does.
        order: of its asking; a lower number asked earlier.
        until: when its lease ends, in monotonic seconds.
        was_told: whether it was last told that leases are needed.
    """

    backend: str
    stage: Stage = Stage.RESTS
    order: int = 0
    until: float = 0.0
    was_told: bool = False

    def is_over(self, now: float) -> bool:
        """True if it has a lease that has lasted long enough."""
        return self.stage is Stage.HOLDS and self.until <= now


class PrefillSlots:
    """Grants leases for chunks of long prompts.

    Attributes:
        changed: the models whose stage has changed since the last `settle`.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        # Bounded by the configuration: models leave with their processes.
        self._members: dict[ModelName, _Member] = {}
        self._asked = 0
        self.changed: set[ModelName] = set()
        self._most_readers: int | None = None  # as the configuration says, since the last `settle`

    # ------------------------------------------------------------ what workers say

    def stepped(self, model: Model, message: Step) -> str:
        """Take a step that a worker has made; return what is wrong with it, or nothing.

        A model that has asked for a lease takes part until it has given that back.
        """
        member = self._members.get(model.name)
        if member is None:
            return ""  # its process is about to end
        before = member.stage
        if message.returns_lease:
            if before not in (Stage.HOLDS, Stage.OUTLASTS):
                return "gave back a lease that it had not got"
            member.stage = Stage.READS
        if member.stage in (Stage.RESTS, Stage.READS):
            member.stage = Stage.READS if message.reads_on else Stage.RESTS
        if message.wants_lease:
            if member.stage not in (Stage.RESTS, Stage.READS):
                return "asked for a lease before its last one was over"
            self._asked += 1
            member.stage, member.order = Stage.WAITS, self._asked
            if model.process.watch is not None:
                model.process.watch.asked_for_lease()
        if member.stage is not before:
            self.changed.add(model.name)
        return ""

    # ------------------------------------------------------------ after every event

    def settle(
        self,
        models: Mapping[ModelName, Model],
        touched: Collection[ModelName],
        most_readers: int | None,
        now: float,
    ) -> list[Model]:
        """Free the leases of models that no longer take part, and grant those that are free.

        Args:
            touched: those that anything has happened to.
            most_readers: the `max_parallel_prefills` of the configuration.

        Returns:
            The models that have got a lease.
        """
        if not touched:
            return []
        changed, self.changed = self.changed, set()
        is_new_limit = most_readers != self._most_readers
        self._most_readers = most_readers
        everybody = self._members.values() if is_new_limit else ()
        backends = dict.fromkeys(one.backend for one in everybody)
        for name in touched:
            member, backend = self._members.get(name), _backend_of(models.get(name))
            if member is None and backend is not None:
                member = self._members[name] = _Member(backend)
            elif member is not None and backend is None:
                del self._members[name]
            elif member is None or not (name in changed or member.is_over(now)):
                continue  # a request came or went, which is no reason to grant anything
            backends[member.backend] = None
        return [model for backend in backends for model in self.grant(backend, models, now)]

    def grant(self, backend: str, models: Mapping[ModelName, Model], now: float) -> list[Model]:
        """Tell the members of a device whether leases are needed, if that has changed, and grant
        the leases that are free.

        Returns:
            The models that have one from now on: by the class of their turn, then in the order of
            asking.
        """
        members = {name: one for name, one in self._members.items() if one.backend == backend}
        limit = self._limit(backend)
        for one in members.values():
            if one.is_over(now):
                one.stage = Stage.OUTLASTS
        readers = sum(one.stage is not Stage.RESTS for one in members.values())
        are_needed = limit is not None and readers > limit
        for name, one in members.items():
            if one.was_told != are_needed:
                one.was_told = are_needed
                self._outbox.tell(models[name], Leases(are_needed=are_needed))
        granted = [name for name, one in members.items() if one.stage is Stage.WAITS]
        granted.sort(key=lambda name: (turn_rank(models[name]), members[name].order))
        if limit is not None:
            holding = sum(one.stage is Stage.HOLDS for one in members.values())
            del granted[max(limit - holding, 0) :]
        for name in granted:
            model, member = models[name], members[name]
            member.stage, member.until = Stage.HOLDS, now + LEASE_S
            self._outbox.tell(model, Lease())
            if model.process.watch is not None:
                model.process.watch.got_lease(now)
        return [models[name] for name in granted]

    def deadline(self, model: Model) -> float | None:
        """Return when something is due for this model, or its lease ends."""
        when, member = model.deadline(), self._members.get(model.name)
        if member is None or member.stage is not Stage.HOLDS:
            return when
        return member.until if when is None else min(when, member.until)

    def check_invariants(self, models: Iterable[Model]) -> None:
        """Raise AssertionError if a model takes part that must not, or waits without need."""
        for model in models:
            is_member = model.name in self._members
            assert is_member is (_backend_of(model) is not None), f"{model.name} takes part wrongly"
        for backend in {one.backend for one in self._members.values()}:
            stages = [one.stage for one in self._members.values() if one.backend == backend]
            if Stage.WAITS in stages:
                limit = self._limit(backend)
                assert limit is not None, "leases are granted without a limit"
                assert stages.count(Stage.HOLDS) >= limit, "a model waits for a lease that is free"

    def _limit(self, backend: str) -> int | None:
        """Return how many models may read long prompts at the same time; None: any number."""
        if self._most_readers is not None:
            return self._most_readers
        return 1 if backend in GPUS else None


def _backend_of(model: Model | None) -> str | None:
    """Return the backend on which a model takes part; None if it does not."""
    if model is None or model.process.ready is None or model.process.is_unlinked:
        return None
    return model.process.ready.backend if model.life.state in SERVES else None


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
