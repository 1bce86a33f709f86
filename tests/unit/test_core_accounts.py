"""On whose behalf a request is, and what `[clients]` grants: classes, places, rows, shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Failed, Notice, Reply
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import FinishReason, Priority
from mlxsup.supervisor.core.events import ConnectionId, Reloaded
from mlxsup.supervisor.core.settings import ANYONE, ClientSettings, CoreSettings
from mlxsup.supervisor.core.sharing.accounts import Terms

from support.core_driver import LAUNCH, Driver, entry
from support.core_looks import ALICE, BOB

INTERACTIVE, NORMAL, BATCH = Priority
ONE_ROW = replace(LAUNCH, max_concurrency=1)
PROCESS = "process 7@1"


def driver_of(
    *names: str, rows: int = 1, others: ClientSettings | None = None, **clients: ClientSettings
) -> Driver:
    """READY models with that many rows each; `others` is for clients without an entry."""
    granted = {**clients, **({ANYONE: others} if others else {})}
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


def work(driver: Driver, seconds: int, *keys: int) -> None:
    """The worker computes these rows all the while, at no cost, and shows signs of life."""
    for _ in range(seconds):
        driver.pass_time(1.0)
        driver.token(*keys)
        driver.beat()


# ---------------------------------------------------------------- whose it is


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


def test_the_status_counts_by_account_and_by_class() -> None:
    driver = driver_of(alice=ClientSettings(weight=2.0))
    driver.ask("a", client="alice")
    driver.ask("b", client="alice", priority=BATCH)
    driver.ask("c", connection=BOB, process=PROCESS, priority=INTERACTIVE)
    assert driver.core.status(driver.now)["queue"] == {
        "waiting": 2,
        "per_client": {"alice": 1, PROCESS: 1},
        "per_class": {"interactive": 1, "normal": 0, "batch": 1},
        "clients": {
            "alice": {"waiting": 1, "running": 1, "weight": 2.0},
            PROCESS: {"waiting": 1, "running": 0, "weight": 1.0},
        },
    }
    driver.pass_time(2.0)
    row = driver.row()
    assert row["queued_per_class"] == {"interactive": 1, "normal": 0, "batch": 1}
    [running] = row["rows"]
    assert running == {
        "id": "a", "number": "#1", "client": "alice", "priority": "normal", "class": "normal",
        "waited_s": 0.0, "paused": None, "resumed": 0,
        "prompt_tokens": None, "read_tokens": 0, "tokens_sent": 0,
    }  # fmt: skip
    assert [(one["number"], one["class"], one["waited_s"]) for one in row["line"]] == [
        ("#3", "interactive", 2.0),
        ("#2", "batch", 2.0),
    ]


# ---------------------------------------------------------------- classes


def test_a_higher_class_is_dispatched_first() -> None:
    driver = driver_of()
    for id, priority in (("runs", None), ("b", BATCH), ("n", None), ("i", INTERACTIVE)):
        driver.ask(id, priority=priority)
    assert driver.line() == ["i", "n", "b"]
    driver.token(1, finish=FinishReason.STOP)
    assert driver.row()["running"] == ["i"]


def test_a_client_without_a_class_of_its_request_has_the_configured_one() -> None:
    driver = driver_of(nightly=ClientSettings(priority=BATCH))
    driver.ask("runs")
    driver.ask("b", client="nightly")
    driver.ask("n")
    assert driver.line() == ["n", "b"]


def test_a_class_above_what_a_client_may_use_is_refused_with_the_fix() -> None:
    driver = driver_of(nightly=ClientSettings(priority=BATCH, max_priority=NORMAL))
    driver.ask("no", client="nightly", priority=INTERACTIVE)
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == "invalid_request"
    assert failed.error["message"] == (
        "priority interactive is above what this client may use: send normal or a lower one, or"
        " raise max_priority in [clients.nightly] and reload"
    )
    assert failed.error["detail"] == {"parameter": "priority", "max_priority": "normal"}
    driver.ask("yes", client="nightly", priority=NORMAL)
    assert driver.row()["running"] == ["yes"]


def test_everybody_without_an_entry_is_held_to_that_of_all_others() -> None:
    driver = driver_of(others=ClientSettings(priority=BATCH, max_priority=BATCH))
    driver.ask("no", client="nobody", priority=NORMAL)
    [failed] = driver.sent(Failed)
    assert 'in [clients."*"]' in failed.error["message"]


def test_a_reload_changes_what_is_granted_and_leaves_who_waits() -> None:
    driver = driver_of()
    driver.ask("runs")
    driver.ask("i", priority=INTERACTIVE)
    change(driver, **{ANYONE: ClientSettings(max_priority=NORMAL)})
    assert driver.line() == ["i"]
    driver.ask("no", priority=INTERACTIVE)
    assert driver.errors() == {"no": "invalid_request"}


def test_a_request_that_has_waited_long_moves_up_by_itself() -> None:
    driver = driver_of()
    driver.ask("runs")
    driver.ask("old", priority=BATCH)
    work(driver, 59, 1)
    driver.ask("new")
    assert driver.line() == ["new", "old"]
    driver.pass_time(1.0)
    assert driver.line() == ["old", "new"], "both are normal now"
    driver.token(1, finish=FinishReason.STOP)
    [running] = driver.row()["rows"]
    assert (running["id"], running["priority"], running["class"]) == ("old", "batch", "normal")


def test_who_moves_up_is_notified_of_its_place() -> None:
    driver = driver_of()
    driver.ask("runs")
    driver.ask("old", priority=BATCH, notices=True)
    work(driver, 59, 1)
    driver.ask("new")
    driver.pass_time(1.0)
    [notice] = driver.sent(Notice)
    assert (notice.id, notice.detail["position"]) == ("old", 1)


def test_the_class_in_which_a_row_was_dispatched_outlives_a_crash() -> None:
    driver = driver_of()
    driver.ask("runs")
    driver.ask("old", priority=BATCH)
    work(driver, 100, 1)
    driver.token(1, finish=FinishReason.STOP)
    driver.accept(2)
    driver.ask("new")
    driver.exit()
    assert driver.line() == ["old", "new"]
    driver.come_up()
    assert driver.row()["running"] == ["old"]


def test_an_interrupted_answer_of_a_lower_class_waits_for_a_higher_one() -> None:
    driver = driver_of()
    driver.ask("b", priority=BATCH)
    driver.accept(1)
    driver.ask("i", priority=INTERACTIVE)
    driver.exit()
    assert driver.line() == ["i", "b"]


# ---------------------------------------------------------------- places and rows


def test_a_client_s_own_number_of_places_counts_before_the_general_one() -> None:
    driver = driver_of(big=ClientSettings(max_queue=6), small=ClientSettings(max_queue=1))
    driver.ask("runs")
    refused = []
    for client, count in (("big", 7), ("small", 2)):
        for number in range(count):
            driver.ask(f"{client}{number}", client=client)
            refused += [*driver.errors()]
    assert refused == ["big6", "small1"]
    [failed] = driver.sent(Failed)
    assert failed.error["detail"]["limit"] == "clients.small max_queue"


def test_who_may_not_run_more_waits_and_others_start_before_it() -> None:
    driver = driver_of(rows=3, nightly=ClientSettings(max_running=1))
    driver.ask("n1", client="nightly", notices=True)
    driver.ask("n2", client="nightly", notices=True, priority=INTERACTIVE)
    [notice] = driver.sent(Notice)
    assert notice.detail == {"position": 1, "reason": "limit", "since_s": 0.0}
    driver.ask("a")
    driver.ask("b")
    assert driver.row()["running"] == ["n1", "a", "b"]
    assert driver.line() == ["n2"]
    driver.token(1, finish=FinishReason.STOP)
    assert driver.row()["running"] == ["a", "b", "n2"]


def test_a_row_that_ends_at_one_model_lets_its_client_start_at_another() -> None:
    driver = driver_of("m", "n", nightly=ClientSettings(max_running=1))
    driver.ask("n1", "m", client="nightly")
    driver.ask("n2", "n", client="nightly")
    assert (driver.row("m")["running"], driver.row("n")["running"]) == (["n1"], [])
    driver.cancel("n1")
    assert driver.row("n")["running"] == ["n2"]


def test_a_limit_that_a_reload_lifts_lets_wait_nobody() -> None:
    driver = driver_of(rows=2, nightly=ClientSettings(max_running=1))
    driver.ask("n1", client="nightly")
    driver.ask("n2", client="nightly")
    change(driver, nightly=ClientSettings())
    assert driver.row()["running"] == ["n1", "n2"]


def test_who_may_not_run_more_is_held_to_the_limits_of_the_queue() -> None:
    driver = driver_of(rows=9, nightly=ClientSettings(max_running=1, max_queue=1))
    for number in range(3):
        driver.ask(f"n{number}", client="nightly")
    assert driver.errors() == {"n2": "overloaded"}, "a row is free, but not for it"
    driver.ask("other")
    assert driver.row()["running"] == ["n0", "other"]


# ---------------------------------------------------------------- by hand


def waiting_driver() -> Driver:
    driver = driver_of()
    for id in ("runs", "a", "b"):
        driver.ask(id)
    return driver


def reply(driver: Driver) -> dict[str, Any]:
    [found] = driver.sent(Reply)
    return found.value


def test_a_waiting_request_gets_another_class_whoever_asks() -> None:
    driver = waiting_driver()
    driver.ask("c", connection=BOB)
    driver.prioritize("c", INTERACTIVE)
    value = reply(driver)
    assert (value["id"], value["number"], value["model"]) == ("c", "#4", "m")
    assert (value["before"], value["priority"], value["is_running"]) == (
        "normal", "interactive", False,
    )  # fmt: skip
    assert driver.line() == ["c", "a", "b"]


def test_a_running_request_keeps_its_row_and_has_another_class_from_now_on() -> None:
    driver = waiting_driver()
    driver.accept(1)
    driver.prioritize("runs", BATCH)
    assert reply(driver)["is_running"] is True
    [running] = driver.row()["rows"]
    assert (running["priority"], running["class"]) == ("batch", "batch")
    driver.exit()
    assert driver.line() == ["a", "b", "runs"]


# ---------------------------------------------------------------- shares


def test_what_a_step_costs_moves_its_account_back() -> None:
    driver = driver_of(alice=ClientSettings(), bob=ClientSettings())
    for id, client in (("a1", "alice"), ("a2", "alice"), ("b1", "bob")):
        driver.ask(id, client=client)
    assert driver.line() == ["a2", "b1"], "nothing was computed yet"
    driver.compute(1.0, 1)
    assert driver.line() == ["b1", "a2"]


def test_a_weight_makes_the_same_step_cost_less() -> None:
    driver = driver_of(alice=ClientSettings(weight=4.0), bob=ClientSettings())
    for id, client in (("a1", "alice"), ("a2", "alice"), ("b1", "bob"), ("b2", "bob")):
        driver.ask(id, client=client)
    driver.compute(1.0, 1)
    driver.token(1, finish=FinishReason.STOP)
    assert driver.row()["running"] == ["b1"]
    driver.compute(1.0, 3)
    driver.token(3, finish=FinishReason.STOP)
    assert driver.row()["running"] == ["a2"], "a quarter of a second, and not one"


def test_a_client_that_comes_back_has_its_debt_and_no_credit() -> None:
    driver = driver_of(alice=ClientSettings(), bob=ClientSettings())
    driver.ask("a1", client="alice")
    driver.ask("b1", connection=BOB, client="bob")
    driver.compute(10.0, 1)
    driver.leave(ALICE)
    driver.row_left(1)
    driver.compute(1.0, 2)
    for id, client in (("b2", "bob"), ("b3", "bob")):
        driver.ask(id, client=client, connection=BOB)
    driver.ask("a2", client="alice", connection=ConnectionId(b"again"))
    assert driver.line()[-1] == "a2"


def test_how_long_a_row_takes_to_be_free_follows_what_requests_have_cost() -> None:
    driver = driver_of()
    driver.ask("a")
    driver.compute(3.0, 1)
    driver.token(1, finish=FinishReason.STOP)
    assert driver.core.fleet.by_name[ModelName("m")].next_free_s() == pytest.approx(3.0)
