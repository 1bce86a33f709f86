"""The measures in virtual time: the engine loses nothing, the orders are what they are called, and
ours keeps a few seeds of each claim that first come, first served does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxsup.protocol.states import Priority

from bench.sharing.peers import ByClass, FirstCome, Job, Order, RoundRobin
from bench.sharing.played import STEP_S, Ours, Peer, Play, Server, play
from bench.sharing.virtual_order import (
    DRR,
    FCFS,
    OURS,
    TENFOLD,
    WEIGHED,
    bounds_of,
    deviation,
    jain,
    received,
)
from bench.sharing.virtual_waits import CLASSES, played

SERVERS: dict[str, Callable[[], Server]] = {
    OURS: lambda: Ours(2, {"a": 1.0, "b": 1.0}, aging_s=60.0),
    DRR: lambda: Peer(RoundRobin(quantum_s=1.0, weights={}), 2),
    FCFS: lambda: Peer(FirstCome(), 2),
}


def job(number: int, account: str, cost_s: float = 1.0, at: float = 0.0) -> Job:
    return Job(number=number, account=account, cost_s=cost_s, at=at)


def drain(order: Order) -> list[int]:
    numbers = []
    while (next_one := order.take()) is not None:
        numbers.append(next_one.number)
        order.charge(next_one.account, next_one.cost_s)
    return numbers


@pytest.mark.parametrize("server", SERVERS)
def test_every_server_serves_everybody_once_and_wastes_no_step(server: str) -> None:
    jobs = [job(1 + n, "ab"[n % 2], 0.5 + n / 10, at=n / 4) for n in range(12)]
    seen = play(SERVERS[server](), jobs)
    most = 0

    def look(now: Play) -> None:
        nonlocal most
        most = max(most, len(now.running))

    seen.until(1 + sum(one.cost_s + STEP_S for one in jobs), look)
    assert seen.is_over
    assert most == 2
    assert sorted(one.number for one in seen.began) == [one.number for one in jobs]
    for account in "ab":
        wanted_s = sum(one.cost_s for one in jobs if one.account == account)
        assert wanted_s <= seen.received_s[account] <= wanted_s + 6 * STEP_S


def test_a_round_robin_follows_weights_and_gives_no_credit_for_being_away() -> None:
    order = RoundRobin(quantum_s=1.0, weights={"b": 2.0})
    for number in range(9):
        order.add(job(number, "abb"[number % 3]))
    assert drain(order)[:6] == [0, 1, 2, 3, 4, 5]
    order.add(job(20, "a", 0.1))
    assert drain(order) == [20]
    for number in range(30, 34):
        order.add(job(number, "ab"[number % 2]))
    assert drain(order)[:3] == [30, 31, 33], "what a left of its turn is lost"


def test_first_come_is_first_served_whoever_asks() -> None:
    order = FirstCome()
    for number in range(6):
        order.add(job(number, "aab"[number % 3]))
    assert drain(order) == [0, 1, 2, 3, 4, 5]


def test_classes_without_aging_serve_the_highest_first() -> None:
    order = ByClass()
    for number, priority in enumerate((Priority.BATCH, Priority.NORMAL, Priority.INTERACTIVE)):
        order.add(Job(number=number, account="a", cost_s=1.0, at=0.0, priority=priority))
    assert drain(order) == [2, 1, 0]


def test_jains_index_is_one_for_equals_and_a_half_if_one_of_two_has_all() -> None:
    assert jain([3.0, 3.0]) == 1.0
    assert jain([3.0, 0.0]) == 0.5


def test_ours_keeps_the_bound_and_first_come_first_served_does_not() -> None:
    gaps = [bounds_of(seed) for seed in (3, 4, 5, 6)]
    assert max(abs(part) for gap in gaps for part in gap[OURS]) <= 1
    assert max(abs(part) for gap in gaps for part in gap[FCFS]) > 1


def test_ours_gives_shares_by_weight_and_first_come_first_served_by_what_is_asked_for() -> None:
    shares, even = received(WEIGHED, 1), received(TENFOLD, 1)
    assert deviation(WEIGHED, shares[OURS]) <= 0.05
    assert deviation(WEIGHED, shares[FCFS]) > 1
    assert jain(list(even[OURS].values())) >= 0.95
    assert jain(list(even[FCFS].values())) < 0.7


def test_nobody_starves_below_a_flood_unless_nobody_ages() -> None:
    runs = [played(seed) for seed in range(1, 9)]
    assert sum(run[OURS][0] for run in runs) == 0
    assert sum(run[CLASSES][0] for run in runs) > 0
