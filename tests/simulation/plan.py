"""What one seed decides beforehand: the models, the faults, the requests and their true answers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings, RestartSettings
from support.core_driver import LAUNCH, entry

EVENTS = 220
"""At least so many events happen in one run, before it is wound up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One kind of request; several requests may share it.

    Attributes:
        body: what is sent.
        length: tokens of the whole answer.
        poison_at: with so many tokens delivered the engine dies; None for an innocent.
        is_refused: the worker rejects it.
    """

    body: bytes
    length: int
    poison_at: int | None = None
    is_refused: bool = False

    def token(self, index: int) -> int:
        """The token that stands at this place of the answer, whichever life computes it."""
        return (sum(self.body) * 31 + index * 7) % 1000 + 1


@dataclass(slots=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        random: for everything that is decided on the way.
        models: the entries.
        settings: the limits.
        prompts: what clients ask.
        faults: the chance of each fault, at each step or load.
        has_stray_accusations: engines also die with evidence that is nobody's fault.
    """

    random: random.Random
    models: list[ModelSettings]
    settings: CoreSettings
    prompts: list[Prompt]
    faults: dict[str, float] = field(default_factory=dict)
    has_stray_accusations: bool = False

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The same for the same seed, always."""
        dice = random.Random(seed)
        has_stray = dice.random() < 0.3
        models = [_model(dice, name) for name in ("a", "b", "c")[: dice.randint(1, 3)]]
        scale = dice.choice((0.0, 0.5, 1.0, 3.0))
        faults = {
            "kill": 0.02,
            "oom": 0.004,
            "stop": 0.006,
            "garbage": 0.003,
            "link_drops": 0.004,
            "row_lost": 0.004,
            "beats_end": 0.004,
            "load_dies": 0.06,
            "load_raises": 0.03,
            "load_lacks_memory": 0.03,
            "load_stalls": 0.02,
            "spawn_fails": 0.03,
            "bad_model": 0.01,
        }
        if has_stray:
            faults |= {"segv": 0.01, "stall": 0.006, "gil": 0.006, "blocked": 0.006}
        return cls(
            random=dice,
            models=models,
            settings=CoreSettings(
                max_queue=dice.randint(4, 12),
                max_queue_per_client=dice.randint(2, 8),
                max_queue_bytes=dice.choice((400, 10_000)),
                drain_timeout_s=dice.choice((2.0, 20.0)),
                queue_timeout_s=dice.choice((30.0, 600.0)),
                first_token_timeout_s=dice.choice((0.0, 40.0)),
            ),
            prompts=[_prompt(dice, number) for number in range(dice.randint(4, 14))],
            faults={name: min(chance * scale, 0.5) for name, chance in faults.items()},
            has_stray_accusations=has_stray,
        )


def _model(dice: random.Random, name: str) -> ModelSettings:
    return entry(
        name,
        launch=replace(LAUNCH, max_concurrency=dice.randint(1, 4), step_timeout_s=5.0),
        preload=dice.random() < 0.5,
        idle_unload_s=dice.choice((0.0, 0.0, 15.0)),
        restart=RestartSettings(
            max_restarts=dice.choice((2, 30)),
            window_s=300.0,
            stable_s=dice.choice((3.0, 20.0)),
            backoff_initial_s=0.5,
            backoff_max_s=4.0,
        ),
    )


def _prompt(dice: random.Random, number: int) -> Prompt:
    length = dice.randint(1, 15)
    is_poison = dice.random() < 0.12
    return Prompt(
        body=f"prompt {number}".encode(),
        length=length,
        poison_at=dice.randrange(length) if is_poison else None,
        is_refused=dice.random() < 0.05,
    )
