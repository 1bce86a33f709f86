"""What the tests and the simulation rely on: a state that contradicts itself is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from mlxsup.protocol.ids import ModelName, RequestId, RequestKey
from mlxsup.protocol.states import State, Wanted
from mlxsup.supervisor.core.events import Caller
from mlxsup.supervisor.core.health.poison import Digest, Held
from mlxsup.supervisor.core.lifecycle.life import Life
from mlxsup.supervisor.core.lifecycle.states import Backoff, Failed, Loading, Ready, Stopped
from mlxsup.supervisor.core.requests.ledger import Ledger, Limits, Request, Stage
from mlxsup.supervisor.core.sharing.accounts import Account

from support.core.driver import LAUNCH, Driver
from support.core.looks import ALICE
from support.core.states import in_state

SOMEONE = Held(digest=Digest(b"someone"))
CALLER = Caller(connection=ALICE, id=RequestId("c"))


def ledger_of(driver: Driver) -> Ledger:
    return driver.core.ledger


def smuggled(driver: Driver, key: int = 99) -> Request:
    """A request that only the ledger has."""
    request = Request(
        key=RequestKey(key), connection=ALICE, id=RequestId("smuggled"), account=Account("c"),
        model=ModelName("m"), body=b"", digest=Digest(b"d"), arrived_at=0.0,
    )  # fmt: skip
    ledger_of(driver).add(request)
    return request


ready, backing_off, loading, failed = (
    partial(in_state, state) for state in (State.READY, State.BACKOFF, State.LOADING, State.FAILED)
)


def idle() -> Driver:
    driver = Driver()
    driver.load()
    driver.come_up()
    return driver


def waiting() -> Driver:
    """One request waits for a load."""
    driver = Driver()
    driver.ask()
    return driver


def wants_up_at_the_end(driver: Driver) -> None:
    driver.signal()
    driver.model().life.wanted = Wanted.UP


def waits_at_the_end(driver: Driver) -> None:
    driver.ask("r2")
    driver.ask("waits")
    driver.model().life.wanted = Wanted.DOWN
    driver.core.fleet.is_shutting_down = True


def miscount(driver: Driver) -> None:
    ledger_of(driver).waiting += 1


def change_first(name: str, value: object) -> Callable[[Driver], None]:
    """Changes an open request behind the ledger's back."""
    return lambda driver: setattr(next(iter(ledger_of(driver))), name, value)


def two_of_one_name(driver: Driver) -> None:
    for key in (98, 99):
        driver.model().queue.join(smuggled(driver, key), driver.now)


def runs_without_process(driver: Driver) -> None:
    request = smuggled(driver)
    ledger_of(driver).move(request, Stage.RUNNING)
    driver.model().batch.running[request.key] = request


def waits_in(phase: type[Failed] | type[Stopped]) -> Callable[[Driver], None]:
    def corrupt(driver: Driver) -> None:
        driver.ask("waits")
        more = {"cause": ""} if phase is Failed else {}
        driver.model().life.phase = phase(since=0.0, **more)

    return corrupt


def waits_beside_room(driver: Driver) -> None:
    driver.model().queue.join(smuggled(driver), driver.now)


def set_life(name: str, value: object) -> Callable[[Driver], None]:
    return lambda driver: setattr(driver.model().life, name, value)


def leaves(*keys: int) -> Callable[[Driver], None]:
    return lambda driver: driver.model().batch.leaving.update(
        {RequestKey(key): SOMEONE for key in keys}
    )


def runs_and_is_queued(driver: Driver) -> None:
    driver.model().batch.running[RequestKey(1)].stage = Stage.QUEUED


def is_paused_and_queued(driver: Driver) -> None:
    driver.model().paused[RequestKey(9)] = smuggled(driver)


def is_kept_for_none(driver: Driver) -> None:
    driver.model().batch.kept.add(RequestKey(9))


def load_waits(driver: Driver) -> None:
    driver.model().up_callers.append(CALLER)


def unload_waits(driver: Driver) -> None:
    driver.model().down_callers.append(CALLER)


OTHER = replace(LAUNCH, path="/other")
CONTRADICTIONS: dict[str, tuple[Callable[[], Driver], Callable[[Driver], object], str]] = {
    "wanted at the end": (ready, wants_up_at_the_end, ""),
    "waits at the end": (ready, waits_at_the_end, ""),
    "bytes": (waiting, change_first("body", b"longer than it was"), ""),
    "waiting": (Driver, miscount, ""),
    "waiting, by account": (waiting, change_first("account", "x"), ""),
    "running, by account": (ready, change_first("account", "x"), ""),
    "listeners": (waiting, change_first("wants_notices", True), ""),
    "two of one name": (waiting, two_of_one_name, ""),
    "runs and is queued": (ready, runs_and_is_queued, ""),
    "paused and queued": (ready, is_paused_and_queued, ""),
    "kept for none": (ready, is_kept_for_none, ""),
    "runs and leaves": (ready, leaves(1), ""),
    "runs without a process": (backing_off, runs_without_process, "m runs requests in BACKOFF"),
    "leaves without a process": (backing_off, leaves(9), "m has leaving rows in BACKOFF"),
    "a pid without a process": (backing_off, set_life("pid", 5), ""),
    "a launch without a process": (backing_off, set_life("launched", LAUNCH), ""),
    "loads what no entry says": (
        loading, set_life("launched", OTHER), "m keeps a process of an old entry",
    ),
    "serves what no entry says": (
        ready, set_life("launched", OTHER), "m keeps a process of an old entry",
    ),
    "more rows than there are": (ready, leaves(8, 9), ""),
    "waits though failed": (backing_off, waits_in(Failed), "m lets requests wait in FAILED"),
    "waits though stopped": (backing_off, waits_in(Stopped), "m lets requests wait in STOPPED"),
    "a load that waits though failed": (failed, load_waits, "m lets callers wait in FAILED"),
    "an unload that waits though stopped": (Driver, unload_waits, ""),
    "waits beside an idle worker": (idle, waits_beside_room, "m has room and lets requests wait"),
    "waits beside a row that is free": (ready, waits_beside_room, "no turn is due"),
    "belongs nowhere": (ready, smuggled, ""),
    "is due at another time": (waiting, change_first("limits", Limits(deadline=1.0)), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_noticed(name: str) -> None:
    make, corrupt, says = CONTRADICTIONS[name]
    driver = make()
    driver.core.check_invariants()
    corrupt(driver)
    with pytest.raises(AssertionError, match=f"^{says}"):
        driver.core.check_invariants()


# ---------------------------------------------------------------- the edges of a life


def life_in(state: State) -> Life:
    return in_state(state).model().life


def test_no_rule_leads_past_an_edge_of_the_table() -> None:
    life = life_in(State.STOPPED)
    with pytest.raises(AssertionError, match="STOPPED → READY"):
        life.enter(Ready(since=0.0))
    assert (life.state, life.take_outcomes()) == (State.STOPPED, [])


def test_an_exit_leads_to_a_state_without_a_process_and_only_from_one_with() -> None:
    ready = life_in(State.READY)
    with pytest.raises(AssertionError):
        ready.enter_after_exit(Loading(since=0.0, stalls_at=1.0, is_restart=False), "")
    assert ready.pid == 77
    with pytest.raises(AssertionError):
        life_in(State.FAILED).enter_after_exit(Backoff(since=0.0, retry_at=1.0), "")
