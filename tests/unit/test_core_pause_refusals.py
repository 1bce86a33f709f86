"""Pauses and resumes that cannot be: each is a typed error, and changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.client_messages import Failed
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import State
from mlxsup.protocol.worker_messages import PauseRow
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import LAUNCH, Driver, entry
from support.core_looks import BOB
from support.core_states import in_state


def refusal(driver: Driver) -> str:
    """The message of the only error; it is one of a wrong request."""
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == ErrorCode.INVALID_REQUEST
    assert driver.told(PauseRow) == []
    return str(failed.error["message"])


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_a_request_that_is_not_open_is_named_with_those_that_are(command: str) -> None:
    driver = in_state(State.READY)
    getattr(driver, command)("nobody")
    assert refusal(driver) == "no open request has the id 'nobody'; open: r1 (#1, runs for m)"
    [failed] = driver.sent(Failed)
    assert failed.error["detail"] == {"parameter": "request", "known": ["r1"], "numbers": ["#1"]}


def test_a_request_of_another_client_may_be_paused() -> None:
    driver = in_state(State.READY)
    driver.pause("r1", BOB)
    assert [told.key for told in driver.told(PauseRow)] == [1]


def test_of_several_with_one_id_the_number_names_one_and_an_id_alone_is_refused() -> None:
    driver = in_state(State.READY)
    driver.ask("r1", connection=BOB, body=b"other")
    driver.pause()
    assert refusal(driver) == (
        "2 open requests have the id 'r1'; name one by its number;"
        " open: r1 (#1, runs for m), r1 (#2, runs for m)"
    )
    driver.pause("#2")
    assert [told.key for told in driver.told(PauseRow)] == [2]


def test_an_error_says_who_is_paused() -> None:
    driver = in_state(State.READY)
    driver.pause()
    driver.row_left(1)
    driver.resume("nobody")
    [failed] = driver.sent(Failed)
    assert failed.error["message"].endswith("open: r1 (#1, is paused on m)")


def test_a_second_pause_is_refused_before_and_after_the_row_has_left() -> None:
    driver = in_state(State.READY)
    driver.pause()
    driver.pause()
    expected = "request 'r1' is paused already: resume it, or cancel it"
    assert refusal(driver) == expected
    driver.row_left(1)
    driver.pause()
    assert refusal(driver) == expected


def test_a_resume_of_what_runs_or_waits_is_refused() -> None:
    driver = in_state(State.READY)
    expected = "request 'r1' is not paused: it runs, or waits for its turn"
    driver.resume()
    assert refusal(driver) == expected
    driver.pause()
    driver.row_left(1)
    driver.resume()
    driver.resume()
    assert refusal(driver) == expected


def test_a_request_that_wants_no_continuation_may_not_be_paused() -> None:
    driver = in_state(State.READY)
    driver.ask("r2", resume=False)
    driver.pause("r2")
    assert refusal(driver) == "request 'r2' may not be paused: it was sent with `resume` false"


def test_requests_of_a_deterministic_model_may_not_be_paused() -> None:
    driver = in_state(State.READY, launch=replace(LAUNCH, deterministic=True))
    driver.pause()
    assert refusal(driver) == "request 'r1' may not be paused: m is `deterministic`"


def test_no_request_of_a_model_that_goes_down_may_be_paused() -> None:
    driver = in_state(State.DRAINING)
    driver.pause()
    assert refusal(driver) == "request 'r1' may not be paused: m is being unloaded (user)"
    driver = in_state(State.READY)
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=(entry("other"),)))
    driver.pause()
    assert refusal(driver) == (
        "request 'r1' may not be paused: no model is called 'm'; configured: other"
    )


def test_a_request_of_a_model_that_restarts_may_be_paused_and_waits_beyond_the_restart() -> None:
    driver = in_state(State.READY)
    driver.restart(now=True)
    assert driver.state() is State.STOPPING
    driver.pause()
    assert driver.told(PauseRow) == [], "its process is asked to end already"
    driver.exit(code=0)
    driver.come_up()
    assert (driver.dispatched(), driver.row()["paused"]) == ([], ["r1"])
