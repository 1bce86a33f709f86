"""The order of a model's queue: classes, accounts, ages, and whose place is news."""

from __future__ import annotations

from mlxsup.protocol.ids import ModelName, RequestId, RequestKey
from mlxsup.protocol.states import Priority
from mlxsup.supervisor.core.health.blame import Digest
from mlxsup.supervisor.core.requests.ledger import Request
from mlxsup.supervisor.core.requests.queue import FARTHEST_TOLD, NEAR, Queue
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings
from mlxsup.supervisor.core.sharing.accounts import Account, Terms
from mlxsup.supervisor.core.sharing.counters import Counters

from support.core_looks import ALICE

INTERACTIVE, NORMAL, BATCH = Priority
AGING_S = 60.0


def request(key: int, account: str = "a", priority: Priority = NORMAL) -> Request:
    return Request(
        key=RequestKey(key), connection=ALICE, id=RequestId(f"r{key}"), account=Account(account),
        model=ModelName("m"), body=b"", digest=Digest(b"d"), arrived_at=0.0, priority=priority,
    )  # fmt: skip


def queue(aging_s: float = AGING_S, **clients: ClientSettings) -> Queue:
    return Queue(Counters(Terms(CoreSettings(aging_s=aging_s, clients=clients))))


def joined(line: Queue, *requests: Request, now: float = 0.0) -> Queue:
    for one in requests:
        line.join(one, now)
    return line


def order(line: Queue) -> list[int]:
    return [one.key for one in line]


def anybody(account: Account) -> bool:
    return True


# ---------------------------------------------------------------- the rules, one by one


def test_classes_come_one_after_the_other() -> None:
    line = joined(queue(), request(1, priority=BATCH), request(2), request(3, "b", INTERACTIVE))
    assert order(line) == [3, 2, 1]
    assert line.per_class == {INTERACTIVE: 1, NORMAL: 1, BATCH: 1}
    assert line.first(anybody) is next(iter(line))


def test_who_was_dispatched_before_comes_first_in_its_class_and_the_oldest_first_of_all() -> None:
    line = joined(queue(), *(request(key) for key in (5, 6, 7)), request(8, priority=INTERACTIVE))
    line.rejoin([request(4), request(2)], 0.0)
    line.rejoin([request(3), request(1, priority=BATCH)], 0.0)
    assert order(line) == [8, 2, 3, 4, 5, 6, 7, 1]
    assert (len(line), RequestKey(2) in line, RequestKey(9) in line) == (8, True, False)
    requests = {one.key: one for one in line}
    for key in (3, 6, 8):
        line.leave(requests[RequestKey(key)])
    assert order(line) == [2, 4, 5, 7, 1]


def test_the_account_that_has_received_least_is_next_and_equals_come_by_arrival() -> None:
    line = joined(queue(), request(1, "a"), request(2, "b"), request(3, "a"), request(4, "b"))
    line.counters.learn(1.0)
    assert order(line) == [1, 2, 3, 4], "turns: each one is expected to cost a second"
    line.counters.charge(Account("a"), 0.5)
    assert order(line) == [2, 1, 4, 3]
    line.counters.charge(Account("a"), 4.5)
    assert order(line) == [2, 4, 1, 3]


def test_what_is_received_counts_by_weight() -> None:
    line = joined(queue(a=ClientSettings(weight=4.0)), *(request(key, "a") for key in range(1, 6)))
    line.counters.learn(1.0)
    joined(line, request(6, "b"), request(7, "b"))
    assert order(line) == [1, 6, 2, 3, 4, 5, 7], "four of a for each of b"
    line.counters.charge(Account("a"), 2.0)
    line.counters.charge(Account("b"), 0.5)
    assert line.first(anybody) == request_of(line, 1), "both stand at half a second"


def request_of(line: Queue, key: int) -> Request:
    return next(one for one in line if one.key == key)


def test_an_account_that_may_not_run_more_holds_nobody_up() -> None:
    line = joined(queue(), *(request(key, "a") for key in (1, 2)), request(3, "b", BATCH))
    line.rejoin([request(4, "a")], 0.0)
    first = line.first(lambda account: account != "a")
    assert first is not None
    assert first.key == 3
    assert line.first(lambda account: False) is None
    assert line.first(anybody) == request_of(line, 4), "and keeps its place"


# ---------------------------------------------------------------- who has waited long


def test_a_request_moves_up_one_class_each_time_it_has_waited_that_long() -> None:
    line = joined(queue(), request(1, priority=BATCH))
    stands = []
    for now in (59.9, 60.0, 119.9, 120.0, 500.0):
        line.age(now)
        stands.append(request_of(line, 1).standing)
    assert stands == [BATCH, NORMAL, NORMAL, INTERACTIVE, INTERACTIVE]
    assert request_of(line, 1).priority is BATCH
    assert line.ages_at is None, "there is no higher class"


def test_several_steps_that_were_missed_are_made_up_for() -> None:
    line = joined(queue(), request(1, priority=BATCH))
    line.age(1000.0)
    assert request_of(line, 1).standing is INTERACTIVE


def test_waits_add_up_and_the_time_between_them_does_not() -> None:
    one = request(1, priority=BATCH)
    line = joined(queue(), one)
    line.age(40.0)
    line.leave(one)
    one.waited_s += 40.0
    line.rejoin([one], 1000.0)
    assert (one.standing, line.ages_at) == (BATCH, 1020.0)
    line.age(1020.0)
    assert one.standing is NORMAL
    line.leave(one)
    line.rejoin([one], 2000.0)
    assert (one.standing, line.ages_at) == (NORMAL, 2060.0)


def test_who_moves_up_comes_among_the_new_ones_there_as_its_account_and_arrival_say() -> None:
    line = joined(queue(), request(1, "a", BATCH), request(2, "b", BATCH))
    joined(line, request(3, "a"), request(4, "b"), now=59.0)
    line.counters.charge(Account("b"), 1.0)
    line.age(60.0)
    assert order(line) == [1, 2, 3, 4]


def test_without_aging_nobody_moves_up() -> None:
    line = joined(queue(0.0), request(1, priority=BATCH))
    assert line.ages_at is None
    line.age(1e6)
    assert request_of(line, 1).standing is BATCH


def test_another_limit_counts_for_the_wait_so_far() -> None:
    line = joined(queue(), request(1, priority=BATCH), request(2, priority=BATCH))
    line.counters.terms.change(CoreSettings(aging_s=10.0))
    line.age(15.0)
    assert [one.standing for one in line] == [NORMAL, NORMAL]
    assert line.ages_at == 20.0
    line.counters.terms.change(CoreSettings(aging_s=0.0))
    line.age(16.0)
    assert [one.standing for one in line] == [BATCH, BATCH]
    assert line.ages_at is None


def test_another_class_by_hand_counts_the_wait_afresh() -> None:
    line = joined(queue(), request(1), request(2))
    line.age(119.0)
    line.prioritize(request_of(line, 2), BATCH, 119.0)
    assert order(line) == [1, 2]
    assert line.per_class == {INTERACTIVE: 1, NORMAL: 0, BATCH: 1}
    assert line.ages_at == 179.0
    line.prioritize(request_of(line, 2), INTERACTIVE, 120.0)
    assert [one.standing for one in line] == [INTERACTIVE, INTERACTIVE]


# ---------------------------------------------------------------- places


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


def test_who_comes_before_others_learns_its_place_and_they_learn_theirs_in_time() -> None:
    line = joined(queue(), *(request(key, priority=BATCH) for key in range(1, 17)))
    line.take_news()
    joined(line, request(20, "b", INTERACTIVE))
    news = line.take_news()
    assert news == {20: 1, **{key: key + 1 for key in range(1, 8)}}, "those near the front"
    line.leave(request_of(line, 1))
    assert RequestKey(16) not in line.take_news(), "it is sixteenth again"
