"""Test who is admitted: limits of queues, of clients and of accounts; refusals and their facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Failed, Notice, Reply
from mlxsup.protocol.codec import encode
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.ids import ConnectionId
from mlxsup.protocol.states import FinishReason, Priority, State
from mlxsup.supervisor.core.accounting import Account, Terms, process_name
from mlxsup.supervisor.core.events import GatewayEnded, GatewayListening, Reloaded
from mlxsup.supervisor.core.settings import ANYONE, ClientSettings, CoreSettings

from support.core.driver import LAUNCH, RESTART, Driver, entry
from support.core.looks import ALICE, BOB
from support.core.scripts import play
from support.core.states import in_state

# Limits of queues

LIMITS = CoreSettings(max_queue=8, max_queue_per_client=4)
OVERLOADED = {"more": ErrorCode.OVERLOADED}


def connection(number: int) -> ConnectionId:
    return ConnectionId(b"c%d" % number)


def refusal(driver: Driver, connection: ConnectionId = ALICE) -> RemoteError:
    [failed] = driver.sent(Failed, connection)
    return failed.error


def fill(driver: Driver, model: str, count: int) -> None:
    """That many requests wait for a model, each from another connection."""
    for number in range(count):
        driver.ask(f"waits for {model}", model, connection(number))
        assert driver.errors(connection(number)) == {}


@pytest.fixture
def driver() -> Driver:
    """`slow` loads; `m` is READY with two rows."""
    driver = Driver([entry(), entry("slow")], LIMITS)
    driver.load()
    driver.come_up()
    driver.load("slow")
    driver.spawned("slow", 5)
    return driver


def test_full_queues_block_no_free_row_of_another_model_H5(driver: Driver) -> None:
    for number in range(LIMITS.max_queue_per_client):
        driver.ask(f"r{number}", "slow")
    fill(driver, "slow", LIMITS.max_queue - LIMITS.max_queue_per_client)
    driver.ask("a")
    assert driver.row()["running"] == ["a"]
    driver.ask("more", "slow")
    assert driver.errors() == OVERLOADED


def test_a_full_queue_leaves_every_other_model_its_share_H5(driver: Driver) -> None:
    fill(driver, "slow", LIMITS.max_queue)
    driver.serve("a", "b")
    fill(driver, "m", LIMITS.max_queue // 2)
    for model in ("m", "slow"):
        driver.ask("more", model, BOB)
        assert driver.errors(BOB) == OVERLOADED, "READY with all rows taken; above its share"


def test_every_model_has_room_for_one_even_where_there_are_more_models_than_places() -> None:
    names = [f"m{number}" for number in range(5)]
    driver = Driver([entry(name) for name in names], replace(LIMITS, max_queue=2))
    fill(driver, "m0", 2)
    for name in names[1:]:
        driver.ask(name, name, connection(9))
    assert [driver.row(name)["queued"] for name in names] == [2, 1, 1, 1, 1]
    driver.ask("more", "m1", BOB)
    assert driver.errors(BOB) == OVERLOADED


def test_a_request_behind_others_of_its_model_may_not_start_before_them(driver: Driver) -> None:
    driver.serve("a", "b")
    fill(driver, "m", LIMITS.max_queue)
    driver.ask("more", connection=BOB)
    assert driver.errors(BOB) == OVERLOADED
    driver.cancel("a")
    driver.ask("more", connection=BOB)
    assert driver.errors(BOB) == OVERLOADED, "the row has not left yet"


def test_limit_of_a_client_spans_names_and_connections_of_a_process_H5(driver: Driver) -> None:
    for number in range(LIMITS.max_queue_per_client):
        driver.ask("r", "slow", connection(number), "process 7@1", client=f"name {number}")
    driver.ask("more", "slow", process="process 7@1", client="another name")
    assert refusal(driver).code == ErrorCode.OVERLOADED
    assert "4 requests of this client are waiting" in refusal(driver).message
    driver.ask("mine", "slow", process="process 7@2", client="name 0")
    assert driver.errors() == {}, "another process with the same pid"


@pytest.mark.parametrize("leaves", [True, False])
def test_the_place_of_a_connection_is_given_back(driver: Driver, leaves: bool) -> None:
    for round_ in range(2):
        for number in range(LIMITS.max_queue_per_client):
            driver.ask(f"{round_}-{number}", "slow", client=f"name {number}")
            assert driver.errors() == {}
        driver.ask("more", "slow")
        assert driver.errors() == OVERLOADED
        for number in range(LIMITS.max_queue_per_client):
            driver.leave() if leaves else driver.cancel(f"{round_}-{number}")


def test_bytes_are_limited_even_with_free_rows() -> None:
    driver = Driver([entry()], replace(LIMITS, max_queue_bytes=9))
    driver.load()
    driver.come_up()
    driver.ask("a", body=b"123456789")
    assert driver.errors() == {}, "up to the limit"
    driver.ask("b", body=b"1")
    assert refusal(driver).detail["limit"] == "max_queue_bytes"
    driver.token(1, finish=FinishReason.STOP)
    driver.ask("b", body=b"1")
    assert driver.errors() == {}


@pytest.mark.parametrize("limit", ["max_queue", "max_queue_per_client", "max_queue_bytes"])
def test_an_overload_names_its_limit_and_has_its_numbers_H3(limit: str) -> None:
    launch = replace(LAUNCH, max_concurrency=1)
    least: dict[str, Any] = {limit: 4 if limit == "max_queue_bytes" else 1}
    driver = Driver([entry(launch=launch)], replace(LIMITS, **least))
    driver.ask("waits")
    driver.ask("more")
    error = refusal(driver)
    assert f"({limit})" in error.message
    assert error.detail == {
        "model": "m",
        "limit": limit,
        "queue_depth": 1,
        "running": [],
        "retry_after_s": 1.0,
    }
    assert error.retryable is True


@pytest.mark.parametrize(
    ("cost_s", "expected"), [([], 1.0), ([8.0], 8.0), ([8.0, 3.0], 7.0), ([0.01], 0.1)]
)
def test_an_overload_says_when_a_row_should_be_free(cost_s: list[float], expected: float) -> None:
    driver = Driver([entry()], CoreSettings(max_queue=1, max_queue_per_client=9))
    driver.load()
    driver.come_up()
    for number, seconds in enumerate(cost_s, start=1):
        driver.ask(f"ran{number}")
        driver.compute(seconds, number)
        driver.token(number, finish=FinishReason.STOP)
    for number in range(4):
        driver.ask(f"r{number}")
    assert refusal(driver).detail["retry_after_s"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ended_s", "spent_s", "expected"),
    [
        (None, [3.0, 2.0], 5.0),
        (None, [0.2, 0.2], 1.0),
        (4.0, [3.0, 2.0], 4.0),
        (4.0, [3.0, 6.0], 6.0),
    ],
    ids=["as long again", "hardly begun", "less than usual", "longer than usual"],
)
def test_an_overload_knows_what_those_that_run_have_cost(
    ended_s: float | None, spent_s: list[float], expected: float
) -> None:
    driver = Driver([entry()], CoreSettings(max_queue=1, max_queue_per_client=9))
    driver.load()
    driver.come_up()
    if ended_s is not None:
        driver.ask("ended")
        driver.compute(ended_s, 1)
        driver.token(1, finish=FinishReason.STOP)
    for number in range(3):
        driver.ask(f"r{number}")
    for key, seconds in zip(list(driver.model().batch.running), spent_s, strict=True):
        for _ in range(2):  # alike steps are charged together
            driver.compute(seconds / 2, key)
    driver.ask("more")
    assert refusal(driver).detail["retry_after_s"] == pytest.approx(expected)


# Refusals


def poisoned() -> Driver:
    """A driver whose request `b"body"` is quarantined."""
    driver = Driver([entry(restart=replace(RESTART, max_restarts=99))], LIMITS)
    driver.load()
    driver.come_up()
    driver.ask("first")
    for _ in range(3):
        driver.exit(signal="SIGSEGV")
        driver.pass_time(10.0)
        driver.come_up()
    assert driver.row()["quarantined"] == 1
    return driver


def shut() -> Driver:
    driver = in_state(State.READY)
    driver.signal()
    return driver


REFUSALS: dict[str, tuple[Callable[[], Driver], dict[str, Any], dict[str, type]]] = {
    "invalid_request": (Driver, {"queue_timeout_s": -1.0}, {"parameter": str}),
    "unknown_model": (Driver, {"model": "x"}, {"known": list, "close": list}),
    "model_failed": (lambda: in_state(State.FAILED), {}, {"model": str, "cause": str}),
    "unloaded": (lambda: in_state(State.DRAINING), {}, {"model": str, "why": str}),
    "quarantined": (poisoned, {}, {"model": str, "tokens_sent": int, "lifted_in_s": float}),
    "shutting_down": (shut, {}, {}),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_travels_with_its_facts_and_their_types(code: str) -> None:
    make, asked, types = REFUSALS[code]
    driver = make()
    driver.ask("r", **asked)
    [failed] = driver.sent(Failed)
    error = failed.error
    assert (failed.id, error.code) == ("r", code)
    assert {name: type(value) for name, value in error.detail.items()} == types
    assert encode(failed), "nothing that does not travel"
    assert driver.row()["queued"] == 0


def crashed_twice(*ids: str) -> Driver:
    """A READY model `m` with a suspect on its turn, the first of these, and an idle model `n`."""
    settings = CoreSettings(max_queue=9, max_queue_per_client=1)
    driver = Driver([entry("m"), entry("n")], settings)
    driver.load()
    driver.come_up()
    for key in driver.serve(*ids):
        driver.accept(key)
    for _ in range(2):
        driver.exit(signal="SIGSEGV")
        driver.pass_time(2.0)
        driver.come_up()
    assert driver.row()["alone"] == ids[0]
    return driver


def test_queue_limits_hold_while_a_suspect_runs_alone() -> None:
    driver = crashed_twice("a", "b")
    assert driver.row()["queued"] == 1
    assert driver.core.status(driver.now)["queue"]["waiting"] == 0, "an interrupted answer"
    driver.ask("new")
    assert driver.errors() == {}
    driver.ask("more")
    assert driver.errors() == OVERLOADED
    driver = crashed_twice("a")
    driver.ask("elsewhere", "n")
    driver.ask("more")
    assert driver.errors() == OVERLOADED, "a row is free, and `a` runs alone"


def test_flood_of_one_client_delays_another_by_one_row_H6() -> None:
    driver = Driver([entry()], CoreSettings(max_queue=1024, max_queue_per_client=64))
    driver.load()
    driver.come_up()
    refused = 0
    for number in range(100):
        driver.ask(f"r{number}")
        refused += len(driver.errors())
    rows = LAUNCH.max_concurrency
    assert refused == 100 - rows - 64
    driver.compute(1.0, *range(1, rows + 1))
    driver.ask("mine", connection=BOB)
    assert driver.errors(BOB) == {}
    driver.compute(1.0, *range(1, rows + 1))
    driver.token(1, finish=FinishReason.STOP)
    assert "mine" in driver.row()["running"]


# Accounts: classes, places, rows and shares

INTERACTIVE, NORMAL, BATCH = Priority
PROCESS = "process 7@1"


def driver_of(*names: str, rows: int = 1, **clients: ClientSettings) -> Driver:
    """READY models with that many rows each; `others` is for clients without an entry."""
    granted = {ANYONE if name == "others" else name: one for name, one in clients.items()}
    limits = CoreSettings(max_queue=99, max_queue_per_client=4, clients=granted)
    launch = replace(LAUNCH, max_concurrency=rows)
    driver = Driver([entry(name, launch=launch) for name in names or ("m",)], limits)
    for name in names or ("m",):
        driver.load(name)
        driver.come_up(name)
    return driver


def change(driver: Driver, **clients: ClientSettings) -> None:
    """The configuration is read again, with these clients."""
    settings = replace(driver.core.fleet.settings, clients=clients)
    models = tuple(model.life.settings for model in driver.core.fleet)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))


@pytest.mark.parametrize(
    ("client", "process", "account"),
    [
        ("alice", PROCESS, "alice"),
        ("alice", "", "alice"),
        ("nobody", PROCESS, PROCESS),
        (None, PROCESS, PROCESS),
        (ANYONE, PROCESS, PROCESS),
        ("nobody", "", "connection 616c696365"),
        (None, "", "connection 616c696365"),
    ],
)
def test_a_name_counts_if_it_is_listed_and_otherwise_the_process_does(
    client: str | None, process: str, account: str
) -> None:
    clients = {"alice": ClientSettings(), ANYONE: ClientSettings(weight=2.0)}
    terms = Terms(CoreSettings(clients=clients))
    found = terms.account(client, process, ALICE)
    assert found == account
    assert terms.of(found).weight == (1.0 if account == "alice" else 2.0)


def test_class_above_max_priority_is_refused_with_the_fix() -> None:
    limit = ClientSettings(priority=BATCH, max_priority=NORMAL)
    driver = driver_of(nightly=limit, others=ClientSettings(priority=BATCH, max_priority=BATCH))
    driver.ask("no", client="nightly", priority=INTERACTIVE)
    error = refusal(driver)
    assert error.code == "invalid_request"
    assert error.message == (
        "this client may not use priority interactive; use normal or a lower one, or"
        " raise max_priority in [clients.nightly] and reload"
    )
    assert error.detail == {"parameter": "priority", "max_priority": "normal"}
    driver.ask("yes", client="nightly", priority=NORMAL)
    assert driver.row()["running"] == ["yes"]
    driver.ask("no", client="nobody", priority=NORMAL)
    assert 'in [clients."*"]' in refusal(driver).message


def test_reload_changes_grants_and_keeps_the_line() -> None:
    driver = play(driver_of(), "ask runs; ask i priority=interactive")
    change(driver, **{ANYONE: ClientSettings(max_priority=NORMAL)})
    play(driver, "-> line=[i]; ask no priority=interactive -> errors={no: invalid_request}")


def test_a_request_that_has_waited_long_moves_up_by_itself() -> None:
    driver = play(
        driver_of(),
        "ask runs; ask old priority=batch;"
        + 59 * "wait 1; token 1; beat;"
        + "ask new -> line=[new, old]; wait 1 -> line=[old, new]; token 1 finish=stop",
    )
    [running] = driver.row()["rows"]
    assert (running["id"], running["priority"], running["class"]) == ("old", "batch", "normal")


def test_a_client_s_own_number_of_places_counts_before_the_general_one() -> None:
    driver = driver_of(big=ClientSettings(max_queue=6), small=ClientSettings(max_queue=1))
    driver.ask("runs")
    refused = []
    for client, count in (("big", 7), ("small", 2)):
        for number in range(count):
            driver.ask(f"{client}{number}", client=client)
            refused += [*driver.errors()]
    assert refused == ["big6", "small1"]
    assert refusal(driver).detail["limit"] == "clients.small max_queue"


def test_max_running_holds_a_client_back_and_no_other() -> None:
    driver = driver_of(rows=3, nightly=ClientSettings(max_running=1, max_queue=1))
    driver.ask("n1", client="nightly", notices=True)
    driver.ask("n2", client="nightly", notices=True, priority=INTERACTIVE)
    [notice] = driver.sent(Notice)
    assert notice.detail == {"position": 1, "reason": "limit", "since_s": 0.0}
    driver.ask("more", client="nightly")
    assert driver.errors() == OVERLOADED, "a row is free, but not for it"
    driver.ask("a")
    driver.ask("b")
    assert driver.row()["running"] == ["n1", "a", "b"]
    assert driver.line() == ["n2"]
    driver.token(1, finish=FinishReason.STOP)
    assert driver.row()["running"] == ["a", "b", "n2"]


def test_a_client_that_is_held_back_waits_for_a_load_first() -> None:
    driver = driver_of("m", "n", nightly=ClientSettings(max_running=1))
    driver.ask("n1", "m", client="nightly")
    driver.exit("n")
    driver.ask("n2", "n", client="nightly", notices=True)
    assert {one.detail["reason"] for one in driver.sent(Notice) if one.kind == "queued"} == {"load"}


@pytest.mark.parametrize("how", ["a row ends at another model", "a reload"])
def test_a_client_starts_once_max_running_allows_it(how: str) -> None:
    driver = driver_of("m", "n", nightly=ClientSettings(max_running=1))
    play(driver, "ask n1 m client=nightly; ask n2 n client=nightly -> m.running=[n1]")
    play(driver, "-> n.running=[]")
    driver.cancel("n1") if how != "a reload" else change(driver, nightly=ClientSettings())
    play(driver, "-> n.running=[n2]")


def reply(driver: Driver) -> dict[str, Any]:
    [found] = driver.sent(Reply)
    return found.value


def test_prioritize_moves_a_waiting_request_and_lets_a_running_one_run() -> None:
    driver = driver_of()
    for id in ("runs", "a", "b"):
        driver.ask(id)
    driver.ask("c", connection=BOB)
    driver.prioritize("c", INTERACTIVE)
    value = reply(driver)
    assert (value["id"], value["number"], value["model"]) == ("c", "#4", "m")
    assert (value["before"], value["priority"], value["is_running"]) == (
        "normal", "interactive", False,
    )  # fmt: skip
    assert driver.line() == ["c", "a", "b"]
    driver.accept(1)
    driver.prioritize("runs", BATCH)
    assert reply(driver)["is_running"] is True
    [running] = driver.row()["rows"]
    assert (running["priority"], running["class"]) == ("batch", "batch")
    driver.exit()
    assert driver.line() == ["c", "a", "b", "runs"]


def test_charged_account_moves_back() -> None:
    play(
        driver_of(alice=ClientSettings(), bob=ClientSettings()),
        "ask a1 client=alice; ask a2 client=alice; ask b1 client=bob -> line=[a2, b1];"
        " compute 1.0 1 -> line=[b1, a2]",
    )


def test_numbers_count_the_requests_that_were_admitted() -> None:
    driver = Driver(settings=CoreSettings(max_queue=1, max_queue_per_client=1))
    driver.ask("a")
    driver.ask("refused")
    driver.cancel("a")
    driver.ask("b")
    assert [request.key for request in driver.core.ledger] == [2]


# HTTP without a key: one process, many clients

QUEUES = CoreSettings(max_queue=100, max_queue_per_client=10)


ADDRESS = Address(host="127.0.0.1", port=1)


def listens(driver: Driver, pid: int, *, number: int = 1) -> None:
    driver.do(GatewayListening(now=driver.now, number=number, pid=pid, address=ADDRESS))


def most_waiting(settings: CoreSettings, gateway_pid: int | None, account: str) -> int:
    driver = Driver(settings=settings, gateway=ADDRESS)
    if gateway_pid is not None:
        listens(driver, gateway_pid)
    return driver.core.ledger.terms.most_waiting(Account(account))


def test_gateway_is_a_door_and_leaves_room_for_another_client() -> None:
    gateway = process_name(7, 99)
    assert most_waiting(QUEUES, 7, gateway) == 90
    assert most_waiting(QUEUES, 7, process_name(77, 99)) == 10
    assert most_waiting(QUEUES, 8, gateway) == 10
    assert most_waiting(QUEUES, None, gateway) == 10


def test_a_process_that_gets_the_pid_of_a_dead_gateway_is_one_client() -> None:
    driver, later = Driver(settings=QUEUES, gateway=ADDRESS), Account(process_name(7, 100))
    terms = driver.core.ledger.terms
    listens(driver, 7)
    driver.do(GatewayEnded(now=driver.now, number=1, cause="it died", is_crash=True))
    assert terms.most_waiting(later) == 10
    listens(driver, 7, number=1)
    assert terms.most_waiting(later) == 10, "it was said of the one that is gone"
    listens(driver, 8, number=2)
    assert terms.most_waiting(Account(process_name(8, 101))) == 90


def test_client_with_a_table_keeps_its_own_limit() -> None:
    named = CoreSettings(max_queue=100, clients={"bob": ClientSettings(max_queue=3)})
    assert most_waiting(named, 7, "bob") == 3


def test_small_queue_still_has_the_places_of_one_client() -> None:
    small = CoreSettings(max_queue=12, max_queue_per_client=10)
    assert most_waiting(small, 7, process_name(7, 99)) == 10
