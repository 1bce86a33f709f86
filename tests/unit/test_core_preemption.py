"""Test preemption: rows leave for higher classes and for memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.cache_cost import GROWTH_TOKENS
from mlxsup.protocol.client_messages import Notice, Subscribe
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, PauseReason, Priority, RowState, State, WorkerPhase
from mlxsup.protocol.worker_messages import Dispatch, GiveBack, Heartbeat, PauseRow, RowDelta, Step
from mlxsup.supervisor.core.actions import SendToWorker
from mlxsup.supervisor.core.events import Appraised, Reloaded
from mlxsup.supervisor.core.memory.pressure import CALM_S
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings

from support.core.driver import LAUNCH, Driver, entry
from support.core.memory import SUBSCRIPTION, MemoryDriver, limited, notes
from support.core.rows import FIXED, LEAST, ONE_ROW, ROWS, RowsDriver, bytes_for, need_of, served
from support.core.shortage import STEP, WHOLE, ShortageDriver, holds, needs
from support.core.suspects import crash, engine_of

# Rows preempted for interactive requests

INTERACTIVE, NORMAL, BATCH = Priority
SETTINGS = CoreSettings(max_queue=99, max_queue_per_client=99, aging_s=60.0)


def driver_of(rows: int, settings: CoreSettings = SETTINGS, **launch: Any) -> Driver:
    """A READY model with that many rows."""
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=rows, **launch))], settings)
    driver.load()
    driver.come_up()
    return driver


def streaming(*priorities: Priority, ran_s: float = 2.0, **more: Any) -> Driver:
    """As many rows as classes: `r1` (key 1) was asked for first, and all have run for so long."""
    driver = driver_of(len(priorities), **more)
    for number, priority in enumerate(priorities, 1):
        begin(driver, f"r{number}", number, priority)
    driver.pass_time(ran_s)
    return driver


def begin(driver: Driver, id: str, key: int, priority: Priority, **more: Any) -> None:
    """A request gets a row and its first token; the next one comes a moment later."""
    driver.ask(id, body=id.encode(), priority=priority, notices=True, **more)
    driver.accept(key)
    driver.token(key)
    driver.pass_time(0.01)


def ask(driver: Driver, id: str = "now", priority: Priority = INTERACTIVE, **more: Any) -> None:
    driver.ask(id, body=id.encode(), priority=priority, notices=True, **more)


def freed(driver: Driver) -> list[int]:
    """Keys of the rows that the latest event asked to leave."""
    assert all(message.keep for message in driver.told(PauseRow))
    return [int(message.key) for message in driver.told(PauseRow)]


def notices(driver: Driver, id: str, kind: str) -> list[dict[str, Any]]:
    return [n.detail for n in driver.sent(Notice) if (n.id, n.kind) == (id, kind)]


def test_the_batch_row_that_was_served_last_is_freed() -> None:
    driver = streaming(BATCH, NORMAL, BATCH, INTERACTIVE)
    ask(driver)
    assert freed(driver) == [3]
    driver.row_left(3)
    assert driver.dispatched() == [5]
    assert driver.line() == ["r3"]


def test_latest_return_is_preempted_first() -> None:
    driver = streaming(BATCH, BATCH)
    driver.pause("r1")
    driver.row_left(1)
    driver.pass_time(1.0)
    driver.resume("r1")
    driver.token(1)
    driver.pass_time(2.0)
    ask(driver)
    assert freed(driver) == [1]


@pytest.mark.parametrize("priority", [NORMAL, BATCH])
def test_only_interactive_requests_preempt(priority: Priority) -> None:
    driver = streaming(BATCH)
    ask(driver, priority=priority)
    assert freed(driver) == []


@pytest.mark.parametrize("priority", [NORMAL, INTERACTIVE])
def test_no_row_of_another_class_is_freed(priority: Priority) -> None:
    driver = streaming(priority)
    ask(driver)
    assert freed(driver) == []


def test_unresumable_request_keeps_its_row() -> None:
    driver = driver_of(1)
    begin(driver, "r1", 1, BATCH, resume=False)
    driver.pass_time(9.0)
    ask(driver)
    assert freed(driver) == []


def test_a_deterministic_model_frees_no_row() -> None:
    driver = streaming(BATCH, deterministic=True)
    ask(driver)
    assert freed(driver) == []


def test_no_more_rows_are_freed_than_requests_wait_for() -> None:
    driver = streaming(BATCH, BATCH, BATCH, BATCH)
    ask(driver, "now1")
    ask(driver, "now2")
    assert freed(driver) == [3], "one more, because the first one's is on its way"
    ask(driver, "later", NORMAL)
    assert freed(driver) == []
    driver.row_left(4)
    assert (driver.dispatched(), freed(driver)) == ([5], [])
    driver.row_left(3)
    assert (driver.dispatched(), freed(driver)) == ([6], [])


def test_a_row_that_is_leaving_anyway_is_enough() -> None:
    driver = streaming(BATCH, BATCH)
    driver.cancel("r1")
    ask(driver)
    assert freed(driver) == []


def test_client_at_max_running_preempts_no_row() -> None:
    one = {"one": ClientSettings(max_running=1)}
    driver = driver_of(2, replace(SETTINGS, clients=one))
    begin(driver, "r1", 1, BATCH)
    begin(driver, "r2", 2, NORMAL, client="one")
    driver.pass_time(9.0)
    ask(driver, "now", client="one")
    assert freed(driver) == []
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [3]


def test_of_those_who_wait_only_as_many_count_as_may_run() -> None:
    two = {"two": ClientSettings(max_running=2)}
    driver = driver_of(3, replace(SETTINGS, clients=two))
    for number in (1, 2, 3):
        begin(driver, f"r{number}", number, BATCH)
    driver.pass_time(9.0)
    asked = []
    for number in range(3):
        ask(driver, f"now{number}", client="two")
        asked += freed(driver)
    assert asked == [3, 2]


def test_a_suspect_that_runs_alone_is_left_alone() -> None:
    driver = driver_of(1, replace(SETTINGS, min_run_s=0.1))
    begin(driver, "r1", 1, BATCH)
    for _ in range(2):
        driver.exit(signal="SIGSEGV")
        driver.pass_time(5.0)
        driver.come_up()
    driver.accept(1)
    driver.token(1)
    driver.pass_time(1.0)
    assert driver.row()["alone"] == "r1"
    ask(driver)
    assert freed(driver) == []
    for _ in range(3):
        driver.pass_time(0.1)
        driver.token(1)
    assert driver.pausing == {1: True}, "it has got past the crash"


def test_a_row_is_freed_once_it_has_gained_tokens_for_long_enough() -> None:
    driver = driver_of(1)
    driver.ask("r1", priority=BATCH)
    driver.accept(1)
    driver.pass_time(30.0)
    ask(driver)
    assert freed(driver) == [], "it has read for half a minute, and gained nothing"
    driver.token(1)
    driver.pass_time(1.9)
    assert freed(driver) == []
    driver.pass_time(0.2)
    assert freed(driver) == [1]


def test_the_time_counts_afresh_after_each_return() -> None:
    driver = streaming(BATCH)
    ask(driver, "now1")
    driver.row_left(1)
    driver.accept(2)
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [1]
    driver.pass_time(9.0)
    ask(driver, "now2")
    assert freed(driver) == [], "it has said nothing since its return"
    driver.token(1)
    driver.pass_time(1.99)
    assert freed(driver) == []
    driver.pass_time(0.02)
    assert freed(driver) == [1]


def test_a_reload_that_shortens_the_time_counts_at_once() -> None:
    driver = streaming(BATCH, ran_s=1.0)
    ask(driver)
    assert freed(driver) == []
    settings = replace(SETTINGS, min_run_s=0.5)
    models = tuple(model.life.settings for model in driver.core.fleet)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))
    assert freed(driver) == [1]


def test_dropped_state_extends_the_minimum_run() -> None:
    driver = driver_of(1)
    driver.ask("r1", priority=BATCH)
    driver.accept(1)
    first = RowDelta(key=RequestKey(1), text="x", tokens=b"\0\0\0\0", prefill_s=3.0)
    driver.worker(Step(step=1, rows=[first]))
    driver.pass_time(2.0)
    ask(driver, "now1")
    assert freed(driver) == [1], "its state is expected to be kept"
    row = RowDelta(key=RequestKey(1), paused=RowState.DROPPED)
    driver.worker(Step(step=1, rows=[row]))
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [1]
    driver.token(1)
    ask(driver, "now2")
    prompt_and_answer = 3 + 2  # `Driver.accept` makes three tokens of a prompt
    driver.pass_time(3.0 * prompt_and_answer / 3 - 0.1)
    assert freed(driver) == []
    driver.pass_time(0.2)
    assert freed(driver) == [1]
    driver.row_left(1)
    driver.token(3, finish=FinishReason.STOP)
    driver.token(1)
    driver.pass_time(2.0)
    ask(driver, "now3")
    assert freed(driver) == [1], "this time it was kept"


def test_memory_pause_does_not_extend_the_minimum_run() -> None:
    """It gave way to a higher class before; its state was kept then."""
    driver = driver_of(1)
    driver.ask("r1", priority=BATCH)
    driver.accept(1)
    first = RowDelta(key=RequestKey(1), text="x", tokens=b"\0\0\0\0", prefill_s=3.0)
    driver.worker(Step(step=1, rows=[first]))
    driver.pass_time(2.0)
    ask(driver, "now1")
    driver.row_left(1)
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [1]
    driver.token(1)
    row = RowDelta(key=RequestKey(1), paused=RowState.DROPPED, pause_reason=PauseReason.MEMORY)
    driver.worker(Step(step=1, rows=[row]))
    assert driver.dispatched() == [1]
    driver.token(1)
    driver.pass_time(2.1)
    ask(driver, "now2")
    assert freed(driver) == [1]


def aged(rows: int = 1) -> Driver:
    """Batch requests have all rows; `old`, another one, has waited for two minutes."""
    driver = driver_of(rows)
    for number in range(1, rows + 1):
        begin(driver, f"r{number}", number, BATCH)
    driver.ask("old", body=b"old", priority=BATCH)
    for _ in range(121):
        driver.pass_time(1.0)
        driver.token(*range(1, rows + 1))
        driver.beat()
    return driver


def test_a_freed_row_goes_to_the_class_that_it_was_freed_for() -> None:
    driver = aged()
    ask(driver)
    assert driver.line() == ["old", "now"]
    assert freed(driver) == [1]
    driver.row_left(1)
    assert driver.dispatched() == [3]
    assert driver.told(Dispatch)[0].body == b"now"


def test_unpreempted_row_goes_to_the_aged_request() -> None:
    driver = aged(rows=2)
    driver.ask("own", body=b"own", priority=INTERACTIVE)
    driver.token(2, finish=FinishReason.STOP)
    assert driver.told(Dispatch)[0].body == b"old"


def test_aged_batch_row_is_preempted_like_others() -> None:
    driver = aged()
    driver.token(1, finish=FinishReason.STOP)
    driver.accept(2)
    driver.token(2)
    driver.pass_time(1.0)
    ask(driver)
    assert freed(driver) == [], "it has had its time first"
    driver.pass_time(1.0)
    assert freed(driver) == [2]
    driver.row_left(2)
    assert driver.line() == ["old"]
    ask(driver, "next")
    driver.token(3, finish=FinishReason.STOP)
    assert driver.dispatched() == [2], "and goes before newer ones"


def test_freed_row_without_a_claimant_goes_to_the_first() -> None:
    driver = aged()
    ask(driver)
    driver.cancel("now")
    driver.row_left(1)
    assert driver.dispatched() == [2]
    assert driver.line() == ["r1"]


def test_another_class_by_hand_frees_a_row_or_keeps_one() -> None:
    driver = streaming(BATCH, BATCH)
    ask(driver, priority=NORMAL)
    driver.prioritize("r2", INTERACTIVE)
    driver.prioritize("now", INTERACTIVE)
    assert freed(driver) == [1]


# Rows preempted for memory of one request

BUDGET = bytes_for(3, 1000 + 256) * 10 // 9 + 1
"""Three rows of 1,000 tokens find room in nine tenths of it."""


def serving(budget_bytes: int = BUDGET, **changes: Any) -> RowsDriver:
    """A model whose rows may take so much."""
    driver = RowsDriver("a", FIXED + budget_bytes, {"a": need_of()}, **changes)
    driver.bring_up("a")
    assert driver.budget("a") == budget_bytes
    return driver


def run(driver: RowsDriver, id: str, tokens: int = 1000, **more: Any) -> RequestKey:
    """A request that has gained its first token; the next one comes a moment later."""
    key = driver.begin("a", id, tokens - 1, **more)
    driver.gain("a", key, 1)
    driver.pass_time(0.01)
    return key


def knock(driver: RowsDriver, id: str = "now", tokens: int = 1000, **more: Any) -> RequestKey:
    """A request whose worker finds no memory for its row."""
    more = {"priority": INTERACTIVE, "notices": True, **more}
    key = driver.begin("a", id, tokens, **more)
    driver.short("a", key)
    return key


def asked(driver: RowsDriver) -> list[int]:
    """Keys of the rows that the latest event asked to leave."""
    return [int(message.key) for message in driver.told(PauseRow)]


def kinds(driver: RowsDriver, id: str) -> list[tuple[str, str]]:
    """The notices of the latest event to one request."""
    notices = [one for one in driver.sent(Notice) if one.id == id]
    return [(str(one.kind), one.detail["reason"]) for one in notices]


def full(*priorities: Priority, ran_s: float = 2.0, **more: Any) -> RowsDriver:
    """Three rows of 1,000 tokens that have run for so long; there is room for no other."""
    driver = serving()
    for number, priority in enumerate(priorities, start=1):
        run(driver, f"r{number}", priority=priority, **more)
    driver.pass_time(ran_s)
    return driver


def test_the_batch_row_that_was_served_last_makes_room() -> None:
    driver = full(BATCH, BATCH, NORMAL)
    now = knock(driver)
    assert asked(driver) == [2]
    driver.row_left(2, "a")
    assert driver.dispatched() == [now]
    assert driver.line("a") == ["r2"]


def test_preempted_row_returns_with_room() -> None:
    driver = full(BATCH, NORMAL, NORMAL)
    now = knock(driver)
    driver.row_left(1, "a", tokens=1)
    driver.accept_long("a", now, 1000)
    driver.gain("a", now, 1)
    assert driver.row("a")["yielded"] == ["r1"]
    assert driver.dispatched() == []
    driver.end("a", now)
    assert driver.dispatched() == [1]
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
    assert len(dispatch.resume.delivered) == 2 * 4


def test_as_many_rows_leave_as_it_needs() -> None:
    driver = full(BATCH, BATCH, BATCH)
    knock(driver, tokens=1300)
    assert sorted(asked(driver)) == [2, 3]


def test_a_row_without_which_the_others_are_enough_stays() -> None:
    """The short row was served last, and frees too little: the long one is enough by itself."""
    driver = serving(bytes_for(2, 1000 + 256) * 10 // 9 + 1)
    run(driver, "r1", 1000, priority=BATCH)
    run(driver, "r2", 100, priority=BATCH)
    driver.pass_time(2.0)
    long = knock(driver, tokens=1000)
    assert asked(driver) == [2]  # every row is padded to the longest
    driver.row_left(2, "a")
    driver.accept_long("a", long, 1000)
    driver = serving(bytes_for(2, 1000 + 256) * 10 // 9 + 1)
    run(driver, "r1", 1300, priority=BATCH)
    run(driver, "r2", 100, priority=BATCH)
    driver.pass_time(2.0)
    knock(driver, tokens=1000)
    assert asked(driver) == [1]


@pytest.mark.parametrize("priority", [NORMAL, INTERACTIVE])
def test_only_rows_of_the_lowest_class_leave(priority: Priority) -> None:
    driver = full(priority, priority, priority)
    knock(driver)
    assert asked(driver) == []


def test_a_row_that_must_run_through_stays() -> None:
    driver = full(BATCH, BATCH, BATCH, resume=False)
    knock(driver)
    assert asked(driver) == []


def test_a_row_runs_for_min_run_s_before_it_leaves() -> None:
    driver = full(BATCH, NORMAL, NORMAL, ran_s=0.5)
    knock(driver)
    assert asked(driver) == []
    driver.pass_time(1.4)
    assert asked(driver) == []
    driver.pass_time(0.1)
    assert asked(driver) == [1]


def test_crash_resets_rows_that_made_room() -> None:
    driver = full(BATCH, NORMAL, NORMAL)
    knock(driver)
    driver.exit("a")
    driver.come_up("a")
    assert len(driver.told(Dispatch)) == 4


def test_queue_timeout_runs_while_waiting_for_memory() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    knock(driver, queue_timeout_s=10.0)
    driver.pass_time(9.9)
    assert driver.errors() == {}
    driver.pass_time(0.2)
    assert driver.errors() == {"now": ErrorCode.QUEUE_TIMEOUT}


def test_unbegun_row_without_memory_is_queued() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    knock(driver)
    assert kinds(driver, "now") == [("queued", "memory")]
    row = driver.row("a")
    assert (row["yielded"], row["queued"]) == ([], 1)
    assert [one["paused"] for one in row["line"]] == [None]
    assert driver.core.status(driver.now)["queue"]["waiting"] == 1


def test_unbegun_answer_counts_no_pause() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    now = knock(driver)
    driver.pass_time(3.0)
    driver.end("a", RequestKey(1))
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
    assert dispatch.resume.delivered == b""
    driver.gain("a", now, 1)
    assert kinds(driver, "now") == []
    driver.end("a", now)
    done = driver.result_of("now")
    assert (done.paused, done.resumed) == (0, 0)
    assert done.timings.queued_s == pytest.approx(3.0)
    assert done.timings.paused_s == 0.0


def test_row_with_a_read_prompt_counts_as_paused() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    key = driver.begin("a", "now", 1000, priority=INTERACTIVE, notices=True, queue_timeout_s=1.0)
    driver.read("a", key, 10)
    driver.short("a", key)
    assert ("paused", "memory") in kinds(driver, "now")
    driver.pass_time(5.0)
    assert driver.errors() == {}
    assert driver.row("a")["yielded"] == ["now"]


def test_unload_ends_a_row_that_waits_for_memory() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    knock(driver)
    driver.unload("a")
    assert driver.errors() == {"now": ErrorCode.UNLOADED}
    assert "tokens_sent" not in driver.failure_of("now").error["detail"]


def test_what_was_dispatched_before_the_end_of_its_model_comes_to_its_own() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    key = driver.begin("a", "now", 1000, priority=INTERACTIVE, notices=True)
    driver.unload("a")
    driver.short("a", key)
    assert driver.errors() == {}
    driver.end("a", RequestKey(1))
    assert driver.dispatched() == [key]


def test_begun_answer_stands_before_a_later_unbegun_one() -> None:
    driver = full(NORMAL, INTERACTIVE, NORMAL)
    knock(driver)
    driver.gain("a", RequestKey(2), 1)
    driver.short("a", RequestKey(2))
    assert driver.line("a") == ["r2", "now"]


def test_a_row_that_the_worker_took_while_it_was_to_make_room_is_there_no_longer() -> None:
    driver = full(BATCH, NORMAL, NORMAL)
    now = knock(driver)
    row = RowDelta(key=RequestKey(1), paused=RowState.DROPPED, pause_reason=PauseReason.MEMORY)
    driver.worker(Step(step=1, rows=[row]), "a")
    assert driver.dispatched() == [now]


def test_unaccepted_row_starts_in_the_next_process() -> None:
    """It waits as a new one, and what was short in the process before does not count."""
    driver = full(NORMAL, NORMAL, NORMAL)
    (key,) = driver.serve("now", model="a")
    driver.short("a", key)
    assert driver.dispatched() == []
    driver.exit("a")
    driver.come_up("a")
    assert len(driver.told(Dispatch)) == 4


# Rows shed while other programs need memory

TURN_S = 10.0
LONG = 2001
"""Tokens of each row here, unless a test says otherwise."""


def room_for(*lengths: int) -> int:
    """A budget in which a model has room for these rows and a little more, but not for another."""
    least = needs(lengths, [LONG])
    return -(-least // STEP) * STEP


def three(**more: Any) -> tuple[ShortageDriver, list[RequestKey]]:
    """A model with one row of each class; the first two are normal and interactive."""
    driver = ShortageDriver(**more)
    classes = (Priority.NORMAL, Priority.INTERACTIVE, Priority.BATCH)
    return driver, [driver.start("a", f"r{n}", priority=one) for n, one in enumerate(classes)]


def test_batch_rows_leave_while_others_need_memory_and_continue_later() -> None:
    driver = ShortageDriver()
    driver.say(Subscribe(id=SUBSCRIPTION))
    first, second = driver.batch("a", "r1"), driver.batch("a", "r2")
    third = driver.batch("a", "r3", notices=True)
    room = room_for(LONG, LONG)
    assert driver.has_room(room) == [third]
    assert driver.budget("a") == bytes_for(2, LONG + GROWTH_TOKENS), "no other takes its place"
    [note] = [note for note in notes(driver) if "batch" in note]
    assert note.startswith("1 batch row leaves because other programs need memory: ")
    assert note.endswith("is available on this machine, and 1.0 MiB must stay free")
    driver.rows_leave("a", third)
    assert "request r3 is paused: its model has too little memory for its row now" in notes(driver)
    told = [(one.kind, one.detail["reason"]) for one in driver.sent(Notice)]
    assert told == [("paused", "memory"), ("queued", "memory")]
    assert driver.row("a")["yielded"] == ["r3"]
    driver.confirm("a")
    assert driver.has_room(room) == []
    assert driver.core.status(driver.now)["memory"]["over_bytes"] == 0
    for key in (first, second):
        driver.gain("a", key, 1)
        assert driver.dispatched() == []
    for _ in range(int(CALM_S)):
        driver.has_room(WHOLE)
        assert driver.dispatched() == [], "memory has not been calm for long enough"
    driver.has_room(WHOLE)
    assert driver.dispatched() == [third]
    driver.gain("a", third, 1)
    assert [one.kind for one in driver.sent(Notice)] == ["resumed"]


def test_unaccepted_row_that_is_shed_waits_as_new() -> None:
    driver = ShortageDriver()
    driver.batch("a", "r1")
    [key] = driver.serve("r2", model="a", priority=Priority.BATCH)
    driver.lengths["a"][key] = LONG - 1
    assert driver.has_room(room_for(LONG)) == [key]
    driver.rows_leave("a", key)
    assert (driver.row("a")["queued"], driver.row("a")["yielded"]) == (1, [])
    driver.token(*driver.lengths["a"], model="a")
    assert driver.dispatched() == []


def test_no_row_of_another_class_leaves() -> None:
    driver, keys = three()
    assert driver.has_room(STEP) == keys[2:]
    driver.rows_leave("a", keys[2])
    for _ in range(3):
        assert driver.has_room(STEP) == []


@pytest.mark.parametrize("count", [1, 2])
def test_latest_rows_are_shed_first(count: int) -> None:
    driver = ShortageDriver()
    driver.say(Subscribe(id=SUBSCRIPTION))
    keys = [driver.batch("a", f"r{n}") for n in range(4)]
    asked = driver.has_room(room_for(*[LONG] * (4 - count)))
    assert asked == keys[4 - count :]
    [note] = [note for note in notes(driver) if "batch" in note]
    said = {1: "1 batch row leaves because ", 2: "2 batch rows leave because "}
    assert note.startswith(said[count])
    assert driver.has_room(room_for(*[LONG] * (4 - count))) == [], "they are on their way"


def test_a_short_row_stays_if_a_longer_one_is_enough() -> None:
    """All rows are padded to the longest."""
    driver = ShortageDriver()
    driver.batch("a", "r1", 500)
    long = driver.batch("a", "r2", 3000)
    driver.batch("a", "r3", 500)
    room = -(-needs([501, 501], [3001]) // STEP) * STEP
    assert room < needs([501, 3001])
    assert driver.has_room(room) == [long]


def test_row_that_frees_nothing_stays() -> None:
    """A model has memory for one row of its least length, whatever runs."""
    driver = ShortageDriver()
    for number in range(2):
        driver.batch("a", f"r{number}", 10)
    assert needs([11, 11]) == needs([11])
    assert driver.has_room(STEP) == []


def test_one_row_of_each_model_is_never_shed() -> None:
    driver = ShortageDriver("ab")
    rows = {name: [driver.batch(name, f"{name}{n}") for n in range(2)] for name in "ab"}
    assert set(driver.has_room(STEP)) == {rows["a"][1], rows["b"][1]}
    for name in "ab":
        driver.rows_leave(name, rows[name][1])
    for _ in range(3):
        assert driver.has_room(STEP) == []


def test_no_row_leaves_for_memory_that_a_leaving_row_frees() -> None:
    """All rows are padded to the longest, and that one has been paused by hand."""
    driver = ShortageDriver()
    driver.start("a", "r0")
    for number in (1, 2):
        driver.batch("a", f"r{number}", 10)
    assert needs([11, 11], [LONG]) == needs([11], [LONG])
    driver.pause("r0")
    assert driver.has_room(STEP) == []


def test_unresumable_row_is_not_shed() -> None:
    driver = ShortageDriver()
    first = driver.batch("a", "r1")
    driver.batch("a", "r2", resume=False)
    assert driver.has_room(STEP) == [first]


def test_rows_of_a_model_with_a_limit_of_its_own_stay() -> None:
    """Its memory is reserved, whatever runs."""
    driver = ShortageDriver("a", {"a": need_of(given=30 * STEP)})
    for number in range(3):
        driver.batch("a", f"r{number}")
    assert driver.has_room(STEP) == []


def test_a_busy_model_goes_if_that_was_not_enough() -> None:
    driver = ShortageDriver("ab")
    driver.start("a", "r1")
    rows = [driver.batch("b", f"b{n}") for n in range(2)]
    driver.now += TURN_S
    assert driver.has_room(holds([LONG])) == rows[1:]
    assert driver.state("b") is State.READY
    driver.has_room(holds([LONG]))
    assert driver.state("b") is State.READY, "a row is on its way"
    driver.rows_leave("b", rows[1])
    assert driver.asked() == rows[:1]
    assert driver.state("b") is State.DRAINING


def test_idle_models_go_first_and_no_row_if_they_are_enough() -> None:
    driver = ShortageDriver("ab")
    for number in range(3):
        driver.batch("b", f"b{number}")
    assert driver.has_room(room_for(LONG, LONG, LONG)) == []
    assert driver.state("a") is State.STOPPING


def test_no_row_leaves_before_reclaim() -> None:
    driver = ShortageDriver()
    rows = [driver.batch("a", f"r{n}") for n in range(3)]
    driver.worker(Heartbeat(step=1, phase=WorkerPhase.IDLE, phase_s=0.0, cache_bytes=STEP), "a")
    assert driver.has_room(room_for(LONG)) == []
    assert driver.has_room(room_for(LONG)) == rows[1:]


def test_no_row_leaves_without_a_shortage() -> None:
    """A budget that is lowered limits what else may be loaded."""
    driver = ShortageDriver()
    for number in range(3):
        driver.batch("a", f"r{number}")
    held = holds([LONG] * 3)
    assert driver.has_room(-(-held // STEP) * STEP) == []


def test_no_row_leaves_for_a_budget_that_a_reload_has_lowered() -> None:
    driver = ShortageDriver("ab")
    for number in range(2):
        driver.batch("a", f"a{number}")
        driver.batch("b", f"b{number}")
    models, settings = (served("a"), served("b")), limited(needs([LONG]))
    known = driver.core.fleet.needs
    driver.do(Reloaded(now=driver.now, settings=settings, models=models, needs=known))
    assert driver.asked() == []


@dataclass(frozen=True)
class Row:
    """A row: of which model, in which class, of how many tokens, and whether it may leave."""

    model: str
    priority: Priority
    tokens: int
    may_leave: bool


rows_of_two = st.lists(
    st.builds(
        Row,
        st.sampled_from("ab"),
        st.sampled_from([Priority.BATCH, Priority.BATCH, Priority.NORMAL]),
        st.integers(1, 5) | st.integers(800, 3000),
        st.sampled_from([True, True, True, False]),
    ),
    max_size=8,
)


@hypothesis.settings(max_examples=25)
@given(rows_of_two, st.integers(0, 60))
def test_rows_shed_are_minimal_and_enough(rows: list[Row], room_steps: int) -> None:
    """Judged by what the rows that stay take, with one step of growth."""
    driver = ShortageDriver("ab")
    placed: dict[RequestKey, Row] = {}
    for number, one in enumerate(rows):
        is_full = len(driver.lengths[one.model]) == ROWS
        if not is_full:
            key = driver.start(
                one.model, f"r{number}", one.tokens - 1, priority=one.priority,
                resume=one.may_leave,
            )  # fmt: skip
            placed[key] = one
    room = room_steps * STEP
    is_short = room < sum(holds(lengths.values()) for lengths in driver.lengths.values())
    left = set(driver.has_room(room))
    staying = placed.keys() - left
    may_go = {key for key in placed if _may_go(placed[key])}
    for name in "ab":
        if driver.state(name) is not State.READY:
            assert not any(placed[key].model == name for key in staying), (
                "nobody stays in one that goes"
            )
            return
        runs = [key for key in placed if placed[key].model == name]
        assert not runs or any(key in staying for key in runs), "one of each stays"
    assert left <= may_go
    needed = _needed(placed, staying)
    assert is_short or not left
    for key in left:
        more = _needed(placed, staying | {key})
        assert more > max(room, needed), "nobody leaves for nothing"
    for key in may_go & staying if is_short and needed > room else ():
        is_last = not [one for one in staying - {key} if placed[one].model == placed[key].model]
        assert is_last or _needed(placed, staying - {key}) == needed, "whoever helps leaves"
    for key in left:
        for other in may_go & staying:
            is_alike = placed[other] == placed[key]
            assert not (is_alike and other > key), "the one served last leaves"


def _may_go(row: Row) -> bool:
    return row.priority is Priority.BATCH and row.may_leave


def _needed(placed: dict[RequestKey, Row], staying: Iterable[RequestKey]) -> int:
    return sum(
        needs(
            [placed[key].tokens for key in staying if placed[key].model == name],
            [one.tokens for one in placed.values() if one.model == name],
        )
        for name in "ab"
    )


# Rows that left for want of memory


def limited_rows(rows_bytes: int, **need: int) -> RowsDriver:
    """A model whose rows may take so much, and no more."""
    driver = RowsDriver("a", FIXED + rows_bytes, {"a": need_of(**need)})
    driver.bring_up("a")
    assert driver.budget("a") == rows_bytes
    return driver


TWO_ROWS = bytes_for(2, 1000)


def test_row_without_memory_waits_for_another_to_end() -> None:
    driver = limited_rows(TWO_ROWS)
    first = driver.begin("a", "r1", 900)
    second = driver.begin("a", "r2", 900)
    driver.gain("a", first, 5)
    driver.short("a", second)
    assert driver.dispatched() == []
    assert driver.row("a")["queued"] == 1
    driver.gain("a", first, 5)
    assert driver.dispatched() == []
    driver.end("a", first)
    assert driver.dispatched() == [second]


@pytest.mark.parametrize("is_removed", [False, True])
def test_row_waits_for_memory_though_its_need_is_unknown(is_removed: bool) -> None:
    """Its folder cannot be read at a reload, or that removes it: its rows are what they were."""
    driver = limited_rows(TWO_ROWS)
    first = driver.begin("a", "r1", 900)
    second = driver.begin("a", "r2", 900)
    driver.gain("a", second, 1)
    driver.short("a", second)
    models = () if is_removed else (served("a"),)
    driver.do(Appraised(now=driver.now, needs={}))
    assert driver.dispatched() == []
    driver.do(Reloaded(now=driver.now, settings=driver.core.fleet.settings, models=models))
    assert driver.dispatched() == []
    driver.gain("a", first, 1)
    assert driver.dispatched() == []
    driver.end("a", first)
    assert driver.dispatched() == [second]


def test_row_returns_at_once_with_room_to_spare() -> None:
    """Ten per cent of the budget, on top of a step of growth."""
    for prompt, returns in ((500, True), (660, True), (670, False)):
        driver = limited_rows(bytes_for(2, 1050))
        driver.begin("a", "r1", 100)
        second = driver.begin("a", "r2", prompt)
        driver.short("a", second)
        needed, budget = bytes_for(2, prompt + 256), bytes_for(2, 1050)
        assert (needed <= budget - budget // 10) is returns
        assert (driver.dispatched() == [second]) is returns, prompt


def test_nothing_of_its_class_starts_before_it() -> None:
    """Others would take the memory that it waits for."""
    driver = limited_rows(TWO_ROWS)
    first = driver.begin("a", "r1", 900)
    second = driver.begin("a", "r2", 900)
    driver.short("a", second)
    assert driver.serve("r3", model="a") == []
    assert driver.serve("r4", model="a", priority=Priority.BATCH) == []
    assert len(driver.serve("r5", model="a", priority=Priority.INTERACTIVE)) == 1
    driver.end("a", first)
    assert driver.dispatched()[0] == second


def test_row_that_does_not_fit_alone_is_refused() -> None:
    driver = limited_rows(ONE_ROW)
    key = driver.begin("a", "r1", LEAST)
    driver.gain("a", key, 7)
    driver.short("a", key)
    error = driver.failure_of("r1").error
    assert error["code"] == ErrorCode.INSUFFICIENT_MEMORY
    assert error["detail"] == {
        "model": "a",
        "needed_bytes": bytes_for(1, LEAST + 7),
        "available_bytes": ONE_ROW,
        "tokens_sent": 7,
    }
    assert "raise" in error["message"]
    assert driver.row("a")["queued"] == 0


@pytest.mark.parametrize("tokens", [1, 2])
def test_unresumable_row_without_memory_is_refused(tokens: int) -> None:
    driver = limited_rows(TWO_ROWS)
    driver.begin("a", "r1", 900)
    key = driver.begin("a", "r2", 900, resume=False)
    driver.gain("a", key, tokens)
    driver.short("a", key)
    assert driver.errors()["r2"] == ErrorCode.INSUFFICIENT_MEMORY


def test_unresumable_row_waits_before_its_first_token() -> None:
    driver = limited_rows(TWO_ROWS)
    first = driver.begin("a", "r1", 900)
    key = driver.begin("a", "r2", 900, resume=False)
    driver.short("a", key)
    assert driver.errors() == {}
    driver.end("a", first)
    assert driver.dispatched() == [key]


def test_a_long_request_gets_the_head_room_of_another_model() -> None:
    """It fits alone, if the other one keeps to one row."""
    budget = 2 * FIXED + 2 * bytes_for(1, 2500)
    driver = RowsDriver("ab", budget)
    driver.bring_up("a")
    driver.load("b")
    driver.confirm("a")
    driver.measure()
    driver.come_up("b")
    for name in "abab":
        driver.confirm(name)
        driver.measure()
    key = driver.begin("b", "r1", 3000)
    before = driver.budget("b")
    assert before < bytes_for(1, 3000) < budget - 2 * FIXED - ONE_ROW
    driver.short("b", key)
    for _ in range(4):
        assert driver.errors() == {}
        driver.now += 1.0
        driver.measure()
        for name in "ab":
            driver.confirm(name)
            if driver.dispatched():
                assert driver.budget("b") >= bytes_for(1, 3000)
                assert driver.reserved() <= budget
                return
    raise AssertionError("it waits for ever")


def test_row_returns_at_once_if_it_fits_alone() -> None:
    """Its worker had another budget when it left."""
    driver = limited_rows(ONE_ROW)
    key = driver.begin("a", "r1", LEAST)
    driver.short("a", key)
    assert driver.dispatched() == [key]


def test_paused_row_without_memory_returns_to_the_next_process() -> None:
    """How many rows had ended when its own left says nothing of another process."""
    driver = limited_rows(TWO_ROWS)
    for id in ("a1", "a2"):
        driver.end("a", driver.begin("a", id, 100))
    driver.begin("a", "r1", 900)
    second = driver.begin("a", "r2", 900)
    driver.short("a", second)
    driver.pause("r2")
    driver.exit("a")
    driver.come_up("a")
    driver.resume("r2")
    assert driver.dispatched() == [second]


def test_row_of_a_client_at_its_limit_holds_up_no_other() -> None:
    clients = {"ann": ClientSettings(max_running=1), "bob": ClientSettings()}
    driver = RowsDriver("ab", 2 * (FIXED + TWO_ROWS), clients=clients)
    for model in "ab":
        driver.load(model)
    for model in "ab":
        driver.come_up(model)
    driver.begin("a", "r1", 900, client="bob")
    second = driver.begin("a", "r2", 900, client="ann")
    driver.short("a", second)
    assert driver.serve("r3", model="a", client="bob") == []
    driver.serve("r4", model="b", client="ann")
    assert driver.row("b")["running"] == ["r4"]
    assert driver.row("a")["running"] == ["r1", "r3"]


# Requests that run out of memory alone


def asked_back(driver: MemoryDriver) -> list[str]:
    """The models that the latest event asked to give back."""
    sent = [action for action in driver.actions if isinstance(action, SendToWorker)]
    return [str(one.model) for one in sent if isinstance(one.message, GiveBack)]


def three_models() -> MemoryDriver:
    """`a` and `b` are READY, `c` is loading; nothing limits their memory."""
    driver = MemoryDriver([entry(name) for name in "abc"], limited(10**12, parallel_loads=2))
    driver.bring_up("a", "b")
    driver.load("c")
    assert driver.state("c") is State.LOADING
    return driver


def test_second_out_of_memory_alone_ends_the_request() -> None:
    driver = engine_of(4)
    [key] = driver.serve("a")
    driver.accept(key)
    driver.token(key)
    assert crash(driver, code=75) == [key]
    assert driver.errors() == {}
    assert driver.row()["row_limit"] == 4, "nobody else is limited"
    driver.exit(code=75)
    assert driver.errors() == {"a": ErrorCode.INSUFFICIENT_MEMORY}


def test_unresumable_request_out_of_memory_ends() -> None:
    driver = engine_of(4)
    driver.ask("a", resume=False)
    [key] = driver.dispatched()
    driver.accept(key)
    driver.exit(code=75)
    assert driver.errors() == {"a": ErrorCode.WORKER_CRASHED}


def test_every_other_worker_that_is_ready_gives_back_before_the_second_try() -> None:
    driver = three_models()
    driver.serve("r", model="a")
    driver.exit("a", code=75)
    assert asked_back(driver) == ["b"], "c has nothing to give, and a is gone"


def test_no_reclaim_without_a_second_try() -> None:
    driver = three_models()
    driver.serve("r", model="a")
    driver.cancel("r")
    driver.exit("a", code=75)
    assert asked_back(driver) == [], "it had been cancelled"
    driver.come_up("a")
    driver.serve("r1", "r2", model="a")
    driver.exit("a", code=75)
    assert asked_back(driver) == [], "half as many run"
