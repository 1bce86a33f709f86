"""What a run of chaos is made of: the fake engine for many requests, or real MLX for some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.daemon import fake

SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGSTOP")
COMMANDS = ("restart", "restart --now", "reload")
CLIENTS = ("client gone", "garbage")
POISON = "poison"

RESTART = {"max_restarts": 1_000_000, "backoff_initial_s": 0.05, "backoff_max_s": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The sizes of one run.

    Attributes:
        where: for the report (J5).
        models: entries by name.
        prompts: how many different ones are asked.
        tokens: of each answer.
        askers: how many ask at the same time, each one model, one request after the other.
        pause_s: from one fault to the next, on average.
        kinds: the faults; each comes once before any comes again.
        requests_per_fault: so many requests call for one fault of each kind.
    """

    where: str
    models: Mapping[str, dict[str, Any]]
    prompts: int
    tokens: int
    askers: int
    pause_s: float
    kinds: tuple[str, ...]
    requests_per_fault: int

    def least_of_each(self, requests: int) -> int:
        """The minimum count of every kind of fault in a run of so many requests."""
        return max(1, requests // self.requests_per_fault)


def fake_setting() -> Setting:
    """Four models of the fake engine, many short answers; one that is down holds up its own."""
    entry = fake(fake={"step_s": 0.002}, restart=RESTART, max_concurrency=32)
    return Setting(
        where="fake engine",
        models=dict.fromkeys("abcd", entry),
        prompts=24,
        tokens=16,
        askers=256,
        pause_s=0.45,
        kinds=(*SIGNALS, *COMMANDS, *CLIENTS, POISON),
        requests_per_fault=2000,
    )


def real_setting(model: Path) -> Setting:
    """Two workers of one real model on the CPU, longer answers."""
    entry = {"path": str(model), "preload": True, "restart": RESTART, "max_concurrency": 8}
    return Setting(
        where="MLX on the CPU",
        models=dict.fromkeys(("a", "b"), entry),
        prompts=8,
        tokens=200,
        askers=16,
        pause_s=1.5,
        kinds=(*SIGNALS, *COMMANDS, *CLIENTS),
        requests_per_fault=100,
    )
