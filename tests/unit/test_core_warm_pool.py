"""Test the warm pool: how many prewarmed workers there are, and which load takes one over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.core import memory_view
from mlxsup.supervisor.core.actions import EndPrewarmed, Spawn, StartPrewarmed
from mlxsup.supervisor.core.events import PrewarmedEnded, PrewarmedReady, Reloaded, Sampled
from mlxsup.supervisor.core.settings import ModelSettings

from support.core.driver import LAUNCH, entry
from support.core.memory import MemoryDriver, limited, sized
from support.core.rows import FIXED, RowsDriver
from support.core.scripts import play

PID = 500
"""Of the first prewarmed worker; the next ones count on."""


def real(name: str, needed_bytes: int = 4, **changes: Any) -> ModelSettings:
    """A model of the engine that prewarmed workers have imported."""
    launch = replace(LAUNCH, engine="mlx", memory_limit_bytes=needed_bytes)
    return entry(name, launch=launch, **changes)


class PoolDriver(MemoryDriver):
    """Plays prewarmed workers of two bytes each; None: as many as memory allows."""

    def __init__(
        self, models: list[ModelSettings], count: int | None, budget_bytes: int, **changes: Any
    ) -> None:
        self.settings_now = limited(budget_bytes, warm_workers=count, prewarmed_bytes=2, **changes)
        self.entries = models
        super().__init__(models, self.settings_now)

    def started(self) -> list[int]:
        """The numbers of those that the latest event has started."""
        return [action.number for action in self.of(StartPrewarmed)]

    def told_to_end(self) -> list[int]:
        """The numbers of those that it has ended."""
        return [action.number for action in self.of(EndPrewarmed)]

    def spawned_with(self) -> list[tuple[ModelName, int | None]]:
        """The models that it has spawned, and with which prewarmed worker."""
        return [(spawn.model, spawn.prewarmed) for spawn in self.of(Spawn)]

    def prewarmed(self, number: int) -> None:
        """One has imported everything."""
        self.do(PrewarmedReady(now=self.now, number=number, pid=PID + number))

    def gone(self, number: int) -> None:
        """The process of one is gone."""
        self.do(PrewarmedEnded(now=self.now, number=number))

    def measure(self, number: int = 0, held_bytes: int = 0, seconds: float = 0.0) -> None:
        """A second has passed, or more; one is measured."""
        self.pass_time(seconds)
        held = {PID + number: held_bytes}
        self.do(Sampled(now=self.now, footprint_bytes=held, machine_bytes=100))

    def reload(self, **changes: Any) -> None:
        """The configuration is read again, with these settings changed."""
        self.settings_now = replace(self.settings_now, **changes)
        models = tuple(self.entries)
        self.do(Reloaded(now=self.now, settings=self.settings_now, models=models))

    def status(self) -> dict[str, Any]:
        """What the status says of the pool."""
        value: dict[str, Any] = self.core.status(self.now)["warm_pool"]
        return value

    def pool(self) -> dict[str, str]:
        """By pid, or by `-` for one that has none yet, its state."""
        return {str(one["pid"] or "-"): one["state"] for one in self.status()["workers"]}


def retry_in_s(driver: PoolDriver) -> float | None:
    found: float | None = driver.status()["retry_in_s"]
    return found


POOLS: dict[str, tuple[list[ModelSettings], int | None, int, str]] = {
    "a load takes over one that waits, and the next is started after it": (
        [real("a")], 1, 20,
        "prewarmed 1; load a; spawned_with -> returns=[(a, 1)]; measure; started -> returns=[];"
        f" up a {PID + 1}; measure; started -> returns=[2]",
    ),
    "one that still imports is not taken over": (
        [real("a")], 1, 20,
        "load a; spawned_with -> returns=[(a, None)]; pool -> returns={'-': starting}",
    ),
    "nor one for another engine": (
        [real("a"), sized("b", 4)], 1, 20,
        "prewarmed 1; load b; spawned_with -> returns=[(b, None)];"
        " pool -> returns={'501': waiting}",
    ),
    "what a load takes over needs no room of its own": (
        [real("a", 4), real("b", 5)], 1, 10,
        "bring_up a; prewarmed 1; load b; spawned_with -> returns=[(b, 1)]; reserved -> returns=9",
    ),
    "they make room before models": (
        [real("a", 4), sized("b", 5)], 1, 10,
        "bring_up a; prewarmed 1; load b; told_to_end -> returns=[1]; spawned_with -> returns=[];"
        " -> a=READY; gone 1; spawned_with -> returns=[(b, None)]; up b; measure;"
        " started -> returns=[] & a=READY",
    ),
    "only as many go as are in the way": (
        [real("a", 1), sized("b", 6)], 3, 10,
        "prewarmed 1; prewarmed 2; prewarmed 3; load b; told_to_end -> returns=[3]; gone 3;"
        " spawned_with -> returns=[(b, None)]; reserved -> returns=10",
    ),
    "all go before a model that must go": (
        [real("a", 6), real("b", 9)], 2, 10,
        "bring_up a; prewarmed 1; wait 100; load b; told_to_end -> returns=[2, 1] & a=STOPPING;"
        " exit a code=0; spawned_with -> returns=[]; started -> returns=[]; gone 1;"
        " spawned_with -> returns=[]; gone 2; spawned_with -> returns=[(b, None)]",
    ),
    "one stays if it fits once a model has made room, and is taken over": (
        [real("a", 6), real("b", 6)], 1, 10,
        "bring_up a; prewarmed 1; wait 100; load b; told_to_end -> returns=[] & a=STOPPING;"
        " exit a code=0; spawned_with -> returns=[(b, 1)]",
    ),
    "they go first when too much is reserved": (
        [real("a", 4), real("b", 4)], 1, 10,
        "bring_up a; prewarmed 1; measure 1 7; told_to_end -> returns=[1]; -> a=READY",
    ),
    "the next is planned with the measured size": (
        [real("a", 4)], 2, 10,
        "prewarmed 1; gone 2; measure 1 3; reserved -> returns=3; wait 5; reserved -> returns=6",
    ),
    "a preload that never fits keeps none away": (
        [real("a", 11, preload=True), real("b", 1)], 1, 10,
        "measure; started -> returns=[1]; -> a=PENDING",
    ),
    "the death of one that was taken over delays none": (
        # It had died as it was taken over; the shell starts another process.
        [real("a")], 1, 20,
        "prewarmed 1; load a; gone 1 -> a=LOADING; retry_in_s -> returns=None",
    ),
    "the delay starts afresh once one has waited for long": (
        [real("a")], 1, 20,
        "gone 1; wait 1.1; prewarmed 2; wait 61; gone 2; retry_in_s -> returns=1.0",
    ),
    "with an automatic number there is one": (
        [real("a", 4)], None, 10,
        "started -> returns=[1]; prewarmed 1; measure; started -> returns=[]",
    ),
    "none if less than a tenth is free beside it": (
        [real("a", 8)], None, 10,
        "prewarmed 1; load a; spawned_with -> returns=[(a, 1)]; up a; measure;"
        " started -> returns=[]; pool -> returns={}",
    ),
    "one that is there goes when models need that tenth, and comes back after a minute": (
        [real("a", 4), sized("b", 4)], None, 10,
        "prewarmed 1; bring_up b; measure; pool -> returns={'501': waiting}; bring_up a; measure;"
        " pool -> returns={}; unload b; exit b code=0; measure 0 0 58; pool -> returns={};"
        " measure 0 0 3; pool -> returns={'-': starting}",
    ),
}  # fmt: skip
"""The models, the number of prewarmed workers, the budget, and the script."""


@pytest.mark.parametrize("rule", POOLS)
def test_pool(rule: str) -> None:
    models, count, budget, script = POOLS[rule]
    play(PoolDriver(models, count, budget), script, retry_in_s)


@pytest.mark.parametrize("count", [1, None])
def test_without_a_model_of_their_engine_there_is_none(count: int | None) -> None:
    driver = PoolDriver([entry("a")], count, 20)
    driver.bring_up("a")
    driver.measure()
    assert driver.pool() == {}
    driver.entries = [entry("a"), real("b")]
    driver.reload()
    assert driver.started() == [1]
    driver.prewarmed(1)
    driver.entries = [entry("a")]
    driver.reload()
    assert driver.told_to_end() == [1]


def test_a_reload_starts_more_or_ends_those_of_least_use() -> None:
    driver = PoolDriver([real("a")], 1, 20)
    driver.prewarmed(1)
    driver.reload(warm_workers=3)
    driver.prewarmed(2)
    assert driver.started() == [3]
    driver.reload(warm_workers=1)
    assert driver.told_to_end() == [3, 2], "the one that is not ready, then the newest"
    driver.signal()
    assert driver.told_to_end() == [1]
    for number in (1, 2, 3):
        driver.gone(number)
        assert driver.started() == []
        assert retry_in_s(driver) is None, "it was ended, and delays no other"


def test_a_reload_wants_none_any_longer_though_none_is_alive() -> None:
    driver = PoolDriver([real("a")], 1, 12)
    driver.gone(1)
    driver.reload(warm_workers=0)
    assert driver.status()["wanted"] == 0


def test_dead_one_is_replaced_with_growing_delay() -> None:
    driver = PoolDriver([real("a")], None, 20)
    driver.bring_up("a")
    number = 1
    for delay_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        driver.gone(number)
        assert driver.started() == []
        assert retry_in_s(driver) == delay_s
        driver.pass_time(delay_s - 0.01)
        assert driver.pool() == {}
        driver.pass_time(0.02)
        number += 1
        assert driver.pool() == {"-": "starting"}
    row = driver.row("a")
    assert (row["state"], row["restarts"], row["last_exit"]) == ("READY", 0, None)


def test_a_model_that_waits_for_them_says_so() -> None:
    driver = play(PoolDriver([real("a", 4), sized("b", 5)], 1, 10), "bring_up a; load b")
    assert "prewarmed workers are about to go" in driver.row("b")["memory_wait"]["reason"]


def test_a_dry_run_says_that_a_load_fits_next_to_them() -> None:
    driver = PoolDriver([real("a", 9)], 1, 10)
    driver.prewarmed(1)
    answer = driver.foresees("a")
    assert (answer["outcome"], answer["reason"]) == ("fits", "it needs 9 B; 10 B is free")


def test_what_rows_could_give_back_leaves_it_and_what_they_need_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_view, "ENGINE", LAUNCH.engine)
    own, size = 2_000, 40_000
    driver = RowsDriver("a", size, warm_workers=None, prewarmed_bytes=own)
    driver.do(PrewarmedReady(now=driver.now, number=1, pid=PID))
    driver.bring_up("a")  # with that one
    driver.confirm("a")
    driver.measure()
    assert driver.of(StartPrewarmed)
    assert driver.budget("a") == size - FIXED - own, "more than nine tenths are reserved"
    for number in range(4):
        driver.begin("a", f"r{number}", prompt=3_500)
    driver.measure()
    assert driver.of(EndPrewarmed)
    driver.do(PrewarmedEnded(now=driver.now, number=2))
    assert driver.budget("a") == size - FIXED, "its part is for rows now"


def test_rows_get_the_memory_of_workers_that_no_model_could_use() -> None:
    size = 40_000
    driver = RowsDriver("a", size, warm_workers=1, prewarmed_bytes=2_000)
    driver.bring_up("a")
    driver.confirm("a")
    assert driver.budget("a") == size - FIXED


def test_when_other_programs_need_memory_there_is_none() -> None:
    driver = PoolDriver([real("a", 4)], None, 20)
    driver.prewarmed(1)
    whole = driver.settings_now.budget
    assert whole is not None
    driver.reload(budget=whole.lowered(19, "others need it", is_short=True))
    assert driver.told_to_end() == [1]


@pytest.mark.parametrize("count", [1, None])
def test_with_cuda_they_take_nothing_of_the_devices_memory(count: int | None) -> None:
    driver = PoolDriver([real("a", 10)], count, 10)
    driver.load("a")
    driver.gone(1)
    driver.come_up("a")
    driver.measure()
    assert driver.pool() == {}, "there is no room"
    driver.reload(prewarmed_bytes=0)
    driver.measure(seconds=60.0)
    driver.prewarmed(2)
    driver.measure(2, 300)
    assert (driver.reserved(), driver.pool()) == (10, {"502": "waiting"})
