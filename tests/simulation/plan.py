"""What one run decides beforehand: its kind, the models, the limits, the faults, the prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName, pack_tokens
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.states import Channel, FinishReason, Priority
from mlxsup.protocol.worker_messages import Acceptance
from mlxsup.supervisor.core.memory.budget import Budget
from mlxsup.supervisor.core.memory.need import Figure, Need, Source
from mlxsup.supervisor.core.settings import (
    ClientSettings,
    CoreSettings,
    ModelSettings,
    RestartSettings,
)

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

    from .books import Ask

T = TypeVar("T")

# ---------------------------------------------------------------- model names

MODELS = ("a", "b", "c", "d", "e")
MANY = 3
"""A run that would have this many models may get more."""


def names_of(seed: int, count: int) -> tuple[str, ...]:
    """The names of `count` models, sometimes of more; no other draw of the run changes."""
    dice = random.Random(f"models of {seed}")
    return MODELS[: dice.choice((3, 3, 3, 4, 5)) if count == MANY else count]


BACKENDS = ("cpu", "metal")


def backend_of(model: ModelName) -> str:
    """The device of a played engine: those of the plan share one, so that leases are contended even
    if there are two of them; others have theirs for themselves."""
    return "cpu" if model in MODELS else "metal"


# ---------------------------------------------------------------- sizes

LAYERS = (CacheLayers(layers=1, token_bytes=1),)
LEAST_TOKENS = 1100
"""Rows are never longer, with a step of growth: what a model needs does not change."""
CONTEXT_TOKENS = 1200
PROMPT_TOKENS = (0, 0, 300, 700)
"""Beside those that tell a prompt from others."""


def row_bytes(layers: tuple[CacheLayers, ...]) -> int:
    """What a model needs for one row."""
    return cache_bytes(layers, rows=1, longest=LEAST_TOKENS)


def usual_prompt_tokens(number: int) -> int:
    """How many tokens a prompt has, beside those that tell it from others."""
    return PROMPT_TOKENS[number // 2 % len(PROMPT_TOKENS)]


def need_for(
    size_bytes: int,
    layers: tuple[CacheLayers, ...],
    rows: int,
    *,
    weights: int,
    given: int | None,
) -> Need:
    """A model that needs that much with one row, or is given what its entry says."""
    own_bytes = size_bytes - row_bytes(layers) - weights
    return Need(
        weights=Figure(size_bytes=weights, source=Source.MEASURED),
        own=Figure(size_bytes=own_bytes, source=Source.MEASURED),
        layers=layers,
        layers_source=Source.MEASURED,
        context_tokens=CONTEXT_TOKENS,
        least_tokens=LEAST_TOKENS,
        max_rows=rows,
        given_bytes=given,
    )


def budget_of(size_bytes: int) -> Budget:
    """The memory budget of a run."""
    return Budget(
        size_bytes=size_bytes, machine_bytes=10 * size_bytes, is_given=True, reason="of the plan"
    )


# ---------------------------------------------------------------- contrast

CONTRAST_KINDS = ("calm", "kills", "people")
"""Runs whose rows take memory, if they are of these kinds: crashes do not take up most of them."""
CONTRAST_ROWS = 5
LONGER = 3
"""Answers are so many times as long as in other runs: rows leave only after a while."""
LEAST_PROMPT_TOKENS = 300
"""Of a prompt: a short one would be read again for so long, as it seems, that its row stays."""
HIGHEST_EACH = 4
"""One of this many prompts is asked for in the highest class, and the others in the lowest."""


def sharpen(plan: Plan) -> None:
    """There are many rows and little memory, nobody is pinned, and batch rows leave soon."""
    dice = random.Random(f"contrast in {plan.seed}")
    if plan.kind not in CONTRAST_KINDS:
        return
    plan.has_contrast = True
    plan.budget_bytes = max(plan.needs.values()) + plan.row_bytes * dice.choice((1, 2, 3))
    plan.settings = replace(
        plan.settings,
        budget=budget_of(plan.budget_bytes),
        min_run_s=dice.choice((0.0, 0.11)),
        aging_s=dice.choice((0.0, 0.37, 60.0)),
    )
    for place, entry in enumerate(plan.models):
        launch = replace(entry.launch, max_concurrency=CONTRAST_ROWS)
        plan.models[place] = replace(entry, launch=launch)


def ask_for_in_contrast(plan: Plan, ask: Ask) -> None:
    """How urgently a client asks in such a run."""
    if plan.has_contrast:
        is_highest = ask.prompt.number % HIGHEST_EACH == 0
        ask.priority = Priority.INTERACTIVE if is_highest else Priority.BATCH


def prompt_tokens(plan: Plan, number: int) -> int:
    """How many tokens a prompt has, beside those that tell it from others."""
    if not plan.layers:
        return 0
    return max(usual_prompt_tokens(number), LEAST_PROMPT_TOKENS if plan.has_contrast else 0)


# ---------------------------------------------------------------- plan

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


class SteadyDice(random.Random):
    """Dice without chance: what happens follows from what is asked for alone."""

    def random(self) -> float:
        """Return a bit less than a half."""
        return 0.499

    def choice(self, seq: SupportsLenAndGetItem[T]) -> T:
        """Return the first."""
        return seq[0]

    def randint(self, a: int, b: int) -> int:
        """Return the most."""
        return b

    def uniform(self, a: float, b: float) -> float:
        """Return the middle."""
        return (a + b) / 2

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        """Return the least."""
        return start if stop is not None else 0

    def expovariate(self, lambd: float = 1.0) -> float:
        """Return the mean."""
        return 1 / lambd


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
        is_steady: whether no dice decide anything.
        prompts: how many were made.
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
    is_steady: bool = False
    prompts: int = 0

    def dice(self, name: str) -> Random:
        """Return dice that decide nothing but what they are for."""
        return SteadyDice() if self.is_steady else Random(f"{name} {self.seed}")

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The same for the same seed, always."""
        dice = random.Random(seed)
        kind = dice.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        is_limited = kind in (Kind.PEOPLE, Kind.STORM)
        names = names_of(seed, dice.choice((1, 1, 2, 3)))
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
            budget=budget_of(self.budget_bytes),
            min_residency_s=residency_s,
            swap_after_s=residency_s,
        )
        self.let_rows_take_memory()
        if dice.random() < PINNED_SHARE and not self.has_contrast:
            self.models[0] = replace(self.models[0], pinned=True)

    @property
    def row_bytes(self) -> int:
        """What a model needs for one row."""
        return row_bytes(self.layers)

    def let_rows_take_memory(self) -> None:
        """In some of these, rows take memory; models whose entry limits it say nothing of that."""
        own = random.Random(f"rows of {self.seed}")
        if own.random() >= ROWS_SHARE:
            return
        self.layers = LAYERS
        row = self.row_bytes
        self.needs = {name: size + row for name, size in self.needs.items()}
        least, most = self._sizes()
        self.budget_bytes = own.randint(least, most) + own.choice((0, row, 2 * row, 4 * row))
        self.settings = replace(self.settings, budget=budget_of(self.budget_bytes))
        sharpen(self)

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

    def weights(self, name: ModelName) -> int:
        """How much of what a model needs is its arrays."""
        return (self.needs[name] - self.row_bytes) // 2

    def appraised(self) -> dict[ModelName, Need]:
        """The needs as the shell would report them."""
        given = {entry.name: entry.launch.memory_limit_bytes for entry in self.models}
        rows = {entry.name: entry.launch.max_concurrency for entry in self.models}
        return {
            name: need_for(
                size, self.layers, rows[name], weights=self.weights(name), given=given[name]
            )
            for name, size in self.needs.items()
        }

    def new_prompt(self) -> Prompt:
        """A prompt that was never sent before."""
        dice = self.random
        self.prompts += 1
        length = dice.randint(1, 24) * (LONGER if self.has_contrast else 1)
        is_poison = dice.random() < self.poison_share
        padding = b"." * (dice.choice((0, 0, 300)) if self.is_limited else 0)
        return Prompt(
            number=self.prompts,
            body=b"prompt %d" % self.prompts + padding,
            length=length,
            poison_at=dice.randrange(length) if is_poison else None,
            is_refused=self.kind is not Kind.CALM and dice.random() < 0.06,
            is_too_large=self.kind is Kind.POISON and self.prompts % TOO_LARGE_EACH == 0,
            is_long=not is_poison and dice.random() < self.long_share,
            tokens=prompt_tokens(self, self.prompts),
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


# ---------------------------------------------------------------- answers

HOLDS_BACK = 5
"""The text of a token that this divides comes with the next one, as half a character does."""
TOKENS = 997
STRIDE = 17
REASONING_TOKENS = 2
"""That many tokens at the beginning of an answer may be reasoning."""


def accept(prompt: Prompt, generation: int) -> Acceptance:
    """What a worker makes of a prompt; each life draws another seed."""
    return Acceptance(
        prompt_tokens=pack_tokens([prompt.number] + [7] * (prompt.number % 5 + prompt.tokens)),
        opening="<think>" if prompt.number % 4 == 0 else "",
        parameters={"temperature": prompt.number % 3 / 2, "max_tokens": prompt.length},
        seed=prompt.number * 1000 + generation,
        fingerprint="f",
    )


def number_of(acceptance: Acceptance) -> int:
    """The prompt's number, which its tokens tell."""
    return int.from_bytes(acceptance.prompt_tokens[:4], "little")


def answer_token(acceptance: Acceptance, index: int) -> int:
    """The token at this place of the answer, whichever life computes it."""
    return (_base(acceptance) + index * STRIDE) % TOKENS + 1


def answer_shown(acceptance: Acceptance, count: int, *, is_end: bool = False) -> str:
    """The text that is shown once this many tokens are known."""
    base = _base(acceptance)
    ends = range(base, base + count * STRIDE, STRIDE)
    if ends and not is_end and (ends[-1] % TOKENS + 1) % HOLDS_BACK == 0:
        ends = ends[:-1]
    return "".join([f"<{one % TOKENS + 1}>" for one in ends])


def _base(acceptance: Acceptance) -> int:
    warmth = int(acceptance.parameters["temperature"] * 2)
    return number_of(acceptance) * 7919 + acceptance.seed * 31 + warmth * 101


def answer_logprobs(acceptance: Acceptance, tokens: list[int]) -> list[Logprobs] | None:
    """How likely these tokens were, if the prompt asked for that."""
    if number_of(acceptance) % 5:
        return None
    return [Logprobs(chosen=TokenLogprob(token=one, logprob=-one / TOKENS)) for one in tokens]


def answer_channel(acceptance: Acceptance, index: int) -> Channel:
    """Which part of the answer a token belongs to."""
    is_reasoning = acceptance.opening and index < REASONING_TOKENS
    return Channel.REASONING if is_reasoning else Channel.CONTENT


def answer_length(acceptance: Acceptance) -> int:
    """Tokens of the whole answer."""
    return int(acceptance.parameters["max_tokens"])


def answer_finish(acceptance: Acceptance) -> FinishReason:
    """How the answer ends by itself."""
    return FinishReason.STOP if number_of(acceptance) % 3 == 0 else FinishReason.LENGTH


def answer_warning(acceptance: Acceptance) -> str | None:
    """What the worker warns of with the first token."""
    number = number_of(acceptance)
    return f"warning of {number}" if number % 7 == 0 else None


# ---------------------------------------------------------------- habits

COMMON = {"ask": 60, "cancel": 7, "ping": 1, "status": 2, "quiet": 0.7, "again": 3, "pause": 5,
          "resume": 5, "attach": 4, "crowd": 0.3, "stop_listening": 1,
          "cancel_any": 0.3}  # fmt: skip
OPERATE = {"load": 1.2, "unload": 1.8, "restart": 1.6, "reload": 1.2, "edit": 0.8, "leave": 1.0,
           "slow": 0.6, "subscribe": 0.8, "twin": 1.0, "unknown": 0.6, "nonsense": 0.6,
           "signal": 0.15, "stop": 0.15}  # fmt: skip
LIFT = {"load": 0.8, "quiet": 2.0}
CROWDED = {"load": 1.5, "dry_load": 1.5, "quiet": 3.0}
FORGIVE = {"again": 6, "copy": 5, "restart": 0.5, "load": 0.4, "reload": 0.4,
           "forgive": 2}  # fmt: skip
"""Requests come again; some of the others lift what is held against them, and some must not."""


def habits(kind: Kind, *, is_limited: bool) -> dict[str, float]:
    """How often each act happens, relative to the others.

    Args:
        kind: of the run.
        is_limited: whether there is a memory budget.
    """
    weights: dict[str, float] = dict(COMMON)
    if kind in (Kind.PEOPLE, Kind.STORM):
        weights |= OPERATE
    if kind is Kind.LOADS:
        weights |= LIFT
    if is_limited:
        weights |= CROWDED
    if kind is Kind.POISON:
        weights |= FORGIVE
    return weights
