"""Test `keep_alive` and the warm pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Failed, Load
from mlxsup.protocol.download import DownloadDone, Repository
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import FinishReason, State
from mlxsup.supervisor.core.actions import EndSpare, Spawn, StartSpare
from mlxsup.supervisor.core.events import DownloadSaid, Reloaded, Sampled, SpareEnded, SpareReady
from mlxsup.supervisor.core.settings import ModelSettings

from support.core.driver import LAUNCH, Driver, entry
from support.core.memory import MemoryDriver, limited, sized
from support.core.scripts import play

PID = 500
"""Of the first spare worker; the next ones count on."""


def real(name: str, needed_bytes: int = 4, **changes: Any) -> ModelSettings:
    """A model of the engine that spare workers have imported."""
    launch = replace(LAUNCH, engine="mlx", memory_limit_bytes=needed_bytes)
    return entry(name, launch=launch, **changes)


class SpareDriver(MemoryDriver):
    """Plays spare workers of two bytes each; `spare_workers` of them are asked for."""

    def __init__(
        self, models: list[ModelSettings], spare_workers: int, budget_bytes: int, **changes: Any
    ) -> None:
        self.settings_now = limited(
            budget_bytes, spare_workers=spare_workers, spare_bytes=2, **changes
        )
        self.entries = models
        super().__init__(models, self.settings_now)

    def started(self) -> list[int]:
        """The numbers of the spares that the latest event has started."""
        return [action.number for action in self.of(StartSpare)]

    def told_to_end(self) -> list[int]:
        """The numbers of those that it has ended."""
        return [action.number for action in self.of(EndSpare)]

    def spawned_with(self) -> list[tuple[ModelName, int | None]]:
        """The models that it has spawned, and with which spare."""
        return [(spawn.model, spawn.spare) for spawn in self.of(Spawn)]

    def spare_ready(self, number: int) -> None:
        """One has imported everything."""
        self.do(SpareReady(now=self.now, number=number, pid=PID + number))

    def spare_gone(self, number: int) -> None:
        """The process of one is gone."""
        self.do(SpareEnded(now=self.now, number=number))

    def measure(self, number: int, held_bytes: int) -> None:
        """A spare is measured."""
        held = {PID + number: held_bytes}
        self.do(Sampled(now=self.now, footprint_bytes=held, machine_bytes=100))

    def reload(self, **changes: Any) -> None:
        """The configuration is read again, with these settings changed."""
        self.settings_now = replace(self.settings_now, **changes)
        models = tuple(self.entries)
        self.do(Reloaded(now=self.now, settings=self.settings_now, models=models))

    def spares(self) -> dict[str, str]:
        """By pid, or by `-` for one that has none yet, what the status says of each."""
        workers = self.core.status(self.now)["spares"]["workers"]
        return {str(worker["pid"] or "-"): worker["state"] for worker in workers}


# Keep alive

CONFIGURED_S = 30.0


def up() -> Driver:
    driver = Driver([entry(idle_unload_s=CONFIGURED_S)])
    driver.load()
    driver.come_up()
    return driver


def answered(driver: Driver, keep_alive: float | None) -> Driver:
    """A request has come and has its whole answer."""
    [key] = driver.serve("r", keep_alive=keep_alive)
    driver.accept(key)
    driver.token(key, finish=FinishReason.STOP)
    return driver


def stays_s(driver: Driver, most_s: float = 100.0) -> float | None:
    """How long it stays READY from now on, in seconds; None: longer than that."""
    begin = driver.now
    while driver.now < begin + most_s:
        if driver.state() is not State.READY:
            return driver.now - begin
        driver.pass_time(1.0)
    return None


@pytest.mark.parametrize(
    ("keep_alive", "expected_s"), [(None, CONFIGURED_S), (0.0, 1.0), (5.0, 5.0), (-1.0, None)]
)
def test_the_latest_request_decides(keep_alive: float | None, expected_s: float | None) -> None:
    assert stays_s(answered(up(), keep_alive)) == expected_s


def test_zero_unloads_with_the_end_of_the_answer_and_not_before() -> None:
    driver = up()
    one, two = driver.serve("one", keep_alive=0.0) + driver.serve("two", keep_alive=0.0)
    for key in (one, two):
        driver.accept(key)
    driver.token(one, finish=FinishReason.STOP)
    driver.pass_time(100.0)
    assert driver.state() is State.READY, "the other one runs"
    driver.token(two, finish=FinishReason.STOP)
    driver.pass_time(0.0)
    assert driver.state() is not State.READY


@pytest.mark.parametrize(("keep_alive", "left_s"), [(None, 25.0), (9.0, 4.0), (-1.0, None)])
def test_status_says_when_an_idle_model_goes(
    keep_alive: float | None, left_s: float | None
) -> None:
    def said(driver: Driver) -> float | None:
        value: float | None = driver.core.status(driver.now)["models"][0]["unloads_in_s"]
        return value

    driver = up()
    [key] = driver.serve("r", keep_alive=keep_alive)
    driver.accept(key)
    driver.pass_time(50.0)
    assert said(driver) == (None if left_s is None else left_s + 5.0), "its time begins at the end"
    driver.token(key, finish=FinishReason.STOP)
    driver.pass_time(5.0)
    assert said(driver) == left_s
    assert said(Driver([entry(idle_unload_s=CONFIGURED_S)])) is None, "it is not loaded"


@pytest.mark.parametrize("before", [0.0, -1.0])
def test_the_next_request_that_says_nothing_brings_the_configured_time_back(before: float) -> None:
    driver = up()
    [key] = driver.serve("one", keep_alive=before)
    driver.accept(key)
    assert stays_s(answered(driver, None)) is None, "the first one runs"
    driver.token(key, finish=FinishReason.STOP)
    assert stays_s(driver) == CONFIGURED_S


def test_a_load_takes_keep_alive_and_refuses_zero() -> None:
    driver = up()
    name = ModelName("m")
    driver.pass_time(CONFIGURED_S - 1.0)
    driver.say(Load(id=RequestId("a"), model=name, keep_alive=5.0))
    assert stays_s(driver, 3.0) is None
    driver.say(Load(id=RequestId("b"), model=name, dry_run=True))
    assert stays_s(driver) == 2.0, "a dry run keeps nothing"
    driver.say(Load(id=RequestId("c"), model=name, keep_alive=7.0, context_length=-1))
    assert driver.errors() == {"c": "invalid_request"}
    assert driver.model().keep_alive_s == 5.0, "what is refused changes nothing"
    driver.say(Load(id=RequestId("b"), model=name, keep_alive=0.0))
    assert driver.errors() == {"b": "invalid_request"}


@pytest.mark.parametrize("idle_s", [CONFIGURED_S - 1.0, 3 * CONFIGURED_S])
def test_after_a_load_that_says_nothing_it_stays_as_configured_from_then_on(idle_s: float) -> None:
    driver = answered(up(), -1.0)
    driver.pass_time(idle_s)
    driver.say(Load(id=RequestId("a"), model=ModelName("m")))
    assert driver.state() is State.READY, "it was kept, and is wanted"
    assert stays_s(driver) == CONFIGURED_S


def test_keep_alive_outlives_a_crash_and_not_an_unload() -> None:
    driver = answered(up(), -1.0)
    driver.exit()
    driver.come_up()
    assert stays_s(driver) is None
    driver = answered(up(), 0.0)
    driver.pass_time(0.0)
    driver.exit(code=0)
    assert driver.state() is State.STOPPED
    driver.restart()
    driver.come_up()
    assert stays_s(driver) == CONFIGURED_S


def test_invalid_keep_alive_is_refused() -> None:
    driver = up()
    for value in (-2.0, float("inf"), float("nan")):
        driver.ask("wrong", keep_alive=value)
        [failed] = driver.sent(Failed)
        assert failed.error["code"] == "invalid_request"
        assert failed.error["detail"] == {"parameter": "keep_alive"}
    assert stays_s(driver) == CONFIGURED_S


def test_an_unload_ends_what_was_said_of_a_model_that_was_never_loaded() -> None:
    tiny = Repository("org/tiny")
    driver = Driver([entry(idle_unload_s=CONFIGURED_S, download=tiny)])
    driver.ask("r", keep_alive=0.0)
    driver.unload()
    assert driver.state() is State.STOPPED
    driver.restart()
    done = DownloadDone(folder="/m", total_bytes=1, fetched_bytes=1)
    driver.do(DownloadSaid(now=driver.now, number=2, report=done))
    driver.come_up()
    assert stays_s(driver) == CONFIGURED_S


# The warm pool


def test_without_a_model_of_their_engine_there_is_none() -> None:
    driver = SpareDriver([entry("a")], 1, 20)
    driver.bring_up("a")
    assert driver.spares() == {}
    driver.entries = [entry("a"), real("b")]
    driver.reload()
    assert driver.started() == [1]
    driver.spare_ready(1)
    driver.entries = [entry("a")]
    driver.reload()
    assert driver.told_to_end() == [1]


def test_a_reload_starts_more_or_ends_those_of_least_use() -> None:
    driver = SpareDriver([real("a")], 1, 20)
    driver.spare_ready(1)
    driver.reload(spare_workers=3)
    driver.spare_ready(2)
    assert driver.started() == [3]
    driver.reload(spare_workers=1)
    assert driver.told_to_end() == [3, 2], "the one that is not ready, then the newest"
    driver.signal()
    assert driver.told_to_end() == [1]
    for number in (1, 2, 3):
        driver.spare_gone(number)
        assert driver.started() == []


@pytest.mark.parametrize("why", ["it is starting", "of another engine"])
def test_a_spare_that_is_not_taken_over(why: str) -> None:
    driver = SpareDriver([real("a"), sized("b", 4)], 1, 20)
    if why == "of another engine":
        driver.spare_ready(1)
    name = "a" if why == "it is starting" else "b"
    driver.load(name)
    assert driver.spawned_with() == [(name, None)]
    assert driver.spares() == ({"-": "starting"} if name == "a" else {"501": "waiting"})


def test_dead_spare_is_replaced_with_growing_delay() -> None:
    driver = SpareDriver([real("a")], 1, 20)
    driver.bring_up("a")
    number = 1
    for delay_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        driver.spare_gone(number)
        assert driver.started() == []
        assert driver.core.status(driver.now)["spares"]["retry_in_s"] == delay_s
        driver.pass_time(delay_s - 0.01)
        assert driver.spares() == {}
        driver.pass_time(0.02)
        number += 1
        assert driver.spares() == {"-": "starting"}
    row = driver.row("a")
    assert (row["state"], row["restarts"], row["last_exit"]) == ("READY", 0, None)


def test_ended_spare_delays_no_other() -> None:
    driver = SpareDriver([real("a")], 1, 20)
    driver.spare_ready(1)
    driver.reload(spare_workers=0)
    driver.spare_gone(1)
    driver.reload(spare_workers=1)
    assert driver.started() == [2], "without delay"


def test_next_spare_is_planned_with_the_measured_size() -> None:
    driver = SpareDriver([real("a", 4)], 2, 10)
    driver.spare_ready(1)
    driver.spare_gone(2)
    driver.measure(1, 3)
    assert driver.reserved() == 3
    driver.pass_time(5.0)
    assert driver.reserved() == 6


POOLS: dict[str, tuple[list[ModelSettings], int, str]] = {
    "a load takes over one that waits, and the next is started after it": (
        [real("a")], 20,
        "spare_ready 1; load a; spawned_with -> returns=[(a, 1)]; started -> returns=[];"
        f" up a {PID + 1}; started -> returns=[2]",
    ),
    "what a load takes over needs no room of its own": (
        [real("a", 4), real("b", 5)], 10,
        "bring_up a; spare_ready 1; load b; spawned_with -> returns=[(b, 1)];"
        " reserved -> returns=9",
    ),
    "spares make room before models": (
        [real("a", 4), sized("b", 5)], 10,
        "bring_up a; spare_ready 1; load b; told_to_end -> returns=[1]; spawned_with -> returns=[];"
        " -> a=READY; spare_gone 1; spawned_with -> returns=[(b, None)]; up b;"
        " started -> returns=[] & a=READY",
    ),
    "spares go first when too much is reserved": (
        [real("a", 4), real("b", 4)], 10,
        "bring_up a; spare_ready 1; measure 1 7; told_to_end -> returns=[1]; -> a=READY",
    ),
    "a preload that never fits keeps no spare away": (
        [real("a", 11, preload=True), real("b", 1)], 10, "started -> returns=[1]; -> a=PENDING",
    ),
    "the death of an adopted spare delays none": (
        # It had died as it was taken over; the shell starts another process.
        [real("a")], 20,
        "spare_ready 1; load a; spare_gone 1 -> a=LOADING; retry_in_s -> returns=None",
    ),
    "the delay starts afresh once one has waited for long": (
        [real("a")], 20,
        "spare_gone 1; wait 1.1; spare_ready 2; wait 61; spare_gone 2; retry_in_s -> returns=1.0",
    ),
}  # fmt: skip
"""The models beside a pool of one spare worker, the budget, and the script."""


def retry_in_s(driver: SpareDriver) -> float | None:
    found: float | None = driver.core.status(driver.now)["spares"]["retry_in_s"]
    return found


@pytest.mark.parametrize("rule", POOLS)
def test_pool_of_one_spare(rule: str) -> None:
    models, budget, script = POOLS[rule]
    play(SpareDriver(models, 1, budget), script, retry_in_s)


def test_a_model_that_waits_for_spares_says_so() -> None:
    driver = play(SpareDriver([real("a", 4), sized("b", 5)], 1, 10), "bring_up a; load b")
    assert "spare workers are about to go" in driver.row("b")["memory_wait"]["reason"]


def test_only_as_many_go_as_are_in_the_way() -> None:
    driver = SpareDriver([real("a", 1), sized("b", 6)], 3, 10)
    play(
        driver,
        "spare_ready 1; spare_ready 2; spare_ready 3; load b; told_to_end -> returns=[3];"
        " spare_gone 3; spawned_with -> returns=[(b, None)]; reserved -> returns=10",
    )


def test_all_spares_go_before_a_model_that_must_go() -> None:
    driver = SpareDriver([real("a", 6), real("b", 9)], 2, 10)
    play(driver, "bring_up a; spare_ready 1; wait 100; load b -> a=STOPPING")
    assert sorted(driver.told_to_end()) == [1, 2]
    play(
        driver,
        "exit a code=0; spawned_with -> returns=[]; started -> returns=[]; spare_gone 1;"
        " spawned_with -> returns=[]; spare_gone 2; spawned_with -> returns=[(b, None)]",
    )


def test_a_dry_run_says_that_a_load_fits_next_to_them() -> None:
    driver = SpareDriver([real("a", 9)], 1, 10)
    driver.spare_ready(1)
    answer = driver.foresees("a")
    assert (answer["outcome"], answer["reason"]) == ("fits", "it needs 9 B; 10 B is free")


def test_with_cuda_they_take_nothing_of_the_devices_memory() -> None:
    driver = SpareDriver([real("a", 4)], 1, 4)
    driver.load("a")
    driver.spare_gone(1)
    driver.come_up("a")
    assert driver.spares() == {}, "there is no room"
    driver.reload(spare_bytes=0)
    driver.spare_ready(2)
    driver.measure(2, 300)
    assert (driver.reserved(), driver.spares()) == (4, {"502": "waiting"})
