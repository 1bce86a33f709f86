"""Any loads, crashes, evictions, swaps and reloads: the books hold, and nobody waits in vain.

To the books of the other machine this one adds rows that gain tokens and leave, and what each
process has been asked to do since it was READY.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.worker_messages import Dispatch, Exit, PauseRow
from mlxsup.supervisor.core.actions import Action, SendToWorker, Spawn
from mlxsup.supervisor.core.model import GIVING_BACK_S
from mlxsup.supervisor.core.settings import CoreSettings

from .test_core_memory_machine import NAMES, MemoryMachine, names
from support.core_memory import limited

MIN_RESIDENCY_S = 3.0
RETURNING = ("restart", "reload")
"""Why a model leaves that loads again at once, in the memory that is kept for it."""


@dataclass(slots=True)
class Turn:
    """What a process has been given and has delivered.

    Attributes:
        ready_at: when it became READY.
        first_token_at: when it delivered its first token.
        pausing: rows that were asked to leave.
        was_given: whether it was given anything.
    """

    ready_at: float | None = None
    first_token_at: float | None = None
    pausing: list[int] = field(default_factory=list)
    was_given: bool = False


class SwapMachine(MemoryMachine):
    def __init__(self) -> None:
        super().__init__()
        self.turns: dict[str, Turn] = {}
        self.swaps = 0

    def settings_of(self, budget: int) -> CoreSettings:
        return limited(budget, swap_after_s=2.0, min_residency_s=MIN_RESIDENCY_S, max_queue=64)

    def obey(self, action: Action) -> None:
        match action:
            case Spawn(model=model):
                self.turns[model] = Turn()
            case SendToWorker(model=model, message=Dispatch()):
                self.turns[model].was_given = True
            case SendToWorker(model=model, message=PauseRow(key=key)):
                self.turns[model].pausing.append(key)
            case SendToWorker(model=model, message=Exit()) if self.is_swap(model):
                self.check_swap(model)
        super().obey(action)

    def is_swap(self, model: str) -> bool:
        return bool(self.rows()[model]["why"] == "swap")

    def check_swap(self, model: str) -> None:
        self.swaps += 1
        turn, now = self.turns[model], self.driver.now
        assert not self.processes[model].rows, f"{model} still runs something"
        assert not self.entry(model).pinned, f"{model} is pinned"
        assert turn.ready_at is not None
        began_at = turn.ready_at if turn.first_token_at is None else turn.first_token_at
        assert turn.first_token_at is not None or not turn.was_given, f"{model} delivered nothing"
        assert now >= began_at + MIN_RESIDENCY_S, f"{model} had no time"
        others = [row for row in self.rows().values() if row["name"] != model]
        held = self.rows()[model]["reserved_bytes"]
        is_short = sum(self.held_later(row) for row in others) + held > self.budget
        waits = [row for row in others if row["memory_wait"]]
        assert waits or is_short, f"{model} goes for nobody"

    def held_later(self, row: dict[str, Any]) -> int:
        """What is held for a model once those that leave have left; who restarts comes back, and
        what a pinned one needs stays its own."""
        held = int(row["reserved_bytes"])
        if not self.is_leaving(row):
            return held
        stays = row["pinned"] or row["why"] in RETURNING
        return min(held, self.need(row["name"])) if stays else 0

    # ------------------------------------------------------------ what happens

    @rule(model=names)
    def one_becomes_ready(self, model: str) -> None:
        super().one_becomes_ready(model)
        turn, process = self.turns.get(model), self.processes.get(model)
        if turn is not None and process is not None and process.is_ready and turn.ready_at is None:
            turn.ready_at = self.driver.now

    @rule(model=names)
    def rows_gain_tokens(self, model: str) -> None:
        process = self.processes.get(model)
        if process is not None and process.rows and process.is_ready:
            for key in process.rows:
                self.driver.accept(key, model)
            self.driver.token(*process.rows, model=model)
            self.has_delivered(model)

    @rule(model=names)
    def a_row_ends(self, model: str) -> None:
        process = self.processes.get(model)
        if process is not None and process.rows:
            self.has_delivered(model)
        super().a_row_ends(model)

    def has_delivered(self, model: str) -> None:
        turn = self.turns[model]
        if turn.first_token_at is None:
            turn.first_token_at = self.driver.now

    @rule(model=names)
    def rows_leave(self, model: str) -> None:
        process, turn = self.processes.get(model), self.turns.get(model)
        while process is not None and turn is not None and turn.pausing:
            key = turn.pausing.pop()
            if key in process.rows:
                process.rows.remove(key)
                self.driver.row_left(RequestKey(key), model)

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.9]))
    def time_passes(self, seconds: float) -> None:
        """Not so long that rows that were asked to leave are cut off."""
        for model in NAMES:
            self.rows_leave(model)
        super().time_passes(seconds)

    @rule()
    def everybody_waits_for_a_turn(self) -> None:
        for _ in range(5):
            for model in NAMES:
                self.one_becomes_ready(model)
                self.rows_gain_tokens(model)
            self.time_passes(1.9)


SwapMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestSwaps = SwapMachine.TestCase


def test_a_swap_is_needed_if_the_other_one_only_restarts() -> None:
    machine = SwapMachine()
    machine.start(needs=(1, 1, 1, 1), budget=6, pin="")
    machine.somebody_reloads(needs=(1, 1, 5, 1), budget=7, pin="", is_same=False)
    machine.somebody_asks("c")
    machine.everybody_waits_for_a_turn()
    machine.somebody_restarts("b", now=False)
    machine.somebody_reloads(needs=(1, 1, 1, 1), budget=6, pin="a", is_same=True)
    assert machine.rows()["b"]["state"] == "STOPPING"
    machine.everybody_has_been_idle()
    assert machine.swaps == 1
    machine.teardown()


def test_a_swap_is_needed_if_the_other_one_is_pinned_and_unloads() -> None:
    machine = SwapMachine()
    machine.start(needs=(5, 1, 1, 4), budget=12, pin="")
    for model in "acd":
        machine.somebody_asks(model)
    machine.everybody_waits_for_a_turn()
    machine.somebody_reloads(needs=(5, 1, 1, 4), budget=9, pin="a", is_same=True)
    machine.somebody_unloads("a")
    machine.teardown()
    assert machine.swaps == 1


def test_an_idle_model_beyond_the_budget_goes_once_the_others_could_give_back() -> None:
    machine = SwapMachine()
    machine.start(needs=(1, 1, 1, 1), budget=6, pin="")
    machine.all_become_ready()
    machine.somebody_asks("b")
    machine.one_dies("b", code=75)
    machine.one_is_measured("a", held=6)
    machine.nobody_idle_is_left_beyond_the_budget()
    assert machine.evicted == 0
    machine.time_passes(GIVING_BACK_S)
    machine.nobody_idle_is_left_beyond_the_budget()
    assert machine.evicted == 1
    machine.teardown()


def test_a_turn_of_three_long_loads_is_waited_for() -> None:
    machine = SwapMachine()
    machine.start(needs=(1, 6, 1, 1), budget=6, pin="")
    machine.one_becomes_ready("a")
    machine.somebody_unloads("a")
    for _ in range(10):
        machine.everybody_has_been_idle()
    machine.somebody_asks("a")
    assert machine.rows()["b"]["state"] == "LOADING"
    machine.teardown()
    assert machine.evicted == 1
