"""Test prefill slots: long prompts of several models are read in turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxsup.protocol.ids import pack_tokens
from mlxsup.protocol.states import Priority, State, WorkerPhase
from mlxsup.protocol.worker_messages import Lease, Ready, RowDelta, Step
from mlxsup.protocol.worker_messages import Leases as LeasesNeeded
from mlxsup.supervisor.core.actions import LookAtWorker, SendToWorker, WorkerSignal
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.prefill_slots import LEASE_S
from mlxsup.supervisor.core.settings import CoreSettings

from support.core.driver import Driver, entry

MODELS = ("a", "b", "c")
LIMIT_S = 30.0
"""Of a step, in the entries here."""


def ready(driver: Driver, model: str, backend: str = "fake") -> None:
    """Has a model come up on a backend."""
    driver.load(model)
    driver.spawned(model, pid=100 + MODELS.index(model))
    driver.hello(model)
    driver.worker(Ready(context_length=100, fingerprint="f", backend=backend), model)


def serving(
    limit: int | None = 1,
    *,
    backend: str = "fake",
    models: int = 2,
    classes: tuple[Priority, ...] = (Priority.NORMAL,) * 3,
) -> Driver:
    """Models with a request each that runs, of these classes."""
    names = MODELS[:models]
    settings = CoreSettings(max_parallel_prefills=limit, drain_timeout_s=60.0)
    driver = Driver([entry(name) for name in names], settings)
    for name, priority in zip(names, classes, strict=False):
        ready(driver, name, backend)
        driver.serve(f"of {name}", model=name, priority=priority)
    return driver


def step(
    driver: Driver,
    model: str,
    *,
    reads_on: bool = True,
    returns: bool = False,
    wants: bool = False,
) -> None:
    """The model's worker makes its next step."""
    number = driver.model(model).process.steps + 1
    driver.worker(
        Step(step=number, reads_on=reads_on, returns_lease=returns, wants_lease=wants), model
    )


def ask(driver: Driver, model: str) -> None:
    """The model's worker asks for a lease between two steps."""
    steps = driver.model(model).process.steps
    driver.worker(Step(step=steps, reads_on=True, wants_lease=True), model)


def needs(driver: Driver) -> dict[str, bool]:
    """What the latest event told which workers about leases."""
    return {
        action.model: action.message.are_needed
        for action in driver.of(SendToWorker)
        if isinstance(action.message, LeasesNeeded)
    }


def grants(driver: Driver) -> list[str]:
    """The models that the latest event granted a lease, in order."""
    return [a.model for a in driver.of(SendToWorker) if isinstance(a.message, Lease)]


def contended(models: int = 2, *classes: Priority) -> Driver:
    """Models that all read long prompts, with one lease; the first has it, the others wait."""
    driver = serving(models=models, classes=classes or (Priority.NORMAL,) * 3)
    for name in MODELS[:models]:
        step(driver, name)
    for name in MODELS[:models]:
        ask(driver, name)
    return driver


def test_decoding_keeps_the_place_in_line() -> None:
    driver = contended(models=3)
    for _ in range(3):
        step(driver, "b")
        assert grants(driver) == []
    step(driver, "a", returns=True)
    assert grants(driver) == ["b"]


def test_turns_go_by_class_and_then_in_the_order_of_asking() -> None:
    driver = contended(3, Priority.BATCH, Priority.BATCH, Priority.INTERACTIVE)
    turns = []
    for reader, reads_on in (("a", True), ("c", True), ("c", False), ("b", True), ("a", True)):
        step(driver, reader, reads_on=reads_on, returns=True, wants=reads_on)
        turns += grants(driver)
    assert turns == ["c", "c", "b", "a", "b"]


def test_an_answer_that_streams_lends_its_class_to_no_turn() -> None:
    driver = serving(classes=(Priority.BATCH, Priority.NORMAL))
    [urgent] = driver.serve("urgent", model="a", priority=Priority.INTERACTIVE)
    for name in ("a", "b"):
        step(driver, name)
        ask(driver, name)
    step(driver, "a", returns=True, wants=True)
    assert grants(driver) == ["a"], "something urgent is left to read"
    number = driver.model("a").process.steps + 1
    row = RowDelta(key=urgent, text="x", tokens=pack_tokens([1]))
    said = Step(step=number, rows=[row], reads_on=True, returns_lease=True, wants_lease=True)
    driver.worker(said, "a")
    assert grants(driver) == ["b"], "only what is of class batch is left to read"
    driver.prioritize("of a", Priority.INTERACTIVE)
    step(driver, "b", returns=True, wants=True)
    assert grants(driver) == ["a"]


def test_as_many_read_at_the_same_time_as_the_limit_says() -> None:
    driver = serving(2, models=3)
    for name in MODELS:
        step(driver, name)
    assert needs(driver) == dict.fromkeys(MODELS, True)
    granted = []
    for name in MODELS:
        ask(driver, name)
        granted.append(grants(driver))
    assert granted == [["a"], ["b"], []]


@pytest.mark.parametrize(
    ("backend", "is_limited"),
    [("metal", True), ("cuda", True), ("cpu", False), ("fake", False)],
)
def test_by_default_one_model_reads_at_a_time_on_a_gpu(backend: str, is_limited: bool) -> None:
    driver = serving(None, backend=backend)
    step(driver, "a")
    step(driver, "b")
    assert bool(needs(driver)) is is_limited


def test_models_on_different_backends_do_not_wait_for_each_other() -> None:
    driver = Driver([entry("a"), entry("b")], CoreSettings(max_parallel_prefills=1))
    ready(driver, "a", "metal")
    ready(driver, "b", "cpu")
    step(driver, "a")
    step(driver, "b")
    assert needs(driver) == {}


ENDS: dict[str, Callable[[Driver], object]] = {
    "exits": lambda driver: driver.exit("a"),
    "breaks": lambda driver: driver.broke("a"),
    "loses its connection": lambda driver: driver.unlinked("a"),
    "is restarted": lambda driver: driver.restart("a", now=True),
}


@pytest.mark.parametrize("ends", ENDS)
def test_the_lease_of_a_worker_that_ends_is_free_at_once(ends: str) -> None:
    driver = contended(models=3)
    ENDS[ends](driver)
    assert grants(driver) == ["b"]
    assert needs(driver) == {}, "b and c still read"
    step(driver, "b", returns=True)
    assert grants(driver) == ["c"]
    driver = contended()
    ENDS[ends](driver)
    assert (grants(driver), needs(driver)) == (["b"], {"b": False}), "the last reader"


def live(
    driver: Driver, seconds: int, *, since: float, **phases: WorkerPhase
) -> list[WorkerSignal]:
    """A beat of each worker each second, and an answer to each look; returns the signals sent.

    A worker that decodes has just begun a step; the others do the same since that time.
    """
    signals = []
    for _ in range(seconds):
        driver.pass_time(1.0)
        signals += looked(driver)
        for name, phase in phases.items():
            if driver.state(name) is State.READY:
                phase_s = 0.0 if phase is WorkerPhase.DECODE else driver.now - since
                steps = driver.model(name).process.steps
                driver.beat(phase, step=steps, phase_s=phase_s, model=name)
                signals += looked(driver)
    return signals


def looked(driver: Driver) -> list[WorkerSignal]:
    signals = driver.signals()
    for look in driver.of(LookAtWorker):
        driver.seen(is_stopped=False, model=look.model)
        signals += driver.signals()
    return signals


def test_stalled_reader_holds_up_no_other() -> None:
    driver = contended()
    driver.pass_time(LEASE_S - 0.5)
    assert grants(driver) == []
    driver.pass_time(0.5)
    assert grants(driver) == ["b"]
    phases = {"a": WorkerPhase.PREFILL, "b": WorkerPhase.DECODE}
    since = driver.now
    assert live(driver, 20, since=since, **phases) == []
    assert live(driver, 20, since=since, **phases)[:1] == [WorkerSignal.DUMP]
    assert driver.state("b") is State.READY


def test_requests_that_wait_for_rows_do_not_put_off_the_end_of_a_lease() -> None:
    driver = contended()
    driver.serve(*(f"waits {number}" for number in range(9)), model="a")
    assert driver.model("a").queue
    driver.pass_time(LEASE_S)
    assert grants(driver) == ["b"]


def test_a_chunk_that_outlasts_its_lease_may_end_and_ask_again() -> None:
    driver = contended()
    driver.pass_time(LEASE_S)
    assert grants(driver) == ["b"]
    step(driver, "a", returns=True)
    ask(driver, "a")
    assert grants(driver) == []
    step(driver, "b", returns=True)
    assert grants(driver) == ["a"]
    assert driver.state("a") is driver.state("b") is State.READY


def test_cancelled_prompts_return_the_slot_unused() -> None:
    driver = contended()
    driver.worker(Step(step=1, returns_lease=True), "a")
    assert (grants(driver), needs(driver)) == (["b"], {"a": False, "b": False})


def test_a_model_that_has_asked_stays_in_line_without_its_prompt() -> None:
    driver = contended()
    step(driver, "b", reads_on=False)
    step(driver, "a", returns=True)
    assert grants(driver) == ["b"]
    step(driver, "b", reads_on=False)
    step(driver, "b", reads_on=False, returns=True)
    assert driver.state("b") is State.READY


@pytest.mark.parametrize("asks", ["a", "b"])
def test_who_asks_late_counts_as_a_reader(asks: str) -> None:
    driver = serving()
    step(driver, "a")
    step(driver, "b")
    step(driver, "b", reads_on=False)
    assert needs(driver) == {"a": False, "b": False}
    if asks == "b":
        step(driver, "a")
    ask(driver, asks)
    assert grants(driver) == [asks]
    assert needs(driver) == ({} if asks == "a" else {"a": True, "b": True})


def test_reload_that_lifts_the_limit_grants_slots() -> None:
    driver = contended(models=3)
    settings = CoreSettings(max_parallel_prefills=None)
    models = tuple(entry(name) for name in MODELS)
    driver.do(Reloaded(now=driver.now, caller=None, settings=settings, models=models, later=()))
    assert grants(driver) == ["b", "c"]
    assert needs(driver) == dict.fromkeys(MODELS, False)


@pytest.mark.parametrize("does", ["asks again", "gives back"])
def test_a_worker_that_breaks_the_rules_of_leases_is_ended(does: str) -> None:
    driver = contended()
    ask(driver, "b") if does == "asks again" else step(driver, "b", returns=True)
    assert driver.state("b") is State.STOPPING
    driver.exit("b")
    detail = {
        "asks again": "asked for a lease before its last one was over",
        "gives back": "gave back a lease that it had not got",
    }[does]
    assert detail in driver.row("b")["last_exit"]["detail"]


def test_slot_messages_of_an_ending_worker_are_ignored() -> None:
    driver = contended()
    driver.restart("a", now=True)
    step(driver, "a", returns=True)
    ask(driver, "a")
    assert (grants(driver), needs(driver)) == ([], {})
    assert driver.state("a") is State.STOPPING


def test_waiting_after_the_grant_is_a_stall_P23() -> None:
    driver = contended()
    phases = {"a": WorkerPhase.DECODE, "b": WorkerPhase.WAITING}
    since = driver.now
    almost = int(LEASE_S + LIMIT_S) - 1
    assert live(driver, almost, since=since, **phases) == [], "it counts from the lease"
    assert driver.state("b") is State.READY
    assert live(driver, 3, since=since, **phases)[:1] == [WorkerSignal.DUMP]
    driver.exit("b")
    assert driver.row("b")["last_exit"]["reason"] == "stall"
    assert "it waits for a lease" in driver.row("b")["last_exit"]["detail"]
