"""Any events in any order: the queue's order is that of a list that is sorted anew each time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxsup.protocol.ids import ModelName, RequestId, RequestKey
from mlxsup.protocol.states import Priority
from mlxsup.supervisor.core.health.blame import Digest
from mlxsup.supervisor.core.requests.ledger import Request
from mlxsup.supervisor.core.requests.queue import Queue
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings
from mlxsup.supervisor.core.sharing.accounts import Account, Terms
from mlxsup.supervisor.core.sharing.counters import Counters

from support.core_looks import ALICE

CLASSES = ["interactive", "normal", "batch"]


def request(key: int, account: str, priority: Priority) -> Request:
    return Request(
        key=RequestKey(key), connection=ALICE, id=RequestId(f"r{key}"), account=Account(account),
        model=ModelName("m"), body=b"", digest=Digest(b"d"), arrived_at=0.0, priority=priority,
    )  # fmt: skip


@dataclass(kw_only=True)
class Waiter:
    """One request as the reference sees it."""

    request: Request
    account: str
    rank: int
    waited_s: float
    since: float
    is_again: bool

    def rank_at(self, now: float, aging_s: float) -> int:
        steps = math.floor((self.waited_s + now - self.since + 1e-6) / aging_s) if aging_s else 0
        return max(0, self.rank - steps)


NAMES = ("a", "b", "c", "d")
names = st.sampled_from(NAMES)
seconds = st.integers(0, 16).map(lambda quarters: quarters / 4)


class QueueMachine(RuleBasedStateMachine):
    """Any order of events; the reference shares no code with the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.aging_s = 60.0
        self.weights = dict.fromkeys(NAMES, 1.0)
        self.terms = Terms(CoreSettings())
        self.queue = Queue(Counters(self.terms))
        self.now = 0.0
        self.last_key = 0
        self.waiting: list[Waiter] = []
        self.running: list[Waiter] = []
        self.counters: dict[str, float] = {}
        self.latest = ""
        self.cost_s = 1.0
        self.has_cost = False
        self.told: dict[RequestKey, int] = {}
        self.come: set[RequestKey] = set()
        self.has_left = False

    # ------------------------------------------------------------ events

    @rule(account=names, rank=st.integers(0, 2), count=st.integers(1, 4))
    def join(self, account: str, rank: int, count: int) -> None:
        for _ in range(count):
            present = {one.account for one in (*self.waiting, *self.running)}
            if account not in present:
                floor = min((self.counters[name] for name in present), default=None)
                if floor is None:
                    floor = self.counters.get(self.latest, 0.0)
                self.counters[account] = max(self.counters.get(account, floor), floor)
                self.queue.counters.join(Account(account), {Account(name) for name in present})
            self.last_key += 1
            one = request(self.last_key, account, Priority(CLASSES[rank]))
            self.queue.join(one, self.now)
            self.waiting.append(
                Waiter(request=one, account=account, rank=rank, waited_s=0.0, since=self.now,
                       is_again=False)
            )  # fmt: skip
            self.come.add(one.key)

    @rule(held_back=st.sets(names))
    def dispatch(self, held_back: set[str]) -> None:
        found = self.queue.first(lambda account: account not in held_back)
        allowed = [one for one in self.in_order() if one.account not in held_back]
        assert found is (allowed[0].request if allowed else None)
        if found is not None:
            self.take_out(allowed[0])
            self.queue.counters.dispatched(found.account)
            found.waited_s += self.now - found.waits_since
            allowed[0].waited_s += self.now - allowed[0].since
            self.running.append(allowed[0])
            self.latest = allowed[0].account

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        if self.waiting:
            self.take_out(self.waiting[which % len(self.waiting)])

    @rule(which=st.integers(0, 100), cost_s=seconds)
    def end(self, which: int, cost_s: float) -> None:
        if self.running:
            self.running.pop(which % len(self.running))
            self.queue.counters.learn(cost_s)
            self.cost_s = self.cost_s + 0.2 * (cost_s - self.cost_s) if self.has_cost else cost_s
            self.has_cost = True

    @rule(which=st.integers(0, 100), count=st.integers(1, 3))
    def crash(self, which: int, count: int) -> None:
        back = self.running[which % (len(self.running) or 1) :][:count]
        self.running = [one for one in self.running if one not in back]
        self.queue.rejoin([one.request for one in back], self.now)
        for one in back:
            one.is_again, one.since = True, self.now
            self.waiting.append(one)

    @rule(account=names, engine_s=seconds)
    def charge(self, account: str, engine_s: float) -> None:
        if account in {one.account for one in (*self.waiting, *self.running)}:
            self.queue.counters.charge(Account(account), engine_s)
            self.counters[account] += engine_s / self.weights[account]

    @rule(passed_s=st.sampled_from([0.0, 0.25, 7.5, 30.0, 61.0, 200.0]))
    def time_passes(self, passed_s: float) -> None:
        before = [one.rank_at(self.now, self.aging_s) for one in self.waiting]
        self.now += passed_s
        self.queue.age(self.now)
        self.has_left |= before != [one.rank_at(self.now, self.aging_s) for one in self.waiting]

    @rule(which=st.integers(0, 100), rank=st.integers(0, 2))
    def prioritize(self, which: int, rank: int) -> None:
        if self.waiting:
            one = self.waiting[which % len(self.waiting)]
            one.rank, one.waited_s, one.since = rank, 0.0, self.now
            self.queue.prioritize(one.request, Priority(CLASSES[rank]), self.now)
            self.has_left = True

    @rule(account=names, weight=st.sampled_from([0.5, 1.0, 2.0]))
    def weigh(self, account: str, weight: float) -> None:
        self.weights[account] = weight
        self.reload()

    @rule(aging_s=st.sampled_from([0.0, 30.0, 60.0]))
    def change_aging(self, aging_s: float) -> None:
        self.has_left |= aging_s != self.aging_s
        self.aging_s = aging_s
        self.reload()
        self.queue.age(self.now)

    def reload(self) -> None:
        clients = {name: ClientSettings(weight=weight) for name, weight in self.weights.items()}
        self.terms.change(CoreSettings(aging_s=self.aging_s, clients=clients))

    @rule()
    def take_news(self) -> None:
        truth = {one.request.key: place for place, one in enumerate(self.in_order(), start=1)}
        news = self.queue.take_news()
        assert news.items() <= truth.items()
        must = self.come | {key for key, place in truth.items() if place <= 8}
        must |= {one.request.key for one in self.waiting if one.is_again}
        if self.has_left:
            must |= {key for key, told in self.told.items() if power(told) != power(truth[key])}
        assert must <= news.keys()
        self.told |= news
        self.come, self.has_left = set(), False

    # ------------------------------------------------------------ what must hold

    @invariant()
    def the_order_is_that_of_the_sorted_list(self) -> None:
        expected = [one.request.key for one in self.in_order()]
        assert [one.key for one in self.queue] == expected
        assert len(self.queue) == len(expected)
        assert self.queue.accounts == {one.account for one in self.waiting}

    def in_order(self) -> list[Waiter]:
        ranks = {one.request.key: one.rank_at(self.now, self.aging_s) for one in self.waiting}
        seen: dict[tuple[int, str], int] = {}
        keyed = []
        for one in sorted(self.waiting, key=lambda one: one.request.key):
            rank = ranks[one.request.key]
            if one.is_again:
                keyed.append(((rank, 0, 0.0, one.request.key), one))
                continue
            place = seen.get((rank, one.account), 0)
            seen[rank, one.account] = place + 1
            cost = self.cost_s / self.weights[one.account]
            start = self.counters[one.account] + place * cost
            keyed.append(((rank, 1, start, one.request.key), one))
        return [one for _, one in sorted(keyed, key=lambda pair: pair[0])]

    def take_out(self, one: Waiter) -> None:
        self.waiting.remove(one)
        self.queue.leave(one.request)
        self.told.pop(one.request.key, None)
        self.come.discard(one.request.key)
        self.has_left = True


def power(place: int) -> int:
    """The power of two at or above a place."""
    found = 1
    while found < place:
        found *= 2
    return found


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestQueue = QueueMachine.TestCase
