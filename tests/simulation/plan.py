"""What one run decides beforehand: its kind, the models, the limits, the faults, the prompts.

Each subject has dice of its own, so that a change to one leaves the others of a seed as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.download import Repository
from mlxsup.protocol.ids import ModelName, pack_tokens
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.states import Channel, FinishReason, Priority
from mlxsup.protocol.worker_messages import Acceptance
from mlxsup.supervisor.core.budget import Budget, Figure, Need, Source
from mlxsup.supervisor.core.settings import (
    ClientSettings,
    CoreSettings,
    ModelSettings,
    RestartSettings,
)

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

T = TypeVar("T")

MODELS = ("a", "b", "c", "d", "e")
REPOSITORIES = (Repository("org/one"), Repository("org/two", "v2"))
# Events of one run, at least, before its faults end.
EVENTS = 200

# ---------------------------------------------------------------- kinds and faults


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


WEIGHTS = {Kind.CALM: 8, Kind.KILLS: 26, Kind.POISON: 18, Kind.LOADS: 12, Kind.PEOPLE: 18,
           Kind.STORM: 18}  # fmt: skip
WITHOUT_EVIDENCE = {"kill": 0.03, "term": 0.008, "fault_71": 0.008, "gpu_72": 0.008,
                    "odd_exit": 0.004, "stop": 0.008, "garbage": 0.006, "link_drops": 0.006,
                    "row_lost": 0.004}  # fmt: skip
STALLS = {"stall": 0.008, "gil": 0.004, "blocked": 0.004, "waits_on": 0.3}
STRAY = {"segv": 0.01, "raise_70": 0.008, "stall": 0.006, "gil": 0.004, "blocked": 0.004,
         "mute": 0.006}  # fmt: skip
MEMORY = {"oom_75": 0.012, "oom_kill": 0.012, "oom_near": 0.006, "oom_beat": 0.008}
LOADING = {"load_dies": 0.05, "load_raises": 0.05, "load_alike": 0.03, "load_lacks_memory": 0.12,
           "load_stalls": 0.02, "spawn_fails": 0.05, "bad_model": 0.01, "other_version": 0.02,
           "load_stops": 0.01}  # fmt: skip
STUCK = {"unkillable": 0.4}
FAULTS: dict[Kind, tuple[dict[str, float], ...]] = {
    Kind.CALM: (),
    Kind.KILLS: (WITHOUT_EVIDENCE,),
    Kind.POISON: ({"kill": 0.01, "stop": 0.004}, STALLS),
    Kind.LOADS: (LOADING, {"kill": 0.03, "idle_dies": 0.1}, MEMORY),
    Kind.PEOPLE: ({"kill": 0.01, "load_dies": 0.02}, STUCK),
    Kind.STORM: (WITHOUT_EVIDENCE, STRAY, MEMORY, LOADING, STUCK),
}

# How often people do what, relative to the rest.
COMMON = {"ask": 60, "cancel": 7, "ping": 1, "status": 2, "quiet": 0.7, "again": 3, "pause": 5,
          "resume": 5, "attach": 4, "crowd": 0.3, "stop_listening": 1,
          "cancel_any": 0.3}  # fmt: skip
OPERATE = {"load": 1.2, "unload": 1.8, "restart": 1.6, "reload": 1.2, "edit": 0.8, "leave": 1.0,
           "slow": 0.6, "subscribe": 0.8, "twin": 1.0, "unknown": 0.6, "nonsense": 0.6,
           "signal": 0.15, "stop": 0.15}  # fmt: skip
CROWDED = {"load": 1.5, "dry_load": 1.5, "quiet": 3.0}
HABITS: dict[Kind, dict[str, float]] = {
    Kind.PEOPLE: OPERATE,
    Kind.STORM: OPERATE,
    Kind.LOADS: {"load": 0.8, "quiet": 2.0},
    # Requests come again; some of the others lift what is held against them, and some must not.
    Kind.POISON: {"again": 6, "copy": 5, "restart": 0.5, "load": 0.4, "reload": 0.4, "forgive": 2},
}


def habits(kind: Kind, *, has_budget: bool) -> dict[str, float]:
    """Return how often each act happens, relative to the others."""
    crowded = CROWDED if has_budget else {}
    if kind is Kind.POISON:
        return COMMON | crowded | HABITS[kind]
    return COMMON | HABITS.get(kind, {}) | crowded


# ---------------------------------------------------------------- plan

LAYERS = (CacheLayers(layers=1, token_bytes=1),)
# Rows are never longer, with a step of growth: what a model needs does not change.
LEAST_TOKENS = 1100
CONTEXT_TOKENS = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request as a client would write it; sent again, it is the same one."""

    number: int
    body: bytes
    length: int  # tokens of the whole answer
    poison_at: int | None = None  # the engine dies with that many tokens computed
    is_refused: bool = False
    is_too_large: bool = False  # its worker runs out of memory again and again
    is_long: bool = False  # it takes long steps to read, as the worker predicts
    tokens: int = 0  # of the prompt, more than usual


class SteadyDice(Random):
    """Dice without chance: what happens follows from what is asked for alone."""

    def random(self) -> float:
        return 0.499

    def choice(self, seq: SupportsLenAndGetItem[T]) -> T:
        return seq[0]

    def randint(self, a: int, b: int) -> int:
        return b

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return start if stop is not None else 0

    def expovariate(self, lambd: float = 1.0) -> float:
        return 1 / lambd


@dataclass(slots=True, kw_only=True)
class Plan:
    """One run."""

    seed: int
    kind: Kind
    random: Random  # for everything that is decided on the way
    models: list[ModelSettings]
    settings: CoreSettings
    faults: dict[str, float]  # the chance of each, at each step, load or kill
    delays_s: dict[str, float]  # the mean of each link
    step_s: float
    is_limited: bool = False  # requests have time limits, and queues are short
    poison_share: float = 0.0
    long_share: float = 0.0
    kept_share: float = 1.0  # of paused rows, those whose state workers keep
    needs: dict[ModelName, int] = field(default_factory=dict)  # bytes, unless an entry says so
    budget_bytes: int | None = None
    layers: tuple[CacheLayers, ...] = ()  # what rows take
    has_contrast: bool = False  # all ask for the highest class, or the lowest
    is_steady: bool = False  # no dice decide anything
    prompts: int = 0  # so many were made

    def dice(self, name: str) -> Random:
        """Return dice that decide nothing but what they are for."""
        return SteadyDice() if self.is_steady else Random(f"{name} {self.seed}")

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Return the plan of a seed: always the same."""
        dice = Random(seed)
        kind = dice.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        is_limited = kind in (Kind.PEOPLE, Kind.STORM)
        count = dice.choice((1, 1, 2, 3))
        if count == 3:
            count = Random(f"models of {seed}").choice((3, 3, 3, 4, 5))
        models = [_model(dice, name, kind) for name in MODELS[:count]]
        readers, long_share = Random(f"turns of {seed}").choice(
            ((None, 0.06), (None, 0.06), (1, 0.25), (1, 0.5), (2, 0.5))
        )
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
                max_parallel_prefills=readers,
                parallel_loads=Random(f"loads of {seed}").choice((1, 1, 2, 3)),
            ),
            faults={name: min(chance * scale, 0.4) for name, chance in _faults(kind, dice)},
            delays_s=delays_s,
            step_s=dice.choice((0.02, 0.05, 0.1)),
            is_limited=is_limited,
            poison_share=_poison_share(dice, kind),
            long_share=long_share,
            kept_share=Random(f"kept in {seed}").choice((1.0, 1.0, 0.5)),
        )
        plan._share_memory()
        if Random(f"deterministic in {seed}").random() < 0.1:
            plan._launch(0, deterministic=True)
        plan._lack_files()
        return plan

    def _launch(self, place: int, **changes: Any) -> None:
        entry = self.models[place]
        self.models[place] = replace(entry, launch=replace(entry.launch, **changes))

    def _share_memory(self) -> None:
        """Give some runs a budget in which not all models fit, and some of those a pinned model."""
        dice = Random(f"memory of {self.seed}")
        self.needs = {entry.name: dice.choice((2000, 3000, 4000)) for entry in self.models}
        if dice.random() >= 0.4:
            return
        self.set_budget(dice.randint(*self._sizes()))
        residency_s = dice.choice((0.5, 2.0))
        self.settings = replace(
            self.settings, min_residency_s=residency_s, swap_after_s=residency_s
        )
        self._let_rows_take_memory()
        if dice.random() < 0.25 and not self.has_contrast:
            self.models[0] = replace(self.models[0], pinned=True)

    def _let_rows_take_memory(self) -> None:
        own = Random(f"rows of {self.seed}")
        if own.random() >= 0.5:
            return
        self.layers = LAYERS
        row = self.row_bytes
        self.needs = {name: size + row for name, size in self.needs.items()}
        self.set_budget(own.randint(*self._sizes()) + own.choice((0, row, 2 * row, 4 * row)))
        if self.kind in (Kind.CALM, Kind.KILLS, Kind.PEOPLE):  # others mostly crash
            self._sharpen(Random(f"contrast in {self.seed}"))

    def _sharpen(self, dice: Random) -> None:
        """Have many rows and little memory, pin nobody, and let batch rows leave soon."""
        self.has_contrast = True
        self.set_budget(max(self.needs.values()) + self.row_bytes * dice.choice((1, 2, 3)))
        self.settings = replace(
            self.settings,
            min_run_s=dice.choice((0.0, 0.11)),
            aging_s=dice.choice((0.0, 0.37, 60.0)),
        )
        for place in range(len(self.models)):
            self._launch(place, max_concurrency=5)

    def _lack_files(self) -> None:
        """In some runs most models have to be downloaded first; a pinned one is there already."""
        dice = Random(f"hub of {self.seed}")
        if dice.random() >= 0.3:
            return
        for place, entry in enumerate(self.models):
            if not entry.pinned and dice.random() < 0.8:
                lacks = dice.choice(REPOSITORIES)
                self.models[place] = replace(
                    entry, repo=lacks.repo, revision=lacks.revision, download=lacks
                )

    def set_budget(self, size_bytes: int) -> None:
        self.budget_bytes = size_bytes
        budget = Budget(
            size_bytes=size_bytes,
            machine_bytes=10 * size_bytes,
            reason="of the plan",
        )
        self.settings = replace(self.settings, budget=budget)

    def _sizes(self) -> tuple[int, int]:
        """Return the largest model, and a byte less than all of them."""
        needs = [entry.launch.memory_limit_bytes or self.needs[entry.name] for entry in self.models]
        return max(needs), max(max(needs), sum(needs) - 1)

    @property
    def row_bytes(self) -> int:
        """What a model needs for one row."""
        return cache_bytes(self.layers, rows=1, longest=LEAST_TOKENS)

    def layers_of(self, entry: LaunchSettings) -> tuple[CacheLayers, ...]:
        """Return what the worker of an entry says of its rows."""
        return () if entry.memory_limit_bytes else self.layers

    def weights(self, name: ModelName) -> int:
        """Return how much of what a model needs is its arrays."""
        return (self.needs[name] - self.row_bytes) // 2

    def appraised(self) -> dict[ModelName, Need]:
        """Return the needs as the shell would report them."""
        return {entry.name: self._need(entry) for entry in self.models}

    def _need(self, entry: ModelSettings) -> Need:
        weights = self.weights(entry.name)
        own_bytes = self.needs[entry.name] - self.row_bytes - weights
        return Need(
            weights=Figure(size_bytes=weights, source=Source.MEASURED),
            own=Figure(size_bytes=own_bytes, source=Source.MEASURED),
            layers=self.layers,
            layers_source=Source.MEASURED,
            context_tokens=CONTEXT_TOKENS,
            least_tokens=LEAST_TOKENS,
            max_rows=entry.launch.max_concurrency,
            given_bytes=entry.launch.memory_limit_bytes,
        )

    def new_prompt(self) -> Prompt:
        """Return a prompt that was never sent before."""
        dice = self.random
        self.prompts += 1
        length = dice.randint(1, 24) * (3 if self.has_contrast else 1)
        is_poison = dice.random() < self.poison_share
        padding = b"." * (dice.choice((0, 0, 300)) if self.is_limited else 0)
        # A short prompt would be read again for so long, as it seems, that its row stays.
        least = 300 if self.has_contrast else 0
        return Prompt(
            number=self.prompts,
            body=b"prompt %d" % self.prompts + padding,
            length=length,
            poison_at=dice.randrange(length) if is_poison else None,
            is_refused=self.kind is not Kind.CALM and dice.random() < 0.06,
            is_too_large=self.kind is Kind.POISON and self.prompts % 9 == 0,
            is_long=not is_poison and dice.random() < self.long_share,
            tokens=max((0, 0, 300, 700)[self.prompts // 2 % 4], least) if self.layers else 0,
        )


def _poison_share(dice: Random, kind: Kind) -> float:
    """Where most kill their engines, three are quarantined in a row: the engine is held broken."""
    if kind is Kind.POISON:
        return dice.choice((0.12, 0.12, 0.12, 0.6))
    return 0.12 if kind is Kind.STORM else 0.0


def _faults(kind: Kind, dice: Random) -> list[tuple[str, float]]:
    names = [one for table in FAULTS[kind] for one in table.items()]
    most = len(names) if kind is not Kind.STORM else 16
    return dice.sample(names, min(most, len(names)))


def _model(dice: Random, name: str, kind: Kind) -> ModelSettings:
    is_faulty = kind in (Kind.LOADS, Kind.STORM)
    launch = LaunchSettings(
        path=f"/{name}",
        engine="fake",
        max_concurrency=dice.randint(1, 5),
        step_timeout_s=dice.choice((2.0, 4.0)),
        memory_limit_bytes=dice.choice((None, 1000)) if is_faulty else None,
    )
    return ModelSettings(
        name=ModelName(name),
        launch=launch,
        preload=dice.random() < 0.5,
        idle_unload_s=dice.choice((0.0, 0.0, 2.5)),
        load_stall_timeout_s=6.0,
        restart=RestartSettings(
            max_restarts=dice.choice((1, 3, 6)) if is_faulty else 1000,
            window_s=dice.choice((5.0, 300.0)),
            stable_s=dice.choice((1.0, 4.0)),
            backoff_initial_s=0.2,
            backoff_max_s=dice.choice((0.8, 3.2)),
        ),
    )


def _settings(dice: Random, seed: int, *, is_limited: bool) -> CoreSettings:
    own = Random(f"who is next {seed}")
    sharing: dict[str, Any] = {
        "aging_s": own.choice((0.0, 0.37, 2.3, 60.0)),  # never due together with another limit
        "clients": _clients(own),
        "min_run_s": Random(f"runs at least {seed}").choice((0.0, 0.11, 0.47, 2.0)),
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


def _clients(dice: Random) -> dict[str, ClientSettings]:
    """Return what the configuration grants; eve has no entry."""
    return {
        name: ClientSettings(
            weight=dice.choice((0.5, 1.0, 3.0)),
            priority=dice.choice((Priority.NORMAL, Priority.BATCH)),
            max_priority=dice.choice((*[Priority.INTERACTIVE] * 4, Priority.NORMAL)),
            max_queue=dice.choice((0, 0, 3)),
            max_running=dice.choice((0, 0, 1, 2)),
        )
        for name in ("ann", "bob", "*")
        if dice.random() < 0.6
    }


# ---------------------------------------------------------------- answers

# The text of a token that this divides comes with the next one, as half a character does.
HOLDS_BACK = 5
# That many tokens at the beginning of an answer may be reasoning.
REASONING_TOKENS = 2
TOKENS, STRIDE = 997, 17


def accept(prompt: Prompt, generation: int) -> Acceptance:
    """Return what a worker makes of a prompt; each life draws another seed."""
    return Acceptance(
        prompt_tokens=pack_tokens([prompt.number] + [7] * (prompt.number % 5 + prompt.tokens)),
        opening="<think>" if prompt.number % 4 == 0 else "",
        parameters={"temperature": prompt.number % 3 / 2, "max_tokens": prompt.length},
        seed=prompt.number * 1000 + generation,
        fingerprint="f",
    )


def number_of(acceptance: Acceptance) -> int:
    """Return the prompt's number, which its tokens tell."""
    return int.from_bytes(acceptance.prompt_tokens[:4], "little")


def answer_token(acceptance: Acceptance, index: int) -> int:
    """Return the token at this place of the answer, whichever life computes it."""
    return (_base(acceptance) + index * STRIDE) % TOKENS + 1


def answer_shown(acceptance: Acceptance, count: int, *, is_end: bool = False) -> str:
    """Return the text that is shown once this many tokens are known."""
    base = _base(acceptance)
    ends = range(base, base + count * STRIDE, STRIDE)
    if ends and not is_end and (ends[-1] % TOKENS + 1) % HOLDS_BACK == 0:
        ends = ends[:-1]
    return "".join([f"<{one % TOKENS + 1}>" for one in ends])


def _base(acceptance: Acceptance) -> int:
    warmth = int(acceptance.parameters["temperature"] * 2)
    return number_of(acceptance) * 7919 + acceptance.seed * 31 + warmth * 101


def answer_logprobs(acceptance: Acceptance, tokens: list[int]) -> list[Logprobs] | None:
    """Return how likely these tokens were, if the prompt asked for that."""
    if number_of(acceptance) % 5:
        return None
    return [Logprobs(chosen=TokenLogprob(token=one, logprob=-one / TOKENS)) for one in tokens]


def answer_channel(acceptance: Acceptance, index: int) -> Channel:
    """Return which part of the answer a token belongs to."""
    is_reasoning = acceptance.opening and index < REASONING_TOKENS
    return Channel.REASONING if is_reasoning else Channel.CONTENT


def answer_length(acceptance: Acceptance) -> int:
    """Return the tokens of the whole answer."""
    return int(acceptance.parameters["max_tokens"])


def answer_finish(acceptance: Acceptance) -> FinishReason:
    """Return how the answer ends by itself."""
    return FinishReason.STOP if number_of(acceptance) % 3 == 0 else FinishReason.LENGTH


def answer_warning(acceptance: Acceptance) -> str | None:
    """Return what the worker warns of with the first token."""
    number = number_of(acceptance)
    return f"warning of {number}" if number % 7 == 0 else None
