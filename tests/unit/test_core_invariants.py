"""What the tests and the simulation rely on: a state that contradicts itself is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mlxsup.protocol.ids import ModelName, RequestId, RequestKey
from mlxsup.protocol.states import State, Wanted
from mlxsup.supervisor.core.events import Caller
from mlxsup.supervisor.core.health.blame import Digest, Held
from mlxsup.supervisor.core.lifecycle.life import Life
from mlxsup.supervisor.core.lifecycle.states import Backoff, Failed, Loading, Ready, Stopped
from mlxsup.supervisor.core.requests.ledger import Ledger, Request, Stage
from mlxsup.supervisor.core.sharing.accounts import Account

from support.core.driver import LAUNCH, Driver
from support.core.looks import ALICE
from support.core.states import in_state

SOMEONE = Held(digest=Digest(b"someone"))
CALLER = Caller(connection=ALICE, id=RequestId("c"))


def ledger_of(driver: Driver) -> Ledger:
    return driver.core.ledger


def smuggled(driver: Driver, key: int = 99) -> Request:
    """A request that the ledger has and nobody else."""
    request = Request(
        key=RequestKey(key), connection=ALICE, id=RequestId("smuggled"), account=Account("c"),
        model=ModelName("m"), body=b"", digest=Digest(b"d"), arrived_at=0.0,
    )  # fmt: skip
    ledger_of(driver).add(request)
    return request


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
    driver.model().running[request.key] = request


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


CONTRADICTIONS: dict[str, tuple[Callable[[], Driver], Callable[[Driver], object], str]] = {
    "wanted at the end": (lambda: in_state(State.READY), wants_up_at_the_end, ""),
    "waits at the end": (lambda: in_state(State.READY), waits_at_the_end, ""),
    "bytes": (waiting, change_first("body", b"longer than it was"), ""),
    "waiting": (Driver, miscount, ""),
    "waiting, by account": (waiting, change_first("account", "x"), ""),
    "running, by account": (lambda: in_state(State.READY), change_first("account", "x"), ""),
    "listeners": (waiting, change_first("wants_notices", True), ""),
    "two of one name": (waiting, two_of_one_name, ""),
    "runs and is queued": (
        lambda: in_state(State.READY),
        lambda d: setattr(d.model().running[RequestKey(1)], "stage", Stage.QUEUED),
        "",
    ),
    "paused and queued": (
        lambda: in_state(State.READY),
        lambda d: d.model().paused.update({RequestKey(9): smuggled(d)}),
        "",
    ),
    "kept for nobody": (
        lambda: in_state(State.READY), lambda d: d.model().kept.add(RequestKey(9)), "",
    ),
    "runs and leaves": (
        lambda: in_state(State.READY),
        lambda d: d.model().leaving.update({RequestKey(1): SOMEONE}),
        "",
    ),
    "runs without a process": (
        lambda: in_state(State.BACKOFF), runs_without_process, "m runs requests in BACKOFF",
    ),
    "leaves without a process": (
        lambda: in_state(State.BACKOFF),
        lambda d: d.model().leaving.update({RequestKey(9): SOMEONE}),
        "m has leaving rows in BACKOFF",
    ),
    "a pid without a process": (lambda: in_state(State.BACKOFF), set_life("pid", 5), ""),
    "a launch without a process": (
        lambda: in_state(State.BACKOFF), set_life("launched", LAUNCH), "",
    ),
    "loads what no entry says": (
        lambda: in_state(State.LOADING),
        set_life("launched", replace(LAUNCH, path="/other")),
        "m keeps a process of an old entry",
    ),
    "serves what no entry says": (
        lambda: in_state(State.READY),
        set_life("launched", replace(LAUNCH, path="/other")),
        "m keeps a process of an old entry",
    ),
    "more rows than there are": (
        lambda: in_state(State.READY),
        lambda d: d.model().leaving.update({RequestKey(8): SOMEONE, RequestKey(9): SOMEONE}),
        "",
    ),
    "waits though failed": (
        lambda: in_state(State.BACKOFF), waits_in(Failed), "m lets requests wait in FAILED",
    ),
    "waits though stopped": (
        lambda: in_state(State.BACKOFF), waits_in(Stopped), "m lets requests wait in STOPPED",
    ),
    "a load that waits though failed": (
        lambda: in_state(State.FAILED),
        lambda d: d.model().up_callers.append(CALLER),
        "m lets callers wait in FAILED",
    ),
    "an unload that waits though stopped": (
        Driver, lambda d: d.model().down_callers.append(CALLER), "",
    ),
    "waits beside an idle worker": (
        idle, waits_beside_room, "m has room and lets requests wait",
    ),
    "waits beside a row, for nobody": (
        lambda: in_state(State.READY), waits_beside_room, "nobody's turn is due",
    ),
    "belongs nowhere": (lambda: in_state(State.READY), smuggled, ""),
    "is due at another time than it says": (waiting, change_first("deadline", 1.0), ""),
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
