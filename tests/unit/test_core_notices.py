"""Who hears of its place in line: near the front at each change, further back now and then."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from mlxsup.protocol.client_messages import Notice
from mlxsup.protocol.states import FinishReason, NoticeKind, State
from mlxsup.supervisor.core.requests.queue import FARTHEST_TOLD, NEAR
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import LAUNCH, Driver, entry
from support.core_looks import ALICE

WAITING = 1024
MOST_PER_DEPARTURE = 15
"""The first eight, and whoever comes to place 16, 32, 64, 128, 256, 512 or 1,024."""


def long_queue(waiting: int, rows: int = 1) -> Driver:
    """`h0`, `h1` … have all rows, and that many wait behind them: `r1`, `r2` …; all listen."""
    limits = CoreSettings(max_queue=9999, max_queue_per_client=9999)
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=rows))], limits)
    driver.load()
    driver.come_up()
    driver.is_checked = False  # quadratic in the line
    for number in range(rows):
        driver.ask(f"h{number}", notices=True)
    for number in range(1, waiting + 1):
        driver.ask(f"r{number}", notices=True)
    driver.core.check_invariants()
    return driver


def places(driver: Driver) -> dict[str, int]:
    """The place of each request that learned its place from the latest event."""
    told = [n for n in driver.sent(Notice) if n.kind is NoticeKind.QUEUED]
    found: dict[str, int] = {notice.id: notice.detail["position"] for notice in told}
    assert len(found) == len(told), "one notice for each"
    return found


def true_places(driver: Driver) -> dict[str, int]:
    return {request.id: place for place, request in enumerate(driver.model().queue, 1)}


def test_a_departure_tells_few_however_many_wait() -> None:
    driver = long_queue(WAITING)
    told: Counter[str] = Counter()
    latest = {f"r{number}": number for number in range(1, WAITING + 1)}
    for key in range(1, WAITING + 1):
        driver.token(key, finish=FinishReason.STOP)
        now = places(driver)
        assert len(now) <= MOST_PER_DEPARTURE
        told.update(now.keys())
        latest.update(now)
        truth = true_places(driver)
        for id, place in truth.items():
            assert latest[id] >= place, "nobody believes to be further ahead than it is"
            assert latest[id] == place if place <= NEAR else latest[id] < 2 * place
    assert max(told.values()) <= MOST_PER_DEPARTURE


def test_who_comes_is_told_its_exact_place_at_once() -> None:
    driver = long_queue(WAITING)
    driver.ask("last", notices=True)
    assert places(driver) == {"last": WAITING + 1}
    driver.cancel("last")
    assert places(driver) == {}, "nobody stood behind it"


def test_what_changes_nothing_tells_nobody() -> None:
    driver = long_queue(100)
    driver.beat()
    driver.token(1)
    assert driver.sent(Notice) == []


def test_several_that_leave_at_once_make_nobody_miss_its_news() -> None:
    driver = long_queue(200, rows=16)
    latest = {f"r{number}": number for number in range(1, 201)}
    for first in range(1, 160, 16):
        driver.token(*range(first, first + 16), finish=FinishReason.STOP)
        now = places(driver)
        assert all(true_places(driver)[id] == place for id, place in now.items())
        assert len(now) <= 16 * MOST_PER_DEPARTURE
        latest.update(now)
        for id, place in true_places(driver).items():
            assert place <= latest[id] < 2 * max(place, NEAR)


def test_a_client_that_leaves_from_the_middle_moves_up_who_stood_behind() -> None:
    driver = long_queue(40)
    for number in range(10, 30):
        driver.cancel(f"r{number}")
    driver.cancel("r9")
    assert places(driver) == {"r37": 16}, "those before it stand where they stood"


def test_after_a_crash_everybody_hears_of_its_place_again() -> None:
    driver = long_queue(50, rows=2)
    driver.exit()
    told = places(driver)
    assert told["h0"] == 1
    assert told == true_places(driver)
    assert {n.detail["reason"] for n in driver.sent(Notice) if n.kind == "queued"} == {"load"}


def test_who_had_been_dispatched_hears_of_each_change_however_many_there_are() -> None:
    driver = long_queue(0, rows=2 * NEAR)
    driver.exit()
    driver.cancel("h0")
    assert places(driver) == {f"h{place}": place for place in range(1, 2 * NEAR)}


def test_who_waits_again_where_it_had_waited_before_is_told_so_again() -> None:
    driver = Driver()
    driver.ask("a", notices=True)
    assert places(driver) == {"a": 1}
    driver.come_up()
    driver.exit()
    assert places(driver) == {"a": 1}


def test_when_the_last_listener_has_ended_nobody_s_place_is_looked_for() -> None:
    driver = long_queue(2)
    for key in range(1, 4):
        driver.token(key, finish=FinishReason.STOP)
    driver.core.check_invariants()
    assert not driver.core.ledger.has_listeners


def test_the_work_of_a_departure_does_not_grow_with_the_line() -> None:
    driver = long_queue(FARTHEST_TOLD + 500)
    driver.token(1, finish=FinishReason.STOP)
    assert max(places(driver).values()) == FARTHEST_TOLD
    assert len(places(driver)) == MOST_PER_DEPARTURE


# ---------------------------------------------------------------- why it waits, and the load


def test_the_reason_is_told_and_each_change_of_it() -> None:
    driver = Driver()
    driver.ask("a", notices=True)
    [queued, _] = driver.sent(Notice)
    assert queued.detail == {"position": 1, "reason": "load", "since_s": 0.0}
    driver.spawned()
    driver.exit()
    assert driver.state() is State.LOADING, "the first crash costs no delay"
    driver.spawned()
    driver.exit()
    [notice] = driver.sent(Notice)
    assert notice.detail == {"position": 1, "reason": "backoff", "since_s": 0.0}
    driver.pass_time(2.0)
    assert [n.detail["reason"] for n in driver.sent(Notice) if n.kind == "queued"] == ["load"]
    driver.ask("b")
    driver.ask("c", notices=True)
    driver.come_up()
    [notice] = driver.sent(Notice)
    assert (notice.id, notice.detail) == ("c", {"position": 1, "reason": "rows", "since_s": 0.0})
    driver.restart()
    [notice] = driver.sent(Notice)
    assert notice.detail == {"position": 1, "reason": "restart", "since_s": 0.0}


def test_a_suspect_that_waits_for_its_turn_is_told_so() -> None:
    driver = Driver(settings=CoreSettings(max_queue=99, max_queue_per_client=99))
    driver.load()
    driver.come_up()
    driver.serve("a", "b", notices=True)
    for _ in range(2):
        driver.exit(signal="SIGSEGV")
        driver.pass_time(5.0)
        driver.come_up()
    [running] = driver.row()["running"]
    [other] = {"a", "b"} - {running}
    told = [n for n in driver.sent(Notice) if n.kind == "queued"]
    assert [(n.id, n.detail) for n in told] == [
        (other, {"position": 1, "reason": "turn", "since_s": 5.0})
    ]
    driver.ask("innocent", body=b"innocent", notices=True)
    told = [n for n in driver.sent(Notice) if n.kind == "queued"]
    assert {n.id: n.detail["reason"] for n in told} == {"innocent": "turn"}


def test_the_load_is_told_to_the_first_at_each_step_and_to_all_at_each_tenth() -> None:
    driver = Driver(settings=CoreSettings(max_queue=99, max_queue_per_client=99))
    for number in range(50):
        driver.ask(f"r{number}", notices=True)
    driver.spawned()
    driver.hello()
    counts = []
    for hundredth in range(1, 100):
        driver.progress(hundredth / 100)
        told = [n for n in driver.sent(Notice, ALICE) if n.kind is NoticeKind.LOADING]
        assert {n.detail["fraction"] for n in told} == {hundredth / 100}
        assert not [n for n in driver.sent(Notice) if n.kind is NoticeKind.QUEUED]
        counts.append(len(told))
    assert Counter(counts) == {50: 10, NEAR: 89}
    assert counts[0] == 50, "a new phase"


def test_who_comes_during_a_load_hears_at_once_how_far_it_is() -> None:
    driver = Driver(settings=CoreSettings(max_queue=99, max_queue_per_client=99))
    for number in range(20):
        driver.ask(f"r{number}", notices=True)
    driver.spawned()
    driver.hello()
    driver.progress(0.55)
    driver.ask("late", notices=True)
    assert [n.kind for n in driver.sent(Notice)] == ["queued", "loading"]
    assert driver.sent(Notice)[1].detail["fraction"] == 0.55
