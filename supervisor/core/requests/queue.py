"""Decides which waiting request of a model is dispatched next, and who is notified of moving up.

By class; within a class, requests that had been dispatched before come first, interrupted ones
before paused ones, and new ones in the order of their accounts' counters (`Line`). A request that
has waited long moves up one class. What was asked for as `interactive`, which is more than to have
come there by waiting, also stands in a separate line: rows may be freed for it.

A place in line is a prediction, because the order changes with each step: it assumes that each
request costs as much as earlier ones did. Costs are charged when they arise and not in advance, so
that counters only grow and a heap entry is corrected when it reaches the top.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from itertools import chain, islice

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import CLASSES, PauseReason, Priority

from ..accounting import Account, Counters
from ..deadlines import Deadlines
from .ledger import Ledger, Request

LIKE_CRASHES = frozenset({PauseReason.TURN, PauseReason.SWAP})
"""Reasons of pauses that do not put a request behind those that a crash has interrupted."""

_Entry = tuple[float, RequestKey, Account]
"""A counter, the account's oldest request, the account."""


def again_order(request: Request) -> tuple[bool, RequestKey]:
    """Sort requests that had been dispatched; it stays the same while they wait.

    Who has left for the turn of another suspect stands with the interrupted ones, because a crash
    was why; and so does who has left because the model made room: its process ended, too. Who has
    left for want of memory before anything was read stands with the paused ones.
    """
    was_paused = request.pauses.is_paused and request.pauses.reason not in LIKE_CRASHES
    was_paused = was_paused or (request.acceptance is not None and not request.has_begun)
    return was_paused and not request.crashes.is_interrupted, request.key


class Line:
    """One class of a model's queue.

    Requests that had been dispatched come first: those that a crash has interrupted, then those
    that were paused, oldest first. New ones come in the order in which
    they will be dispatched if each costs as much as earlier ones did: always one of the account
    with the smallest counter, its oldest; with equal counters, the one that arrived first.
    """

    def __init__(self, counters: Counters, ledger: Ledger) -> None:
        self._counters = counters
        self._ledger = ledger
        # Bounded by admission, as the queue is. By key, because keys count arrivals.
        self._again: dict[RequestKey, Request] = {}
        self._new: dict[RequestKey, Request] = {}
        self._by_account: dict[Account, list[RequestKey]] = {}
        # For each account at least one entry that is not above its present one. Counters only
        # grow: an entry that lags behind is corrected when it reaches the top.
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        yield from self._again.values()
        counters, new = self._counters, self._new
        starts = [
            (counters.of(account), keys[0], 0, account)
            for account, keys in self._by_account.items()
        ]
        heapq.heapify(starts)
        while starts:
            _, key, place, account = starts[0]
            yield new[key]
            keys, place = self._by_account[account], place + 1
            if place == len(keys):
                heapq.heappop(starts)
            else:
                heapq.heapreplace(starts, (*self._start(account, place), place, account))

    @property
    def again(self) -> dict[RequestKey, Request]:
        """Return those that had been dispatched, in order."""
        return self._again

    def add(self, request: Request, *, is_again: bool) -> None:
        """Add a request that comes, or had been dispatched and comes again."""
        key = request.key
        if is_again:
            last = next(reversed(self._again.values()), None)
            self._again[key] = request
            if last is not None and again_order(request) < again_order(last):
                in_order = sorted(self._again.values(), key=again_order)
                self._again = {one.key: one for one in in_order}
            return
        self._new[key] = request
        keys = self._by_account.setdefault(request.account, [])
        insort(keys, key)
        if keys[0] == key:
            heapq.heappush(self._heap, self._entry(request.account))
            if len(self._heap) > 64 and len(self._heap) > 4 * len(self._by_account):
                self._heap = [self._entry(account) for account in self._by_account]
                heapq.heapify(self._heap)

    def remove(self, request: Request) -> None:
        """Remove a request."""
        key = request.key
        if self._again.pop(key, None) is not None:
            return
        del self._new[key]
        keys = self._by_account[request.account]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._by_account[request.account]

    def first(self) -> Request | None:
        """Return the request to dispatch next; None if no account of those that wait
        may run more."""
        for request in self._again.values():
            if self._ledger.may_run(request.account):
                return request
        heap, passed_over = self._heap, []
        found = None
        while heap and found is None:
            account = heap[0][2]
            if account not in self._by_account:
                heapq.heappop(heap)
            elif (entry := self._entry(account)) != heap[0]:
                heapq.heapreplace(heap, entry)
            elif self._ledger.may_run(account):
                found = self._new[entry[1]]
            else:
                passed_over.append(heapq.heappop(heap))
        for entry in passed_over:
            heapq.heappush(heap, entry)
        return found

    def count_startable(self, most: int) -> int:
        """Return how many of those who wait could start at once, if there were that many rows.

        Args:
            most: the answer is at most this.
        """
        again = Counter(request.account for request in self._again.values())
        only_again = (account for account in again if account not in self._by_account)
        count = 0.0
        for account in chain(self._by_account, only_again):
            own = len(self._by_account.get(account, ())) + again[account]
            count += min(own, self._ledger.may_run_more(account))
            if count >= most:
                return most
        return int(count)

    def place(self, request: Request) -> int:
        """Return the place of a request in this class, from 1, without looking at all
        the others."""
        key = request.key
        if key in self._again:
            return 1 + list(self._again).index(key)
        own = self._by_account[request.account]
        start = self._start(request.account, bisect_left(own, key))
        ahead = sum(self._before(account, start) for account in self._by_account)
        return 1 + len(self._again) + ahead

    def _before(self, account: Account, start: tuple[float, RequestKey]) -> int:
        """Return how many of an account's requests come before one that starts so."""
        places = range(len(self._by_account[account]))
        return bisect_left(places, start, key=lambda place: self._start(account, place))

    def _entry(self, account: Account) -> _Entry:
        return self._counters.of(account), self._by_account[account][0], account

    def _start(self, account: Account, place: int) -> tuple[float, RequestKey]:
        """Return what the account's counter is expected to be when its request at this place, from
        0, is dispatched, and that request."""
        counter = self._counters.of(account) + place * self._counters.expected(account)
        return counter, self._by_account[account][place]


NEAR = 8
"""This many at the front are notified of each change of place, and all that had been dispatched."""

FARTHEST_TOLD = 1024
"""Behind those, a place is news if there is another power of two at or above it, up to this one."""

URGENT = Priority.INTERACTIVE
"""The class for which rows of the lowest one are freed."""

LATE_S = 1e-6
"""Sums of waiting times are rounded: one that falls short of `aging_s` by less has reached it."""


class Queue:
    """The requests of one model that are waiting to be dispatched."""

    def __init__(self, ledger: Ledger) -> None:
        self.counters = counters = Counters(ledger.terms)
        self._ledger = ledger
        # Bounded by admission: at most twice `max_queue` over all models, and those who come back.
        self._requests: dict[RequestKey, Request] = {}
        self._waiting: Counter[Account] = Counter()
        self._lines = {priority: Line(counters, ledger) for priority in Priority}
        self._urgent = Line(counters, ledger)
        self._aging = Deadlines()
        self._aging_s = counters.terms.aging_s
        # Since the news was last taken: which requests have come and still wait, and whether any
        # may have moved up. And the place that each was last notified of.
        self._come: dict[RequestKey, Request] = {}
        self._has_moved_up = False
        self._told: dict[RequestKey, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._lines.values())

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    @property
    def startable(self) -> list[Request]:
        """Return those whose accounts may run more, in the order of the line."""
        return [one for one in self if self._ledger.may_run(one.account)]

    @property
    def accounts(self) -> Set[Account]:
        """Return the accounts that have a request waiting."""
        return self._waiting.keys()

    @property
    def per_class(self) -> dict[Priority, int]:
        """Return how many wait in each class, as they stand in the line now."""
        return {priority: len(line) for priority, line in self._lines.items()}

    @property
    def urgent(self) -> Line:
        """Return those whose own class is the highest one, in the order in which they are
        dispatched."""
        return self._urgent

    @property
    def again(self) -> Iterator[Request]:
        """Return those that had been dispatched, in order."""
        return chain.from_iterable(line.again.values() for line in self._lines.values())

    # ------------------------------------------------------------ who comes and goes

    def join(self, request: Request, now: float) -> None:
        """Add a new request."""
        self._add(request, now, is_again=False)
        self._come[request.key] = request

    def rejoin(self, requests: Iterable[Request], now: float) -> None:
        """Put requests that had been dispatched back, ahead of the new ones of their class."""
        for request in sorted(requests, key=again_order):
            self._add(request, now, is_again=True)

    def leave(self, request: Request) -> None:
        """Remove a request that was dispatched, cancelled or answered."""
        key = request.key
        del self._requests[key]
        self._lines[request.waiting.standing].remove(request)
        if request.priority is URGENT:
            self._urgent.remove(request)
        self._waiting[request.account] -= 1
        if not self._waiting[request.account]:
            del self._waiting[request.account]
        self._aging.set(key, None)
        self._told.pop(key, None)
        self._come.pop(key, None)
        self._has_moved_up = True

    def prioritize(self, request: Request, priority: Priority, now: float) -> None:
        """Give a waiting request another class, in which its wait counts afresh."""
        is_again = request.key in self._lines[request.waiting.standing].again
        if request.priority is URGENT:
            self._urgent.remove(request)
        if priority is URGENT:
            self._urgent.add(request, is_again=is_again)
        request.priority, request.waiting.waited_s, request.waiting.since = priority, 0.0, now
        self._stand_anew(request, priority)

    def first(self) -> Request | None:
        """Return the request to dispatch next; None if none of the accounts may run more."""
        for line in self._lines.values():
            if line and (request := line.first()) is not None:
                return request
        return None

    # ------------------------------------------------------------ who has waited long

    @property
    def ages_at(self) -> float | None:
        """Return when the next request moves up; None if none does."""
        return self._aging.earliest()

    def age(self, now: float) -> None:
        """Move up those that have waited long enough; all anew, if `aging_s` has changed."""
        if self._aging_s != self.counters.terms.aging_s:
            self._age_anew(now)
        for subject in self._aging.take_due(now):
            assert isinstance(subject, int)
            request = self._requests[subject]
            _wait_until(request, now)
            self._stand_anew(request, self._standing(request))

    def _age_anew(self, now: float) -> None:
        self._aging_s = self.counters.terms.aging_s
        for request in self._requests.values():
            _wait_until(request, now)
            self._stand_anew(request, self._standing(request))

    # ------------------------------------------------------------ places

    def places(self) -> dict[RequestKey, int]:
        """Return the place of each request, from 1."""
        self.skip_news()
        self._told = {request.key: place for place, request in enumerate(self, start=1)}
        return self._told

    def place(self, request: Request) -> int:
        """Return the place of one request, from 1, without looking at all the others."""
        ahead = 0
        for priority, line in self._lines.items():
            if priority is request.waiting.standing:
                break
            ahead += len(line)
        return ahead + line.place(request)

    def take_news(self) -> dict[RequestKey, int]:
        """Return the places, from 1, that are news since the last call; some may turn out not to
        be.

        Those of all newcomers, of the near ones, of those that had been dispatched, and of those
        that have moved past a power of two. Looks at no more than the first `FARTHEST_TOLD`, and
        only at the near ones unless a request left or moved up.
        """
        come, has_moved_up = self._come, self._has_moved_up
        self.skip_news()
        news: dict[RequestKey, int] = {}
        ahead = 0
        for line in self._lines.values():
            news |= {key: place for place, key in enumerate(line.again, start=ahead + 1)}
            ahead += len(line)
        front = islice(self, FARTHEST_TOLD if has_moved_up else NEAR)
        for place, request in enumerate(front, start=1):
            told = self._told.get(request.key)
            if place <= NEAR or told is None or _band(told) != _band(place):
                news[request.key] = place
        news |= {key: self.place(request) for key, request in come.items() if key not in news}
        self._told |= news
        return news

    def skip_news(self) -> None:
        """Discard all news so far."""
        self._has_moved_up, self._come = False, {}

    # ------------------------------------------------------------ inside

    def _add(self, request: Request, now: float, *, is_again: bool) -> None:
        self._requests[request.key] = request
        self._waiting[request.account] += 1
        request.waiting.queued_at = request.waiting.since = now
        if request.priority is URGENT:
            self._urgent.add(request, is_again=is_again)
        self._stand(request, self._standing(request), is_again=is_again)

    def _stand(self, request: Request, standing: Priority, *, is_again: bool) -> None:
        """Put a request into a class, from which it moves up in time."""
        request.waiting.standing = standing
        self._lines[standing].add(request, is_again=is_again)
        aging_s, when = self._aging_s, None
        if standing.rank and aging_s > 0:
            left_s = aging_s * (1 + _steps(request, aging_s)) - request.waiting.waited_s
            when = request.waiting.since + left_s
        self._aging.set(request.key, when)

    def _stand_anew(self, request: Request, standing: Priority) -> None:
        """Move a request to another class, and leave it where that class has it."""
        line = self._lines[request.waiting.standing]
        is_again = request.key in line.again
        line.remove(request)
        self._stand(request, standing, is_again=is_again)
        self._has_moved_up = True

    def _standing(self, request: Request) -> Priority:
        """Return the class in which its wait so far puts a request."""
        steps = _steps(request, self._aging_s) if self._aging_s > 0 else 0
        return CLASSES[max(request.priority.rank - steps, 0)]


def _wait_until(request: Request, now: float) -> None:
    request.waiting.waited_s += now - request.waiting.since
    request.waiting.since = now


def _steps(request: Request, aging_s: float) -> int:
    """Return how many classes its wait so far lifts a request; at most as many as there are."""
    return min(int((request.waiting.waited_s + LATE_S) / aging_s), len(Priority))


def _band(place: int) -> int:
    """Return the power of two at or above a place, as its exponent."""
    return (place - 1).bit_length()
