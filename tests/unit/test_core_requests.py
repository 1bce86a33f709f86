"""Test requests from dispatch to their end: streams, limits, cancels, crashes, reports."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from mlxsup.protocol.client_messages import (
    Deltas,
    Done,
    Event,
    Failed,
    Notice,
    Subscribe,
    Timings,
    Usage,
)
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.flight import PROMPT_ONLY, RequestEnded
from mlxsup.protocol.ids import ConnectionId, RequestId, RequestKey, pack_tokens
from mlxsup.protocol.states import Channel, FinishReason, State
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    CancelRow,
    Dispatch,
    PrefillProgress,
    Rejected,
    RowDelta,
    Step,
)
from mlxsup.supervisor.announcements import facts_of
from mlxsup.supervisor.core.actions import RequestRefused, SendToClient, SignalWorker
from mlxsup.supervisor.core.events import ClientTooSlow
from mlxsup.supervisor.core.settings import CoreSettings

from support.client.pieces import piece
from support.core.driver import Driver, entry
from support.core.looks import ALICE, BOB
from support.core.scripts import play
from support.core.states import in_state

INVALID = RemoteError(ErrorCode.INVALID_REQUEST, "no")
ACCEPTANCE = Acceptance(
    prompt_tokens=pack_tokens([1, 2, 3]), opening="", parameters={}, seed=5, fingerprint="f"
)


def idle(**settings: Any) -> Driver:
    """A READY model with two rows."""
    driver = Driver([entry()], CoreSettings(**settings))
    driver.load()
    driver.come_up()
    return driver


def row(key: int = 1, **values: Any) -> RowDelta:
    return RowDelta(key=RequestKey(key), **values)


def step(driver: Driver, *rows: RowDelta) -> None:
    driver.worker(Step(step=1, rows=list(rows)))


def notices(driver: Driver, kind: str) -> list[dict[str, object]]:
    return [notice.detail for notice in driver.sent(Notice) if notice.kind == kind]


def ends(driver: Driver, id: str = "r1", connection: ConnectionId = ALICE) -> list[str]:
    """How a request ended, each time that its client heard of an end."""
    return [
        str(message.finish_reason) if isinstance(message, Done) else message.error.code
        for message in driver.terminals.get((connection, id), [])
    ]


# Pieces and ends of streams


def test_an_answer_from_its_first_piece_to_its_end() -> None:
    driver = idle()
    driver.now = 1010.0
    for id in ("a", "b", "r1"):
        driver.ask(id)
    driver.now = 1011.0
    step(driver, row(1, tokens=pack_tokens([1]), finish=FinishReason.STOP))
    assert driver.told(Dispatch) == [Dispatch(key=RequestKey(3), body=b"body")]
    driver.now = 1011.5
    changed = ["changed: a"]
    driver.worker(
        Accepted(key=RequestKey(3), acceptance=ACCEPTANCE, tokenize_s=0.125, warnings=changed)
    )
    assert driver.actions == [], "its client wants no notices"
    for key in (7, 3):  # of an unknown request, and a second time
        driver.worker(Accepted(key=RequestKey(key), acceptance=ACCEPTANCE, tokenize_s=9.0))
    driver.now = 1013.0
    step(
        driver,
        row(
            3, text="th", tokens=pack_tokens([7]), channel=Channel.REASONING, prefill_s=0.75,
            cached_tokens=2, warning="odd",
        ),
    )  # fmt: skip
    first = piece("r1", 0, "th", tokens=pack_tokens([7]), channel=Channel.REASONING)
    assert driver.sent(Deltas) == [Deltas(deltas=[first])]
    driver.now = 1014.0
    step(driver, row(3, tokens=pack_tokens([8]), prefill_s=9.0, cached_tokens=9, warning="odd"))
    second = piece("r1", 1, tokens=pack_tokens([8]))
    assert driver.sent(Deltas) == [Deltas(deltas=[second])]
    step(driver, row(3, text="!"), row(3, warning="worse"))
    assert driver.sent(Deltas) == [Deltas(deltas=[piece("r1", 2, "!")])]
    driver.now = 1015.0
    step(driver, row(3, finish=FinishReason.LENGTH))
    assert driver.sent(Deltas) == [], "nothing new"
    assert driver.sent(Done) == [
        Done(
            id=RequestId("r1"),
            seq=3,
            finish_reason=FinishReason.LENGTH,
            usage=Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=2),
            timings=Timings(
                queued_s=1.0, tokenize_s=0.125, prefill_s=0.75, first_token_s=3.0, total_s=5.0
            ),
            seed=5,
            resumed=0,
            warnings=["changed: a", "odd", "worse"],
        )
    ]
    assert driver.row()["running"] == ["b"]


def test_pieces_of_one_step_come_before_its_ends_and_after_an_end_nothing_is_read() -> None:
    driver = idle()
    driver.ask("a")
    driver.ask("b", connection=BOB)
    step(
        driver,
        row(1, text="x", finish=FinishReason.STOP),
        row(2, text="y"),
        row(1, text="late", finish=FinishReason.STOP),
    )
    sent = [(a.connection, a.message) for a in driver.of(SendToClient)]
    assert [(who, type(message).__name__) for who, message in sent] == [
        (ALICE, "Deltas"), (BOB, "Deltas"), (ALICE, "Done"),
    ]  # fmt: skip
    assert [len(m.deltas) for _, m in sent if isinstance(m, Deltas)] == [1, 1]


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_rejection_says_how_far_the_answer_was(has_begun: bool) -> None:
    driver = idle()
    driver.ask()
    if has_begun:
        driver.accept(1)
        driver.token(1)
    driver.worker(Rejected(key=RequestKey(1), error=INVALID))
    detail = {"tokens_sent": 1} if has_begun else {}
    error = RemoteError(ErrorCode.INVALID_REQUEST, "no", detail=detail)
    assert driver.sent(Failed) == [Failed(id=RequestId("r1"), error=error)]
    assert driver.row()["running"] == []


def test_a_waiting_request_is_told_its_position_and_how_the_load_goes() -> None:
    driver = Driver()
    driver.ask("silent")
    assert driver.sent(Notice) == []
    driver.ask("r1", notices=True)
    assert notices(driver, "queued") == [{"position": 2, "reason": "load", "since_s": 0.0}]
    assert notices(driver, "loading") == [{"state": "LOADING", "phase": "spawn", "fraction": 0.0}]
    driver.spawned()
    driver.hello()
    driver.progress(0.5)
    assert notices(driver, "loading") == [{"state": "LOADING", "phase": "weights", "fraction": 0.5}]
    assert notices(driver, "queued") == [], "only what has changed"
    driver.cancel("silent")
    assert notices(driver, "queued") == [{"position": 1, "reason": "load", "since_s": 0.0}]
    driver.ready()
    assert driver.sent(Notice) == [], "it no longer waits"
    rows = [PrefillProgress(key=RequestKey(key), done=16, total=64) for key in (7, 2)]
    for told in ([{"done": 16, "total": 64}], []):
        driver.worker(Step(step=1, prefill=rows))
        assert notices(driver, "prefilling") == told, "once"
    [shown] = driver.row()["rows"]
    assert (shown["read_tokens"], shown["prompt_tokens"]) == (16, None), "not accepted yet"
    changed = ["changed: a", "changed: b"]
    accepted = Accepted(key=RequestKey(2), acceptance=ACCEPTANCE, tokenize_s=0.1, warnings=changed)
    driver.worker(accepted)
    assert notices(driver, "changed") == [{"warnings": changed}]
    driver.worker(accepted)
    assert notices(driver, "changed") == [], "once"


def test_a_wait_is_told_from_its_beginning_and_not_from_that_of_the_request() -> None:
    driver = idle()
    driver.ask(notices=True)
    driver.accept(1)
    driver.token(1)
    driver.pass_time(3.0)
    driver.exit(signal="SIGKILL")
    [told] = notices(driver, "queued")
    assert told["since_s"] == 0.0


def test_after_quiescence_everything_is_empty_D9() -> None:
    driver = idle()
    for round_ in range(5):
        for number in range(4):
            driver.ask(f"{round_}-{number}")
        first = 4 * round_ + 1
        driver.cancel(f"{round_}-3")
        driver.token(first)
        driver.cancel(f"{round_}-0")
        driver.row_left(first)
        driver.token(first + 1, finish=FinishReason.STOP)
        driver.token(first + 2, finish=FinishReason.STOP)
    ledger, model = driver.core.ledger, driver.model()
    ledger.check_invariants()
    assert (len(ledger), ledger.held_bytes) == (0, 0)
    assert (len(model.queue), model.batch.running, model.batch.leaving) == (0, {}, {})
    assert all(len(ends) == 1 for ends in driver.terminals.values())


# Ids, connections and limits of time

RULES: dict[str, tuple[str, str]] = {
    "an open id is used once by a connection, and again after its end D7": (
        "READY",
        "ask r1 -> errors={r1: duplicate_id}; cancel r1; ask r1 -> errors={} & dispatched=[2];"
        " token 1 -> deltas=0; token 2 -> deltas=1",
    ),
    "a client that goes cancels all its requests D12": (
        "READY", "ask r2; ask r3; leave -> told=[CancelRow, CancelRow] & done={} & errors={};"
        " row_left 1 -> running=[] & queued=0",
    ),
    "a cancel in the queue is never dispatched D1": (
        "READY", "ask r2; ask r3; cancel r3 -> done={r3: cancelled} & told=[];"
        " token 1 2 finish=stop -> dispatched=[]",
    ),
    "a cancel of a running request answers at once D4": (
        "READY", "token 1; cancel -> done={r1: cancelled} & told=[CancelRow]; token 1 -> deltas=0",
    ),
    "a cancel after the end changes nothing D6": (
        "READY", "token 1 finish=stop -> done={r1: stop}; cancel -> done={} & told=[]",
    ),
    "a cancel before a crash is the end D6": (
        "READY",
        "cancel -> done={r1: cancelled}; exit -> errors={}; up -> dispatched=[] & queued=0",
    ),
    "a cancel after a crash is the end D6": (
        "READY", "exit; cancel -> done={r1: cancelled}; up -> dispatched=[] & queued=0",
    ),
    "the queue has a limit B4": (
        "STOPPED", "ask queue_timeout_s=3; wait 2.9 -> errors={};"
        " wait 0.2 -> errors={r1: queue_timeout}; up -> dispatched=[]",
    ),
    "the first token has a limit, also in the queue B4": (
        "STOPPED", "ask first_token_timeout_s=3; wait 2.9 -> errors={};"
        " wait 0.2 -> errors={r1: deadline_exceeded}; up -> dispatched=[]",
    ),
    "the end has a limit, also in the queue B4": (
        "STOPPED", "ask timeout_s=3; wait 2.9 -> errors={};"
        " wait 0.2 -> errors={r1: deadline_exceeded}; up -> dispatched=[]",
    ),
    "an interrupted answer was started, and only its end has a limit": (
        "READY",
        "ask r2 timeout_s=50 queue_timeout_s=5 first_token_timeout_s=6; accept 2; token 2; wait 20;"
        " exit; wait 29 -> errors={}; wait 1.1 -> errors={r2: deadline_exceeded}",
    ),
    "three deaths in a row without a new token end a request": (
        "READY", "exit; up; exit; wait 10; up -> errors={}; exit -> errors={r1: worker_crashed}",
    ),
    "three deaths in a row end a request that was never accepted": (
        "READY", "ask r2; token 1 finish=stop; exit; up; exit; wait 10; up -> errors={};"
        " exit -> errors={r2: worker_crashed}",
    ),
}  # fmt: skip
"""In which state each begins; request `r1` runs in READY."""


@pytest.mark.parametrize("rule", RULES)
def test_rule_of_requests(rule: str) -> None:
    state, script = RULES[rule]
    play(in_state(State(state)), script)


def test_requests_of_another_connection_are_others() -> None:
    driver = in_state(State.READY)
    driver.ask("r1", connection=BOB)
    assert driver.errors(BOB) == {}
    driver.ask("r3")
    driver.leave()
    assert driver.told(CancelRow) == [CancelRow(key=RequestKey(1))]
    queue = driver.core.status(driver.now)["queue"]
    assert (queue["waiting"], queue["per_client"]) == (0, {})
    driver.row_left(1)
    assert driver.row()["running"] == ["r1"]


def test_a_slow_client_ends_with_slow_consumer_H7() -> None:
    driver = in_state(State.READY)
    driver.do(ClientTooSlow(now=driver.now, connection=ALICE))
    assert driver.errors() == {"r1": ErrorCode.SLOW_CONSUMER}
    assert driver.told(CancelRow) != []


def test_a_second_subscription_takes_the_place_of_the_first_which_ends() -> None:
    driver = in_state(State.READY)
    driver.say(Subscribe(id=RequestId("s")))
    driver.say(Subscribe(id=RequestId("t")))
    (ended,) = driver.sent(Failed)
    assert (ended.id, ended.error.code) == ("s", ErrorCode.SUPERSEDED)
    assert driver.core.outbox.subscriptions == {ALICE: "t"}
    driver.say(Subscribe(id=RequestId("t")))
    assert driver.sent(Failed) == []
    driver.leave()
    assert driver.core.outbox.subscriptions == {}


def test_a_subscription_ends_with_its_own_cancel() -> None:
    driver = Driver()
    driver.say(Subscribe(id=RequestId("s")))
    driver.cancel("s2")
    driver.load()
    assert driver.sent(Event) != []
    driver.cancel("s")
    driver.come_up()
    assert driver.sent(Event) == []


LIMITS = ("queue_timeout_s", "first_token_timeout_s", "timeout_s")


def test_deadlines_of_a_running_request_act_as_cancels_D15() -> None:
    driver = idle()
    driver.ask(queue_timeout_s=1.0, first_token_timeout_s=3.0, timeout_s=6.0)
    driver.pass_time(2.0)
    assert driver.errors() == {}, "it no longer waits"
    driver.accept(1)
    driver.token(1)
    driver.pass_time(2.0)
    assert driver.errors() == {}, "the first token has come"
    driver.pass_time(2.1)
    error = driver.failure_of().error
    assert error.code == ErrorCode.DEADLINE_EXCEEDED
    assert error.message == (
        "the end of the answer of m did not arrive within the request's time limit"
    )
    assert error.detail == {"model": "m", "tokens_sent": 1}
    assert driver.told(CancelRow) == [CancelRow(key=RequestKey(1))]


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_below_zero_is_refused_by_name_and_zero_is_none(name: str) -> None:
    driver = Driver(settings=CoreSettings(queue_timeout_s=0.0))
    below: dict[str, Any] = {name: -0.5}
    driver.ask(**below)
    [failed] = driver.sent(Failed)
    assert failed.error.message == f"{name} must be 0 seconds or more, not -0.5"
    assert failed.error.detail == {"parameter": name}
    none: dict[str, Any] = {name: 0.0}
    driver.ask(**none)
    driver.pass_time(1000.0)
    assert driver.terminals == {(b"alice", "r1"): [failed]}


def test_without_limits_of_its_own_a_request_has_those_of_the_settings() -> None:
    settings = CoreSettings(queue_timeout_s=5.0, first_token_timeout_s=8.0)
    driver = Driver([entry(load_stall_timeout_s=1000.0)], settings)
    driver.ask("waits")
    driver.ask("longer", queue_timeout_s=20.0)
    driver.pass_time(5.0)
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error.code) == ("waits", ErrorCode.QUEUE_TIMEOUT)
    assert failed.error.message == "the request waited 5.0 s for m and was not started"
    driver.pass_time(3.0)
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error.code) == ("longer", ErrorCode.DEADLINE_EXCEEDED)
    assert failed.error.message == (
        "the first token of m did not arrive within the request's time limit"
    )


# Cancels that cross other messages


def test_a_cancelled_request_reports_how_long_it_waited() -> None:
    driver = play(Driver(), "ask; now 2; cancel")
    assert driver.sent(Done) == [
        Done(
            id=RequestId("r1"),
            seq=0,
            finish_reason=FinishReason.CANCELLED,
            timings=Timings(queued_s=2.0, total_s=2.0),
        )
    ]


ROWS = 2
"""Of the model in READY."""

CROSSINGS: dict[str, Callable[[Driver], object]] = {
    "its end": lambda driver: driver.token(1, finish=FinishReason.STOP),
    "a token and its end": lambda driver: (
        driver.token(1),
        driver.token(1, finish=FinishReason.LENGTH),
    ),
    "a rejection": lambda driver: driver.worker(Rejected(key=RequestKey(1), error=INVALID)),
    "the row's leaving": lambda driver: driver.row_left(1),
}
"""What the worker had sent when the cancel of its request 1 reached the supervisor."""


@pytest.mark.parametrize("crossing", CROSSINGS)
def test_a_cancel_that_crosses_an_end_is_one_end_and_one_free_place_D6(crossing: str) -> None:
    driver = in_state(State.READY)
    told = []
    for _ in range(2):
        driver.cancel()
        told += driver.told(CancelRow)
    assert told == [CancelRow(key=RequestKey(1))], "the worker hears of it once"
    CROSSINGS[crossing](driver)
    driver.cancel()
    assert driver.actions == []
    assert ends(driver) == ["cancelled"]
    for number in range(ROWS + 1):
        driver.ask(f"next{number}", connection=BOB)
    assert len(driver.row()["running"]) == ROWS, "its place is free"
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [4]
    driver.token(3, 4, finish=FinishReason.STOP)
    assert [ends(driver, f"next{n}", BOB) for n in range(ROWS + 1)] == [["stop"]] * 3


def test_cancel_never_precedes_its_dispatch_D5() -> None:
    """Whatever the order in which three ids are asked for and cancelled."""
    for order in sorted(set(itertools.permutations("aabbc"))):
        driver = idle()
        dispatched: set[int] = set()
        is_open: set[str] = set()
        for id in order:
            (driver.cancel if id in is_open else driver.ask)(id)
            is_open ^= {id}
            dispatched.update(driver.dispatched())
            assert all(cancel.key in dispatched for cancel in driver.told(CancelRow)), order
        assert all(ends(driver, id) == ["cancelled"] for id in "ab")


# Answers that outlive their worker


def streaming(**asked: Any) -> Driver:
    """Request r1 (key 1) was accepted and has two tokens."""
    driver = idle(drain_timeout_s=5.0)
    driver.ask(**asked)
    driver.accept(1)
    driver.token(1)
    driver.token(1)
    return driver


def come_back(driver: Driver) -> Dispatch:
    """From a crash to the dispatch of what was interrupted."""
    if driver.state() is State.BACKOFF:
        driver.pass_time(10.0)
    driver.come_up()
    [dispatch] = driver.told(Dispatch)
    return dispatch


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_crash_pauses_a_stream_and_it_goes_on_where_it_was_F10(signal: str) -> None:
    driver = streaming()
    driver.now += 2.0
    driver.exit(signal=signal)
    assert driver.errors() == {}
    driver.now += 5.0
    dispatch = come_back(driver)
    assert (dispatch.key, dispatch.body) == (1, b"")
    assert dispatch.resume is not None
    assert dispatch.resume.acceptance.prompt_tokens == pack_tokens([1, 2, 3])
    assert dispatch.resume.delivered == pack_tokens([9, 9])
    late = RowDelta(key=RequestKey(1), text="late", tokens=pack_tokens([9]))
    driver.worker(Step(step=3, rows=[late]), generation=1)
    assert driver.actions == [], "a token of the dead worker"
    driver.token(1)
    [deltas] = driver.sent(Deltas)
    assert [d.seq for d in deltas.deltas] == [2], "the numbers continue without a gap"
    driver.token(1, finish=FinishReason.STOP)
    [done] = driver.sent(Done)
    assert (done.resumed, done.seq, done.seed) == (1, 4, 5)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 4)
    timings = done.timings
    assert (timings.queued_s, timings.first_token_s, timings.total_s) == (0.0, 0.0, 7.0)


def test_pieces_of_a_prompt_are_counted_and_are_no_first_token_F10() -> None:
    driver, key = idle(), RequestKey(1)
    driver.ask()
    driver.accept(key)
    pieces = [
        RowDelta(key=key, text="abc"[n], channel=Channel.PROMPT, is_prompt=True) for n in range(3)
    ]
    driver.now += 1.0
    driver.worker(Step(step=1, rows=pieces[:2], between_steps=2))
    driver.exit(signal="SIGKILL")
    dispatch = come_back(driver)
    assert dispatch.resume is not None
    assert (dispatch.resume.delivered, dispatch.resume.shown) == (b"", 2)
    driver.worker(Step(step=1, rows=pieces[2:], between_steps=1))
    [deltas] = driver.sent(Deltas)
    assert [d.seq for d in deltas.deltas] == [2]
    driver.now += 1.0
    driver.token(key, finish=FinishReason.LENGTH)
    [done] = driver.sent(Done)
    assert (done.seq, done.resumed, done.usage.completion_tokens) == (4, 1, 1)
    assert done.timings.first_token_s == done.timings.total_s >= 2.0


def test_crash_ends_only_unresumable_answers_F1() -> None:
    driver = Driver([entry(), entry("other")])
    play(
        driver,
        "load m; up m 1; load other; up other 2; ask accepted resume=False;"
        " ask dispatched resume=False; ask queued resume=False; ask elsewhere other;"
        " accept 1; token 1; exit m -> errors={accepted: worker_crashed}",
    )
    [failed] = driver.sent(Failed)
    assert failed.error.detail["tokens_sent"] == 1
    assert failed.error.retryable is True
    play(driver, "up m 3 -> dispatched=[2, 3] & other.running=[elsewhere]")


def test_after_a_crash_clients_that_received_nothing_wait_for_those_that_ran() -> None:
    play(
        Driver(),
        "load; up; ask r1; ask r2; accept 2; token 2; ask newcomer process=another@1; compute 5 1;"
        " exit; up -> dispatched=[1, 2]",
    )


def test_with_progress_there_is_no_limit_and_deaths_asked_for_do_not_count() -> None:
    driver = streaming()
    for _ in range(5):
        driver.exit()
        come_back(driver)
        driver.token(1)
        driver.now += 200.0  # the restart window is another matter
    for _ in range(5):
        driver.restart(now=True)
        driver.exit(code=0)
        come_back(driver)
    driver.token(1, finish=FinishReason.STOP)
    assert driver.sent(Done)[0].resumed == 6, "only where it resumed"


def test_delivered_tokens_count_among_the_bytes_that_are_bounded() -> None:
    driver = streaming()
    ledger = driver.core.ledger
    held_bytes = 12 + len(repr({})) + 8
    assert ledger.held_bytes == held_bytes, "prompt, parameters and answer"
    driver.exit()
    assert ledger.held_bytes == held_bytes
    come_back(driver)
    driver.token(1, finish=FinishReason.STOP)
    assert ledger.held_bytes == 0


def rejects(driver: Driver) -> None:
    error = RemoteError(ErrorCode.WORKER_CRASHED, "the model changed")
    driver.worker(Rejected(key=RequestKey(1), error=error))
    assert driver.of(SignalWorker) == []


CUTS = {
    "exit; up; rejects": ("worker_crashed", "READY"),
    "exit; spawned; exit code=66": ("worker_crashed", "FAILED"),
    "exit; unload": ("unloaded", "STOPPING"),
    "unload; exit": ("unloaded", "STOPPED"),
    "unload; wait 5": ("unloaded", "STOPPING"),
    "stop now=True": ("shutting_down", "STOPPING"),
}


@pytest.mark.parametrize("cut", CUTS)
def test_an_answer_that_cannot_continue_ends_with_its_tokens(cut: str) -> None:
    driver = play(streaming(), cut, rejects)
    error = driver.failure_of().error
    assert (error.code, driver.state()) == CUTS[cut]
    assert error.detail["tokens_sent"] == 2


@pytest.mark.parametrize("cut", ["unload; wait 5", "stop now=True"])
def test_an_answer_that_had_not_begun_reports_no_tokens(cut: str) -> None:
    driver = play(idle(drain_timeout_s=5.0), f"ask; {cut}")
    assert "tokens_sent" not in driver.failure_of().error.detail


# Reports of ended requests


def reports(driver: Driver) -> list[tuple[str, str]]:
    """Return the request and the outcome of each end that the latest event led to."""
    return [(one.id, one.outcome) for one in driver.of(RequestEnded)]


def test_report_of_a_finished_request() -> None:
    driver = idle()
    driver.now += 1.0
    [key] = driver.serve("one", process="process 12@99")
    driver.compute(2.0, key)
    driver.compute(4.0, key)
    driver.token(key, finish=FinishReason.LENGTH)
    [ended] = driver.of(RequestEnded)
    assert facts_of(ended) == {
        "id": "one",
        "number": key,
        "model": "m",
        "client": "process 12@99",
        "outcome": "length",
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "completion_tokens": 3,
        "queued_s": 0.0,
        "first_token_s": 2.0,
        "total_s": 6.0,
        "engine_s": 6.0,
        "tokens_per_s": 0.5,
    }


def test_speed_of_a_model_counts_tokens_and_not_pieces() -> None:
    driver = idle()
    [key] = driver.serve("one")
    driver.accept(key)
    driver.sample(1)
    driver.worker(Step(step=1, rows=[RowDelta(key=key, text="x", tokens=pack_tokens([9, 9, 9]))]))
    driver.now += 1.0
    driver.sample(1)
    assert driver.row("m")["tokens_per_s"] == 3.0


def test_a_request_that_asked_for_no_token_is_not_called_cut_short() -> None:
    driver = idle()
    [key] = driver.serve("one")
    driver.accept(key)
    driver.worker(Step(step=1, rows=[RowDelta(key=key, finish=FinishReason.LENGTH)]))
    [ended] = driver.of(RequestEnded)
    assert (ended.outcome, ended.usage.completion_tokens) == (PROMPT_ONLY, 0)


def test_every_way_to_end_is_one_line_with_its_outcome() -> None:
    rejection = RemoteError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long")

    def rejects(driver: Driver) -> None:
        driver.worker(Rejected(key=RequestKey(1), error=rejection))

    told = []
    driver = play(idle(), "serve one two; serve late queue_timeout_s=5; serve waits unread")
    for script in ("cancel two", "wait 5", "rejects", "leave"):
        told += reports(play(driver, script, rejects))
    assert told == [
        ("two", "cancelled"),
        ("late", "queue_timeout"),
        ("one", "context_length_exceeded"),
        ("waits", "gone"),
        ("unread", "gone"),
    ]


def test_a_request_that_is_refused_when_it_comes_is_a_line_for_debugging_only() -> None:
    driver = idle()
    driver.ask("one", model="nobody")
    assert driver.of(RequestEnded) == []
    [refused] = driver.of(RequestRefused)
    assert (refused.id, refused.model, refused.outcome) == ("one", "nobody", "unknown_model")
    [key] = driver.serve("two")
    driver.accept(key)
    driver.token(key, finish=FinishReason.STOP)
    assert driver.of(RequestRefused) == []
    assert reports(driver) == [("two", "stop")]
