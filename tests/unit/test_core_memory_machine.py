"""Any loads, crashes, exits, evictions and reloads: the books hold, and nobody waits in vain.

The machine keeps books that are independent of the core's: what a process was spawned with and
measured at, until its exit. After each event they are compared with the status.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import Dispatch, Exit, GiveBack
from mlxsup.supervisor.core.actions import Abandon, Action, SendToWorker, SignalWorker, Spawn
from mlxsup.supervisor.core.actions import WorkerSignal as Signal
from mlxsup.supervisor.core.events import Reloaded, Sampled
from mlxsup.supervisor.core.memory.residency import RESIDENCY_LOADS
from mlxsup.supervisor.core.model import ASK_AGAIN_S, GIVING_BACK_S
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core_memory import MemoryDriver, limited, sized

NAMES = "abcd"
names = st.sampled_from(NAMES)
sizes = st.integers(1, 6)
budgets = st.integers(6, 12)
all_sizes = st.tuples(sizes, sizes, sizes, sizes)
pins = st.sampled_from(["", "", "a", "b"])
FULL = "another has waited longer"
ENDING = ("DRAINING", "STOPPING")
SETTLING_S = 150.0
"""By then whoever waits has been served, if every load is short."""


@dataclass(slots=True, kw_only=True)
class Process:
    """A process as the machine plays it, what it holds of the budget, and what it was started with.

    Attributes:
        asked_back_at: when it was last asked to give back.
    """

    held: int
    granted: int
    asked_back_at: float = -math.inf
    is_ready: bool = False
    is_ending: bool = False
    rows: list[int] = field(default_factory=list)


class MemoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.processes: dict[str, Process] = {}
        self.kept: dict[str, int] = {}
        """What may be kept for models without a process: what they held, at most what they need."""
        self.asked = 0
        self.evicted = 0

    @initialize(needs=all_sizes, budget=budgets, pin=pins)
    def start(self, needs: tuple[int, ...], budget: int, pin: str) -> None:
        self.budget = budget
        self.entries = self.entries_of(needs, pin)
        self.driver = MemoryDriver([], self.settings_of(budget))
        self.driver.obey = self.obey_all
        self.began_at = self.driver.now
        self.reload_to(self.entries)

    def settings_of(self, budget: int) -> CoreSettings:
        return limited(budget, swap=False)

    @staticmethod
    def entries_of(needs: tuple[int, ...], pin: str) -> list[ModelSettings]:
        return [
            sized(
                name,
                need,
                pinned=name == pin,
                preload=name in "ab",
                load_stall_timeout_s=1e6,
            )
            for name, need in zip(NAMES, needs, strict=True)
        ]

    # ------------------------------------------------------------ the world

    def obey_all(self, actions: list[Action]) -> None:
        for action in actions:
            self.obey(action)

    def obey(self, action: Action) -> None:
        match action:
            case Spawn(model=model, launch=launch):
                assert model not in self.processes, "two processes of one model"
                granted = launch.memory_limit_bytes or 0
                self.processes[model] = Process(held=granted, granted=granted)
                self.kept.pop(model, None)
                reserved = self.driver.reserved()
                assert reserved <= self.budget, f"{model} is spawned: {reserved} are reserved"
            case SendToWorker(model=model, message=Dispatch(key=key)):
                self.processes[model].rows.append(key)
            case SendToWorker(model=model, message=GiveBack()):
                self.processes[model].asked_back_at = self.driver.now
            case SendToWorker(model=model, message=Exit()):
                process = self.processes[model]
                process.is_ending = True
                if self.driver.row(model)["why"] == "evict":
                    self.evicted += 1
                    assert not process.rows, f"{model} was busy"
                    assert not self.entry(model).pinned, f"{model} is pinned"
            case SignalWorker(model=model, signal=signal):
                self.processes[model].is_ending |= signal is not Signal.DUMP
            case Abandon():
                raise AssertionError("every process obeys in time")

    def entry(self, name: str) -> ModelSettings:
        return next(entry for entry in self.entries if entry.name == name)

    def need(self, name: str) -> int:
        return self.entry(name).launch.memory_limit_bytes or 0

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.driver.core.status(self.driver.now)["models"]}

    # ------------------------------------------------------------ what happens

    @rule(model=names)
    def somebody_asks(self, model: str) -> None:
        self.asked += 1
        self.driver.ask(f"r{self.asked}", model)

    @rule(model=names)
    def somebody_loads(self, model: str) -> None:
        self.driver.load(model)

    @rule(model=names)
    def somebody_unloads(self, model: str) -> None:
        self.driver.unload(model)

    @rule(model=names, now=st.booleans())
    def somebody_restarts(self, model: str, now: bool) -> None:
        self.driver.restart(model, now=now)

    @rule(model=names)
    def one_becomes_ready(self, model: str) -> None:
        process = self.processes.get(model)
        if process is not None and not process.is_ready and not process.is_ending:
            process.is_ready = True
            self.driver.come_up(model)

    @rule()
    def all_become_ready(self) -> None:
        for model in NAMES:
            self.one_obeys(model)
            self.one_becomes_ready(model)

    @rule(model=names)
    def a_row_ends(self, model: str) -> None:
        process = self.processes.get(model)
        if process is not None and process.rows:
            key = process.rows.pop()
            self.driver.accept(key, model)
            self.driver.token(key, model=model, finish=FinishReason.STOP)

    @rule(model=names, code=st.sampled_from([None, None, 0, 65, 70, 75]))
    def one_dies(self, model: str, code: int | None) -> None:
        if model in self.processes:
            self.kept[model] = min(self.processes.pop(model).held, self.need(model))
            self.driver.exit(model, code=code)

    @rule(model=names)
    def one_obeys(self, model: str) -> None:
        process = self.processes.get(model)
        if process is not None and process.is_ending:
            self.one_dies(model, 0)

    @rule(model=names, held=st.integers(1, 9))
    def one_is_measured(self, model: str, held: int) -> None:
        """Nothing is seen of the others. Who was asked to give back may hold less than before."""
        if self.rows()[model]["pid"] is not None:
            self.memory_is_sampled({model: held})

    def memory_is_sampled(self, footprints: dict[str, int]) -> None:
        rows = self.rows()
        by_pid = {rows[name]["pid"]: held for name, held in footprints.items()}
        for name, process in self.processes.items():
            least = process.granted if self.may_shrink(name) else process.held
            process.held = max(least, footprints.get(name, 0))
        self.driver.do(Sampled(now=self.driver.now, footprint_bytes=by_pid, machine_bytes=100))

    def may_shrink(self, name: str) -> bool:
        is_recent = self.driver.now < self.processes[name].asked_back_at + ASK_AGAIN_S
        return is_recent and self.rows()[name]["state"] in ("READY", "DRAINING")

    @rule(needs=all_sizes, budget=budgets, pin=pins, is_same=st.booleans())
    def somebody_reloads(
        self, needs: tuple[int, ...], budget: int, pin: str, is_same: bool
    ) -> None:
        self.budget = budget
        if is_same:
            self.entries = [replace(e, pinned=e.name == pin) for e in self.entries]
        else:
            self.entries = self.entries_of(needs, pin)
        for name, held in self.kept.items():
            self.kept[name] = min(held, self.need(name))
        self.reload_to(self.entries)

    def reload_to(self, entries: list[ModelSettings]) -> None:
        for name, process in self.processes.items():
            if self.entry(name).pinned:
                process.held = max(process.held, self.need(name))
        settings_ = self.settings_of(self.budget)
        self.driver.do(Reloaded(now=self.driver.now, settings=settings_, models=tuple(entries)))

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.9]))
    def time_passes(self, seconds: float) -> None:
        """Not so long that a process that was told to end is killed; all hold what they held."""
        for model in list(self.processes):  # each can be told to end now at the latest
            if self.rows()[model]["pid"] is None:
                self.driver.spawned(model, ord(model))
        self.driver.pass_time(seconds)
        self.memory_is_sampled({name: one.held for name, one in self.processes.items()})
        for model in NAMES:
            self.one_obeys(model)

    @rule()
    def everybody_has_been_idle(self) -> None:
        for _ in range(8):
            self.time_passes(1.9)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "driver"):
            return
        rows = self.rows()
        for name, row in rows.items():
            process, pinned = self.processes.get(name), self.entry(name).pinned
            least = self.need(name) if pinned else 0
            if process is not None:
                assert row["reserved_bytes"] == max(process.held, least), row
            elif row["state"] in ("STOPPED", "FAILED"):
                assert row["reserved_bytes"] == least, row
            else:
                kept = min(self.kept.get(name, 0), self.need(name))
                allowed = {least, max(kept, least)}  # or it was given back
                assert row["reserved_bytes"] in allowed, (row, allowed)
        assert self.driver.reserved() == sum(row["reserved_bytes"] for row in rows.values())

    @invariant()
    def nobody_idle_is_left_beyond_the_budget(self) -> None:
        if not hasattr(self, "driver"):
            return
        since = max((one.asked_back_at for one in self.processes.values()), default=-math.inf)
        if self.driver.now < since + GIVING_BACK_S:
            return  # what is given back may be enough
        rows = self.rows().values()
        staying = [row for row in rows if not self.is_leaving(row)]
        if sum(row["reserved_bytes"] for row in staying) > self.budget:
            assert [row["name"] for row in staying if self.is_idle(row)] == []

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        """What fits is loaded, if nothing else loads."""
        if not hasattr(self, "driver"):
            return
        rows = self.rows()
        if any(row["state"] in ("LOADING", *ENDING) for row in rows.values()):
            return  # what loads goes first, and what is being freed may be for another
        for name, row in rows.items():
            if row["state"] != "PENDING" or FULL in (row["memory_wait"] or {}).get("reason", ""):
                continue
            others = sum(one["reserved_bytes"] for one in rows.values()) - row["reserved_bytes"]
            assert others + self.need(name) > self.budget, row

    @staticmethod
    def is_idle(row: dict[str, Any]) -> bool:
        is_at_work = row["running"] or row["queued"]
        return row["state"] == "READY" and not row["pinned"] and not is_at_work

    @staticmethod
    def is_leaving(row: dict[str, Any]) -> bool:
        return row["state"] in ENDING

    def teardown(self) -> None:
        """Whoever waits is served in the end, or knows why not."""
        if not hasattr(self, "driver"):
            return
        self.settle_until(self.is_quiet)
        ended = {id for _, id in self.driver.terminals if id.startswith("r")}
        assert ended == {f"r{number}" for number in range(1, self.asked + 1)}

    def is_quiet(self) -> bool:
        return not any(row["queued"] or row["running"] for row in self.rows().values())

    def settle_until(self, is_reached: Callable[[], bool]) -> None:
        """A turn lasts `RESIDENCY_LOADS` times what its load took: at most all that has passed."""
        passed_s = self.driver.now - self.began_at
        ends_at = self.driver.now + SETTLING_S + RESIDENCY_LOADS * passed_s
        while self.driver.now < ends_at:
            for model in NAMES:
                self.one_obeys(model)
                self.one_becomes_ready(model)
                while (process := self.processes.get(model)) is not None and process.rows:
                    self.a_row_ends(model)
                self.the_books_agree()
                self.nobody_waits_in_vain()
            if is_reached():
                return
            self.time_passes(1.9)
        raise AssertionError(f"somebody waits for ever: {self.rows()}")


MemoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestMemory = MemoryMachine.TestCase
