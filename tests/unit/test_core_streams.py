"""What a client gets of its answer: every field of every piece, and of the end."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.client_messages import (
    Deltas,
    Done,
    Failed,
    Generate,
    Notice,
    Timings,
    Usage,
)
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import ModelName, RequestId, RequestKey, pack_tokens
from mlxsup.protocol.states import Channel, FinishReason, State
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    CancelRow,
    Dispatch,
    PrefillProgress,
    Rejected,
    Resume,
    RowDelta,
    Step,
)
from mlxsup.supervisor.core.actions import SendToClient
from mlxsup.supervisor.core.admission import refuse_for_state
from mlxsup.supervisor.core.events import ConnectionId
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import Driver, entry
from support.core_looks import ALICE, BOB
from support.core_states import in_state
from support.pieces import piece

INVALID = RemoteError(ErrorCode.INVALID_REQUEST, "no")
ACCEPTANCE = Acceptance(
    prompt_tokens=pack_tokens([1, 2, 3]), opening="", parameters={}, seed=5, fingerprint="f"
)


def idle(**changes: Any) -> Driver:
    driver = Driver([entry(**changes)])
    driver.load()
    driver.come_up()
    return driver


def row(key: int = 1, **values: Any) -> RowDelta:
    return RowDelta(key=RequestKey(key), **values)


def step(driver: Driver, *rows: RowDelta, number: int = 1) -> None:
    driver.worker(Step(step=number, rows=list(rows)))


def test_an_answer_from_its_first_piece_to_its_end() -> None:
    driver = idle()
    driver.now = 1010.0
    for id in ("a", "b", "r1"):
        driver.ask(id)
    driver.now = 1011.0
    step(driver, row(1, tokens=pack_tokens([1]), finish=FinishReason.STOP))
    assert driver.told(Dispatch) == [Dispatch(key=RequestKey(3), body=b"body")]
    driver.now = 1011.5
    driver.worker(Accepted(key=RequestKey(3), acceptance=ACCEPTANCE, tokenize_s=0.125))
    assert driver.actions == []
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
            warnings=["odd", "worse"],
        )
    ]
    assert driver.row()["running"] == ["b"]


def test_a_request_that_is_cancelled_in_line_has_used_nothing() -> None:
    driver = Driver()
    driver.ask()
    driver.now += 2.0
    driver.cancel()
    assert driver.sent(Done) == [
        Done(
            id=RequestId("r1"),
            seq=0,
            finish_reason=FinishReason.CANCELLED,
            timings=Timings(queued_s=2.0, total_s=2.0),
        )
    ]


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


def test_a_warning_alone_is_no_piece() -> None:
    driver = in_state(State.READY)
    step(driver, row(warning="careful"))
    assert driver.sent(Deltas) == []


def test_only_the_first_acceptance_counts_and_only_of_who_runs() -> None:
    driver = idle()
    driver.ask()
    driver.worker(Accepted(key=RequestKey(7), acceptance=ACCEPTANCE, tokenize_s=9.0))
    driver.accept(1)
    driver.worker(Accepted(key=RequestKey(1), acceptance=ACCEPTANCE, tokenize_s=9.0))
    driver.token(1, finish=FinishReason.STOP)
    [done] = driver.sent(Done)
    assert done.timings.tokenize_s == 0.1


def test_what_was_interrupted_is_sent_again_with_all_that_its_client_has() -> None:
    driver = in_state(State.READY)
    driver.ask("fresh", body=b"fresh")
    driver.token(1)
    driver.exit()
    driver.come_up()
    resume = Resume(
        acceptance=Acceptance(
            prompt_tokens=pack_tokens([1, 2, 3]), opening="", parameters={}, seed=5,
            fingerprint="f",
        ),
        delivered=pack_tokens([9]),
    )  # fmt: skip
    assert driver.told(Dispatch) == [
        Dispatch(key=RequestKey(1), resume=resume),
        Dispatch(key=RequestKey(2), body=b"fresh"),
    ]


def test_interrupted_and_resumed_are_told_each_time() -> None:
    driver = idle()
    driver.ask(notices=True)
    driver.accept(1)
    driver.token(1)
    for times in (1, 2):
        driver.exit(last_lines=("gone",))
        told = [(n.kind.value, n.detail) for n in driver.sent(Notice)]
        assert told[0] == ("interrupted", {"cause": "SIGKILL: gone", "tokens_sent": times})
        driver.pass_time(10.0)
        driver.come_up()
        driver.token(1)
        assert [(n.kind.value, n.detail) for n in driver.sent(Notice)] == [
            ("resumed", {"times": times, "after": "crash"})
        ]
    driver.token(1)
    assert driver.sent(Notice) == []


def test_prefill_is_told_to_who_runs_and_only_if_it_is_news() -> None:
    driver = idle()
    driver.ask(notices=True)
    rows = [PrefillProgress(key=RequestKey(key), done=16, total=64) for key in (7, 1)]
    for count in (1, 0):
        driver.worker(Step(step=1, prefill=rows))
        assert len(driver.sent(Notice)) == count


# ---------------------------------------------------------------- rejections


def test_a_rejection_of_an_answer_that_had_begun_says_how_far_it_was() -> None:
    driver = in_state(State.READY)
    driver.token(1)
    driver.worker(Rejected(key=RequestKey(1), error=INVALID.to_wire()))
    [failed] = driver.sent(Failed)
    error = RemoteError(ErrorCode.INVALID_REQUEST, "no", detail={"tokens_sent": 1})
    assert failed.error == error.to_wire()
    assert driver.row()["running"] == []


def test_a_rejection_of_one_that_had_not_begun_is_passed_on_as_it_is() -> None:
    driver = idle()
    driver.ask()
    driver.worker(Rejected(key=RequestKey(1), error=INVALID.to_wire()))
    assert driver.sent(Failed) == [Failed(id=RequestId("r1"), error=INVALID.to_wire())]


def test_a_rejection_that_is_no_error_is_garbage() -> None:
    driver = in_state(State.READY)
    driver.worker(Rejected(key=RequestKey(1), error={"code": "?"}))
    assert driver.state() is State.STOPPING
    driver.exit()
    assert driver.row()["last_exit"]["detail"].startswith("rejected a request wrongly: an error")


@pytest.mark.parametrize("how", ["rejected", "finished", "left"])
def test_idleness_begins_when_the_last_row_has_left(how: str) -> None:
    driver = idle(idle_unload_s=30.0)
    driver.ask()
    driver.now += 20.0
    if how == "rejected":
        driver.worker(Rejected(key=RequestKey(1), error=INVALID.to_wire()))
    elif how == "finished":
        driver.token(1, finish=FinishReason.STOP)
    else:
        driver.cancel()
        driver.pass_time(15.0)
        driver.row_left(1)
    driver.pass_time(29.9)
    assert driver.state() is State.READY
    driver.pass_time(0.1)
    assert (driver.state(), driver.row()["why"]) == (State.STOPPING, "idle")


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("name", ["queue_timeout_s", "first_token_timeout_s", "timeout_s"])
def test_a_limit_below_zero_is_refused_by_name_and_zero_is_none(name: str) -> None:
    driver = Driver(settings=CoreSettings(queue_timeout_s=0.0))
    below: dict[str, Any] = {name: -0.5}
    driver.ask("r1", "m", ALICE, **below)
    [failed] = driver.sent(Failed)
    assert failed.error["message"] == f"{name} takes seconds from 0, not -0.5"
    assert failed.error["detail"] == {"parameter": name}
    none: dict[str, Any] = {name: 0.0}
    driver.ask("r1", "m", ALICE, **none)
    driver.pass_time(10_000.0)
    assert driver.terminals == {(b"alice", "r1"): [failed]}


def test_without_limits_of_its_own_a_request_has_those_of_the_settings() -> None:
    settings = CoreSettings(queue_timeout_s=5.0, first_token_timeout_s=8.0)
    driver = Driver([entry(load_stall_timeout_s=1000.0)], settings)
    driver.ask("waits")
    driver.ask("longer", queue_timeout_s=20.0)
    driver.pass_time(5.0)
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error["code"]) == ("waits", ErrorCode.QUEUE_TIMEOUT)
    assert failed.error["message"] == "the request waited 5.0 s for m without being started"
    driver.pass_time(3.0)
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error["code"]) == ("longer", ErrorCode.DEADLINE_EXCEEDED)
    assert failed.error["message"] == (
        "the first token of m did not arrive within the request's time limit"
    )


def test_the_end_of_an_answer_that_comes_too_late_is_named() -> None:
    driver = in_state(State.READY)
    driver.ask("r2", timeout_s=4.0)
    driver.token(2)
    driver.pass_time(4.0)
    [failed] = driver.sent(Failed)
    assert failed.error["message"] == (
        "the end of the answer of m did not arrive within the request's time limit"
    )
    assert failed.error["detail"] == {"model": "m", "tokens_sent": 1}
    assert driver.told(CancelRow) == [CancelRow(key=RequestKey(2))]


@pytest.mark.parametrize(
    ("cost_s", "expected"), [([], 1.0), ([8.0], 8.0), ([8.0, 3.0], 7.0), ([0.01], 0.1)]
)
def test_an_overload_says_when_a_row_should_be_free(cost_s: list[float], expected: float) -> None:
    driver = Driver([entry()], CoreSettings(max_queue=1, max_queue_per_client=9))
    driver.load()
    driver.come_up()
    for number, seconds in enumerate(cost_s, start=1):
        driver.ask(f"ran{number}")
        driver.compute(seconds, number)
        driver.token(number, finish=FinishReason.STOP)
    for number in range(4):
        driver.ask(f"r{number}")
    [failed] = driver.sent(Failed)
    assert failed.error["detail"]["retry_after_s"] == pytest.approx(expected)


def test_the_sentences_of_an_overload_have_their_numbers() -> None:
    driver = Driver([entry()], CoreSettings(max_queue=3, max_queue_per_client=2, max_queue_bytes=9))
    driver.ask("a", body=b"12345")
    driver.ask("b", body=b"12345")
    [failed] = driver.sent(Failed)
    assert failed.error["message"] == (
        "m cannot take more requests: open requests hold 5 bytes, near the limit (max_queue_bytes)"
    )
    driver.ask("c", body=b"1")
    driver.ask("d", body=b"1")
    [failed] = driver.sent(Failed)
    assert failed.error["message"] == (
        "m cannot take more requests: 2 requests of this client are waiting, the limit"
        " (max_queue_per_client)"
    )
    driver.ask("e", connection=BOB, body=b"1")
    driver.ask("f", connection=ConnectionId(b"carol"), body=b"1")
    [failed] = driver.sent(Failed, ConnectionId(b"carol"))
    assert failed.error["message"] == (
        "m cannot take more requests: 3 requests are waiting, 3 of them for it, the limit"
        " (max_queue)"
    )


def test_bytes_up_to_the_limit_are_let_in() -> None:
    driver = Driver([entry()], CoreSettings(max_queue_bytes=9))
    driver.ask("a", body=b"123456789")
    assert driver.errors() == {}


def test_a_request_without_a_client_is_its_connections() -> None:
    driver = Driver()
    driver.say(Generate(id=RequestId("r"), model=ModelName("m"), body=b""))
    assert driver.core.status(driver.now)["queue"]["per_client"] == {f"connection {ALICE.hex()}": 1}


def test_only_an_unload_that_a_person_asked_for_keeps_requests_out() -> None:
    for state, is_refused in {
        State.READY: False, State.DRAINING: True, State.STOPPING: True, State.STOPPED: False,
        State.FAILED: True, State.BACKOFF: False,
    }.items():  # fmt: skip
        life = in_state(state).model().life
        assert (refuse_for_state(life) is not None) is is_refused, state
