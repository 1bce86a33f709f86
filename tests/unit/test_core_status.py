"""Test status, events, stories, the flight recorder and the words of errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from mlxsup.protocol.client_messages import Event, Ping, Reply, StatusQuery, Subscribe
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.flight import (
    Entry,
    ModelChanged,
    RequestEnded,
    WorkerDied,
)
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.launch import GroupHost
from mlxsup.protocol.states import (
    Batching,
    LoadPhase,
    State,
    WaitReason,
    Why,
    WorkerPhase,
)
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import Heartbeat, LoadProgress, RankState, Ready
from mlxsup.supervisor.core import errors
from mlxsup.supervisor.core.actions import (
    CHANGES_OF_A_MODEL,
    DEATHS_OF_A_MODEL,
    MOST_MODELS,
    OF_REQUESTS,
    Announce,
    Journal,
)
from mlxsup.supervisor.core.events import Reloaded, Sampled
from mlxsup.supervisor.core.settings import CoreSettings
from mlxsup.supervisor.core.status import wait_reason, waiting_news

from support.core.driver import LAUNCH, Driver, entry
from support.core.flight import Recorder
from support.core.looks import BOB
from support.core.needs import GIB
from support.core.rows import FIXED, RowsDriver
from support.core.states import in_state

# Status


def test_models_may_grow_to_what_is_reserved_and_never_to_less_than_they_use() -> None:
    driver = RowsDriver("ab", 10 * FIXED * GIB)
    driver.bring_up("a")
    driver.bring_up("b")
    reserved = [driver.row(name)["reserved_bytes"] for name in "ab"]
    pids = [driver.row(name)["pid"] for name in "ab"]
    driver.do(Sampled(now=driver.now, footprint_bytes={pids[0]: 1, pids[1]: GIB}, machine_bytes=1))
    memory = driver.core.status(driver.now)["memory"]
    assert 1 < reserved[0] < GIB > reserved[1]
    assert (memory["used_bytes"], memory["may_grow_to_bytes"]) == (1 + GIB, reserved[0] + GIB)


def text(fields: dict[str, Any]) -> str:
    """Return each field in a line of its own, as JSON."""
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in fields.items())


def shown(row: dict[str, Any]) -> str:
    """Return what a row says that is not said of a model that was never started."""
    never = Driver().row()
    return text({name: value for name, value in row.items() if value != never[name]})


def test_a_model_that_was_never_started(snapshot: SnapshotAssertion) -> None:
    driver = Driver()
    driver.now += 5.0
    assert text(driver.row()) == snapshot


def test_the_whole_status_of_a_daemon(snapshot: SnapshotAssertion) -> None:
    driver = Driver([entry("a"), entry("b")])
    for pid, name in enumerate("ab", start=5):
        driver.load(name)
        driver.come_up(name, pid)
    driver.ask("r1", "a")
    driver.ask("r2", "a", BOB, "process 7@1")
    driver.ask("r3", "a", BOB, "process 7@1")
    driver.now += 12.0
    driver.do(Sampled(now=driver.now, footprint_bytes={5: 300, 6: 40}, machine_bytes=9000))
    status = driver.core.status(driver.now)
    rows = status.pop("models")
    assert [(row["name"], row["footprint_bytes"]) for row in rows] == [("a", 300), ("b", 40)]
    assert status.pop("version") == VERSION
    assert text(status) == snapshot


def test_a_daemon_that_ends_says_what_it_waits_for_and_how_long() -> None:
    driver = Driver([entry("a"), entry("b")])
    for pid, name in enumerate("ab", start=5):
        driver.load(name)
        driver.come_up(name, pid)
    driver.ask("r1", "a")
    assert driver.core.status(driver.now)["stopping"] is None
    driver.stop(timeout_s=20.0)
    driver.now += 5.0
    assert driver.core.status(driver.now)["stopping"] == {"running": 1, "limit_s": 15.0}
    driver.now += 60.0
    assert driver.core.status(driver.now)["stopping"] == {"running": 1, "limit_s": 0.0}


def test_status_of_a_ready_model(snapshot: SnapshotAssertion) -> None:
    driver = Driver([entry(launch=replace(LAUNCH, decode_stall_target_ms=99))])
    driver.load()
    driver.now += 1.0
    driver.spawned()
    driver.hello()
    ready = Ready(
        context_length=2048, fingerprint="f", backend="gpu",
        batching=Batching.SERIAL_PREFILL, batching_reason="why", warnings=["careful"],
    )  # fmt: skip
    driver.worker(ready)
    for id in ("r1", "r2", "r3"):
        driver.ask(id)
    driver.worker(
        Heartbeat(
            step=0, phase=WorkerPhase.PREFILL, phase_s=0.5, requests=2, active_bytes=10,
            cache_bytes=20, peak_bytes=30, interleaved_s=8.0,
            interleaved_decode_s=5.0, shapes_seen=3, shapes_s=0.5,
        )
    )  # fmt: skip
    driver.sample(1234)
    driver.token(1)
    driver.now += 2.5
    assert shown(driver.row()) == snapshot


def test_status_of_a_group_lists_its_ranks() -> None:
    hosts = (GroupHost(address="10.0.0.1"), GroupHost(address="10.0.0.2", ssh="far"))
    driver = Driver([entry(launch=replace(LAUNCH, hosts=hosts))])

    def ranks(*states: RankState) -> list[tuple[str, float, int]]:
        if states:
            driver.worker(
                Heartbeat(step=0, phase=WorkerPhase.IDLE, phase_s=0.1, active_bytes=7,
                          ranks=list(states))
            )  # fmt: skip
        said = driver.row()["ranks"]
        assert [(one["rank"], one["host"], one["address"]) for one in said] == [
            (0, None, "10.0.0.1"), (1, "far", "10.0.0.2"),
        ]  # fmt: skip
        return [(one["state"], one["silent_s"], one["active_bytes"]) for one in said]

    assert ranks() == [("stopped", 0.0, 0), ("stopped", 0.0, 0)]
    driver.load()
    driver.spawned()
    driver.hello()
    assert ranks(RankState(rank=1, state="starting")) == [("loading", 0.0, 7), ("starting", 0.0, 0)]
    driver.worker(Ready(context_length=2048, fingerprint="f", backend="gpu", ranks=[1]))
    # Until the next beat: no host of a group that is READY still starts.
    assert ranks() == [("ready", 0.0, 7), ("ready", 0.0, 0)]
    ready = RankState(rank=1, state="ready", silent_s=3.0, active_bytes=8)
    assert ranks(ready) == [("ready", 0.0, 7), ("ready", 3.0, 8)]
    driver.exit()
    assert ranks() == [("stopped", 0.0, 0), ("stopped", 0.0, 0)]
    driver.spawned()
    driver.hello()
    driver.worker(Ready(context_length=2048, fingerprint="f", backend="gpu"))
    assert [one["state"] for one in driver.row()["ranks"]] == ["ready", "left out"]


def test_status_of_loading_and_pending_models(snapshot: SnapshotAssertion) -> None:
    driver = Driver([entry("z"), entry()])
    driver.load("z")
    driver.load()
    driver.now += 3.0
    assert shown(driver.row()) == snapshot
    driver.come_up("z", 5)
    driver.spawned()
    driver.hello()
    driver.worker(LoadProgress(phase=LoadPhase.WEIGHTS, progress=0.25))
    driver.now += 4.0
    assert shown(driver.row()) == snapshot


def test_a_model_that_crashed_shows_how_and_when_it_is_started_again(
    snapshot: SnapshotAssertion,
) -> None:
    driver = in_state(State.READY)
    driver.exit(signal="SIGSEGV", last_lines=("boom",), at=11.0)
    driver.come_up()
    driver.exit(code=70, last_lines=("bang",), at=12.0)
    retry_in_s = driver.row()["retry_in_s"]
    driver.now += 0.25
    assert driver.row()["retry_in_s"] == pytest.approx(retry_in_s - 0.25)
    driver.now += 60.0
    assert shown(driver.row()) == snapshot


def test_a_failed_and_a_stopped_model_show_why_and_since_when(snapshot: SnapshotAssertion) -> None:
    driver = in_state(State.LOADING)
    driver.exit(code=66, last_lines=("no such folder",), at=3.0)
    driver.now += 1.0
    assert shown(driver.row()) == snapshot
    driver.unload()
    driver.now += 2.0
    assert shown(driver.row()) == snapshot


# Changes and stories


def changes(driver: Driver) -> list[dict[str, Any]]:
    return [action.change for action in driver.of(Announce)]


def test_a_change_is_announced_whole_and_sent_to_subscribers(snapshot: SnapshotAssertion) -> None:
    driver = Driver()
    driver.say(Subscribe(id=RequestId("s")))
    driver.load()
    announced = changes(driver)
    assert driver.sent(Event) == [Event(id=RequestId("s"), value=one) for one in announced]
    driver.spawned()
    driver.hello()
    announced += changes(driver)
    driver.now += 2.0
    driver.progress(0.5)
    driver.now += 0.5
    driver.ready()
    announced += changes(driver)
    assert [text(change) for change in announced] == snapshot


def notes(driver: Driver) -> list[tuple[str, str]]:
    return [(change["to"], change["note"]) for change in changes(driver)]


def test_a_ping_is_answered_with_nothing_and_a_status_with_entries_if_asked() -> None:
    driver = Driver()
    driver.say(Ping(id=RequestId("p")))
    assert driver.sent(Reply) == [Reply(id=RequestId("p"), value={})]
    driver.say(StatusQuery(id=RequestId("q")))
    assert driver.sent(Reply) == [Reply(id=RequestId("q"), value=driver.core.status(driver.now))]
    driver.load()
    driver.come_up()
    driver.ask()
    driver.say(StatusQuery(id=RequestId("q"), debug=True))
    [reply] = driver.sent(Reply)
    first, second, *others = reply.value["flight"]
    assert (first["before"], first["after"], first["ago_s"]) == ("STOPPED", "PENDING", 0.0)
    assert (second["n"], second["after"], second["generation"]) == (2, "LOADING", 1)
    assert [one["kind"] for one in others] == ["model_changed", "request_started"]


def test_story_has_each_death_and_verdict() -> None:
    driver = in_state(State.READY)
    driver.exit(signal="SIGSEGV", last_lines=("boom",))
    [death] = driver.of(WorkerDied)
    assert (death.evidence, death.verdict) == ("accuses", "1 request under suspicion")
    story = driver.core.stories()["m"]
    assert story[-3] == "1000.000 SIGSEGV: boom: 1 request under suspicion"
    assert story[-2] == "1000.000 READY died (SIGSEGV: boom) → PENDING"
    assert story[-1] == "1000.000 PENDING turn → LOADING"


@pytest.mark.parametrize("how", ["wanted", "unloaded", "removed"])
def test_a_process_that_cannot_be_ended_and_its_end_at_last_are_announced(how: str) -> None:
    driver = in_state(State.READY)
    driver.broke()
    driver.pass_time(10.0)
    assert notes(driver) == [("FAILED", "process 77 cannot be ended")]
    if how == "unloaded":
        driver.unload()
    elif how == "removed":
        driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=()))
    assert (driver.row()["pid"], driver.row()["last_exit"]) == (77, None)
    last = "process 77 has finally ended"
    driver.exit(code=9, last_lines=("late",), at=3.0)
    assert (
        notes(driver)
        == {
            "wanted": [("PENDING", last), ("LOADING", "")],
            "unloaded": [("STOPPED", last)],
            "removed": [("STOPPED", "removed")],
        }[how]
    )
    if how != "removed":
        assert driver.row()["last_exit"] == {
            "reason": "asked", "code": 9, "signal": None, "detail": "late", "at": 3.0,
            "cause": "unknown", "last_words": "late",
        }  # fmt: skip


def test_a_load_is_news_to_all_at_each_tenth_and_not_between() -> None:
    driver = in_state(State.LOADING)
    model = driver.model()
    assert waiting_news(model) == (WaitReason.LOAD, "import", 0)
    for hundredth in range(1, 100):
        driver.progress(hundredth / 100)
        assert waiting_news(model) == (WaitReason.LOAD, "weights", hundredth // 10)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (State.PENDING, "load"), (State.LOADING, "load"), (State.READY, "rows"),
        (State.DRAINING, "rows"), (State.STOPPING, "restart"), (State.BACKOFF, "backoff"),
    ],
)  # fmt: skip
def test_each_state_has_a_reason_to_wait(state: State, reason: str) -> None:
    assert wait_reason(in_state(state).model()) == reason


def test_all_requests_wait_while_a_process_is_replaced() -> None:
    driver = in_state(State.READY)
    driver.restart()
    assert (driver.state(), wait_reason(driver.model())) == (State.DRAINING, "restart")


# Flight recorder


def changed(model: str) -> ModelChanged:
    return ModelChanged(model=model, generation=1, before="READY", after="STOPPED")


def died(model: str) -> WorkerDied:
    return WorkerDied(model=model, generation=1, reason="crash", after="PENDING")


def ended(number: int) -> RequestEnded:
    return RequestEnded(id="r", number=number, model="m", outcome="stop")


RUNS = st.tuples(
    st.sampled_from([changed("a"), changed("b"), died("a"), ended(1)]), st.integers(1, 300)
)


@hypothesis.settings(max_examples=20)
@given(st.lists(RUNS, max_size=6))
def test_the_latest_of_each_kind_and_model_are_kept_in_order(
    runs: list[tuple[Entry, int]],
) -> None:
    entries = [one for one, times in runs for _ in range(times)]
    journal = Journal()
    for place, one in enumerate(entries):
        journal.keep(one, float(place))
    kept = journal.entries(float(len(entries)))
    numbers = [one["n"] for one in kept]
    assert numbers == sorted(numbers)
    assert all(one["ago_s"] == len(entries) - one["n"] + 1 for one in kept)
    expected = set[int]()
    for like, most in ((changed("a"), CHANGES_OF_A_MODEL), (changed("b"), CHANGES_OF_A_MODEL),
                       (died("a"), DEATHS_OF_A_MODEL), (ended(1), OF_REQUESTS)):  # fmt: skip
        alike = [place for place, one in enumerate(entries, start=1) if one == like]
        expected |= set(alike[-most:])
    assert set(numbers) == expected


def test_a_model_that_has_just_changed_outlives_those_that_changed_before_it() -> None:
    journal = Journal()
    for number in (*range(MOST_MODELS), 0, MOST_MODELS):
        journal.keep(changed(f"m{number}"), 0.0)
    kept = [one["model"] for one in journal.entries(0.0)]
    assert kept.count("m0") == 2
    assert "m1" not in kept
    assert f"m{MOST_MODELS}" in kept


def test_only_a_new_state_is_recorded_and_no_progress_of_a_load() -> None:
    driver = in_state(State.LOADING)
    recorder = Recorder(driver)
    for tenth in range(1, 10):
        driver.progress(tenth / 10)
    assert recorder.entries == []
    driver.ready()
    [change] = recorder.entries
    assert isinstance(change, ModelChanged)
    assert (change.before, change.after) == ("LOADING", "READY")


# Errors

M = ModelName("m")
ERRORS: dict[str, Callable[[], RemoteError]] = {
    "model failed": lambda: errors.model_failed(M, "no disk"),
    "load failed": lambda: errors.load_failed(M, "no disk", is_retryable=False),
    "load failed, to be tried again": lambda: errors.load_failed(M, "killed", is_retryable=True),
    "cut off by an unload": lambda: errors.cut_off(M, Why.IDLE),
    "cut off by a shutdown": lambda: errors.cut_off(M, Why.SHUTDOWN),
    "superseded": lambda: errors.superseded(M, "a load"),
    "worker crashed": lambda: errors.worker_crashed(M, "SIGKILL", 7),
    "quarantined, for whole minutes": lambda: errors.quarantined(M, 7, 120.0),
    "quarantined, for a part of one more": lambda: errors.quarantined(M, 0, 121.0),
    "out of memory alone": lambda: errors.insufficient_memory(M, "exit code 75", 7),
    "overloaded": lambda: errors.overloaded(
        M,
        "max_queue",
        "9 are waiting",
        queue_depth=9,
        running=[RequestId("r")],
        retry_after_s=2.5,
    ),
    "bad configuration": lambda: errors.bad_configuration(iter(["line 1", "line 2"])),
    "duplicate id": lambda: errors.duplicate_id(RequestId("r")),
    "superseded subscription": lambda: errors.superseded_subscription(),
    "queue time-out": lambda: errors.queue_timeout(M, 2.25),
    "deadline exceeded": lambda: errors.deadline_exceeded(M, "the first token", 0),
    "slow consumer": lambda: errors.slow_consumer(),
}


def test_errors_have_their_code_words_and_facts(snapshot: SnapshotAssertion) -> None:
    made = {name: make() for name, make in ERRORS.items()}
    facts = {
        name: [str(one.code), one.message, one.retryable, one.detail] for name, one in made.items()
    }
    assert text(facts) == snapshot


def test_an_unknown_model_is_answered_with_the_names_there_are_and_the_close_ones_H10() -> None:
    known = [ModelName(name) for name in ("qwen", "Llama-3b", "llama-8b", "llama-1b", "llama-70b")]
    error = errors.unknown_model("LLAMA-3B", known)
    assert error.code is ErrorCode.UNKNOWN_MODEL
    assert error.message == (
        "there is no model 'LLAMA-3B'; configured: Llama-3b, llama-1b, llama-70b, llama-8b, qwen"
    )
    assert error.detail["known"] == ["Llama-3b", "llama-1b", "llama-70b", "llama-8b", "qwen"]
    assert error.detail["close"] == ["Llama-3b", "llama-8b", "llama-1b"], "the best three"
    assert error.retryable is False
    assert errors.unknown_model("m", []).message == "there is no model 'm'; configured: none"


def test_a_worker_that_cannot_continue_an_answer_gives_the_detail_of_every_crash() -> None:
    said = RemoteError(ErrorCode.WORKER_CRASHED, "the model changed", detail={"tokens_sent": 1})
    detail = {"model": "m", "cause": "the model changed", "tokens_sent": 7}
    assert errors.for_interrupted(said, M, 7).detail == detail
