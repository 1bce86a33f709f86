"""How commands name an open request: by its id, or by its number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.client_messages import Failed
from mlxsup.protocol.states import Priority
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import LAUNCH, Driver, entry
from support.core_looks import BOB

INTERACTIVE, NORMAL, BATCH = Priority


def up() -> Driver:
    """A READY model with one row."""
    limits = CoreSettings(max_queue=99, max_queue_per_client=50)
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=1))], limits)
    driver.load()
    driver.come_up()
    return driver


def waiting_driver() -> Driver:
    driver = up()
    for id in ("runs", "a", "b"):
        driver.ask(id)
    return driver


def test_a_number_names_a_request_as_well() -> None:
    driver = waiting_driver()
    driver.prioritize("#3", INTERACTIVE)
    assert driver.line() == ["b", "a"]


def test_of_several_with_one_id_only_the_number_names_one() -> None:
    driver = waiting_driver()
    driver.ask("a", connection=BOB)
    driver.prioritize("a", BATCH)
    [failed] = driver.sent(Failed)
    assert failed.error["message"] == (
        "2 open requests have the id 'a'; name one by its number;"
        " open: a (#2, waits for m), a (#4, waits for m)"
    )
    assert failed.error["detail"] == {
        "parameter": "request", "known": ["a", "a"], "numbers": ["#2", "#4"],
    }  # fmt: skip
    driver.prioritize("#4", INTERACTIVE)
    assert [shown["number"] for shown in driver.row()["line"]] == ["#4", "#2", "#3"]


def test_a_name_that_nobody_has_is_refused_with_those_that_are_open() -> None:
    driver = waiting_driver()
    driver.prioritize("z", BATCH)
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == "invalid_request"
    assert failed.error["message"] == (
        "no open request has the id 'z'; open: runs (#1, runs for m), a (#2, waits for m),"
        " b (#3, waits for m)"
    )
    assert driver.row()["queued_per_class"]["batch"] == 0


@pytest.mark.parametrize(
    ("count", "ending"),
    [
        (8, "r7 (#8, waits for m)"),
        (9, "r7 (#8, waits for m) and 1 more, see `mlxsup requests`"),
        (12, "r7 (#8, waits for m) and 4 more, see `mlxsup requests`"),
    ],
)
def test_many_open_requests_are_not_all_listed(count: int, ending: str) -> None:
    driver = up()
    for number in range(count):
        driver.ask(f"r{number}")
    driver.prioritize("z", BATCH)
    [failed] = driver.sent(Failed)
    assert failed.error["message"].endswith(ending)
    assert len(failed.error["detail"]["known"]) == 8


def test_with_nothing_open_there_is_nothing_to_name() -> None:
    driver = up()
    driver.prioritize("z", BATCH)
    [failed] = driver.sent(Failed)
    assert failed.error["message"] == "no open request has the id 'z'; open: none"
