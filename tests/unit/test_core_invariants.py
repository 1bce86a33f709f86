"""What the tests and the simulation rely on: a state that contradicts itself is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from mlxsup.protocol.ids import ModelName, RequestId, RequestKey
from mlxsup.protocol.states import State, Wanted
from mlxsup.supervisor.core.events import Caller, ConnectionId
from mlxsup.supervisor.core.health.blame import Digest, Held
from mlxsup.supervisor.core.lifecycle.life import Life
from mlxsup.supervisor.core.lifecycle.states import Backoff, Failed, Loading, Ready, Stopped
from mlxsup.supervisor.core.model import Model
from mlxsup.supervisor.core.requests.ledger import Ledger, Request, Stage
from support.core_driver import ALICE, LAUNCH, Driver, entry, in_state

SOMEONE = Held(digest=Digest(b"someone"))
CALLER = Caller(connection=ALICE, id=RequestId("c"))


def model_of(driver: Driver, name: str = "m") -> Model:
    return driver.core.fleet.by_name[ModelName(name)]


def ledger_of(driver: Driver) -> Ledger:
    return driver.core.ledger


def smuggled(driver: Driver, key: int = 99) -> Request:
    """A request that the ledger has and nobody else."""
    request = Request(
        key=RequestKey(key), connection=ALICE, id=RequestId(f"smuggled {key}"), client="c",
        model=ModelName("m"), body=b"", digest=Digest(b"d"), arrived_at=0.0,
    )  # fmt: skip
    ledger_of(driver).add(request)
    return request


def idle() -> Driver:
    driver = Driver()
    driver.load()
    driver.come_up()
    return driver


def two_loads() -> Driver:
    """Both lanes are taken: `a` loads after a crash, and `b` for the first time."""
    driver = Driver([entry("a"), entry("b")])
    driver.load("a")
    driver.come_up("a")
    driver.load("b")
    driver.spawned("b", 2)
    driver.exit("a")
    assert [driver.state(name) for name in "ab"] == [State.LOADING] * 2
    return driver


def wants_up_at_the_end(driver: Driver) -> None:
    driver.signal()
    model_of(driver).life.wanted = Wanted.UP


def waits_at_the_end(driver: Driver) -> None:
    driver.ask("r2")
    driver.ask("waits")
    model_of(driver).life.wanted = Wanted.DOWN
    driver.core.fleet.is_shutting_down = True


def add(name: str, change: int = 1) -> Callable[[Driver], None]:
    def corrupt(driver: Driver) -> None:
        ledger = ledger_of(driver)
        setattr(ledger, name, getattr(ledger, name) + change)

    return corrupt


def runs_without_process(driver: Driver) -> None:
    request = smuggled(driver)
    ledger_of(driver).move(request, Stage.RUNNING)
    model_of(driver).running[request.key] = request


def waits_in(phase: type[Failed] | type[Stopped]) -> Callable[[Driver], None]:
    def corrupt(driver: Driver) -> None:
        driver.ask("waits")
        more = {"cause": ""} if phase is Failed else {}
        model_of(driver).life.phase = phase(since=0.0, **more)

    return corrupt


def waits_beside_room(driver: Driver) -> None:
    model_of(driver).queue.join(smuggled(driver).key)


def set_life(name: str, value: object) -> Callable[[Driver], None]:
    return lambda driver: setattr(model_of(driver).life, name, value)


def load_twice(*, is_after_crash: bool) -> Callable[[Driver], None]:
    def corrupt(driver: Driver) -> None:
        for name in "ab":
            model_of(driver, name).life.is_after_crash = is_after_crash

    return corrupt


CONTRADICTIONS: dict[str, tuple[Callable[[], Driver], Callable[[Driver], object], str]] = {
    "wanted at the end": (lambda: in_state(State.READY), wants_up_at_the_end, ""),
    "waits at the end": (lambda: in_state(State.READY), waits_at_the_end, ""),
    "bytes": (Driver, add("_held_bytes"), ""),
    "waiting": (Driver, add("_waiting"), ""),
    "waiting, by client": (
        Driver, lambda d: ledger_of(d)._waiting_by_client.update(["x"]), "",
    ),
    "waiting, by connection": (
        Driver, lambda d: ledger_of(d)._waiting_by_connection.update([ConnectionId(b"x")]), "",
    ),
    "listeners": (Driver, add("_listening"), ""),
    "a connection that nobody has": (
        lambda: in_state(State.READY),
        lambda d: ledger_of(d)._by_connection.update(
            {ConnectionId(b"x"): {RequestId("r"): next(iter(ledger_of(d)))}}
        ),
        "",
    ),
    "runs and is queued": (
        lambda: in_state(State.READY),
        lambda d: setattr(model_of(d).running[RequestKey(1)], "stage", Stage.QUEUED),
        "",
    ),
    "runs and leaves": (
        lambda: in_state(State.READY),
        lambda d: model_of(d).leaving.update({RequestKey(1): SOMEONE}),
        "",
    ),
    "runs without a process": (
        lambda: in_state(State.BACKOFF), runs_without_process, "m runs requests in BACKOFF",
    ),
    "leaves without a process": (
        lambda: in_state(State.BACKOFF),
        lambda d: model_of(d).leaving.update({RequestKey(9): SOMEONE}),
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
        lambda d: model_of(d).leaving.update({RequestKey(8): SOMEONE, RequestKey(9): SOMEONE}),
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
        lambda d: model_of(d).up_callers.append(CALLER),
        "m lets callers wait in FAILED",
    ),
    "an unload that waits though stopped": (
        Driver, lambda d: model_of(d).down_callers.append(CALLER), "",
    ),
    "waits beside an idle worker": (
        idle, waits_beside_room, "m has room and lets requests wait",
    ),
    "waits beside a row, for nobody": (
        lambda: in_state(State.READY), waits_beside_room, "nobody's turn is due",
    ),
    "belongs nowhere": (lambda: in_state(State.READY), smuggled, ""),
    "two loads after crashes": (two_loads, load_twice(is_after_crash=True), ""),
    "two loads afresh": (two_loads, load_twice(is_after_crash=False), ""),
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
    return model_of(in_state(state)).life


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
