"""What the core has the flight recorder keep: bounded, once for each thing, and true."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.client_messages import Done, Reply, StatusQuery
from mlxsup.protocol.flight import (
    Entry,
    LostRow,
    ModelChanged,
    RequestContinued,
    RequestEnded,
    RequestPaused,
    RequestStarted,
    WorkerDied,
)
from mlxsup.protocol.ids import RequestId, RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason, State, WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat, RowDelta, Step
from mlxsup.supervisor.core.flight import (
    CHANGES_OF_A_MODEL,
    DEATHS_OF_A_MODEL,
    MOST_MODELS,
    OF_REQUESTS,
    Flight,
)
from mlxsup.supervisor.core.last_moments import MOST_ROWS
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import LAUNCH, Driver, entry
from support.core_states import in_state
from support.flight import Recorder


def changed(model: str) -> ModelChanged:
    return ModelChanged(model=model, generation=1, before="READY", after="STOPPED")


def died(model: str) -> WorkerDied:
    return WorkerDied(model=model, generation=1, reason="crash", after="PENDING")


def ended(number: int) -> RequestEnded:
    return RequestEnded(id="r", number=number, model="m", outcome="stop")


RUNS = st.tuples(
    st.sampled_from([changed("a"), changed("b"), died("a"), ended(1)]), st.integers(1, 300)
)


@given(st.lists(RUNS, max_size=6))
def test_the_latest_of_each_kind_and_model_are_kept_in_order(
    runs: list[tuple[Entry, int]],
) -> None:
    entries = [one for one, times in runs for _ in range(times)]
    flight = Flight()
    for place, one in enumerate(entries):
        flight.keep(one, float(place))
    kept = flight.entries(float(len(entries)))
    numbers = [one["n"] for one in kept]
    assert numbers == sorted(numbers)
    assert all(one["ago_s"] == len(entries) - one["n"] + 1 for one in kept)
    expected = set[int]()
    for like, most in ((changed("a"), CHANGES_OF_A_MODEL), (changed("b"), CHANGES_OF_A_MODEL),
                       (died("a"), DEATHS_OF_A_MODEL), (ended(1), OF_REQUESTS)):  # fmt: skip
        alike = [place for place, one in enumerate(entries, start=1) if one == like]
        expected |= set(alike[-most:])
    assert set(numbers) == expected


def test_models_that_come_and_go_take_no_more_and_more_memory() -> None:
    flight = Flight()
    for number in range(MOST_MODELS + 5):
        flight.keep(changed(f"m{number}"), 0.0)
    kept = [one["model"] for one in flight.entries(0.0)]
    assert (len(kept), kept[0], kept[-1]) == (MOST_MODELS, "m5", f"m{MOST_MODELS + 4}")


def test_a_model_that_has_just_changed_outlives_those_that_changed_before_it() -> None:
    flight = Flight()
    for number in (*range(MOST_MODELS), 0, MOST_MODELS):
        flight.keep(changed(f"m{number}"), 0.0)
    kept = [one["model"] for one in flight.entries(0.0)]
    assert kept.count("m0") == 2
    assert "m1" not in kept
    assert f"m{MOST_MODELS}" in kept


def test_the_end_of_a_request_is_recorded_with_what_its_client_was_told() -> None:
    driver = Driver()
    recorder = Recorder(driver)
    driver.load()
    driver.ask("r1")
    driver.now += 2.5  # waits for the load
    driver.come_up()
    driver.now += 4.0
    driver.accept(1)
    driver.now += 0.25
    first = RowDelta(key=RequestKey(1), text="x", tokens=pack_tokens([9]), cached_tokens=2)
    driver.worker(Step(step=1, rows=[first], took_s=0.125))
    driver.now += 8.0
    driver.pause()
    driver.row_left(1)
    driver.now += 16.0
    driver.resume()
    driver.token(1)
    driver.token(1)
    driver.now += 32.0
    driver.token(1, finish=FinishReason.STOP)
    [done] = driver.sent(Done)
    [end] = [one for one in recorder.entries if isinstance(one, RequestEnded)]
    assert (end.usage, end.timings) == (done.usage, done.timings)
    assert end.outcome == done.finish_reason


def test_a_request_from_its_start_to_its_end_with_a_crash_and_a_pause_between() -> None:
    driver = Driver()
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    [key] = driver.serve("r1")
    driver.accept(key)
    driver.token(key)
    driver.now += 2.0
    driver.exit(signal="SIGKILL")
    driver.come_up()
    driver.token(key)
    driver.pause()
    driver.row_left(key)
    driver.resume()
    driver.token(key)
    driver.token(key, finish=FinishReason.STOP)
    about = [one for one in recorder.entries if not isinstance(one, ModelChanged)]
    assert [type(one) for one in about] == [
        RequestStarted, WorkerDied, RequestContinued, RequestPaused, RequestContinued, RequestEnded,
    ]  # fmt: skip
    _, death, after_crash, pause, after_pause, end = about
    assert isinstance(death, WorkerDied)
    assert death.rows == [LostRow(id="r1", number=key, tokens=1)]
    assert isinstance(after_crash, RequestContinued)
    assert (after_crash.after, after_crash.generation, after_crash.tokens) == ("crash", 2, 1)
    assert isinstance(pause, RequestPaused)
    assert (pause.reason, pause.tokens) == ("user", 2)
    assert isinstance(after_pause, RequestContinued)
    assert after_pause.after == "pause"
    assert isinstance(end, RequestEnded)
    assert (end.outcome, end.usage.completion_tokens, end.resumed, end.paused) == ("stop", 4, 1, 1)
    assert [one.number for one in recorder.recorded] == list(range(1, len(recorder.recorded) + 1))


def test_a_death_has_what_its_process_did_and_held_before_it() -> None:
    driver = in_state(State.READY)
    recorder = Recorder(driver)
    driver.token(1)
    held = Heartbeat(step=1, phase=WorkerPhase.DECODE, phase_s=0.0, active_bytes=5, cache_bytes=3)
    driver.worker(held)
    driver.sample(3 * 2**30, machine_bytes=2**36)
    driver.now += 4.0
    driver.exit(code=70, last_lines=("boom",))
    [death] = recorder.deaths
    assert (death.reason, death.code, death.signal, death.detail) == ("crash", 70, "", "boom")
    assert death.evidence == "accuses"
    assert (death.doing, death.steps, death.ready_s) == ("decode", 1, 4.0)
    assert (death.footprint_bytes, death.machine_bytes) == (3 * 2**30, 2**36)
    assert (death.active_bytes, death.cache_bytes) == (5, 3)
    assert (death.generation, death.pid, death.after) == (1, 77, "PENDING")
    assert (death.crashes, death.most_crashes, death.window_s) == (1, 3, 100.0)
    assert "under suspicion" in death.verdict
    assert death.rows == [LostRow(id="r1", number=1, tokens=1, is_suspect=True)]


def test_what_a_death_made_of_each_row_is_what_its_client_heard() -> None:
    driver = Driver()
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    stays, ends = driver.serve("stays"), driver.serve("ends", resume=False)
    for key in (*stays, *ends):
        driver.accept(key)
    driver.exit()
    [death] = recorder.deaths
    assert {row.id: row.fate for row in death.rows} == {
        "stays": "continues",
        "ends": driver.failure_of("ends").error["code"],
    }


def test_the_third_death_of_a_poison_says_that_it_is_quarantined() -> None:
    driver = Driver()
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    driver.serve("poison")
    for _ in range(3):
        driver.exit(signal="SIGSEGV")
        driver.pass_time(5.0)
        if driver.state() is State.LOADING:
            driver.come_up()
    assert [death.rows[0].fate for death in recorder.deaths] == [
        "continues", "continues", "quarantined",
    ]  # fmt: skip
    assert "quarantined" in recorder.deaths[-1].verdict


def test_of_many_rows_some_are_named_and_the_others_counted() -> None:
    many = MOST_ROWS + 3
    limits = CoreSettings(max_queue=many, max_queue_per_client=many)
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=many))], limits)
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    driver.serve(*(f"r{number}" for number in range(many)))
    driver.exit()
    [death] = recorder.deaths
    assert (len(death.rows), death.more_rows) == (MOST_ROWS, 3)


def test_an_end_that_was_asked_for_is_recorded_only_if_requests_ran() -> None:
    driver = in_state(State.READY)
    recorder = Recorder(driver)
    driver.restart(now=True)
    driver.exit(code=0)
    [death] = recorder.deaths
    assert (death.reason, [row.fate for row in death.rows]) == ("asked", ["continues"])
    driver.come_up()
    driver.token(1, finish=FinishReason.STOP)
    driver.unload()
    driver.exit(code=0)
    assert len(recorder.deaths) == 1


def test_a_load_that_dies_says_how_far_it_was_and_when_it_is_tried_again() -> None:
    driver = in_state(State.LOADING)
    recorder = Recorder(driver)
    driver.progress(0.4)
    driver.exit(code=75, last_lines=("MemoryError",))
    driver.spawned()
    driver.exit(code=75, last_lines=("MemoryError",))
    first, second = recorder.deaths
    assert (first.doing, first.ready_s, first.after) == ("weights 40%", None, "PENDING")
    assert (first.active_bytes, first.cache_bytes) == (0, 0), "it has sent no beat"
    assert second.after == "BACKOFF"
    assert second.retry_in_s is not None
    assert 0.5 <= second.retry_in_s <= 1.0


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


def test_the_status_has_it_only_if_it_is_asked_for() -> None:
    driver = in_state(State.READY)
    driver.say(StatusQuery(id=RequestId("q")))
    [plain] = driver.sent(Reply)
    assert "flight" not in plain.value
    driver.say(StatusQuery(id=RequestId("q"), debug=True))
    [reply] = driver.sent(Reply)
    kinds = [one["kind"] for one in reply.value["flight"]]
    assert kinds == ["model_changed"] * 3 + ["request_started"]
