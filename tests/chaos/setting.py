"""What a run of chaos is made of: the fake engine for many requests, or real MLX for some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .answers import Answers, FakeAnswers, LearntAnswers
from .crowding import EVICTION
from support.daemon import fake

EVIDENCE = ("SIGSEGV", "SIGABRT")
SILENT = ("SIGKILL", "SIGTERM", "SIGSTOP")
SIGNALS = (*EVIDENCE, *SILENT)
COMMANDS = ("restart", "restart --now", "reload", "other launch", "unload")
CLIENTS = ("client gone", "client killed", "garbage")
SHORT_STOP = "short stop"
INSIDE = ("poison", "stall", "out of memory")
PAUSES = ("pause",)

SUPERVISOR = {"max_queue_per_client": 1024, "parallel_loads": 2}
RESTART = {"max_restarts": 1_000_000, "backoff_initial_s": 0.05, "backoff_max_s": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The sizes of one run.

    Attributes:
        where: for the report (J5).
        models: entries by name.
        answers: what is asked, and the right answers.
        askers: how many ask at the same time, each one model, one request after the other.
        pause_s: from one fault to the next, on average.
        kinds: the faults; each comes once before any comes again.
        follows: what comes of itself and is counted as they are.
        supervisor: the table of that name.
        is_roaming: whether each asker asks now this model, now that one.
        requests_per_fault: that many requests call for one fault of each kind.
        left_tokens: of an answer, which no client lags behind.
        end_limit_s: a request that has no end after this is lost.
        run_limit_s: a run that takes longer asks no more.
        supervisor: keys of `[supervisor]`.
    """

    where: str
    models: Mapping[str, dict[str, Any]]
    answers: Answers
    askers: int
    pause_s: float
    kinds: tuple[str, ...]
    requests_per_fault: int
    left_tokens: int
    end_limit_s: float
    run_limit_s: float
    follows: tuple[str, ...] = ()
    supervisor: Mapping[str, Any] = field(default_factory=SUPERVISOR.copy)
    is_roaming: bool = False

    @property
    def has_kills(self) -> bool:
        """Whether any fault ends a process that requests run in."""
        return bool({*SIGNALS, "restart --now"} & {*self.kinds})

    def least_of_each(self, requests: int) -> int:
        """The minimum count of every kind of fault in a run of that many requests."""
        return max(1, requests // self.requests_per_fault)


def fake_setting() -> Setting:
    """Four models of the fake engine, many short answers; one that is down holds up its own."""
    return Setting(
        where="fake engine",
        models={
            name: fake(
                fake={"step_s": 0.002, "voice": name},
                restart=RESTART,
                max_concurrency=32,
                step_timeout_s=5.0,
            )
            for name in "abcd"
        },
        answers=FakeAnswers(short=(8, 32), long=200),
        askers=256,
        pause_s=0.4,
        kinds=(*SIGNALS, *COMMANDS, *CLIENTS, SHORT_STOP, *INSIDE, *PAUSES),
        requests_per_fault=6000,
        left_tokens=60,
        end_limit_s=120.0,
        run_limit_s=900.0,
    )


def crowded_setting() -> Setting:
    """Four models of the fake engine, of which three fit; one of them is pinned.

    Fewer ask than there are models, one request after the other, so that models fall idle.
    """
    return Setting(
        where="fake engine, too little memory",
        models={
            name: fake(
                fake={"step_s": 0.002, "voice": name},
                restart=RESTART,
                max_concurrency=4,
                memory="300MiB",
                preload=name == "a",
                pinned=name == "a",
            )
            for name in "abcd"
        },
        answers=FakeAnswers(short=(80, 200), long=400),
        askers=3,
        pause_s=0.4,
        kinds=("SIGKILL", "SIGSEGV", "restart", "restart --now", "other launch", "unload", *PAUSES),
        follows=(EVICTION,),
        requests_per_fault=100,
        left_tokens=40,
        end_limit_s=120.0,
        run_limit_s=400.0,
        supervisor={**SUPERVISOR, "memory_budget": "1000MiB", "min_residency_s": 0},
        is_roaming=True,
    )


def real_setting(folders: dict[str, Path]) -> Setting:
    """Real models on the CPU, each of other weights, with longer answers.

    Args:
        folders: of the models, by name.
    """
    entry = {"preload": True, "restart": RESTART, "max_concurrency": 8}
    return Setting(
        where="MLX on the CPU",
        models={name: {"path": str(folder), **entry} for name, folder in folders.items()},
        answers=LearntAnswers(folders, prompts=8, tokens=200),
        askers=16,
        pause_s=1.2,
        kinds=(*SIGNALS, *COMMANDS, *CLIENTS, SHORT_STOP, *PAUSES),
        requests_per_fault=250,
        left_tokens=100,
        end_limit_s=180.0,
        run_limit_s=500.0,
        supervisor={**SUPERVISOR, "spare_workers": 1},
    )
