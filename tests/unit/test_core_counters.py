"""The counters of a model's accounts: who joins where, what is remembered, and what follows."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.protocol.ids import ModelName, RequestId, RequestKey
from mlxsup.protocol.states import Priority
from mlxsup.supervisor.core.health.blame import Digest
from mlxsup.supervisor.core.requests.ledger import Request
from mlxsup.supervisor.core.requests.queue import Queue
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings
from mlxsup.supervisor.core.sharing.accounts import Account, Terms
from mlxsup.supervisor.core.sharing.counters import (
    MAX_ACCOUNTS,
    UNKNOWN_COST_S,
    Counters,
)

from support.core_looks import ALICE

A, B, C = map(Account, "abc")


def counters(aging_s: float = 0.0, **weights: float) -> Counters:
    clients = {name: ClientSettings(weight=weight) for name, weight in weights.items()}
    return Counters(Terms(CoreSettings(aging_s=aging_s, clients=clients)))


# ---------------------------------------------------------------- joining and leaving


def test_who_joins_begins_at_the_smallest_counter_of_those_who_wait_or_run() -> None:
    of = counters()
    of.join(A, ())
    of.charge(A, 5.0)
    of.join(B, {A})
    assert (of.of(A), of.of(B)) == (5.0, 5.0)
    of.charge(B, 3.0)
    of.join(C, {A, B})
    assert of.of(C) == 5.0


def test_on_an_empty_line_who_joins_begins_where_the_last_dispatched_account_stands() -> None:
    of = counters()
    of.join(A, ())
    of.join(B, {A})
    of.dispatched(B)
    of.dispatched(A)
    of.charge(B, 9.0)
    of.charge(A, 2.0)
    of.join(C, ())
    assert of.of(C) == 2.0


def test_debt_outlives_an_absence_and_credit_does_not() -> None:
    of = counters()
    of.join(A, ())
    of.join(B, {A})
    of.charge(A, 10.0)
    of.charge(B, 4.0)
    of.join(A, {B})
    assert of.of(A) == 10.0, "6 seconds above the floor"
    of.charge(A, 2.0)
    of.join(B, {A})
    assert of.of(B) == 12.0, "idleness earns nothing"


def test_a_weight_divides_and_a_changed_weight_divides_what_comes_after_it() -> None:
    of = counters(a=4.0)
    of.charge(A, 8.0)
    of.charge(B, 8.0)
    assert (of.of(A), of.of(B)) == (2.0, 8.0)
    of.terms.change(CoreSettings(clients={"a": ClientSettings(weight=0.5)}))
    of.charge(A, 1.0)
    assert of.of(A) == 4.0


def test_of_many_accounts_that_left_the_least_debt_is_forgotten_first() -> None:
    of = counters()
    for number in range(MAX_ACCOUNTS + 3):
        account = Account(f"n{number}")
        of.join(account, {A})
        of.charge(account, float(number))
    of.join(B, {A})
    assert len(of) == MAX_ACCOUNTS - MAX_ACCOUNTS // 8 + 2, "an eighth is forgotten at once"
    assert of.of(Account("n1")) == 0.0, "forgotten"
    assert of.of(Account(f"n{MAX_ACCOUNTS}")) == MAX_ACCOUNTS
    for number in range(3 * MAX_ACCOUNTS):
        of.join(Account(f"m{number}"), {A})
        assert len(of) <= MAX_ACCOUNTS + 3


def test_who_waits_is_never_forgotten_however_many_there_are() -> None:
    of = counters()
    present: set[Account] = set()
    for number in range(MAX_ACCOUNTS + 600):
        account = Account(f"n{number}")
        of.join(account, present)
        present.add(account)
        of.charge(account, 1.0)
    assert all(of.of(account) >= 1.0 for account in present)


def test_what_a_request_is_expected_to_cost_follows_what_others_have_cost() -> None:
    of = counters(a=2.0)
    assert (of.cost_s, of.expected(B)) == (None, UNKNOWN_COST_S)
    of.learn(10.0)
    assert (of.cost_s, of.expected(A), of.expected(B)) == (10.0, 5.0, 10.0)
    of.learn(5.0)
    assert of.cost_s == 9.0


# ---------------------------------------------------------------- an engine in virtual time


@dataclass(slots=True, kw_only=True)
class Job:
    """One request of a played account, and what it has yet to receive."""

    request: Request
    left_s: float


@dataclass(slots=True)
class Engine:
    """Rows that share each step equally, fed from a queue; time is virtual.

    Attributes:
        queue: decides who is next.
        rows: how many run at once.
        received_s: engine seconds, by account.
        dispatched: the keys, in order.
    """

    queue: Queue
    rows: int
    now: float = 0.0
    received_s: dict[Account, float] = field(default_factory=lambda: defaultdict(float))
    dispatched: list[int] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    waiting: dict[RequestKey, Job] = field(default_factory=dict)
    last_key: int = 0

    def ask(self, account: Account, cost_s: float, priority: Priority = Priority.NORMAL) -> int:
        """One more request that costs this much."""
        self.last_key += 1
        request = Request(
            key=RequestKey(self.last_key), connection=ALICE, id=RequestId("r"), account=account,
            model=ModelName("m"), body=b"", digest=Digest(b"d"), arrived_at=self.now,
            priority=priority,
        )  # fmt: skip
        present = self.queue.accounts | {job.request.account for job in self.running}
        if account not in present:
            self.queue.counters.join(account, present)
        self.queue.join(request, self.now)
        self.waiting[request.key] = Job(request=request, left_s=cost_s)
        return self.last_key

    def backlog(self, account: Account) -> int:
        """How many of an account wait."""
        return sum(job.request.account == account for job in self.waiting.values())

    def step(self, took_s: float) -> None:
        """Fills the rows, and computes one step."""
        self.queue.age(self.now)
        while len(self.running) < self.rows:
            request = self.queue.first(lambda account: True)
            if request is None:
                break
            self.queue.leave(request)
            self.queue.counters.dispatched(request.account)
            self.dispatched.append(request.key)
            self.running.append(self.waiting.pop(request.key))
        for job in self.running:
            share_s = took_s / len(self.running)
            job.left_s -= share_s
            self.received_s[job.request.account] += share_s
            self.queue.counters.charge(job.request.account, share_s)
        self.running = [job for job in self.running if job.left_s > 0]
        self.now += took_s


def engine(rows: int, aging_s: float = 0.0, **weights: float) -> Engine:
    return Engine(Queue(counters(aging_s, **weights)), rows)


STEP_S = 0.25
costs = st.lists(st.integers(1, 24).map(lambda steps: steps * STEP_S), min_size=1, max_size=6)


@settings(deadline=None)
@given(
    rows=st.integers(1, 6),
    cost_of=st.tuples(costs, costs),
    backlog=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    weight=st.sampled_from([0.25, 1.0, 2.0, 4.0]),
)
def test_two_accounts_that_always_wait_stay_within_the_bound(
    rows: int, cost_of: tuple[list[float], list[float]], backlog: tuple[int, int], weight: float
) -> None:
    """By twice the largest cost, over weight, of as many requests as there are rows."""
    played, weights = engine(rows, a=weight), {A: weight, B: 1.0}
    largest = [max(given_costs) + STEP_S for given_costs in cost_of]  # it ends with a step
    bound = 2 * rows * max(largest[0] / weight, largest[1])
    asked: Counter[Account] = Counter()
    for _ in range(400):
        for account, given_costs, depth in zip((A, B), cost_of, backlog, strict=True):
            while played.backlog(account) < depth + rows:
                played.ask(account, given_costs[asked[account] % len(given_costs)])
                asked[account] += 1
        played.step(STEP_S)
        shares = [played.received_s[account] / weights[account] for account in (A, B)]
        assert abs(shares[0] - shares[1]) <= bound


@pytest.mark.parametrize("weight", [1.0, 3.0, 10.0])
def test_shares_follow_the_weights_however_much_is_asked_for(weight: float) -> None:
    """Within 5 %, at ten requests offered for each one of the other."""
    played, dice = engine(4, a=weight), random.Random(5)
    for _ in range(8000):
        while played.backlog(A) < 10:
            played.ask(A, dice.uniform(0.5, 4.0))
        while played.backlog(B) < 100:
            played.ask(B, dice.uniform(0.5, 4.0))
        played.step(STEP_S)
    share = played.received_s[A] / played.received_s[B]
    assert share == pytest.approx(weight, rel=0.05)


def test_a_light_account_next_to_a_flood_waits_for_one_row_and_not_for_the_flood() -> None:
    played = engine(2)
    for _ in range(100):
        played.ask(A, 2.0)
    for _ in range(10):
        played.step(STEP_S)
    before = len(played.dispatched)
    key = played.ask(B, 1.0)
    while key not in played.dispatched:
        played.step(STEP_S)
    assert played.dispatched[before] == key


@pytest.mark.parametrize("account", [A, B])
def test_a_batch_request_is_served_in_time_while_others_never_cease_to_come(
    account: Account,
) -> None:
    """After twice `aging_s` it stands in the highest class, where the counters hold."""
    played = engine(1, aging_s=60.0)
    key = played.ask(account, 1.0, Priority.BATCH)
    while key not in played.dispatched:
        while played.backlog(A) < 3:
            played.ask(A, 1.0, Priority.INTERACTIVE)
        played.step(STEP_S)
        assert played.now < 2 * 60.0 + 5.0
    assert played.now >= 2 * 60.0
