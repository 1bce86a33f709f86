"""What one seed decides beforehand: the kind of run, the models, the faults, the prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import Priority
from mlxsup.supervisor.core.memory.need import Need
from mlxsup.supervisor.core.settings import (
    ClientSettings,
    CoreSettings,
    ModelSettings,
    RestartSettings,
)

from . import contrast, model_names, sizes

EVENTS = 200
"""At least that many events happen in one run before its faults end."""


LIMITED_SHARE = 0.4
"""Of runs with a memory budget."""

ROWS_SHARE = 0.5
"""Of those, runs whose rows take memory, too."""

PINNED_SHARE = 0.25
"""Of those, runs with a pinned model."""

DETERMINISTIC_SHARE = 0.1
"""Of all runs."""


TOO_LARGE_EACH = 9
"""One of this many prompts of a run with poison needs more memory than there is."""


class Kind(StrEnum):
    """Kinds of runs, by what may happen; the fewer things may, the stricter the rules."""

    CALM = "calm"
    """No faults, no limits: everything finishes."""
    KILLS = "kills"
    """Deaths without evidence: everything that may resume does so, and finishes."""
    POISON = "poison"
    """Requests that kill their engines, or need too much memory: they alone pay."""
    LOADS = "loads"
    """Loads and idle engines fail: restarts, back-off, FAILED."""
    PEOPLE = "people"
    """Commands, reloads, signals, limits, clients that come and go."""
    STORM = "storm"
    """All of it together."""


WEIGHTS = {
    Kind.CALM: 8,
    Kind.KILLS: 26,
    Kind.POISON: 18,
    Kind.LOADS: 12,
    Kind.PEOPLE: 18,
    Kind.STORM: 18,
}

WITHOUT_EVIDENCE = {
    "kill": 0.03,
    "term": 0.008,
    "fault_71": 0.008,
    "gpu_72": 0.008,
    "odd_exit": 0.004,
    "stop": 0.008,
    "garbage": 0.006,
    "link_drops": 0.006,
    "row_lost": 0.004,
}
STALLS = {"stall": 0.008, "gil": 0.004, "blocked": 0.004, "waits_on": 0.3}
STRAY = {"segv": 0.01, "raise_70": 0.008, "stall": 0.006, "gil": 0.004, "blocked": 0.004,
         "mute": 0.006}  # fmt: skip
MEMORY = {"oom_75": 0.012, "oom_kill": 0.012, "oom_near": 0.006, "oom_beat": 0.008}
LOADING = {
    "load_dies": 0.05,
    "load_raises": 0.05,
    "load_alike": 0.03,
    "load_lacks_memory": 0.12,
    "load_stalls": 0.02,
    "spawn_fails": 0.05,
    "bad_model": 0.01,
    "other_version": 0.02,
    "load_stops": 0.01,
}
STUCK = {"unkillable": 0.4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request as a client would write it; sent again, it is the same one.

    Attributes:
        number: what tells it from others.
        body: what is sent.
        length: tokens of the whole answer.
        poison_at: with that many tokens computed the engine dies; None for an innocent.
        is_refused: the worker rejects it.
        is_too_large: its worker runs out of memory again and again.
        is_long: its prompt takes long steps to read, as the worker predicts.
        tokens: how many more than usual it has.
    """

    number: int
    body: bytes
    length: int
    poison_at: int | None = None
    is_refused: bool = False
    is_too_large: bool = False
    is_long: bool = False
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        seed: of the run.
        kind: what may happen.
        random: for everything that is decided on the way.
        models: the entries.
        settings: the limits.
        faults: the chance of each fault, at each step, load or kill.
        delays_s: the mean delay of each link by name.
        step_s: how long a step takes.
        is_limited: whether requests have time limits, and queues are short.
        poison_share, long_share: of prompts that kill their engines, and that take long to read.
        kept_share: of paused rows, those whose state workers keep.
        needs: what each model needs of the memory, in bytes, unless its entry says so.
        budget_bytes: what all may take together; None for no limit.
        layers: what rows take; empty if they take nothing.
        has_contrast: whether everybody asks for the highest class, or the lowest.
    """

    seed: int
    kind: Kind
    random: random.Random
    models: list[ModelSettings]
    settings: CoreSettings
    faults: dict[str, float]
    delays_s: dict[str, float]
    step_s: float
    is_limited: bool
    poison_share: float
    long_share: float
    kept_share: float
    needs: dict[ModelName, int] = field(default_factory=dict)
    budget_bytes: int | None = None
    layers: tuple[CacheLayers, ...] = ()
    has_contrast: bool = False
    _prompts: int = 0

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The same for the same seed, always."""
        dice = random.Random(seed)
        kind = dice.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        is_limited = kind in (Kind.PEOPLE, Kind.STORM)
        names = model_names.of(seed, dice.choice((1, 1, 2, 3)))
        models = [_model(dice, name, kind) for name in names]
        max_parallel_prefills, long_share = _turns(seed)
        scale = dice.choice((0.5, 1.0, 2.0))
        delays_s = {
            name: dice.choice((0.0, 0.002, 0.02, 0.1, 0.4))
            for name in ("client_up", "client_down", "worker_up", "worker_down", "beat")
        }
        plan = cls(
            seed=seed,
            kind=kind,
            random=dice,
            models=models,
            settings=replace(
                _settings(dice, seed, is_limited=is_limited),
                max_parallel_prefills=max_parallel_prefills,
                parallel_loads=_loads(seed),
            ),
            faults={name: min(chance * scale, 0.4) for name, chance in _faults(kind, dice)},
            delays_s=delays_s,
            step_s=dice.choice((0.02, 0.05, 0.1)),
            is_limited=is_limited,
            poison_share=_poison_share(dice, kind),
            long_share=long_share,
            kept_share=random.Random(f"kept in {seed}").choice((1.0, 1.0, 0.5)),
        )
        plan.share_memory()
        plan.make_deterministic()
        plan.add_spares()
        return plan

    def share_memory(self) -> None:
        """Some runs have a budget in which not all models fit, and some of those a pinned model.

        The dice are not those of the run, so that the runs without a budget stay as they are.
        """
        dice = random.Random(f"memory of {self.seed}")
        self.needs = {entry.name: dice.choice((2000, 3000, 4000)) for entry in self.models}
        if dice.random() >= LIMITED_SHARE:
            return
        least, most = self._sizes()
        self.budget_bytes = dice.randint(least, most)
        residency_s = dice.choice((0.5, 2.0))
        self.settings = replace(
            self.settings,
            budget=sizes.budget(self.budget_bytes),
            min_residency_s=residency_s,
            swap_after_s=residency_s,
        )
        self.let_rows_take_memory()
        if dice.random() < PINNED_SHARE and not self.has_contrast:
            self.models[0] = replace(self.models[0], pinned=True)

    @property
    def row_bytes(self) -> int:
        """What a model needs for one row."""
        return sizes.row_bytes(self.layers)

    def let_rows_take_memory(self) -> None:
        """In some of these, rows take memory; models whose entry limits it say nothing of that."""
        own = random.Random(f"rows of {self.seed}")
        if own.random() >= ROWS_SHARE:
            return
        self.layers = sizes.LAYERS
        row = self.row_bytes
        self.needs = {name: size + row for name, size in self.needs.items()}
        least, most = self._sizes()
        self.budget_bytes = own.randint(least, most) + own.choice((0, row, 2 * row, 4 * row))
        self.settings = replace(self.settings, budget=sizes.budget(self.budget_bytes))
        contrast.sharpen(self)

    def _sizes(self) -> tuple[int, int]:
        """The largest model, and a byte less than all of them."""
        needs = [entry.launch.memory_limit_bytes or self.needs[entry.name] for entry in self.models]
        return max(needs), max(max(needs), sum(needs) - 1)

    def layers_of(self, entry: LaunchSettings) -> tuple[CacheLayers, ...]:
        """What the worker of an entry says of its rows."""
        return () if entry.memory_limit_bytes else self.layers

    def make_deterministic(self) -> None:
        """In some runs the first model is deterministic: none of its requests may be paused."""
        if random.Random(f"deterministic in {self.seed}").random() < DETERMINISTIC_SHARE:
            launch = replace(self.models[0].launch, deterministic=True)
            self.models[0] = replace(self.models[0], launch=launch)

    def add_spares(self) -> None:
        """Some runs have spare workers, and models of their engine; the rest stays as it is."""
        dice = random.Random(f"spares of {self.seed}")
        wanted, spare_bytes = dice.choice((0, 0, 1, 2)), dice.choice((100, 400))
        if not wanted:
            return
        self.settings = replace(self.settings, spare_workers=wanted, spare_bytes=spare_bytes)
        for place, entry in enumerate(self.models):
            if dice.random() < 0.8:
                launch = replace(entry.launch, engine="mlx")
                self.models[place] = replace(entry, launch=launch)

    def weights(self, name: ModelName) -> int:
        """How much of what a model needs is its arrays."""
        return (self.needs[name] - self.row_bytes) // 2

    def appraised(self) -> dict[ModelName, Need]:
        """The needs as the shell would report them."""
        given = {entry.name: entry.launch.memory_limit_bytes for entry in self.models}
        rows = {entry.name: entry.launch.max_concurrency for entry in self.models}
        return {
            name: sizes.need(
                size, self.layers, rows[name], weights=self.weights(name), given=given[name]
            )
            for name, size in self.needs.items()
        }

    def new_prompt(self) -> Prompt:
        """A prompt that was never sent before."""
        dice = self.random
        self._prompts += 1
        length = dice.randint(1, 24) * (contrast.LONGER if self.has_contrast else 1)
        is_poison = dice.random() < self.poison_share
        padding = b"." * (dice.choice((0, 0, 300)) if self.is_limited else 0)
        return Prompt(
            number=self._prompts,
            body=b"prompt %d" % self._prompts + padding,
            length=length,
            poison_at=dice.randrange(length) if is_poison else None,
            is_refused=self.kind is not Kind.CALM and dice.random() < 0.06,
            is_too_large=self.kind is Kind.POISON and self._prompts % TOO_LARGE_EACH == 0,
            is_long=not is_poison and dice.random() < self.long_share,
            tokens=contrast.prompt_tokens(self, self._prompts),
        )


def _poison_share(dice: random.Random, kind: Kind) -> float:
    """Where most kill their engines, three are quarantined in a row: the engine is held broken."""
    if kind is Kind.POISON:
        return dice.choice((0.12, 0.12, 0.12, 0.6))
    return 0.12 if kind is Kind.STORM else 0.0


def _turns(seed: int) -> tuple[int | None, float]:
    """How many models may read long prompts at the same time, and the share of long ones."""
    dice = random.Random(f"turns of {seed}")  # the other draws stay what they were
    return dice.choice(((None, 0.06), (None, 0.06), (1, 0.25), (1, 0.5), (2, 0.5)))


def _loads(seed: int) -> int:
    """How many models may load at the same time."""
    return random.Random(f"loads of {seed}").choice((1, 1, 2, 3))


def _faults(kind: Kind, dice: random.Random) -> list[tuple[str, float]]:
    tables: dict[Kind, tuple[dict[str, float], ...]] = {
        Kind.CALM: (),
        Kind.KILLS: (WITHOUT_EVIDENCE,),
        Kind.POISON: ({"kill": 0.01, "stop": 0.004}, STALLS),
        Kind.LOADS: (LOADING, {"kill": 0.03, "idle_dies": 0.1}, MEMORY),
        Kind.PEOPLE: ({"kill": 0.01, "load_dies": 0.02}, STUCK),
        Kind.STORM: (WITHOUT_EVIDENCE, STRAY, MEMORY, LOADING, STUCK),
    }
    names = [(name, chance) for table in tables[kind] for name, chance in table.items()]
    most = len(names) if kind is not Kind.STORM else 16
    return dice.sample(names, min(most, len(names)))


def _model(dice: random.Random, name: str, kind: Kind) -> ModelSettings:
    has_memory = kind in (Kind.LOADS, Kind.STORM)
    launch = LaunchSettings(
        path=f"/{name}",
        engine="fake",
        max_concurrency=dice.randint(1, 5),
        step_timeout_s=dice.choice((2.0, 4.0)),
        memory_limit_bytes=dice.choice((None, 1000)) if has_memory else None,
    )
    return ModelSettings(
        name=ModelName(name),
        launch=launch,
        preload=dice.random() < 0.5,
        idle_unload_s=dice.choice((0.0, 0.0, 2.5)),
        load_stall_timeout_s=6.0,
        restart=RestartSettings(
            max_restarts=dice.choice((1, 3, 6)) if kind in (Kind.LOADS, Kind.STORM) else 1000,
            window_s=dice.choice((5.0, 300.0)),
            stable_s=dice.choice((1.0, 4.0)),
            backoff_initial_s=0.2,
            backoff_max_s=dice.choice((0.8, 3.2)),
        ),
    )


def _settings(dice: random.Random, seed: int, *, is_limited: bool) -> CoreSettings:
    own = random.Random(f"who is next {seed}")  # what it decides changes nothing else of a seed
    sharing: dict[str, Any] = {
        "aging_s": own.choice((0.0, 0.37, 2.3, 60.0)),  # never due together with another limit
        "clients": _clients(own),
        "min_run_s": random.Random(f"runs at least {seed}").choice((0.0, 0.11, 0.47, 2.0)),
    }
    if not is_limited:
        return CoreSettings(queue_timeout_s=0.0, **sharing)
    return CoreSettings(
        **sharing,
        max_queue=dice.randint(3, 12),
        max_queue_per_client=dice.randint(2, 8),
        max_queue_bytes=dice.choice((1500, 1_000_000)),
        drain_timeout_s=dice.choice((0.5, 3.0)),
        queue_timeout_s=dice.choice((4.0, 600.0)),
        first_token_timeout_s=dice.choice((0.0, 0.0, 8.0)),
        exit_grace_s=dice.choice((0.3, 2.0)),
    )


def other_launch(dice: random.Random, entry: ModelSettings) -> ModelSettings:
    """The entry with another launch, as an edited file has it."""
    rows = dice.choice([n for n in range(1, 6) if n != entry.launch.max_concurrency])
    return replace(entry, launch=replace(entry.launch, max_concurrency=rows))


def _clients(dice: random.Random) -> dict[str, ClientSettings]:
    """What the configuration grants; eve has no entry, and never more than others without one."""
    found = {}
    for name in ("ann", "bob", "*"):
        if dice.random() < 0.6:
            found[name] = ClientSettings(
                weight=dice.choice((0.5, 1.0, 3.0)),
                priority=dice.choice((Priority.NORMAL, Priority.BATCH)),
                max_priority=dice.choice((*[Priority.INTERACTIVE] * 4, Priority.NORMAL)),
                max_queue=dice.choice((0, 0, 3)),
                max_running=dice.choice((0, 0, 1, 2)),
            )
    return found
