"""Test the kv budget: free memory is divided among models for their rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName, RequestKey
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.text import size_text
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.kv_budget import GIVES_AGAIN_AFTER_S, Row, RowBudget, Rows
from mlxsup.supervisor.core.life import Lack, Wait
from mlxsup.supervisor.core.memory_plan import divide, plan
from mlxsup.supervisor.core.memory_view import (
    LoadedModel,
    LoadRequest,
    MemoryView,
    Standing,
    Urgency,
    loaded_models,
)
from mlxsup.supervisor.core.settings import ModelSettings

from support.core.driver import RESTART
from support.core.memory import limited, sized, states
from support.core.needs import budget
from support.core.rows import (
    FIXED,
    ONE_ROW,
    RowsDriver,
    bytes_for,
    need_of,
    served,
)
from support.core.scripts import play
from support.core.shortage import ShortageDriver

# Division of free memory

MODEL = FIXED + ONE_ROW
"""What is reserved before a load."""


def test_free_memory_is_shared_equally() -> None:
    driver = RowsDriver("ab", 2 * MODEL + 1000)
    driver.bring_up("a")
    assert driver.budget("a") == ONE_ROW + MODEL + 1000
    driver.load("b")
    driver.confirm("a")
    driver.now += 1
    driver.measure()
    assert driver.budget("a") == ONE_ROW + 1000, "what is free, until b can use it, too"
    driver.come_up("b")
    assert (driver.budget("a"), driver.budget("b")) == (ONE_ROW + 500, ONE_ROW)
    driver.confirm("a")
    assert (driver.budget("a"), driver.budget("b")) == (ONE_ROW + 500, ONE_ROW + 500)
    assert driver.reserved() == 2 * MODEL + 1000


MEMBER = LoadedModel(
    name=ModelName("a"),
    reserved_bytes=500,
    standing=Standing.BUSY,
    spare_bytes=1,
    rows=Rows(
        layers=(CacheLayers(layers=1, row_bytes=200),),
        least_bytes=100,
        wanted_bytes=1000,
        size_bytes=300,
        most_bytes=500,
        rows=(Row(0.0, RequestKey(1), 64),),
    ),
)
"""Its row holds 400 bytes."""


def view_with(*waiting: LoadRequest) -> MemoryView:
    """One model shares 2000 bytes, and these wait."""
    return MemoryView(budget=budget(2000), now=0.0, loaded={MEMBER.name: MEMBER}, waiting=waiting)


def waits(urgency: Urgency) -> LoadRequest:
    lack = Lack(since=0.0, wait=Wait(reason="needs more"))
    return LoadRequest(name=ModelName("b"), needed_bytes=1, urgency=urgency, lack=lack)


def test_who_gives_back_is_not_told_more_at_the_same_time() -> None:
    """Its rows hold more than it was told, until it keeps to that."""
    [part] = divide(view_with(), is_short=True)
    assert (part.size_bytes, part.gives_back) == (300, True)


@pytest.mark.parametrize(("urgency", "size_bytes"), [(Urgency.REQUEST, None), (Urgency.NONE, 1000)])
def test_rows_get_no_more_while_a_request_waits_for_memory(
    urgency: Urgency, size_bytes: int | None
) -> None:
    [part] = divide(view_with(waits(urgency)), is_short=False)
    assert part.size_bytes == size_bytes


def test_who_has_spare_gives_it_back_while_more_is_reserved_than_there_is() -> None:
    """No model waits for it; a worker that is not asked would keep what it has for speed."""
    found = [
        plan(replace(view_with(), budget=budget(size_bytes))).parts[0] for size_bytes in (500, 499)
    ]
    assert [part.gives_back for part in found] == [False, True]


def changed(**rows: Any) -> MemoryView:
    """The same model, with other facts about its rows."""
    assert MEMBER.rows is not None
    other = replace(MEMBER, rows=replace(MEMBER.rows, **rows))
    return replace(view_with(), loaded={MEMBER.name: other})


def test_a_given_memory_is_all_that_rows_could_take() -> None:
    """Whatever the other models leave: `memory` in the entry is what the row would be told."""
    wanted = MEMBER.rows.wanted_bytes if MEMBER.rows is not None else 0
    assert divide(changed(is_given=True), is_short=False)[0].could_bytes == wanted
    assert divide(changed(), is_short=False)[0].could_bytes > wanted


def test_what_was_raised_gives_way_to_a_row_at_once() -> None:
    """Its row needs 900 of 1000 bytes, of which 300 are there because others ran out of memory."""
    [one] = changed(least_bytes=900, raise_bytes=300, size_bytes=600).loaded.values()
    full = replace(one, reserved_bytes=1000)
    short = replace(view_with(), budget=budget(1000), loaded={one.name: full})
    part = divide(short, is_short=False)[0]
    assert (part.could_bytes, part.raise_bytes, part.size_bytes) == (1000, 100, 900)


def test_a_budget_is_lowered_by_an_eighth_or_not_at_all() -> None:
    """A worker that is told of every token would be told at every step."""
    told = [
        divide(changed(size_bytes=size_bytes), is_short=False)[0].size_bytes
        for size_bytes in (1142, 1144)
    ]
    assert told == [None, 1000]


def test_rows_get_no_more_while_another_model_tries_a_request_again() -> None:
    """It has run out of memory alone: what is free must stay free for it."""
    alone, beside = (
        divide(replace(view_with(), tried_again=frozenset({ModelName(name)})), is_short=False)[0]
        for name in ("a", "b")
    )
    assert (alone.size_bytes, beside.size_bytes) == (1000, 400)


def test_what_is_kept_for_a_pinned_model_is_not_spare() -> None:
    """Its weights take less than was expected."""
    driver = RowsDriver("a", 3 * MODEL, own_bytes=0, pinned="a")
    driver.bring_up("a")
    driver.confirm("a")
    [one] = loaded_models(driver.core.fleet, driver.core.fleet.settings, driver.now)
    assert one.rows is not None
    kept_bytes = driver.model("a").life.pinned_bytes
    assert one.rows.fixed_bytes + one.rows.held_bytes < kept_bytes
    assert (one.least_bytes, one.rows.kept_bytes) == (kept_bytes, kept_bytes)
    assert replace(one.rows, most_bytes=0).reserved_with(0) == kept_bytes


@pytest.mark.parametrize(
    ("third_bytes", "budget_bytes", "told_bytes"),
    [
        pytest.param(1000, 1400, (300, None), id="200 are free"),
        pytest.param(500, 1600, (533, 533), id="900 are free"),
    ],
)
def test_models_that_get_more_do_not_get_the_same_memory(
    third_bytes: int, budget_bytes: int, told_bytes: tuple[int, int | None]
) -> None:
    """The third may hold what the first two could have, until its worker keeps to less."""

    def member(name: str, size_bytes: int) -> LoadedModel:
        assert MEMBER.rows is not None
        rows = replace(MEMBER.rows, rows=(), size_bytes=size_bytes, most_bytes=size_bytes)
        return replace(MEMBER, name=ModelName(name), reserved_bytes=size_bytes, rows=rows)

    members = [
        member(name, size_bytes)
        for name, size_bytes in (("a", 100), ("b", 100), ("c", third_bytes))
    ]
    loaded = {one.name: one for one in members}
    view = replace(view_with(), budget=budget(budget_bytes), loaded=loaded)
    told = {str(part.name): part.size_bytes for part in divide(view, is_short=False)}
    assert (told["a"], told["b"]) == told_bytes


def test_a_confirmation_is_heard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beat repeats it, and beats are many."""
    driver = RowsDriver("a", 2 * MODEL)
    driver.bring_up("a")
    heard: list[int] = []
    was_confirmed = RowBudget.was_confirmed

    def noted(self: RowBudget) -> bool:
        heard.append(self.number)
        return was_confirmed(self)

    monkeypatch.setattr(RowBudget, "was_confirmed", noted)
    for _ in range(3):
        driver.confirm("a")
    assert heard == [driver.budgets["a"][-1].number]


def test_nothing_is_divided_before_what_is_due_first() -> None:
    assert plan(view_with()).parts != []
    assert plan(replace(view_with(), is_division_due=False)).parts == []
    found = plan(view_with(waits(Urgency.REQUEST)))
    assert (len(found.steps), found.parts) == (1, [])


def test_a_paused_answer_is_loaded_for_again() -> None:
    driver = RowsDriver("a", 10 * MODEL)
    driver.bring_up("a")
    key = driver.begin("a", "r1", prompt=3000)
    needed_bytes = driver.row("a")["needed_bytes"]
    assert needed_bytes > MODEL
    driver.pause("r1")
    driver.row_left(key, "a")
    assert (driver.row("a")["paused"], driver.row("a")["needed_bytes"]) == (["r1"], needed_bytes)


def test_load_takes_head_room_back_before_evicting() -> None:
    """And waits until the worker keeps to the lower budget."""
    driver = play(RowsDriver("ab", 2 * MODEL), "bring_up a; load b -> a=READY & b=PENDING")
    message = driver.budgets["a"][-1]
    assert (message.rows_bytes, message.gives_back) == (ONE_ROW, True)
    full = f"reserved -> returns={2 * MODEL}"  # it may still take it
    play(
        driver,
        f"{full}; confirm a {message.number - 1} -> b=PENDING; confirm a -> b=LOADING; {full}",
    )


def test_budget_covers_running_rows() -> None:
    driver = RowsDriver("ab", 3 * MODEL)
    driver.bring_up("a")
    for id in ("r1", "r2"):
        driver.begin("a", id, prompt=500)
    driver.load("b")
    assert driver.budget("a") == bytes_for(2, 500 + 256)


@pytest.mark.parametrize("gives_back", [True, False])
def test_given_back_caches_show_at_the_next_measurement(gives_back: bool) -> None:
    """Until then no model is evicted for it."""
    driver = RowsDriver("ab", 2 * MODEL)
    driver.bring_up("a")
    driver.measure(a=2 * MODEL - 5)
    driver.now += 1000
    driver.load("b")
    driver.confirm("a")
    assert states(driver, "ab") == [State.READY, State.PENDING]
    driver.measure(a=MODEL if gives_back else 2 * MODEL - 5)
    kept, evicted = [State.READY, State.LOADING], [State.STOPPING, State.PENDING]
    assert states(driver, "ab") == (kept if gives_back else evicted)


def test_a_given_memory_is_the_limit_without_a_budget_too() -> None:
    driver = RowsDriver("a", 1, {"a": need_of(given=MODEL)}, budget=None)
    driver.bring_up("a")
    assert driver.budget("a") == ONE_ROW


def test_rows_that_nothing_limits_are_told_no_budget() -> None:
    driver = RowsDriver("a", 1, budget=None)
    driver.bring_up("a")
    assert driver.budgets["a"] == []


def test_rows_of_a_model_that_drains_give_back_too() -> None:
    driver = RowsDriver("ab", 2 * MODEL + 1000)
    driver.bring_up("a")
    driver.confirm("a")
    key = driver.begin("a", "r1")
    driver.gain("a", key, 1)
    told = driver.budget("a")
    driver.restart("a")
    driver.load("b")
    assert driver.state("a") is State.DRAINING
    assert driver.budget("a") < told


# Rows of pinned models

LONG = 3000
BUDGET = 2 * MODEL + 4000
BUSY = FIXED + bytes_for(2, LONG + 1 + 256)
"""A model finds no room beside that."""


def run_long_rows(driver: RowsDriver) -> list[RequestKey]:
    """`p` runs two rows that take all that there is beside it."""
    driver.now += 10.0
    driver.confirm("p")
    driver.measure()
    keys = [driver.begin("p", id, LONG) for id in ("p1", "p2")]
    for key in keys:
        driver.gain("p", key, 1)
    return keys


def rows_end(driver: RowsDriver, keys: list[RequestKey]) -> None:
    for key in keys:
        driver.end("p", key)
    driver.confirm("p")
    driver.measure()


def reload(driver: RowsDriver, *models: ModelSettings, budget_bytes: int = BUDGET) -> None:
    settings = limited(budget_bytes, min_residency_s=0.0)
    needs = driver.core.fleet.needs
    driver.do(Reloaded(now=driver.now, settings=settings, models=models, needs=needs))


def test_a_request_waits_until_rows_of_a_pinned_model_have_ended() -> None:
    driver = RowsDriver("pm", BUDGET, pinned="p")
    driver.bring_up("p")
    keys = run_long_rows(driver)
    assert driver.foresees("m")["outcome"] == "waits"
    driver.ask("r1", "m")
    assert driver.errors() == {}
    assert driver.row("m")["memory_wait"]["reason"] == (
        f"needs {size_text(MODEL)}; 0.0 MiB is free:"
        f" p is pinned and holds {size_text(BUSY)} for now"
    )
    rows_end(driver, keys)
    assert driver.state("m") is State.LOADING


def test_answers_of_a_model_that_crashed_wait_for_rows_of_a_pinned_one() -> None:
    """Its restart is too far away for its memory to be kept, so rows of the other one take it."""
    driver = RowsDriver("pm", BUDGET, pinned="p")
    slow = replace(RESTART, backoff_initial_s=8.0, backoff_max_s=8.0)
    reload(driver, served("p", pinned=True), served("m", restart=slow))
    driver.bring_up("p")
    driver.load("m")
    for _ in range(2):
        driver.confirm("p")
        driver.measure()
    driver.come_up("m")
    driver.exit("m")
    driver.come_up("m")
    stream = driver.begin("m", "r1", 100)
    driver.gain("m", stream, 1)
    driver.exit("m")
    assert driver.state("m") is State.BACKOFF
    keys = run_long_rows(driver)
    driver.pass_time(10.0)
    assert (driver.state("m"), driver.errors()) == (State.PENDING, {})
    rows_end(driver, keys)
    driver.come_up("m")
    assert driver.dispatched() == [stream]


def test_model_that_can_return_later_goes_for_a_lowered_budget() -> None:
    driver = ShortageDriver("pm", pinned="p")
    run_long_rows(driver)
    driver.start("m", "m1", 100)
    driver.now += 60.0
    driver.measure()
    models = (served("p", pinned=True), served("m"))
    reload(driver, *models, budget_bytes=2 * MODEL + 2000)
    driver.measure()
    assert states(driver, "pm") == [State.READY, State.DRAINING]


def test_outgrown_pinned_process_blocks_for_good() -> None:
    held = BUDGET - 100
    driver = RowsDriver("pm", BUDGET, pinned="p")
    driver.bring_up("p")
    driver.confirm("p")
    driver.now += 1.0
    driver.measure(p=held)
    driver.ask("r1", "m")
    assert driver.errors() == {}, "it may keep that for speed alone"
    driver.confirm("p")
    driver.now += 1.0
    driver.measure(p=held)
    error = driver.failure_of("r1").error
    assert f"p is pinned and holds {size_text(held)}" in error.message


def test_measurement_under_load_does_not_block_for_good() -> None:
    """It gave back just before, so what it holds is what it needs; that was for its rows."""
    driver = RowsDriver("pms", BUDGET, pinned="p")
    reload(driver, served("p", pinned=True), served("m"), sized("s", 1000))
    driver.bring_up("p")
    keys = run_long_rows(driver)
    driver.ask("r1", "m")
    driver.ask("r2", "s")
    driver.confirm("p")
    driver.now += 1.0
    driver.measure(p=BUSY)
    assert driver.state("s") is State.LOADING
    driver.come_up("s")
    driver.token(*keys, model="p", finish=FinishReason.STOP)
    assert (driver.errors(), driver.state("m")) == ({}, State.PENDING)
    driver.unload("s")
    driver.exit("s", code=0)
    for _ in range(12):
        driver.now += 1.0
        driver.measure(p=MODEL)
        driver.confirm("p")
    assert driver.state("m") is State.LOADING


def test_one_that_has_given_back_is_asked_again_after_a_while() -> None:
    budget = RowBudget()
    budget.tell(1, gives_back=True)
    budget.was_confirmed()
    budget.was_measured(5.0)
    moments = (5.0, 4.9 + GIVES_AGAIN_AFTER_S, 5.0 + GIVES_AGAIN_AFTER_S)
    assert [budget.may_give_back(now) for now in moments] == [False, False, True]
