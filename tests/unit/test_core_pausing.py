"""Test pause and resume by hand; the tests play the worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Done, Failed, Notice, Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.flight import WorkerDied
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import PauseReason, Priority, State
from mlxsup.protocol.worker_messages import CancelRow, Dispatch, DropKept, PauseRow
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.requests import PAUSED_BYTES
from mlxsup.supervisor.core.settings import CoreSettings

from support.core.driver import LAUNCH, Driver, entry
from support.core.looks import BOB
from support.core.scripts import play
from support.core.states import in_state

# Pauses

KEY = RequestKey(1)


def streaming(rows: int = 2, **asked: Any) -> Driver:
    """A READY model; request `r1` (key 1) was accepted and has two tokens."""
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=rows))])
    play(driver, "load; up")
    driver.ask(notices=True, **asked)
    return play(driver, "accept 1; token 1; token 1")


def notices(driver: Driver, kind: str) -> list[dict[str, Any]]:
    return [notice.detail for notice in driver.sent(Notice) if notice.kind == kind]


def told(tokens_sent: int) -> dict[str, Any]:
    """What a notice says of a pause that has just begun."""
    return {"reason": PauseReason.USER, "tokens_sent": tokens_sent, "since_s": 0.0}


def test_the_wait_before_a_pause_counts_and_the_pause_does_not() -> None:
    driver = streaming(rows=1)
    driver.ask("late")
    driver.pass_time(0.25)
    driver.pause("late")
    driver.pass_time(1.0)
    driver.resume("late")
    driver.pass_time(0.5)
    [waiting] = driver.row()["line"]
    assert (waiting["id"], waiting["waited_s"]) == ("late", 0.75)


RULES = {
    "a paused request frees its row and returns first C11": (
        "ask r2; ask r3; pause -> dispatched=[]; row_left 1 -> dispatched=[2];"
        " resume -> queued=2; token 2 finish=stop -> dispatched=[1]"
    ),
    "an end that crosses the pause wins": (
        "pause; token 1 finish=stop -> done={r1: stop} & running=[] & paused=[]"
    ),
    "a cancel that crosses the pause drops its state": (
        "ask r2; pause; cancel -> done={r1: cancelled} & told=[CancelRow] & dispatched=[];"
        " row_left 1 -> told=[DropKept, Dispatch] & dispatched=[2]"
    ),
    "a resume before the row has left brings it back": (
        "pause; resume; row_left 1 -> dispatched=[1] & paused=[]"
    ),
    "a pause after that resume waits for the same row": (
        "pause; resume; pause -> told=[]; row_left 1 -> dispatched=[] & paused=[r1]"
    ),
    "a crash leaves it paused": (
        "pause; exit -> paused=[r1]; up -> dispatched=[] & paused=[r1]; resume -> dispatched=[1]"
    ),
    "a restart leaves it paused": (
        "pause; row_left 1; restart; exit code=0; up -> dispatched=[] & paused=[r1];"
        " resume -> dispatched=[1]"
    ),
    "a pause during a restart waits beyond it": (
        "restart now=True -> STOPPING; pause -> told=[]; exit code=0;"
        " up -> dispatched=[] & paused=[r1]"
    ),
    "the limit of a drain ends paused answers": (
        "pause; row_left 1; ask r2; accept 2; unload -> dispatched=[];"
        " wait 5 -> STOPPING & errors={r1: unloaded, r2: unloaded}"
    ),
    "a request without an answer whose row leaves in a drain is not run again": (
        "token 1 finish=stop; ask new; pause new; unload -> DRAINING & errors={};"
        " row_left 2 -> errors={new: unloaded} & dispatched=[]"
    ),
    "an unload ends paused requests without an answer": (
        "token 1 finish=stop; ask new; pause new; row_left 2; unload -> errors={new: unloaded}"
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_of_pauses(rule: str) -> None:
    """In a model of one row, in which `r1` streams."""
    play(streaming(rows=1), RULES[rule])


@pytest.mark.parametrize("end", ["unload", "stop", "signal"])
def test_a_living_worker_brings_paused_answers_to_their_end(end: str) -> None:
    play(
        streaming(),
        f"pause; row_left 1; {end} -> DRAINING & dispatched=[1];"
        " token 1 finish=stop -> done={r1: stop} & STOPPING",
    )


def test_an_answer_that_waits_since_a_crash_ends_when_its_model_goes_down() -> None:
    """The next process has half as many rows, for want of memory."""
    play(
        streaming(rows=2),
        "ask r2; accept 2; token 2; exit code=75; up -> dispatched=[1];"
        " unload -> DRAINING & errors={r2: unloaded}",
    )


def test_a_pause_of_a_row_that_leaves_for_another_request_is_a_persons() -> None:
    driver = streaming(rows=1, priority=Priority.BATCH)
    play(driver, "wait 2; ask urgent priority=interactive -> pauses=[1]; pause; row_left 1")
    assert [one["reason"] for one in notices(driver, "paused")] == [PauseReason.USER]


def test_answers_to_pause_and_resume_name_the_stage() -> None:
    driver, stages = streaming(), []
    for script in ("pause", "resume", "pause", "row_left 1; resume", "ask r2; ask r3; pause r3"):
        play(driver, script)
        stages += [reply.value["stage"] for reply in driver.sent(Reply)]
    assert stages == ["pausing", "queued", "pausing", "queued", "paused"]


def test_resumed_request_continues_from_delivered_tokens() -> None:
    driver = play(streaming(), "pause; token 1 -> deltas=1")
    assert notices(driver, "resumed") == [], "a token that crosses the pause is no return"
    driver.row_left(1, tokens=1)
    assert notices(driver, "paused") == [told(4)]
    driver.resume()
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
    assert dispatch.resume.delivered == pack_tokens([9] * 4)
    assert notices(driver, "resumed") == []
    driver.token(1)
    assert notices(driver, "resumed") == [{"times": 1, "after": "pause"}]
    play(driver, "token 1 finish=stop")
    done = driver.result_of()
    assert (done.paused, done.resumed, done.usage.completion_tokens) == (1, 0, 6)


def test_the_time_of_its_pauses_is_told() -> None:
    driver = play(
        streaming(),
        "pause; row_left 1; wait 3; resume; wait 5; token 1; pause; row_left 1; wait 4; cancel",
    )
    done = driver.result_of()
    assert (done.timings.paused_s, done.paused) == (7.0, 1)


def test_a_row_that_leaves_again_before_it_says_anything_has_not_continued() -> None:
    driver = play(streaming(), "pause; row_left 1; resume; pause; row_left 1")
    assert notices(driver, "resumed") == []
    play(driver, "resume; token 1 finish=stop")
    assert driver.result_of().paused == 1


def test_a_crash_before_the_worker_confirms_interrupts() -> None:
    driver = play(streaming(), "pause; exit")
    assert notices(driver, "interrupted") == [{"cause": "SIGKILL: last words", "tokens_sent": 2}]
    [died] = driver.of(WorkerDied)
    assert [row.fate for row in died.rows] == ["paused"]
    play(driver, "up; resume; token 1")
    assert notices(driver, "resumed") == [{"times": 1, "after": "crash"}]
    play(driver, "token 1 finish=stop")
    assert (driver.result_of().resumed, driver.result_of().paused) == (1, 1)


@pytest.mark.parametrize(("needs_body", "sent"), [(True, b"body"), (False, b"")])
def test_a_body_is_sent_again_if_its_ids_do_not_tell_all(*, needs_body: bool, sent: bytes) -> None:
    driver = play(Driver(), "load; up; ask")
    driver.accept(1, needs_body=needs_body)
    play(driver, "token 1; pause; row_left 1")
    driver.resume()
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
    assert (dispatch.resume.delivered, dispatch.body) == (pack_tokens([9]), sent)
    play(driver, "accept 1; token 1 finish=stop")
    assert driver.core.ledger.held_bytes == 0


def test_a_request_that_was_not_accepted_is_new_again() -> None:
    driver = play(Driver(), "load; up; ask notices=True; pause; row_left 1")
    assert notices(driver, "paused") == [told(0)]
    driver.resume()
    [dispatch] = driver.told(Dispatch)
    assert (dispatch.resume, dispatch.body) == (None, b"body")
    play(driver, "accept 1; token 1 finish=stop")
    assert driver.result_of().paused == 0, "its answer had not begun"


@pytest.mark.parametrize(
    ("limit", "script"),
    [
        (
            "queue_timeout_s",
            "wait 4; pause -> queued=0; wait 10; resume; wait 0.9 -> queued=1;"
            " wait 0.2 -> errors={r1: queue_timeout}",
        ),
        ("timeout_s", "pause; wait 5 -> errors={r1: deadline_exceeded} & paused=[]"),
        ("first_token_timeout_s", "pause; wait 5 -> errors={r1: deadline_exceeded} & paused=[]"),
    ],
)
def test_only_the_limit_of_the_queue_stands_still(limit: str, script: str) -> None:
    play(Driver(), f"ask {limit}=5; {script}")


@pytest.mark.parametrize("how", ["cancel", "leave"])
@pytest.mark.parametrize("state", ["kept", "dropped", "taken up", "gone with its process"])
def test_cancel_of_a_paused_request_drops_the_state_that_is_kept(state: str, how: str) -> None:
    driver = streaming()
    driver.pause()
    if state == "dropped":
        driver.pausing[KEY] = False  # the row had no state worth keeping
    driver.row_left(1)
    play(driver, {"taken up": "resume", "gone with its process": "exit; up"}.get(state, ""))
    driver = play(driver, f"{how} -> paused=[]")
    assert driver.told(DropKept) == ([DropKept(key=KEY)] if state == "kept" else [])
    assert driver.told(CancelRow) == ([CancelRow(key=KEY)] if state == "taken up" else [])
    assert (len(driver.core.ledger), len(driver.sent(Done))) == (0, int(how == "cancel"))


def test_a_model_with_paused_requests_is_not_idle() -> None:
    play(
        Driver([entry(idle_unload_s=10.0)]),
        "load; up; ask; pause; row_left 1; wait 100 -> READY; cancel; wait 9 -> READY;"
        " wait 2 -> STOPPING",
    )


# Refusals


def refusal(driver: Driver) -> str:
    """The message of the only error; it is one of a wrong request."""
    [failed] = driver.sent(Failed)
    assert failed.error.code == ErrorCode.INVALID_REQUEST
    assert driver.told(PauseRow) == []
    return str(failed.error.message)


def is_removed(driver: Driver) -> None:
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=(entry("other"),)))


PAUSED = "request 'r1' is already paused; resume or cancel it"
NOT_PAUSED = "request 'r1' is not paused; it is running or waiting"
REFUSED: dict[str, str] = {
    "pause; pause": PAUSED,
    "pause; row_left 1; pause": PAUSED,
    "resume": NOT_PAUSED,
    "pause; row_left 1; resume; resume": NOT_PAUSED,
    "pause nobody": "no open request has the id or number 'nobody'; open: r1 (#1, runs for m)",
    "resume nobody": "no open request has the id or number 'nobody'; open: r1 (#1, runs for m)",
    "ask r2 resume=False; pause r2": (
        "request 'r2' cannot be paused: it was sent with `resume` false"
    ),
    "unload; pause": (
        "request 'r1' cannot be paused: m is being unloaded; a request that comes after that"
        " loads it again"
    ),
    "is_removed; pause": (
        "request 'r1' cannot be paused: there is no model 'm'; configured: other"
    ),
}


@pytest.mark.parametrize("script", REFUSED)
def test_a_pause_or_resume_is_refused(script: str) -> None:
    driver = play(in_state(State.READY), script, is_removed)
    assert refusal(driver) == REFUSED[script]
    if "nobody" in script:
        detail = driver.sent(Failed)[0].error.detail
        assert detail == {"parameter": "request", "known": ["r1"], "numbers": ["#1"]}


@pytest.mark.parametrize(
    ("name", "meant"),
    [("r1", "r1"), ("#1", "r1"), ("1", "r1"), ("last", "last"), ("#last", None), ("01", None)],
)
def test_a_request_is_named_by_its_id_or_its_number(name: str, meant: str | None) -> None:
    driver = in_state(State.READY)
    driver.ask("last")
    driver.ask("r3")
    driver.pause(name)
    assert [one.value["request"] for one in driver.sent(Reply)] == ([meant] if meant else [])


def test_the_last_request_is_the_one_that_came_last() -> None:
    driver = in_state(State.READY)
    driver.ask("r2")
    driver.pause("last")
    assert driver.sent(Reply)[0].value["request"] == "r2"


def test_requests_of_a_deterministic_model_may_not_be_paused() -> None:
    driver = in_state(State.READY, launch=replace(LAUNCH, deterministic=True))
    driver.pause()
    assert refusal(driver) == "request 'r1' cannot be paused: m is `deterministic`"


def test_a_request_of_another_client_may_be_paused() -> None:
    driver = in_state(State.READY)
    driver.pause("r1", BOB)
    assert [told.key for told in driver.told(PauseRow)] == [1]


# Places and bytes


def waiting(driver: Driver) -> int:
    """How many wait, as the status says."""
    count: int = driver.core.status(driver.now)["queue"]["waiting"]
    return count


def test_a_paused_request_gives_its_place_to_another_and_may_always_return() -> None:
    driver = Driver(settings=CoreSettings(max_queue=1, max_queue_per_client=1))
    assert waiting(play(driver, "ask; pause")) == 0
    assert waiting(play(driver, "ask r2")) == 1
    assert waiting(play(driver, "resume -> queued=2")) == 2
    driver.ask("r3")
    assert driver.failure_of("r3").error.detail["limit"] == "max_queue"


def test_an_answer_that_has_begun_takes_no_place_either_paused_or_resumed() -> None:
    driver = play(Driver(), "load; up; ask; accept 1; pause; row_left 1")
    assert waiting(driver) == 0
    assert waiting(play(driver, "resume")) == 0
    play(driver, "token 1 finish=stop")
    assert driver.core.ledger.held_bytes == 0


def test_pausing_is_no_way_to_have_any_number_of_requests_open() -> None:
    settings = CoreSettings(max_queue=1, max_queue_bytes=2 * PAUSED_BYTES)
    driver = Driver(settings=settings)
    for id in ("r1", "r2"):
        driver.ask(id, body=b"")
        driver.pause(id)
    driver.ask("r3", body=b"1")
    assert driver.failure_of("r3").error.detail["limit"] == "max_queue_bytes"
    driver.resume()
    assert driver.core.ledger.held_bytes == PAUSED_BYTES
    driver.cancel("r2")
    assert driver.core.ledger.held_bytes == 0
