"""What watchers receive: each change, each story, why requests wait."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.client_messages import Event, Ping, Reply, StatusQuery, Subscribe
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, State, WaitReason
from mlxsup.supervisor.core.actions import Announce
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.settings import CoreSettings
from mlxsup.supervisor.core.status import wait_reason, waiting_news

from support.core_driver import Driver, entry
from support.core_states import in_state


def changes(driver: Driver) -> list[dict[str, Any]]:
    return [action.change for action in driver.of(Announce)]


def test_a_change_is_announced_whole_and_sent_to_who_subscribed() -> None:
    driver = Driver()
    driver.say(Subscribe(id=RequestId("s")))
    driver.load()
    pending = {
        "model": "m",
        "from": "STOPPED",
        "to": "PENDING",
        "generation": 0,
        "pid": None,
        "wanted": "up",
        "why": "user",
        "note": "",
        "progress": {"phase": "waiting for turn", "fraction": 0.0},
        "batching": None,
        "warnings": [],
        "load_phases_s": None,
    }
    loading = pending | {
        "from": "PENDING",
        "to": "LOADING",
        "generation": 1,
        "progress": {"phase": "spawn", "fraction": 0.0},
    }
    assert changes(driver) == [pending, loading]
    assert driver.sent(Event) == [Event(id=RequestId("s"), value=one) for one in (pending, loading)]
    driver.spawned()
    driver.hello()
    assert changes(driver) == [
        loading
        | {
            "from": "LOADING",
            "pid": 77,
            "note": "import 0%",
            "progress": {"phase": "import", "fraction": 0.0},
        }
    ]
    driver.now += 2.0
    driver.progress(0.5)
    driver.now += 0.5
    driver.ready()
    [ready] = changes(driver)
    assert ready == pending | {
        "from": "LOADING",
        "to": "READY",
        "generation": 1,
        "pid": 77,
        "progress": None,
        "batching": {"mode": "together", "reason": ""},
        "load_phases_s": {"spawn": 0.0, "import": 2.0, "weights": 0.5},
    }


def notes(driver: Driver) -> list[tuple[str, str]]:
    return [(change["to"], change["note"]) for change in changes(driver)]


def test_each_change_has_a_note_that_says_why() -> None:
    driver = in_state(State.READY)
    driver.restart()
    assert notes(driver) == [("DRAINING", "restart")]
    driver.token(1, finish=FinishReason.STOP)
    driver.exit(code=0)
    assert notes(driver) == [("PENDING", ""), ("LOADING", "")]
    driver.spawned()
    driver.hello()
    driver.progress(1 / 3)
    assert notes(driver) == [("LOADING", "weights 33%")]
    driver.ready()
    assert notes(driver) == [("READY", "")]
    driver.ask("r2")
    driver.unload()
    assert notes(driver) == [("DRAINING", "user")]
    driver.exit(signal="SIGSEGV")
    assert notes(driver) == [("STOPPED", ""), ("STOPPED", "1 request under suspicion")]


def test_a_ping_is_answered_with_nothing_and_a_status_with_entries_if_asked() -> None:
    driver = Driver()
    driver.say(Ping(id=RequestId("p")))
    assert driver.sent(Reply) == [Reply(id=RequestId("p"), value={})]
    driver.say(StatusQuery(id=RequestId("q")))
    assert driver.sent(Reply) == [Reply(id=RequestId("q"), value=driver.core.status(driver.now))]
    driver.load()
    driver.say(StatusQuery(id=RequestId("q"), debug=True))
    [reply] = driver.sent(Reply)
    first, second = reply.value["flight"]
    assert (first["before"], first["after"], first["ago_s"]) == ("STOPPED", "PENDING", 0.0)
    assert (second["n"], second["after"], second["generation"]) == (2, "LOADING", 1)


def test_the_story_of_a_model_has_each_death_and_what_was_made_of_it() -> None:
    driver = in_state(State.READY)
    driver.exit(signal="SIGSEGV", last_lines=("boom",))
    story = driver.core.stories()["m"]
    assert story[-3] == "1000.000 SIGSEGV: boom: 1 request under suspicion"
    assert story[-2] == "1000.000 READY died (SIGSEGV: boom) → PENDING"
    assert story[-1] == "1000.000 PENDING turn → LOADING"


def test_no_more_than_the_latest_two_hundred_lines_of_a_story_are_kept() -> None:
    driver = Driver()
    for _ in range(150):
        driver.load()
        driver.unload()
    assert len(driver.core.stories()["m"]) == 200


@pytest.mark.parametrize("how", ["wanted", "unloaded", "removed"])
def test_a_process_that_cannot_be_ended_and_its_end_at_last_are_announced(how: str) -> None:
    driver = in_state(State.READY)
    driver.broke()
    driver.pass_time(10.0)
    assert notes(driver) == [("FAILED", "process 77 cannot be ended")]
    if how == "unloaded":
        driver.unload()
    elif how == "removed":
        driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=()))
    assert (driver.row()["pid"], driver.row()["last_exit"]) == (77, None)
    last = "process 77 has ended at last"
    driver.exit(code=9, last_lines=("late",), at=3.0)
    assert (
        notes(driver)
        == {
            "wanted": [("PENDING", last), ("LOADING", "")],
            "unloaded": [("STOPPED", last)],
            "removed": [("STOPPED", "removed")],
        }[how]
    )
    if how != "removed":
        assert driver.row()["last_exit"] == {
            "reason": "asked", "code": 9, "signal": None, "detail": "late", "at": 3.0,
            "cause": "unknown",
        }  # fmt: skip


def test_a_load_is_news_to_all_at_each_tenth_and_not_between() -> None:
    driver = in_state(State.LOADING)
    model = driver.model()
    assert waiting_news(model) == (WaitReason.LOAD, "import", 0)
    for hundredth in range(1, 100):
        driver.progress(hundredth / 100)
        assert waiting_news(model) == (WaitReason.LOAD, "weights", hundredth // 10)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (State.PENDING, "load"), (State.LOADING, "load"), (State.READY, "rows"),
        (State.DRAINING, "rows"), (State.STOPPING, "restart"), (State.BACKOFF, "backoff"),
    ],
)  # fmt: skip
def test_each_state_has_a_reason_to_wait(state: State, reason: str) -> None:
    assert wait_reason(in_state(state).model()) == reason


def test_while_a_process_is_replaced_everybody_waits_for_that() -> None:
    driver = in_state(State.READY)
    driver.restart()
    assert (driver.state(), wait_reason(driver.model())) == (State.DRAINING, "restart")


def test_after_a_reload_the_models_stand_in_the_order_of_the_file() -> None:
    driver = Driver([entry(name=name) for name in ("a", "b", "c")])

    def reload(*names: str) -> list[str]:
        models = tuple(entry(name=name) for name in names)
        driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=models))
        return [row["name"] for row in driver.core.status(driver.now)["models"]]

    assert reload("b", "c") == ["b", "c"]
    assert reload("a", "c", "b") == ["a", "c", "b"]
