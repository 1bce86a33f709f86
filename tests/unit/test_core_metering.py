"""Engine seconds of requests and models, over crashes, cancels and other engines."""

from __future__ import annotations

import pytest

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import PrefillProgress, Ready, Rejected, RowDelta, Step
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import Driver, entry


def token(key: int, finish: FinishReason | None = None) -> RowDelta:
    return RowDelta(key=RequestKey(key), text="x", tokens=pack_tokens([9]), finish=finish)


def gone(key: int) -> RowDelta:
    return RowDelta(key=RequestKey(key), finish=FinishReason.CANCELLED)


def read(key: int, done: int, computed: int) -> PrefillProgress:
    return PrefillProgress(key=RequestKey(key), done=done, total=100, computed=computed)


def spend(
    driver: Driver,
    took_s: float,
    *parts: RowDelta | PrefillProgress,
    decode_s: float = 0.0,
    model: str = "m",
    **more: bool,
) -> None:
    """A step that ends now, with those rows; the status is not asked, which would charge it."""
    rows = [part for part in parts if isinstance(part, RowDelta)]
    left = [row for row in rows if row.finish is FinishReason.CANCELLED]
    driver.now += took_s
    driver.worker(
        Step(
            step=driver.model(model).steps + 1,
            rows=[*left, *(row for row in rows if row not in left)],
            prefill=[part for part in parts if isinstance(part, PrefillProgress)],
            took_s=took_s,
            decode_s=decode_s,
            between_steps=len(left),
            reads_on=more.get("reads_on", False),
            returns_lease=more.get("returns_lease", False),
            wants_lease=more.get("wants_lease", False),
            only_waits=more.get("only_waits", False),
        ),
        model,
        generation=driver.model(model).life.generation,
    )


def running(
    *ids: str, models: tuple[str, ...] = ("m",), settings: CoreSettings | None = None
) -> Driver:
    """Each model is READY, and its requests are accepted; the first has key 1.

    If there are several models, the name of each is part of its requests' ids.
    """
    is_one = len(models) == 1
    driver = Driver([entry(name) for name in models], settings)
    for model in models:
        driver.load(model)
        driver.come_up(model)
        named = ids if is_one else [id + model for id in ids]
        for key in driver.serve(*named, model=model):
            driver.accept(key, model)
    return driver


def seconds(driver: Driver, model: str = "m") -> tuple[float, float]:
    """What requests, and what nobody, paid for."""
    row = driver.row(model)
    return round(row["engine_s"], 9), round(row["repeated_s"], 9)


def paid(driver: Driver, id: str) -> float:
    """What the result of a request says."""
    return round(driver.result_of(id).usage.engine_s, 9)


def come_back(driver: Driver) -> None:
    """The worker dies, and the next one gets what was interrupted."""
    driver.exit(generation=driver.model().life.generation)
    driver.come_up()
    for key in driver.dispatched():
        driver.accept(key)


def test_a_request_pays_from_its_prompt_to_the_step_that_ends_it() -> None:
    driver = running("a", "b")
    spend(driver, 2.0, read(1, 30, 30), read(2, 10, 10))
    spend(driver, 1.0, token(1), read(2, 20, 10), decode_s=0.25)
    spend(driver, 0.5, token(1, FinishReason.STOP), token(2))
    assert paid(driver, "a") == 1.5 + 0.25 + 0.25
    spend(driver, 0.5, token(2, FinishReason.LENGTH))
    assert paid(driver, "b") == 0.5 + 0.75 + 0.25 + 0.5
    assert seconds(driver) == (4.0, 0.0)


def test_a_request_that_is_cancelled_says_what_it_cost_and_later_steps_cost_it_nothing() -> None:
    driver = running("a", "b")
    spend(driver, 1.0, token(1), token(2))
    driver.cancel("a")
    assert paid(driver, "a") == 0.5
    spend(driver, 1.0, token(1), token(2))
    assert seconds(driver) == (2.0, 0.0), "its row was still in the batch"
    spend(driver, 1.0, gone(1), token(2, FinishReason.STOP))
    assert paid(driver, "b") == 0.5 + 0.5 + 1.0


def test_an_error_of_a_request_that_has_run_says_what_it_cost() -> None:
    driver = running("a", "b")
    spend(driver, 1.5, token(1))
    driver.unload()
    driver.pass_time(5.0)
    ended = driver.failure_of("a").error["detail"], driver.failure_of("b").error["detail"]
    assert [detail.get("engine_s") for detail in ended] == [1.5, None]
    assert [detail["why"] for detail in ended] == ["user", "user"]


def test_a_request_that_waits_again_says_what_it_has_cost_if_it_fails() -> None:
    driver = running("a")
    spend(driver, 1.5, token(1))
    driver.exit()
    driver.spawned()
    driver.exit(code=66)
    failed = driver.failure_of("a").error
    assert (failed["code"], failed["detail"]["engine_s"]) == ("worker_crashed", 1.5)


def test_what_is_read_again_after_a_crash_is_charged_to_the_model() -> None:
    driver = running("a")
    spend(driver, 2.0, read(1, 100, 100))
    spend(driver, 1.0, token(1))
    come_back(driver)
    spend(driver, 3.0, read(1, 60, 60))
    spend(driver, 1.0, read(1, 101, 41))
    assert seconds(driver) == (3.0, 4.0)
    spend(driver, 1.0, token(1, FinishReason.STOP))
    assert paid(driver, "a") == 4.0
    assert seconds(driver) == (4.0, 4.0)


def test_a_prompt_that_was_read_in_part_is_repeated_up_to_there() -> None:
    driver = running("a")
    spend(driver, 1.0, read(1, 40, 40))
    come_back(driver)
    spend(driver, 1.0, read(1, 20, 20))
    spend(driver, 1.0, read(1, 60, 40))
    spend(driver, 1.0, read(1, 100, 40))
    assert seconds(driver) == (1.0 + 0.5 + 1.0, 1.0 + 0.5)


def test_what_a_cache_keeps_is_not_repeated() -> None:
    driver = running("a")
    spend(driver, 1.0, read(1, 40, 40))
    come_back(driver)
    spend(driver, 1.0, read(1, 100, 60))
    assert seconds(driver) == (2.0, 0.0)


def test_a_step_for_nobody_is_charged_to_nobody() -> None:
    driver = running("a")
    spend(driver, 1.0)
    assert seconds(driver) == (0.0, 0.0)


@pytest.mark.parametrize("took_s", [-3.0, 0.0])
def test_a_duration_that_cannot_be_costs_nothing(took_s: float) -> None:
    driver = running("a")
    driver.now += 1.0
    driver.worker(Step(step=1, rows=[token(1)], took_s=took_s, decode_s=9.0))
    assert seconds(driver) == (0.0, 0.0)


# ---------------------------------------------------------------- engines at once


def test_engines_that_work_at_once_share_their_time() -> None:
    driver = running("x", models=("a", "b"))
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (1.0, 0.0)
    driver.worker(Step(step=1, rows=[token(2)], took_s=2.0), "b")
    assert seconds(driver, "b") == (1.0, 0.0)


def test_an_engine_without_requests_shares_nothing() -> None:
    driver = running("x", models=("a", "b"))
    driver.worker(Step(step=1, rows=[token(2, FinishReason.STOP)]), "b")
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (2.0, 0.0)
    driver.ask("y", "b", body=b"y")
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (4.0, 0.0), "what is not accepted is not computed yet"


def test_an_engine_whose_process_is_gone_shares_nothing() -> None:
    driver = running("x", models=("a", "b"))
    driver.exit("b")
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (2.0, 0.0)


def test_an_engine_works_until_its_cancelled_row_has_left() -> None:
    driver = running("x", models=("a", "b"))
    driver.cancel("xb")
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (1.0, 0.0)
    spend(driver, 0.0, gone(2), model="b")
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (3.0, 0.0)


def test_an_engine_that_only_waits_for_a_lease_shares_nothing() -> None:
    settings = CoreSettings(max_parallel_prefills=1)
    driver = running("x", models=("a", "b"), settings=settings)
    for model in ("a", "b"):
        driver.worker(Step(step=0, reads_on=True), model)
    for model in ("a", "b"):
        asks = Step(step=0, reads_on=True, wants_lease=True, only_waits=True)
        driver.worker(asks, model)  # a gets the lease, b waits
    turn = {"reads_on": True, "returns_lease": True, "wants_lease": True, "only_waits": True}
    spend(driver, 2.0, read(1, 30, 30), model="a", **turn)
    assert seconds(driver, "a") == (2.0, 0.0)
    driver.accept(driver.serve("y", model="a")[0], "a")
    spend(driver, 2.0, read(2, 30, 30), model="b", **turn)
    assert seconds(driver, "b") == (2.0, 0.0), "a has accepted a request, and still waits"


def test_an_engine_that_decodes_while_it_waits_for_a_lease_shares_the_device() -> None:
    settings = CoreSettings(max_parallel_prefills=1)
    driver = running("x", models=("a", "b"), settings=settings)
    for model in ("a", "b"):
        driver.worker(Step(step=0, reads_on=True), model)
    for model in ("a", "b"):
        driver.worker(Step(step=0, reads_on=True, wants_lease=True), model)
    spend(driver, 2.0, read(1, 30, 30), model="a", reads_on=True, returns_lease=True)
    assert seconds(driver, "a") == (1.0, 0.0)


def test_engines_on_different_backends_do_not_share() -> None:
    driver = Driver([entry("a"), entry("b")])
    for model, backend in (("a", "cpu"), ("b", "cuda")):
        driver.load(model)
        driver.spawned(model)
        driver.hello(model)
        driver.worker(Ready(context_length=100, fingerprint="f", backend=backend), model)
        [key] = driver.serve("x" + model, model=model)
        driver.accept(key, model)
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (2.0, 0.0)


def test_steps_that_differ_in_nothing_are_charged_whenever_somebody_looks() -> None:
    driver = running("a", "b")
    for _ in range(5):
        spend(driver, 1.0, token(1), token(2))
    alike = driver.model().alike
    assert alike is not None
    assert alike.took_s == 4.0, "the first one was charged by itself"
    assert seconds(driver) == (5.0, 0.0)
    for _ in range(3):
        spend(driver, 1.0, token(1), token(2))
    driver.cancel("a")
    assert paid(driver, "a") == 4.0
    for _ in range(3):
        spend(driver, 1.0, token(1), token(2))
    spend(driver, 1.0, gone(1), token(2))
    for _ in range(3):
        spend(driver, 1.0, token(2))
    spend(driver, 1.0, token(2, FinishReason.STOP))
    assert paid(driver, "b") == 4.0 + 1.5 + 5.0
    assert seconds(driver) == (16.0, 0.0)


def test_steps_before_a_crash_are_charged_before_it() -> None:
    driver = running("a")
    for _ in range(4):
        spend(driver, 1.0, token(1))
    come_back(driver)
    assert seconds(driver) == (4.0, 0.0)
    spend(driver, 1.0, token(1, FinishReason.STOP))
    assert paid(driver, "a") == 5.0


def test_steps_before_another_engine_begins_or_rests_are_charged_whole() -> None:
    driver = Driver([entry("a"), entry("b")])
    for model in ("a", "b"):
        driver.load(model)
        driver.come_up(model)
    [key] = driver.serve("xa", model="a")
    driver.accept(key, "a")
    for _ in range(4):
        spend(driver, 1.0, token(1), model="a")
    [key] = driver.serve("xb", model="b")
    driver.accept(key, "b")
    for _ in range(4):
        spend(driver, 1.0, token(1), model="a")
    driver.worker(Step(step=1, rows=[token(2, FinishReason.STOP)], took_s=4.0), "b")
    for _ in range(4):
        spend(driver, 1.0, token(1), model="a")
    assert seconds(driver, "a") == (4.0 + 2.0 + 4.0, 0.0)
    assert seconds(driver, "b") == (2.0, 0.0)


def test_a_crash_that_ends_a_request_is_told_with_all_its_steps() -> None:
    driver = Driver([entry()])
    driver.load()
    driver.come_up()
    [key] = driver.serve("a", resume=False)
    driver.accept(key)
    for _ in range(4):
        spend(driver, 1.0, token(1))
    driver.exit(generation=driver.model().life.generation)
    failed = driver.failure_of("a").error
    assert (failed["code"], failed["detail"]["engine_s"]) == ("worker_crashed", 4.0)


def test_a_rejection_after_some_steps_says_them_all() -> None:
    driver = running("a")
    for _ in range(4):
        spend(driver, 1.0, token(1))
    error = RemoteError(ErrorCode.INVALID_REQUEST, "its form is too complex")
    driver.worker(Rejected(key=RequestKey(1), error=error.to_wire()), generation=1)
    assert driver.failure_of("a").error["detail"]["engine_s"] == 4.0


def test_steps_are_no_longer_alike_when_another_row_reads_joins_or_ends() -> None:
    driver = running("a", "b")
    for _ in range(3):
        spend(driver, 1.0, token(1))
    for done in (5, 10, 15):
        spend(driver, 1.0, token(1), read(2, done, 5), decode_s=0.25)
    for _ in range(3):
        spend(driver, 1.0, token(1), token(2))
    spend(driver, 1.0, token(1), token(2, FinishReason.STOP))
    assert paid(driver, "b") == 3 * 0.75 + 4 * 0.5
    spend(driver, 1.0, token(1, FinishReason.STOP))
    assert paid(driver, "a") == 3.0 + 3 * 0.25 + 4 * 0.5 + 1.0


def test_a_row_that_joins_without_having_read_anything_pays_at_once() -> None:
    driver = running("a", "b")
    for _ in range(3):
        spend(driver, 1.0, token(1))
    spend(driver, 1.0, token(1), token(2))
    spend(driver, 1.0, token(1), token(2, FinishReason.STOP))
    assert paid(driver, "b") == 1.0
