"""Test fair-share accounting: engine seconds, charges, counters, device time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.protocol.worker_messages import Lease, PrefillProgress, Ready, Rejected, RowDelta, Step
from mlxsup.supervisor.core.accounting import (
    MAX_ACCOUNTS,
    Account,
    Counters,
    DeviceTime,
    Meter,
    Terms,
    charge,
)
from mlxsup.supervisor.core.actions import SendToWorker
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings

from support.core.driver import LAUNCH, Driver, entry

# Engine seconds of requests and models


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
    **more: Any,
) -> None:
    """A step that ends now, with those rows; the status is not asked, which would charge it."""
    rows = [part for part in parts if isinstance(part, RowDelta)]
    left = [row for row in rows if row.finish is FinishReason.CANCELLED]
    said = Step(
        step=driver.model(model).process.steps + 1,
        rows=[*left, *(row for row in rows if row not in left)],
        prefill=[part for part in parts if isinstance(part, PrefillProgress)],
        took_s=took_s,
        decode_s=decode_s,
        between_steps=len(left),
    )
    driver.now += took_s
    generation = driver.model(model).life.generation
    driver.worker(replace(said, **more), model, generation=generation)


def running(
    *ids: str,
    models: tuple[str, ...] = ("m",),
    settings: CoreSettings | None = None,
    **parameters: Any,
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
            driver.accept(key, model, **parameters)
    return driver


def seconds(driver: Driver, model: str = "m") -> tuple[float, float]:
    """Return the engine seconds that requests paid, and those that were repeated."""
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


def test_each_account_pays_for_its_own_rows() -> None:
    settings = CoreSettings(clients={"a": ClientSettings(), "b": ClientSettings()})
    driver = Driver([entry()], settings)
    driver.load()
    driver.come_up()
    for key, account in enumerate("ab", start=1):
        driver.ask(account, client=account)
        driver.accept(key)
    spend(driver, 1.0, token(1), token(2))
    spend(driver, 1.0, token(1), token(2, FinishReason.STOP))
    spend(driver, 1.0, token(1, FinishReason.STOP))
    received = driver.model().queue.counters
    assert (received.of(Account("a")), received.of(Account("b"))) == (2.0, 1.0)


def test_cancelled_request_reports_its_cost_and_pays_no_later_step() -> None:
    driver = running("a", "b")
    spend(driver, 1.0, token(1), token(2))
    driver.cancel("a")
    assert paid(driver, "a") == 0.5
    spend(driver, 1.0, token(1), token(2))
    assert seconds(driver) == (2.0, 0.0), "its row was still in the batch"
    spend(driver, 1.0, gone(1), token(2, FinishReason.STOP))
    assert paid(driver, "b") == 0.5 + 0.5 + 1.0


def test_rereading_after_a_crash_is_charged_to_the_model() -> None:
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


def test_request_whose_texts_are_answered_one_by_one_pays_for_each_and_once() -> None:
    driver = running("a", lengths=[50, 30, 20])
    spend(driver, 2.0, read(1, 50, 50), token(1))
    spend(driver, 1.0, read(1, 80, 30), token(1))
    assert seconds(driver) == (3.0, 0.0)
    come_back(driver)
    spend(driver, 0.5, read(1, 80, 30))
    spend(driver, 1.0, read(1, 100, 20), token(1, FinishReason.STOP))
    assert paid(driver, "a") == 4.0
    assert seconds(driver) == (4.0, 0.5)


@pytest.mark.parametrize(
    ("parts", "paid_s"),
    [
        pytest.param([(20, 20), (60, 40), (100, 40)], (1.0 + 0.5 + 1.0, 1.0 + 0.5), id="again"),
        pytest.param([(100, 60)], (2.0, 0.0), id="cached"),
    ],
)
def test_a_prompt_that_was_read_in_part_is_repeated_up_to_there(
    parts: list[tuple[int, int]], paid_s: tuple[float, float]
) -> None:
    driver = running("a")
    spend(driver, 1.0, read(1, 40, 40))
    come_back(driver)
    for done, computed in parts:
        spend(driver, 1.0, read(1, done, computed))
    assert seconds(driver) == paid_s


def test_an_engine_works_until_its_cancelled_row_has_left() -> None:
    driver = running("x", models=("a", "b"))
    driver.cancel("xb")
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (1.0, 0.0)
    spend(driver, 0.0, gone(2), model="b")
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (3.0, 0.0)


def test_an_engine_that_has_died_shares_nothing() -> None:
    driver = running("x", models=("a", "b"))
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (1.0, 0.0)
    driver.exit("b")
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
    spend(driver, 2.0, token(1), model="b")
    assert seconds(driver, "b") == (3.0, 0.0), "a works from its lease on"


def test_a_lease_wakes_no_engine_whose_next_request_is_not_accepted() -> None:
    settings = CoreSettings(max_parallel_prefills=1)
    driver = running("x", models=("a", "b"), settings=settings)
    for model in ("a", "b"):
        driver.worker(Step(step=0, reads_on=True), model)
    for model in ("a", "b"):
        asks = Step(step=0, reads_on=True, wants_lease=True, only_waits=True)
        driver.worker(asks, model)  # a gets the lease, b waits
    driver.cancel("xb")
    spend(driver, 0.0, gone(2), model="b")
    [key] = driver.serve("y", model="b")
    spend(driver, 2.0, read(1, 100, 100), model="a", returns_lease=True)
    assert Lease() in [action.message for action in driver.of(SendToWorker)]
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (4.0, 0.0), "b has nothing to compute yet"
    driver.accept(key, "b")
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (5.0, 0.0)


def test_a_step_without_rows_puts_no_engine_to_work() -> None:
    driver = Driver([entry("a"), entry("b")])
    for model in ("a", "b"):
        driver.load(model)
        driver.come_up(model)
    [key] = driver.serve("xa", model="a")
    driver.accept(key, "a")
    spend(driver, 0.0, model="b")
    spend(driver, 2.0, token(1), model="a")
    assert seconds(driver, "a") == (2.0, 0.0)


def test_a_step_that_took_less_than_no_time_costs_nothing() -> None:
    driver = running("a")
    spend(driver, 1.0, token(1))
    spend(driver, -3.0, token(1))
    assert seconds(driver) == (1.0, 0.0)
    spend(driver, -3.0, read(1, 100, 100))
    assert seconds(driver) == (1.0, 0.0)


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


def test_alike_steps_are_charged_when_the_status_is_read() -> None:
    driver = running("a", "b")
    for _ in range(5):
        spend(driver, 1.0, token(1), token(2))
    assert driver.model().meter.engine_s == 1.0, "the first one was charged by itself"
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


@pytest.mark.parametrize("is_crash", [True, False], ids=["crash", "rejection"])
def test_an_error_after_some_steps_says_them_all(is_crash: bool) -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    [key] = driver.serve("a", resume=False)
    driver.accept(key)
    for _ in range(4):
        spend(driver, 1.0, token(1))
    if is_crash:
        driver.exit(generation=1)
    else:
        error = RemoteError(ErrorCode.INVALID_REQUEST, "its form is too complex")
        driver.worker(Rejected(key=key, error=error), generation=1)
    assert driver.failure_of("a").error.detail["engine_s"] == 4.0


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


def test_steps_of_as_many_other_rows_are_not_alike() -> None:
    driver = running("a", "b")
    for key in (1, 1, 1, 2, 2):
        spend(driver, 1.0, token(key))
    spend(driver, 1.0, token(1, FinishReason.STOP))
    spend(driver, 1.0, token(2, FinishReason.STOP))
    assert (paid(driver, "a"), paid(driver, "b")) == (4.0, 3.0)


def test_a_row_that_joins_without_having_read_anything_pays_at_once() -> None:
    driver = running("a", "b")
    for _ in range(3):
        spend(driver, 1.0, token(1))
    spend(driver, 1.0, token(1), token(2))
    spend(driver, 1.0, token(1), token(2, FinishReason.STOP))
    assert paid(driver, "b") == 1.0


# Charges of one step

A, B, C = (RequestKey(number) for number in (1, 2, 3))


def row(key: RequestKey) -> RowDelta:
    return RowDelta(key=key, text="x", tokens=pack_tokens([9]))


def left(key: RequestKey) -> RowDelta:
    return RowDelta(key=key, finish=FinishReason.CANCELLED)


def part(key: RequestKey, computed: int, *, done: int | None = None) -> PrefillProgress:
    """By default from the beginning of the prompt."""
    return PrefillProgress(
        key=key, done=computed if done is None else done, total=1000, computed=computed
    )


STEPS: dict[str, tuple[dict[str, Any], dict[RequestKey, float]]] = {
    "rows pay equal parts": ({"rows": [row(A), row(B)], "decode_s": 0.25}, {A: 0.5, B: 0.5}),
    "two pieces of a row are one part": (
        {"rows": [row(A), RowDelta(key=A, text="!", channel=Channel.REASONING), row(B)]},
        {A: 0.5, B: 0.5},
    ),
    "a row that ends was computed": (
        {"rows": [RowDelta(key=A, finish=FinishReason.STOP), row(B)]}, {A: 0.5, B: 0.5},
    ),
    "rows that left between steps pay nothing": (
        {"rows": [left(A), left(B), row(C)], "between_steps": 2}, {C: 1.0},
    ),
    "prompts pay by computed tokens": (
        {"prefill": [part(A, 10, done=900), part(B, 30)]}, {A: 0.25, B: 0.75},
    ),
    "decode is what was predicted": (
        {"rows": [row(A), row(B)], "prefill": [part(C, 8)], "took_s": 2.0, "decode_s": 0.5},
        {A: 0.25, B: 0.25, C: 1.5},
    ),
    "a prediction is at most the step": (
        {"rows": [row(A)], "prefill": [part(B, 1)], "decode_s": 5.0}, {A: 1.0, B: 0.0},
    ),
    "a prediction is at least nothing": (
        {"rows": [row(A)], "prefill": [part(B, 1)], "decode_s": -1.0}, {A: 0.0, B: 1.0},
    ),
    "without a duration prompts pay": (
        {"rows": [row(A)], "prefill": [part(B, 8)], "took_s": 0.0, "decode_s": 0.5,
         "engine_s": 1.0},
        {A: 0.0, B: 1.0},
    ),
    "without rows prompts pay all": (
        {"rows": [left(B)], "between_steps": 1, "prefill": [part(A, 8)], "decode_s": 0.5}, {A: 1.0},
    ),
    "without prompts rows pay all": (
        {"rows": [row(A)], "prefill": [part(B, 0, done=5)], "decode_s": 0.25}, {A: 1.0},
    ),
    "a shared device costs less": (
        {"rows": [row(A)], "prefill": [part(C, 8)], "took_s": 2.0, "decode_s": 0.5,
         "engine_s": 1.0},
        {A: 0.25, C: 0.75},
    ),
    "repeated in part": ({"prefill": [part(A, 10)], "read_before": {A: 5.0}}, {A: 0.5}),
    "repeated as a whole": ({"prefill": [part(A, 10)], "read_before": {A: math.inf}}, {}),
    "beyond what was read": (
        {"prefill": [part(A, 10, done=20)], "read_before": {A: 10.0}}, {A: 1.0},
    ),
    "a row that reads and decodes pays both": (
        {"rows": [row(A)], "prefill": [part(A, 10)], "decode_s": 0.25}, {A: 1.0},
    ),
    "a count below nothing leaves no row out": (
        {"rows": [row(A), row(B)], "between_steps": -1}, {A: 0.5, B: 0.5},
    ),
    "a number below nothing pays nothing": (
        {"prefill": [part(A, -5, done=5), part(B, 8)]}, {B: 1.0},
    ),
    "nothing was computed": ({"rows": [left(A)], "between_steps": 1}, {}),
}  # fmt: skip
"""What was computed, and what each request pays; the model pays for what is repeated."""


@pytest.mark.parametrize("name", STEPS)
def test_charges_of_a_step(name: str) -> None:
    made, requests = STEPS[name]
    said = {"took_s": 1.0, **made}
    before: dict[RequestKey, float] = said.pop("read_before", {})
    engine_s: float = said.pop("engine_s", said["took_s"])
    paid, repeated_s = charge(Step(step=1, **said), engine_s, before)
    assert paid == requests
    assert repeated_s == (engine_s - sum(requests.values()) if before else 0.0)


# Fair-share counters

ANN, BEN, CAT = map(Account, "abc")


def counters(**weights: float) -> Counters:
    clients = {name: ClientSettings(weight=weight) for name, weight in weights.items()}
    return Counters(Terms(CoreSettings(clients=clients)))


def test_debt_outlives_an_absence_and_credit_does_not() -> None:
    of = counters()
    of.join(ANN, ())
    of.join(BEN, {ANN})
    of.charge(ANN, 10.0)
    of.charge(BEN, 4.0)
    of.join(ANN, {BEN})
    assert of.of(ANN) == 10.0, "6 seconds above the floor"
    of.charge(ANN, 2.0)
    of.join(BEN, {ANN})
    assert of.of(BEN) == 12.0, "idleness earns nothing"


def test_of_many_accounts_that_left_the_least_debt_is_forgotten_first() -> None:
    of = counters()
    of.dispatched(Account("n2"))
    for number in range(MAX_ACCOUNTS + 3):
        account = Account(f"n{number}")
        of.join(account, {ANN})
        of.charge(account, float(number))
    of.join(BEN, {ANN})
    assert len(of) == MAX_ACCOUNTS - MAX_ACCOUNTS // 8 + 3, "an eighth is forgotten at once"
    assert of.of(Account("n1")) == 0.0, "forgotten"
    assert of.of(Account("n2")) == 2.0, "the latest says where the next one begins"
    assert of.of(Account(f"n{MAX_ACCOUNTS}")) == MAX_ACCOUNTS
    for number in range(3 * MAX_ACCOUNTS):
        of.join(Account(f"m{number}"), {ANN})
        assert len(of) <= MAX_ACCOUNTS + 3


def test_shares_follow_the_weights_however_much_is_asked_for() -> None:
    """Thirty requests of `b` wait beside six of `a`; each takes eight steps of a quarter second."""
    settings = CoreSettings(
        max_queue=999,
        max_queue_per_client=999,
        aging_s=0.0,
        clients={"a": ClientSettings(weight=10.0), "b": ClientSettings()},
    )
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=4))], settings)
    driver.load()
    driver.come_up()
    driver.is_checked = False  # quadratic in the line
    received, asked = Counter[str](), 0
    for _ in range(360):
        waiting = Counter(request.account for request in driver.model().queue)
        for account, most in (("a", 6), ("b", 30)):
            for _ in range(most - waiting[Account(account)]):
                asked += 1
                driver.ask(f"{account}{asked}", client=account)
        rows = list(driver.model().batch.running.values())
        driver.compute(0.25, *(row.key for row in rows))
        for row in rows:
            received[row.account] += 1
            if row.tokens_sent == 8:
                driver.token(row.key, finish=FinishReason.STOP)
    assert received["a"] / received["b"] == pytest.approx(10.0, rel=0.15)


# Engines that share a device

ENGINE_A, ENGINE_B = (Meter(Counters(Terms(CoreSettings()))) for _ in range(2))


def test_two_engines_at_once_pay_half_each_also_while_the_step_of_the_other_is_under_way() -> None:
    device = DeviceTime()
    device.works(ENGINE_A, 10.0)
    device.works(ENGINE_B, 10.0)
    assert device.cost_s(ENGINE_A, 1.0, 11.0) == 0.5
    assert device.cost_s(ENGINE_A, 1.0, 12.0) == 0.5
    assert device.cost_s(ENGINE_B, 2.0, 12.0) == 1.0, "its step began before those of the other"
    device.rests(ENGINE_B, 13.0)
    assert device.cost_s(ENGINE_A, 2.0, 14.0) == 1.5, "half of its time until the other rested"
    device.works(ENGINE_B, 15.0)
    assert device.cost_s(ENGINE_A, 2.0, 16.0) == 1.5
