"""Test the queue of a model: order, places, notices, names and deadlines."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import (
    CancelRequest,
    Done,
    Failed,
    Notice,
    Reply,
    RequestsQuery,
)
from mlxsup.protocol.ids import ModelName, RequestId, RequestKey
from mlxsup.protocol.states import FinishReason, NoticeKind, Priority
from mlxsup.protocol.worker_messages import CancelRow, PrefillProgress, Step
from mlxsup.supervisor.core.accounting import Account
from mlxsup.supervisor.core.actions import Deadlines
from mlxsup.supervisor.core.poison import Digest
from mlxsup.supervisor.core.requests import FARTHEST_TOLD, NEAR, Ledger, Queue, Request
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings

from support.core.driver import LAUNCH, Driver, entry
from support.core.looks import ALICE, BOB
from support.core.scripts import play

# The order of a queue

INTERACTIVE, NORMAL, BATCH = Priority
AGING_S = 60.0


def request(key: int, account: str = "a", priority: Priority = NORMAL) -> Request:
    return Request(
        key=RequestKey(key), connection=ALICE, id=RequestId(f"r{key}"), account=Account(account),
        model=ModelName("m"), body=b"", digest=Digest(b"d"), priority=priority,
    )  # fmt: skip


def queue(aging_s: float = AGING_S, **clients: ClientSettings) -> Queue:
    return Queue(Ledger(CoreSettings(aging_s=aging_s, clients=clients), Deadlines()))


def joined(line: Queue, *requests: Request, now: float = 0.0) -> Queue:
    for one in requests:
        line.join(one, now)
    return line


def order(line: Queue) -> list[int]:
    return [one.key for one in line]


def test_classes_come_one_after_the_other() -> None:
    line = joined(queue(), request(1, priority=BATCH), request(2), request(3, "b", INTERACTIVE))
    assert order(line) == [3, 2, 1]
    assert line.per_class == {INTERACTIVE: 1, NORMAL: 1, BATCH: 1}
    assert line.first() is next(iter(line))


def test_rejoined_requests_come_first_in_their_class() -> None:
    line = joined(queue(), *(request(key) for key in (5, 6, 7)), request(8, priority=INTERACTIVE))
    line.rejoin([request(4), request(2)], 0.0)
    line.rejoin([request(3), request(1, priority=BATCH)], 0.0)
    assert order(line) == [8, 2, 3, 4, 5, 6, 7, 1]
    assert (len(line), RequestKey(2) in line, RequestKey(9) in line) == (8, True, False)
    requests = {one.key: one for one in line}
    for key in (3, 6, 8):
        line.leave(requests[RequestKey(key)])
    assert order(line) == [2, 4, 5, 7, 1]


def test_what_is_received_counts_by_weight() -> None:
    line = joined(queue(a=ClientSettings(weight=4.0)), *(request(key, "a") for key in range(1, 6)))
    line.counters.learn(1.0)
    joined(line, request(6, "b"), request(7, "b"))
    assert order(line) == [1, 6, 2, 3, 4, 5, 7], "four of a for each of b"
    line.counters.charge(Account("a"), 2.0)
    line.counters.charge(Account("b"), 0.5)
    assert line.first() == request_of(line, 1), "both stand at half a second"


def request_of(line: Queue, key: int) -> Request:
    return next(one for one in line if one.key == key)


@pytest.mark.parametrize("aging_s", [AGING_S, 0.0])
def test_a_request_moves_up_one_class_each_time_it_has_waited_that_long(aging_s: float) -> None:
    line = joined(queue(aging_s), request(1, priority=BATCH), request(2, priority=BATCH))
    stands = []
    for now in (59.9, 60.0, 119.9, 120.0, 500.0):
        line.age(now)
        stands.append(request_of(line, 1).waiting.standing)
    moved = [BATCH, NORMAL, NORMAL, INTERACTIVE, INTERACTIVE]
    assert stands == (moved if aging_s else [BATCH] * 5)
    assert request_of(line, 1).priority is BATCH
    assert line.ages_at is None, "there is no higher class, or no ageing"
    late = joined(queue(aging_s), request(1, priority=BATCH))
    late.age(1000.0)
    assert request_of(late, 1).waiting.standing is stands[-1], "steps that were missed are made up"


def test_another_limit_counts_for_the_wait_so_far() -> None:
    line = joined(queue(), request(1, priority=BATCH), request(2, priority=BATCH))
    line.counters.terms.settings = CoreSettings(aging_s=10.0)
    line.age(15.0)
    assert [one.waiting.standing for one in line] == [NORMAL, NORMAL]
    assert line.ages_at == 20.0
    line.counters.terms.settings = CoreSettings(aging_s=0.0)
    line.age(16.0)
    assert [one.waiting.standing for one in line] == [BATCH, BATCH]
    assert line.ages_at is None


def test_another_class_by_hand_counts_the_wait_afresh() -> None:
    line = joined(queue(), request(1), request(2))
    line.age(119.0)
    line.prioritize(request_of(line, 2), BATCH, 119.0)
    assert order(line) == [1, 2]
    assert line.per_class == {INTERACTIVE: 1, NORMAL: 0, BATCH: 1}
    assert line.ages_at == 179.0
    line.prioritize(request_of(line, 2), INTERACTIVE, 120.0)
    assert [one.waiting.standing for one in line] == [INTERACTIVE, INTERACTIVE]


def test_places_are_news_near_the_front_for_newcomers_and_at_powers_of_two() -> None:
    assert (NEAR, FARTHEST_TOLD) == (8, 1024)
    line = joined(queue(), *(request(key) for key in range(1, 41)))
    requests = {one.key: one for one in line}
    near = {key: key for key in range(1, 9)}
    assert line.take_news() == {key: key for key in range(1, 41)}, "all have come"
    assert line.take_news() == near, "nothing has changed"
    line.leave(requests[RequestKey(20)])
    assert line.take_news() == {**near, 33: 32}
    for key in (1, 2, 3):
        line.leave(requests[RequestKey(key)])
    joined(line, request(99))
    near = {key: key - 3 for key in range(4, 12)}
    assert line.take_news() == {**near, 17: 14, 18: 15, 19: 16, 34: 30, 35: 31, 36: 32, 99: 37}
    line.leave(requests[RequestKey(10)])
    joined(line, request(100))
    line.skip_news()
    assert set(line.take_news()) == set(order(line)[:8]), "skipped"


# Notices of places

MOST_PER_DEPARTURE = 15
"""The first eight, and those that come to place 16, 32, 64, 128, 256, 512 or 1,024."""


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


@pytest.mark.parametrize("rows", [1, 16])
def test_departures_tell_few_however_many_wait(rows: int) -> None:
    driver = long_queue(128, rows)
    latest = {f"r{number}": number for number in range(1, 129)}
    told: Counter[str] = Counter()
    for first in range(1, 129, rows):
        driver.token(*range(first, first + rows), finish=FinishReason.STOP)
        now = places(driver)
        told.update(now.keys())
        latest.update(now)
        truth = {request.id: place for place, request in enumerate(driver.model().queue, 1)}
        assert all(truth[RequestId(id)] == place for id, place in now.items())
        assert len(now) <= rows * MOST_PER_DEPARTURE
        for id, place in truth.items():
            assert place <= latest[id] < 2 * max(place, NEAR), "no request believes to be ahead"
            assert place > NEAR or latest[id] == place
    assert max(told.values()) <= MOST_PER_DEPARTURE
    driver.ask("next", notices=True)
    driver.ask("last", notices=True)
    assert places(driver) == {"last": 2}


def test_departure_from_the_middle_moves_up_those_behind() -> None:
    driver = long_queue(40)
    for number in range(10, 30):
        driver.cancel(f"r{number}")
    driver.cancel("r9")
    assert places(driver) == {"r37": 16}, "those before it stand where they stood"


def test_interrupted_requests_hear_of_each_change() -> None:
    driver = long_queue(0, rows=2 * NEAR)
    driver.exit()
    driver.cancel("h0")
    assert places(driver) == {f"h{place}": place for place in range(1, 2 * NEAR)}


def test_an_interrupted_request_hears_again_what_it_has_heard_before() -> None:
    driver = play(Driver(), "load")
    driver.ask(notices=True)
    before = [one.kind for one in driver.sent(Notice)]
    play(driver, "up; accept 1; token 1")
    driver.exit()
    heard = [one.kind for one in driver.sent(Notice)]
    assert heard == [NoticeKind.INTERRUPTED, *before]


def test_the_reason_is_told_and_each_change_of_it() -> None:
    driver = Driver()
    told = []
    for script in (
        "ask a notices=True",
        "spawned; exit -> LOADING; spawned; exit",  # the first crash costs no delay
        "wait 2",
        "ask b; ask c notices=True; up",
        "restart",
    ):
        play(driver, script)
        queued = [one for one in driver.sent(Notice) if one.kind is NoticeKind.QUEUED]
        told += [(one.id, one.detail["position"], one.detail["reason"]) for one in queued]
    assert told == [
        ("a", 1, "load"),
        ("a", 1, "backoff"),
        ("a", 1, "load"),
        ("c", 1, "rows"),
        ("c", 1, "restart"),
    ]


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


def test_newcomer_during_a_load_hears_its_progress() -> None:
    driver = Driver(settings=CoreSettings(max_queue=99, max_queue_per_client=99))
    for number in range(20):
        driver.ask(f"r{number}", notices=True)
    driver.spawned()
    driver.hello()
    driver.progress(0.55)
    driver.ask("late", notices=True)
    assert [n.kind for n in driver.sent(Notice)] == ["queued", "loading"]
    assert driver.sent(Notice)[1].detail["fraction"] == 0.55


# Names of open requests


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


def test_of_several_with_one_id_only_the_number_names_one() -> None:
    driver = waiting_driver()
    driver.ask("a", connection=BOB)
    driver.prioritize("a", BATCH)
    [failed] = driver.sent(Failed)
    assert failed.error.message == (
        "2 open requests have the id 'a'; use the number of one;"
        " open: a (#2, waits for m), a (#4, waits for m)"
    )
    assert failed.error.detail == {
        "parameter": "request", "known": ["a", "a"], "numbers": ["#2", "#4"],
    }  # fmt: skip
    driver.prioritize("#4", INTERACTIVE)
    assert [shown["number"] for shown in driver.row()["line"]] == ["#4", "#2", "#3"]


@pytest.mark.parametrize(
    ("count", "ending"),
    [
        (8, "r7 (#8, waits for m)"),
        (9, "r7 (#8, waits for m) and 1 more; see `mlxsup requests`"),
        (12, "r7 (#8, waits for m) and 4 more; see `mlxsup requests`"),
    ],
)
def test_many_open_requests_are_not_all_listed(count: int, ending: str) -> None:
    driver = up()
    for number in range(count):
        driver.ask(f"r{number}")
    driver.prioritize("z", BATCH)
    [failed] = driver.sent(Failed)
    assert failed.error.message.endswith(ending)
    assert len(failed.error.detail["known"]) == 8


# `requests` and `cancel`

ASKING = RequestId("q")


def requests(driver: Driver, client: str | None = None) -> dict[str, Any]:
    """What `requests` is answered."""
    driver.say(RequestsQuery(id=ASKING, client=client), BOB)
    [reply] = driver.sent(Reply, BOB)
    return reply.value


def seen(driver: Driver, client: str | None = None) -> dict[str, dict[str, Any]]:
    """Each request that it lists, by its id."""
    return {one["id"]: one for one in requests(driver, client)["requests"]}


def ready_models(models: int = 1, settings: CoreSettings | None = None) -> Driver:
    """Models with two rows each, READY."""
    names = [f"m{number}" if number else "m" for number in range(models)]
    driver = Driver([entry(name) for name in names], settings)
    for name in names:
        driver.load(name)
        driver.come_up(name)
    return driver


def read(driver: Driver, key: int, done: int, total: int) -> None:
    """A step that has read so much of a prompt."""
    progress = PrefillProgress(key=RequestKey(key), done=done, total=total, computed=done)
    driver.worker(Step(step=1, prefill=[progress], took_s=1.0, reads_on=True))


def test_requests_lists_each_stage() -> None:
    driver = ready_models()
    answering, reading = driver.serve("answering", "reading")
    driver.serve("next", priority=Priority.NORMAL)
    driver.serve("last", priority=Priority.BATCH)
    driver.accept(answering)
    driver.accept(reading)
    driver.token(answering)
    driver.now += 2.0
    driver.token(answering)
    read(driver, reading, 1, 3)
    driver.pause("last")
    listed = seen(driver)
    assert list(listed) == ["answering", "reading", "last", "next"], "rows, paused ones, the line"
    doing = {id: (one["state"], one["place"], one["prefill"]) for id, one in listed.items()}
    assert doing == {
        "answering": ("answering", None, None),
        "reading": ("reading", None, 1 / 3),
        "last": ("paused", None, None),
        "next": ("waiting", 1, None),
    }
    assert listed["next"]["reason"] == "rows"
    assert (listed["answering"]["tokens_sent"], listed["answering"]["tokens_per_s"]) == (2, 0.5)
    assert (listed["reading"]["prompt_tokens"], listed["next"]["prompt_tokens"]) == (3, None)
    # A third of the prompt took two seconds.
    assert round(listed["reading"]["expected_s"], 6) == 4.0
    assert {one["model"] for one in listed.values()} == {"m"}


def test_requests_shows_the_limit_of_a_client() -> None:
    terms = {"team": ClientSettings(max_running=1)}
    driver = ready_models(settings=CoreSettings(clients=terms))
    # So that it is known what a request costs.
    play(driver, "serve known; compute 2.0 1; token 1 finish=stop; serve first second client=team")
    second = seen(driver)["second"]
    assert (second["reason"], second["expected_s"]) == ("limit", None)


def test_cancelling_ends_the_request_of_another_connection_and_answers_at_once_D13() -> None:
    driver = ready_models()
    running, _ = driver.serve("running", "other")
    driver.serve("waiting")
    driver.accept(running)
    driver.token(running)
    cancelled = {}
    for id in ("waiting", f"#{running}"):
        driver.say(CancelRequest(id=ASKING, request=RequestId(id)), BOB)
        [reply] = driver.sent(Reply, BOB)
        cancelled[id] = reply.value
        ended = driver.sent(Done, ALICE)
        assert [(done.id, done.finish_reason) for done in ended] == [
            (reply.value["request"], FinishReason.CANCELLED)
        ]
    assert cancelled == {
        "waiting": {"request": "waiting", "number": "#3", "model": "m", "tokens_sent": 0},
        "#1": {"request": "running", "number": "#1", "model": "m", "tokens_sent": 1},
    }
    assert [message.key for message in driver.told(CancelRow)] == [running]
    assert list(seen(driver)) == ["other"]


# Deadlines

A, B = ModelName("a"), ModelName("b")


def test_the_latest_time_of_a_subject_counts_whether_earlier_later_or_none() -> None:
    deadlines = Deadlines()
    deadlines.set(A, 2.0)
    deadlines.set(A, 5.0)
    assert (deadlines.earliest(), deadlines.take_due(4.0)) == (5.0, [])
    deadlines.set(A, 1.0)
    assert deadlines.take_due(4.0) == [A]
    assert deadlines.take_due(9.0) == [], "once"
    deadlines.set(A, 10.0)
    deadlines.set(A, None)
    deadlines.set(B, None)
    assert (deadlines.earliest(), deadlines.take_due(1e9), len(deadlines)) == (None, [], 0)
    deadlines.set(A, 10.0)
    for _ in range(2):
        assert deadlines.take_due(10.0) == [A], "set anew, to the same time as before"
        deadlines.set(A, 10.0)


def test_times_that_are_put_off_again_and_again_are_forgotten() -> None:
    deadlines = Deadlines()
    for number in range(64):
        deadlines.set(A, float(number))
    assert deadlines.held == 64, "few enough to be left alone"
    deadlines.set(A, 64.0)
    assert deadlines.held == 1
    assert deadlines.take_due(1e9) == [A]
