"""Test preemption: rows leave for higher classes and for memory; the tests play the worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.cache_cost import GROWTH_TOKENS
from mlxsup.protocol.client_messages import Notice, Subscribe
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import (
    FinishReason,
    NoticeKind,
    PauseReason,
    Priority,
    RowState,
    WorkerPhase,
)
from mlxsup.protocol.worker_messages import (
    Dispatch,
    GiveBack,
    Heartbeat,
    PauseRow,
    Rejected,
    RowDelta,
    Step,
)
from mlxsup.supervisor.core.actions import SendToWorker
from mlxsup.supervisor.core.budget import CALM_S
from mlxsup.supervisor.core.events import Appraised, Reloaded
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings

from support.core.driver import LAUNCH, Driver, entry
from support.core.memory import SUBSCRIPTION, MemoryDriver, limited, notes
from support.core.rows import FIXED, LEAST, ONE_ROW, RowsDriver, bytes_for, need_of, served
from support.core.scripts import play
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


def streaming(*priorities: Priority, ran_s: float = 2.0, asked: Any = None, **more: Any) -> Driver:
    """As many rows as classes: `r1` (key 1) was asked for first, and all have run for so long."""
    driver = driver_of(len(priorities), **more)
    for number, priority in enumerate(priorities, 1):
        begin(driver, f"r{number}", number, priority, **(asked or {}))
    driver.pass_time(ran_s)
    return driver


def begin(driver: Driver, id: str, key: int, priority: Priority = BATCH, **more: Any) -> None:
    """A request gets a row and its first token; the next one comes a moment later."""
    driver.ask(id, body=id.encode(), priority=priority, **more)
    driver.accept(key)
    driver.token(key)
    driver.pass_time(0.01)


def ask(driver: Driver, id: str = "now", priority: Priority = INTERACTIVE) -> list[int]:
    """Asks for an answer; returns the keys of the rows that must leave for it."""
    driver.ask(id, body=id.encode(), priority=priority)
    return freed(driver)


def freed(driver: Driver) -> list[int]:
    """Keys of the rows that the latest event asked to leave."""
    assert all(message.keep for message in driver.told(PauseRow))
    return [int(message.key) for message in driver.told(PauseRow)]


def urgent(driver: Driver, *ids: str, client: str | None = None) -> None:
    """Interactive requests."""
    for id in ids:
        driver.ask(id, body=id.encode(), priority=INTERACTIVE, client=client)


@pytest.mark.parametrize(
    ("running", "asks", "more", "leaves"),
    [
        pytest.param((BATCH, NORMAL, BATCH, INTERACTIVE), INTERACTIVE, {}, [3], id="served last"),
        pytest.param((BATCH,), NORMAL, {}, [], id="none for normal"),
        pytest.param((BATCH,), BATCH, {}, [], id="none for batch"),
        pytest.param((NORMAL,), INTERACTIVE, {}, [], id="no normal row"),
        pytest.param((INTERACTIVE,), INTERACTIVE, {}, [], id="no interactive row"),
        pytest.param((BATCH,), INTERACTIVE, {"asked": {"resume": False}}, [], id="unresumable"),
        pytest.param((BATCH,), INTERACTIVE, {"deterministic": True}, [], id="deterministic"),
    ],
)
def test_batch_rows_leave_for_interactive_requests(
    running: tuple[Priority, ...], asks: Priority, more: dict[str, Any], leaves: list[int]
) -> None:
    driver = streaming(*running, **more)
    assert ask(driver, priority=asks) == leaves
    if leaves:
        driver.row_left(3)
        assert (driver.dispatched(), driver.line()) == ([5], ["r3"])


PREEMPTIONS: dict[str, tuple[int, str]] = {
    "the latest return leaves first": (
        2, "pause r1; row_left 1; wait 1; resume r1; token 1; wait 2; urgent now -> pauses=[1]",
    ),
    "no more rows leave than requests wait for": (
        4,
        "urgent now1 -> pauses=[4]; urgent now2 -> pauses=[3]; ask later -> pauses=[];"
        " row_left 4 -> dispatched=[5] & pauses=[]; row_left 3 -> dispatched=[6] & pauses=[]",
    ),
    "a row that leaves anyway is enough": (2, "cancel r1; urgent now -> pauses=[]"),
    "a request beyond max_running preempts no row": (
        3,
        "urgent now1 client=one -> pauses=[3]; urgent now2 client=one -> pauses=[];"
        " row_left 3 -> dispatched=[4] & pauses=[]; urgent now3 client=one -> pauses=[]",
    ),
    "the time counts afresh after a return": (
        1,
        "urgent now1; row_left 1; accept 2; token 2 finish=stop -> dispatched=[1]; wait 9;"
        " urgent now2 -> pauses=[]; token 1; wait 1.99 -> pauses=[]; wait 0.02 -> pauses=[1]",
    ),
    "a request that gets a lower class by hand frees no row": (
        1,
        "urgent now1; row_left 1; accept 2; token 2 finish=stop; urgent now2;"
        " prioritize now2 normal; token 1; wait 2.1 -> pauses=[]",
    ),
    "another class by hand frees a row or keeps one": (
        2, "ask now; prioritize r2 interactive; prioritize now interactive -> pauses=[1]",
    ),
}  # fmt: skip
"""How many rows of class batch have run for long enough, and the script."""


@pytest.mark.parametrize("rule", PREEMPTIONS)
def test_preemption_of_batch_rows(rule: str) -> None:
    rows, script = PREEMPTIONS[rule]
    settings = replace(SETTINGS, clients={"one": ClientSettings(max_running=1)})
    play(streaming(*[BATCH] * rows, settings=settings), script, urgent)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_row_that_leaves_is_told_when_it_gets_another_one(is_cancelled: bool) -> None:
    """The urgent request is still in line then, and takes the row that becomes free."""
    driver = driver_of(1)
    begin(driver, "r1", 1)
    driver.token(1, finish=FinishReason.STOP)  # what a request costs is known
    begin(driver, "r2", 2, notices=True)
    driver.pass_time(2.0)
    assert ask(driver) == [2]
    if is_cancelled:
        driver.cancel("now")
    driver.row_left(2)
    told = [(one.kind, one.detail["expected_s"]) for one in driver.sent(Notice)]
    wait_s = driver.model("m").next_free_s()
    queued = [] if is_cancelled else [(NoticeKind.QUEUED, wait_s)]
    assert told == [(NoticeKind.PAUSED, wait_s), *queued]


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
    assert ask(driver) == []
    for _ in range(3):
        driver.pass_time(0.1)
        driver.token(1)
    assert driver.pausing == {1: True}, "it has got past the crash"


def test_a_row_is_freed_once_it_has_gained_tokens_for_long_enough() -> None:
    play(
        driver_of(1),
        "ask r1 priority=batch; accept 1; wait 30; urgent now -> pauses=[];"  # it only reads
        " token 1; wait 1.9 -> pauses=[]; wait 0.2 -> pauses=[1]",
        urgent,
    )


def test_a_reload_that_shortens_the_time_counts_at_once() -> None:
    driver = streaming(BATCH, ran_s=1.0)
    assert ask(driver) == []
    settings = replace(SETTINGS, min_run_s=0.5)
    models = tuple(model.life.settings for model in driver.core.fleet)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))
    assert freed(driver) == [1]


@pytest.mark.parametrize("reason", [None, PauseReason.MEMORY])
def test_dropped_state_extends_the_minimum_run(reason: PauseReason | None) -> None:
    """By the time that its prompt takes; not if it was dropped for memory."""
    driver = driver_of(1)
    driver.ask("r1", priority=BATCH)
    driver.accept(1)
    first = RowDelta(
        key=RequestKey(1), text="x", tokens=b"\0\0\0\0", prefill_s=3.0, cached_tokens=1
    )
    driver.worker(Step(step=1, rows=[first]))
    driver.pass_time(2.0)
    assert ask(driver, "now1") == [1], "its state is expected to be kept"
    row = RowDelta(key=RequestKey(1), paused=RowState.DROPPED)
    if reason is not None:
        driver.row_left(1)
        driver.token(2, finish=FinishReason.STOP)
        driver.token(1)
        row = replace(row, pause_reason=reason)
    driver.worker(Step(step=1, rows=[row]))
    if reason is None:
        driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [1]
    driver.token(1)
    assert ask(driver, "now2") == []
    read, prompt_and_answer = 3 - 1, 3 + 2  # `Driver.accept` makes three tokens of a prompt
    driver.pass_time((2.0 if reason else 3.0 * prompt_and_answer / read) - 0.1)
    assert freed(driver) == []
    driver.pass_time(0.2)
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


AGED: dict[str, tuple[int, str]] = {
    "a freed row goes to the class that it was freed for": (
        1, "urgent now -> pauses=[1] & line=[old, now]; row_left 1 -> running=[now]",
    ),
    "a row that ends goes to the aged request": (
        2, "urgent now; token 1 finish=stop -> running=[r2, old]",
    ),
    "a freed row goes to the aged request if no other claims it": (
        2, "urgent now; cancel now; row_left 2 -> running=[r1, old]",
    ),
    "an aged row is preempted once it has had its time, and returns before newer ones": (
        1,
        "token 1 finish=stop; accept 2; token 2; wait 1; urgent now -> pauses=[];"
        " wait 1 -> pauses=[2]; row_left 2 -> line=[old]; urgent next;"
        " token 3 finish=stop -> dispatched=[2]",
    ),
}  # fmt: skip
"""How many rows of class batch run while `old` has waited for two minutes, and the script."""


@pytest.mark.parametrize("rule", AGED)
def test_preemption_beside_an_aged_request(rule: str) -> None:
    rows, script = AGED[rule]
    play(aged(rows), script, urgent)


# Rows preempted for the memory of one request

THREE_ROWS = bytes_for(3, 1000 + 256) * 10 // 9 + 1
"""Three rows of 1,000 tokens find room in nine tenths of it."""
TWO_ROWS = bytes_for(2, 1000)


def limited_rows(rows_bytes: int, **need: int) -> RowsDriver:
    """A model whose rows may take so much, and no more."""
    driver = RowsDriver("a", FIXED + rows_bytes, {"a": need_of(**need)})
    driver.bring_up("a")
    assert driver.budget("a") == rows_bytes
    return driver


def run(driver: RowsDriver, id: str, tokens: int = 1000, **more: Any) -> RequestKey:
    """A request that has gained its first token; the next one comes a moment later."""
    key = driver.begin("a", id, tokens - 1, **more)
    driver.gain("a", key, 1)
    driver.pass_time(0.01)
    return key


def knock(driver: RowsDriver, id: str = "now", tokens: int = 1000, **more: Any) -> RequestKey:
    """A request whose worker finds no memory for its row."""
    key = driver.begin("a", id, tokens, **{"priority": INTERACTIVE, "notices": True, **more})
    driver.short("a", key)
    return key


def asked(driver: RowsDriver) -> list[int]:
    """Keys of the rows that the latest event asked to leave."""
    return sorted(int(message.key) for message in driver.told(PauseRow))


def kinds(driver: RowsDriver, id: str) -> list[tuple[str, str]]:
    """The notices of the latest event to one request."""
    found = [one for one in driver.sent(Notice) if one.id == id]
    return [(str(one.kind), one.detail["reason"]) for one in found]


def full(*priorities: Priority, ran_s: float = 2.0, **more: Any) -> RowsDriver:
    """Three rows of 1,000 tokens that have run for so long; there is room for no other."""
    driver = limited_rows(THREE_ROWS)
    for number, priority in enumerate(priorities, start=1):
        run(driver, f"r{number}", priority=priority, **more)
    driver.pass_time(ran_s)
    return driver


@pytest.mark.parametrize(
    ("running", "tokens", "more", "leave"),
    [
        pytest.param((BATCH, BATCH, NORMAL), 1000, {}, [2], id="the batch row served last"),
        pytest.param((BATCH, BATCH, BATCH), 1300, {}, [2, 3], id="as many as it needs"),
        pytest.param((NORMAL, NORMAL, NORMAL), 1000, {}, [], id="no normal row"),
        pytest.param((INTERACTIVE,) * 3, 1000, {}, [], id="no interactive row"),
        pytest.param((BATCH, BATCH, BATCH), 1000, {"resume": False}, [], id="unresumable"),
    ],
)
def test_rows_of_the_lowest_class_leave_for_memory(
    running: tuple[Priority, ...], tokens: int, more: dict[str, Any], leave: list[int]
) -> None:
    driver = full(*running, **more)
    now = knock(driver, tokens=tokens)
    assert asked(driver) == leave
    if leave == [2]:
        driver.row_left(2, "a")
        assert (driver.dispatched(), driver.line("a")) == ([now], ["r2"])


@pytest.mark.parametrize(("first", "leaves"), [(1000, [2]), (1300, [1])])
def test_a_row_without_which_the_others_are_enough_stays(first: int, leaves: list[int]) -> None:
    """Every row is padded to the longest; the short one was served last and may free too little."""
    driver = limited_rows(bytes_for(2, 1000 + 256) * 10 // 9 + 1)
    run(driver, "r1", first, priority=BATCH)
    run(driver, "r2", 100, priority=BATCH)
    driver.pass_time(2.0)
    knock(driver)
    assert asked(driver) == leaves


def test_preempted_row_returns_with_room() -> None:
    driver = full(BATCH, NORMAL, NORMAL, ran_s=0.5)
    now = knock(driver)
    assert asked(driver) == [], "it has not run for min_run_s"
    driver.pass_time(1.4)
    assert asked(driver) == []
    driver.pass_time(0.1)
    assert asked(driver) == [1]
    driver.row_left(1, "a", tokens=1)
    driver.accept_long("a", now, 1000)
    driver.gain("a", now, 1)
    assert (driver.row("a")["yielded"], driver.dispatched()) == (["r1"], [])
    driver.end("a", now)
    [dispatch] = driver.told(Dispatch)
    assert dispatch.key == 1
    assert dispatch.resume is not None
    assert len(dispatch.resume.delivered) == 2 * 4


FULL: dict[str, tuple[tuple[Priority, ...], str]] = {
    "a row that the worker took meanwhile has left": (
        (BATCH, NORMAL, NORMAL), "knock; short a 1 -> dispatched=[4]",
    ),
    "the next process starts all rows": (
        (BATCH, NORMAL, NORMAL), "knock; exit a; up a -> dispatched=[4, 2, 3, 1]",
    ),
    "the next process starts a row that was not accepted": (
        (NORMAL, NORMAL, NORMAL),
        "serve now model=a; short a 4 -> dispatched=[]; exit a; up a -> dispatched=[1, 2, 3, 4]",
    ),
    "a row that is short during an unload still has its answer": (
        (NORMAL, NORMAL, NORMAL),
        "begin a now 1000; unload a; short a 4 -> errors={}; end a 1 -> dispatched=[4]",
    ),
    "a row that has not begun waits as others: its limit": (
        (NORMAL, NORMAL, NORMAL),
        "knock queue_timeout_s=10; wait 9.9 -> errors={}; wait 0.2 -> errors={now: queue_timeout}",
    ),
    "a row that has not begun waits as others: an unload": (
        (NORMAL, NORMAL, NORMAL), "knock; unload a -> errors={now: unloaded}",
    ),
    "a row whose prompt is read counts as paused": (
        (NORMAL, NORMAL, NORMAL),
        "begin a now 1000 priority=interactive queue_timeout_s=1; read a 4 10; short a 4; wait 5;"
        " -> errors={} & a.yielded=[now]",
    ),
}  # fmt: skip
"""The classes of three rows that fill the memory of `a`, and the script."""


@pytest.mark.parametrize("rule", FULL)
def test_rows_without_memory(rule: str) -> None:
    classes, script = FULL[rule]
    play(full(*classes), script, knock)


def test_begun_answer_stands_before_a_later_unbegun_one() -> None:
    driver = play(full(NORMAL, INTERACTIVE, NORMAL), "knock; gain a 2 1; short a 2", knock)
    assert driver.line("a") == ["r2", "now"]


def test_unbegun_row_without_memory_is_queued() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    now = knock(driver, queue_timeout_s=10.0)
    assert kinds(driver, "now") == [("queued", "memory")]
    row = driver.row("a")
    assert (row["yielded"], row["queued"]) == ([], 1)
    assert [one["paused"] for one in row["line"]] == [None]
    assert driver.core.status(driver.now)["queue"]["waiting"] == 1
    driver.pass_time(3.0)
    driver.end("a", RequestKey(1))
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
    assert dispatch.resume.delivered == b""
    driver.gain("a", now, 1)
    assert kinds(driver, "now") == []
    driver.end("a", now)
    done = driver.result_of("now")
    assert (done.paused, done.resumed, done.timings.paused_s) == (0, 0, 0.0)
    assert done.timings.queued_s == pytest.approx(3.0)


# Rows that wait for memory


def two(**second: Any) -> tuple[RowsDriver, RequestKey, RequestKey]:
    """Two rows of 900 tokens in memory for two of 1,000."""
    driver = limited_rows(TWO_ROWS)
    return driver, driver.begin("a", "r1", 900), driver.begin("a", "r2", 900, **second)


@pytest.mark.parametrize("need", ["known", "unknown", "removed"])
def test_row_without_memory_waits_for_another_to_end(need: str) -> None:
    """Also if a reload cannot read its folder, or removes its model."""
    driver, first, second = two()
    driver.gain("a", second, 1)
    driver.short("a", second)
    assert driver.dispatched() == []
    assert driver.row("a")["queued"] == 1
    if need != "known":
        driver.do(Appraised(now=driver.now, needs={}))
        models = () if need == "removed" else (served("a"),)
        driver.do(Reloaded(now=driver.now, settings=driver.core.fleet.settings, models=models))
    driver.gain("a", first, 5)
    assert driver.dispatched() == []
    driver.end("a", first)
    assert driver.dispatched() == [second]


def test_a_rejected_answer_is_a_row_that_has_ended() -> None:
    """One whose format its tokens did not keep to had a row."""
    driver, _, second = two()
    driver.short("a", second)
    [third] = driver.serve("r3", model="a", priority=INTERACTIVE)
    error = RemoteError(ErrorCode.INTERNAL, "no JSON")
    driver.worker(Rejected(key=third, error=error), "a")
    assert driver.dispatched() == [second]


@pytest.mark.parametrize(("prompt", "returns"), [(500, True), (660, True), (670, False)])
def test_row_returns_at_once_with_room_to_spare(prompt: int, returns: bool) -> None:
    """Ten per cent of the budget, on top of a step of growth."""
    driver = limited_rows(bytes_for(2, 1050))
    driver.begin("a", "r1", 100)
    second = driver.begin("a", "r2", prompt)
    driver.short("a", second)
    needed, budget = bytes_for(2, prompt + 256), bytes_for(2, 1050)
    assert (needed <= budget - budget // 10) is returns
    assert (driver.dispatched() == [second]) is returns


def test_nothing_of_its_class_starts_before_it() -> None:
    """Others would take the memory that it waits for."""
    driver, *_ = two()
    play(
        driver,
        "short a 2; serve r3 model=a -> returns=[]; serve r4 model=a priority=batch -> returns=[];"
        " serve r5 model=a priority=interactive -> returns=[5]; end a 1 -> dispatched=[2, 3, 4]",
    )


def test_row_that_does_not_fit_alone_is_refused() -> None:
    driver = limited_rows(ONE_ROW)
    key = driver.begin("a", "r1", LEAST)
    driver.short("a", key)
    assert driver.dispatched() == [key], "its worker had another budget when it left"
    driver.gain("a", key, 7)
    driver.short("a", key)
    error = driver.failure_of("r1").error
    assert error.code == ErrorCode.INSUFFICIENT_MEMORY
    assert error.detail == {
        "model": "a",
        "needed_bytes": bytes_for(1, LEAST + 7),
        "available_bytes": ONE_ROW,
        "tokens_sent": 7,
    }
    assert "raise" in error.message
    assert driver.row("a")["queued"] == 0


@pytest.mark.parametrize("tokens", [0, 1])
def test_unresumable_row_waits_only_before_its_first_token(tokens: int) -> None:
    driver, first, key = two(resume=False)
    if tokens:
        driver.gain("a", key, tokens)
    driver.short("a", key)
    assert driver.errors() == ({"r2": ErrorCode.INSUFFICIENT_MEMORY} if tokens else {})
    driver.end("a", first)
    assert driver.dispatched() == ([] if tokens else [key])


def test_a_long_request_gets_the_head_room_of_another_model() -> None:
    """It fits alone, if the other one keeps to one row."""
    budget = 2 * FIXED + 2 * bytes_for(1, 2500)
    driver = RowsDriver("ab", budget)
    settle = "confirm a; measure; confirm b; measure;"
    play(driver, f"bring_up a; load b; confirm a; measure; up b; {settle} {settle} begin b r1 3000")
    assert driver.budget("b") < bytes_for(1, 3000) < budget - 2 * FIXED - ONE_ROW
    driver.short("b", RequestKey(1))
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


def test_paused_row_without_memory_returns_to_the_next_process() -> None:
    """How many rows had ended when its own left says nothing of another process."""
    play(
        limited_rows(TWO_ROWS),
        "begin a a1 100; end a 1; begin a a2 100; end a 2; begin a r1 900; begin a r2 900;"
        " short a 4; pause r2; exit a; up a; resume r2 -> dispatched=[4]",
    )


def test_row_of_a_client_at_its_limit_holds_up_no_other() -> None:
    clients = {"ann": ClientSettings(max_running=1), "bob": ClientSettings()}
    play(
        RowsDriver("ab", 2 * (FIXED + TWO_ROWS), clients=clients),
        "load a; load b; up a; up b; begin a r1 900 client=bob; begin a r2 900 client=ann;"
        " short a 2; serve r3 model=a client=bob -> returns=[];"
        " serve r4 model=b client=ann -> b.running=[r4] & a.running=[r1, r3]",
    )


# Rows shed while other programs need memory

LONG = 2001
"""Tokens of each row here, unless a test says otherwise."""


def room_for(*lengths: int) -> int:
    """A budget in which a model has room for these rows and a little more, but not for another."""
    return -(-needs(lengths, [LONG]) // STEP) * STEP


def test_batch_rows_leave_while_others_need_memory_and_continue_later() -> None:
    driver = ShortageDriver()
    driver.say(Subscribe(id=SUBSCRIPTION))
    first, second = driver.batch("a", "r1"), driver.batch("a", "r2")
    third = driver.batch("a", "r3", notices=True)
    room = room_for(LONG, LONG)
    assert driver.has_room(room) == [third]
    assert driver.budget("a") == bytes_for(2, LONG + GROWTH_TOKENS), "no other takes its place"
    [note] = [note for note in notes(driver) if "batch" in note]
    assert note.startswith("1 batch request leaves because other programs need memory: ")
    assert note.endswith("is available on this machine, and 1.0 MiB must stay free")
    driver.rows_leave("a", third)
    assert "request r3 is paused: its model has too little memory for it right now" in notes(driver)
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
    [key] = driver.serve("r2", model="a", priority=BATCH)
    driver.lengths["a"][key] = LONG - 1
    assert driver.has_room(room_for(LONG)) == [key]
    driver.rows_leave("a", key)
    assert (driver.row("a")["queued"], driver.row("a")["yielded"]) == (1, [])
    driver.token(*driver.lengths["a"], model="a")
    assert driver.dispatched() == []


def test_no_row_is_shed_of_a_worker_that_cannot_be_told() -> None:
    driver = ShortageDriver()
    for number in range(2):
        driver.batch("a", f"r{number}")
    driver.unlinked("a")
    assert driver.has_room(room_for(LONG)) == []


def test_latest_rows_are_shed_first() -> None:
    driver = ShortageDriver()
    driver.say(Subscribe(id=SUBSCRIPTION))
    keys = [driver.batch("a", f"r{n}") for n in range(4)]
    assert driver.has_room(room_for(LONG, LONG)) == keys[2:]
    [note] = [note for note in notes(driver) if "batch" in note]
    assert note.startswith("2 batch requests leave because ")
    assert driver.has_room(room_for(LONG, LONG)) == [], "they are on their way"


SHED: dict[str, tuple[list[dict[str, Any]], list[int]]] = {
    "no other class": ([{"priority": NORMAL}, {"priority": INTERACTIVE}, {}], [3]),
    "not the last row": ([{}, {}], [2]),
    "nor if its step of growth ends beyond its context": ([{"prompt": 7900}, {}], [2]),
    "not one that may not be resumed": ([{}, {"resume": False}], [1]),
    "none that frees nothing": ([{"prompt": 10}, {"prompt": 10}], []),
    "none for what is freed anyway": (
        [{"priority": NORMAL, "paused": True}, {"prompt": 10}, {"prompt": 10}], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHED)
def test_rows_that_may_be_shed(name: str) -> None:
    rows, leave = SHED[name]
    driver = ShortageDriver()
    for number, row in enumerate(rows, start=1):
        asked = {key: value for key, value in row.items() if key != "paused"}
        driver.start("a", f"r{number}", **{"priority": BATCH, **asked})
    if rows[0].get("paused"):
        driver.pause("r1")
    left = driver.has_room(STEP)
    assert left == leave
    driver.rows_leave("a", *left)
    assert driver.has_room(STEP) == []


SHEDDING: dict[str, tuple[str, str]] = {
    "a busy model goes if that was not enough": (
        "ab",
        "start a r1; batch b b1; batch b b2; now 10; has_room {two} -> returns=[3];"
        " has_room {two} -> b=READY; rows_leave b 3; asked -> returns=[2]; -> b=DRAINING",
    ),
    "idle models go first, and no row if they are enough": (
        "ab", "batch b b1; batch b b2; batch b b3; has_room {three} -> returns=[] & a=STOPPING",
    ),
    "no row leaves before its worker has given back what it keeps for reuse": (
        "a",
        "batch a r1; batch a r2; batch a r3; keeps a; has_room {one} -> returns=[];"
        " has_room {one} -> returns=[2, 3]",
    ),
    "no row leaves without a shortage, though a budget is lowered": (
        "a", "batch a r1; batch a r2; batch a r3; has_room {held} -> returns=[];"
        " reload; asked -> returns=[]",
    ),
}  # fmt: skip
"""Models that are READY, and the script: when there is room for so many rows."""


def keeps(driver: ShortageDriver, model: str) -> None:
    """The worker says that it keeps something for reuse."""
    beat = Heartbeat(step=1, phase=WorkerPhase.IDLE, phase_s=0.0, cache_bytes=STEP)
    driver.worker(beat, model)


def reload(driver: ShortageDriver) -> None:
    """The budget is lowered to that of one row."""
    settings, known = limited(needs([LONG])), driver.core.fleet.needs
    driver.do(Reloaded(now=driver.now, settings=settings, models=(served("a"),), needs=known))


@pytest.mark.parametrize("rule", SHEDDING)
def test_rows_are_shed_in_their_order(rule: str) -> None:
    names, script = SHEDDING[rule]
    room = {
        "one": room_for(LONG),
        "two": holds([LONG]),
        "three": room_for(LONG, LONG, LONG),
        "held": -(-holds([LONG] * 3) // STEP) * STEP,
    }
    play(ShortageDriver(names), script.format(**room), keeps, reload)


def test_rows_of_a_model_with_a_limit_of_its_own_stay() -> None:
    """Its memory is reserved, whatever runs."""
    driver = ShortageDriver("a", {"a": need_of(given=30 * STEP)})
    play(driver, f"batch a r1; batch a r2; batch a r3; has_room {STEP} -> returns=[]")


def test_a_request_that_is_held_back_keeps_its_place_only_until_another_client_is_due() -> None:
    """A step may charge its client so much that a request of another one is first."""
    clients = {name: ClientSettings() for name in ("one", "two")}
    driver = RowsDriver("a", FIXED + ONE_ROW, clients=clients)
    driver.bring_up("a")
    running = driver.begin("a", "r1", 3000, client="one")
    driver.gain("a", running, 1)
    [short] = driver.serve("r2", model="a", client="one")
    driver.short("a", short)
    driver.ask("r3", "a", client="two")
    assert (driver.dispatched(), driver.model("a").batch.held_back) == ([], short)
    row = RowDelta(key=running, text="x", tokens=b"\1\0\0\0")
    driver.worker(Step(step=1, rows=[row], took_s=0.0), "a")
    assert driver.dispatched() == []
    driver.worker(Step(step=2, rows=[row], took_s=1.0), "a")
    assert driver.dispatched() == [short + 1]


# Requests that run out of memory alone


def asked_back(driver: MemoryDriver) -> list[str]:
    """The models that the latest event asked to give back."""
    sent = driver.of(SendToWorker)
    return [str(one.model) for one in sent if isinstance(one.message, GiveBack)]


def test_second_out_of_memory_alone_ends_the_request() -> None:
    driver = engine_of(4)
    [key] = driver.serve("a")
    driver.accept(key)
    driver.token(key)
    assert crash(driver, code=75) == [key]
    assert driver.errors() == {}
    assert driver.row()["row_limit"] == 4, "no other is limited"
    driver.exit(code=75)
    assert driver.errors() == {"a": ErrorCode.INSUFFICIENT_MEMORY}
    driver.pass_time(1.0)
    driver.come_up()
    driver.ask("b", resume=False)
    driver.accept(driver.dispatched()[0])
    driver.exit(code=75)
    assert driver.errors() == {"b": ErrorCode.WORKER_CRASHED}, "without a second try"


def test_ready_workers_give_back_before_the_second_try() -> None:
    driver = MemoryDriver([entry(name) for name in "abc"], limited(10**12, parallel_loads=2))
    play(
        driver,
        "bring_up a b; load c; serve r model=a; exit a code=75; asked_back -> returns=[b];"
        " cancel r; up a; serve r model=a; cancel r; exit a code=75; asked_back -> returns=[];"
        " wait 4; up a; serve r1 r2 model=a; exit a code=75; asked_back -> returns=[]",
        asked_back,
    )


def test_no_worker_gives_back_for_a_request_that_waits_from_an_earlier_death() -> None:
    """The one that ran now must run through, so it is not tried again."""
    driver = MemoryDriver([entry(name) for name in "ab"], limited(10**12))
    play(
        driver,
        "bring_up a b; serve r model=a; accept 1 a; exit a code=75; asked_back -> returns=[b];"
        " pause r; up a; serve s model=a resume=False; accept 2 a;"
        " exit a code=75 -> errors={s: worker_crashed}; asked_back -> returns=[]",
        asked_back,
    )
