"""Open requests: how far each has come, the ledger of all, and the line of those that wait for a
model.

The line is by class; within a class, requests that had been dispatched before come first,
interrupted ones before paused ones, and new ones in the order of their accounts' counters (`Line`).
A request that has waited long moves up one class. What was asked for as `interactive`, which is
more than to have come there by waiting, also stands in a separate line: rows may be freed for it.

A place in line is a prediction, because the order changes with each step: it assumes that each
request costs as much as earlier ones did. Costs are charged when they arise and not in advance, so
that counters only grow and a heap entry is corrected when it reaches the top.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, islice
from typing import Any

from mlxsup.protocol.client_messages import Timings, Usage
from mlxsup.protocol.ids import ConnectionId, ModelName, RequestId, RequestKey
from mlxsup.protocol.states import CLASSES, NoticeKind, PauseReason, Priority
from mlxsup.protocol.worker_messages import Acceptance

from .accounting import Account, Cost, Counters, DeviceTime, Terms
from .actions import Deadlines
from .poison import Digest, Held
from .settings import CoreSettings

MAX_DEATHS_WITHOUT_PROGRESS = 3
"""After this many deaths in a row without a new token a request is given up."""

PAUSED_BYTES = 4096
"""A request that a person has paused counts as so much more, because only bytes limit those."""


class Stage(Enum):
    """The stage of an open request.

    YIELDING and PAUSING ones run until their row has left; then the former queue, and the latter
    are PAUSED: they wait outside the queue, until a person resumes them.
    """

    QUEUED = auto()
    RUNNING = auto()
    YIELDING = auto()
    PAUSING = auto()
    PAUSED = auto()


@dataclass(slots=True, kw_only=True)
class Limits:
    """Until when a request must have been dispatched, have its first token, and have ended, in
    monotonic seconds; None for no limit."""

    queue_deadline: float | None = None
    first_token_deadline: float | None = None
    deadline: float | None = None


@dataclass(slots=True, kw_only=True)
class Waiting:
    """The waits of a request.

    Attributes:
        arrived_at: when it was asked for, monotonic seconds.
        standing: the class in which it waits, or in which it was dispatched: higher than its
            priority if it has waited long.
        queued_at: when it came into the queue, or came back.
        since: from when on `waited_s` does not count its present wait.
        waited_s: how long it had waited before, since it was asked for or got its class; pauses by
            a person are no waits.
    """

    arrived_at: float = 0.0
    standing: Priority = Priority.NORMAL
    queued_at: float = 0.0
    since: float = 0.0
    waited_s: float = 0.0

    def end(self, now: float) -> None:
        """Note that it leaves the line, because it was dispatched or a person has paused it."""
        self.waited_s += now - self.since


@dataclass(slots=True, kw_only=True)
class Run:
    """The row of a request.

    Attributes:
        dispatched_at: time of the last dispatch.
        gains_since: when its row said something for the first time since then; None: it has not.
        started_at: time of the dispatch with which it began; None: it has not begun, because it was
            not dispatched, or its row left before anything of its prompt was read.
        left_short_at: how many rows of its model had ended when its own left, or was asked to, for
            want of memory; None: it was not, or was dispatched since.
    """

    dispatched_at: float | None = None
    gains_since: float | None = None
    started_at: float | None = None
    left_short_at: int | None = None


@dataclass(slots=True, kw_only=True)
class Pauses:
    """The pauses of a request.

    Attributes:
        reason: why its row was last asked to leave; says nothing before that.
        is_paused: whether its row has left the batch since it last said anything.
        count: how many times it has continued after that.
        since: when its pause began; None: it is not paused, or was dispatched since.
        before_s: how long its earlier pauses took.
    """

    reason: PauseReason = PauseReason.USER
    is_paused: bool = False
    count: int = 0
    since: float | None = None
    before_s: float = 0.0

    def end(self, now: float) -> None:
        """Note that it is dispatched, or its pause has only delayed its start."""
        if self.since is not None:
            self.before_s += now - self.since
            self.since = None


@dataclass(slots=True, kw_only=True)
class Crashes:
    """The workers that have died under a request.

    Attributes:
        is_interrupted: whether its worker died and no other has continued it yet.
        resumed: how many times it has continued after that.
        deaths: workers that died under it in a row without a new token and without evidence.
        shortages: workers that ran out of memory while it ran alone.
    """

    is_interrupted: bool = False
    resumed: int = 0
    deaths: int = 0
    shortages: int = 0


@dataclass(slots=True, kw_only=True)
class Sent:
    """The pieces that the client of a request was sent.

    Attributes:
        tokens: their packed ids.
        shown: pieces of its prompt.
        seq: pieces, all in all.
        warnings: sentences for its result.
        notices: the latest one of each kind.
    """

    tokens: bytearray = field(default_factory=bytearray)
    shown: int = 0
    seq: int = 0
    warnings: list[str] = field(default_factory=list)
    notices: dict[NoticeKind, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One open request, from admission to its terminal message.

    Attributes:
        key: the supervisor's name for it.
        id: the client's name for it.
        account: on whose behalf, for limits and fairness.
        adapter: one of its adapters; empty: the model itself.
        priority: its class, as it was asked for.
        body: the body frame, until the worker has accepted it.
        digest: hash of the model and the body; equal requests have equal ones.
        may_resume: whether it continues after its worker has died.
        wants_notices: whether to notify its client of what it is waiting for.
        limits: until when it must have come how far.
        acceptance: what the worker made of it; None before.
        waiting, run, pauses, crashes: how it came there.
    """

    key: RequestKey
    connection: ConnectionId
    id: RequestId
    account: Account
    model: ModelName
    body: bytes
    digest: Digest
    adapter: str = ""
    priority: Priority = Priority.NORMAL
    may_resume: bool = True
    wants_notices: bool = False
    limits: Limits = field(default_factory=Limits)
    acceptance: Acceptance | None = None
    stage: Stage = Stage.QUEUED
    waiting: Waiting = field(default_factory=Waiting)
    run: Run = field(default_factory=Run)
    pauses: Pauses = field(default_factory=Pauses)
    crashes: Crashes = field(default_factory=Crashes)
    sent: Sent = field(default_factory=Sent)
    cost: Cost = field(default_factory=Cost)

    @property
    def tokens_sent(self) -> int:
        """Return how many tokens the client was sent."""
        return len(self.sent.tokens) // 4

    @property
    def has_begun(self) -> bool:
        """True if the worker has accepted it and it has had a row since: it will be continued, and
        no longer waits for its start."""
        return self.acceptance is not None and self.run.started_at is not None

    @property
    def is_unread(self) -> bool:
        """True if nothing has been computed for it, and its client has not heard otherwise."""
        is_known = self.crashes.is_interrupted or self.pauses.is_paused
        return not (is_known or self.cost.read_tokens or self.sent.tokens)

    @property
    def is_counted(self) -> bool:
        """True if it counts as waiting in the queue: not if its answer has begun."""
        return self.stage is Stage.QUEUED and not self.has_begun

    @property
    def has_row(self) -> bool:
        """True if it was dispatched and its row has not left since, as far as is known."""
        return self.stage is not Stage.QUEUED and self.stage is not Stage.PAUSED

    @property
    def held(self) -> Held:
        """Return what a crash of its worker is judged by."""
        return Held(digest=self.digest, tokens=self.tokens_sent, shortages=self.crashes.shortages)

    @property
    def held_bytes(self) -> int:
        """Return how much memory the request takes, not counting what the queue and the
        rows bound."""
        own_bytes = PAUSED_BYTES if self.stage is Stage.PAUSED else 0
        return own_bytes + len(self.body) + self.cost.acceptance_bytes + len(self.sent.tokens)

    @property
    def prompt_tokens(self) -> int:
        """Return how many tokens its prompt has; 0 before it was accepted."""
        return len(self.acceptance.prompt_tokens) // 4 if self.acceptance else 0

    @property
    def length(self) -> int:
        """Return the tokens of its prompt and of what was sent."""
        return self.prompt_tokens + self.tokens_sent

    @property
    def is_leaving(self) -> bool:
        """True if its row was asked to leave, for any reason, and has not left yet."""
        return self.stage is Stage.YIELDING or self.stage is Stage.PAUSING

    @property
    def is_leaving_short(self) -> bool:
        """True if its row was asked to leave for want of memory, and has not left yet."""
        return self.stage is Stage.YIELDING and self.pauses.reason is PauseReason.MEMORY

    @property
    def repeat_s(self) -> float:
        """Return how long reading its prompt and its answer so far again would take, judged by how
        long its prompt has taken, in seconds; 0 before its first token."""
        read = max(self.prompt_tokens - self.cost.cached_tokens, 1)
        return self.cost.prefill_s * self.length / read

    @property
    def computed_tokens(self) -> float:
        """Return how many tokens of its prompt and its answer have been computed, in any process;
        infinity for all of them."""
        is_read = self.sent.tokens and not self.answers_while_reading
        return math.inf if is_read else self.cost.read_tokens

    @property
    def next_deadline(self) -> float | None:
        """Return the earliest of its deadlines that still applies; None for none."""
        times = [self.limits.deadline]
        if self.stage is Stage.QUEUED:
            times.append(self.limits.queue_deadline)
        if self.cost.first_token_at is None:
            times.append(self.limits.first_token_deadline)
        return min((t for t in times if t is not None), default=None)

    @property
    def answers_while_reading(self) -> bool:
        """True if tokens come before the whole prompt is read: a text's vector comes with its
        pass."""
        return self.acceptance is not None and "lengths" in self.acceptance.parameters

    def usage(self) -> Usage:
        """Return the tokens and engine seconds counted so far."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cost.cached_tokens,
            completion_tokens=self.tokens_sent,
            engine_s=self.cost.engine_s,
            drafted=self.cost.drafted,
            draft_accepted=self.cost.draft_accepted,
        )

    def timings(self, now: float) -> Timings:
        """Return where its time has gone so far."""
        started_at = now if self.run.started_at is None else self.run.started_at
        first = (
            0.0
            if self.cost.first_token_at is None
            else self.cost.first_token_at - self.waiting.arrived_at
        )
        paused_s = 0.0 if self.pauses.since is None else now - self.pauses.since
        return Timings(
            queued_s=started_at - self.waiting.arrived_at,
            tokenize_s=self.cost.tokenize_s,
            prefill_s=self.cost.prefill_s,
            first_token_s=first,
            total_s=now - self.waiting.arrived_at,
            paused_s=self.pauses.before_s + paused_s,
        )


# ---------------------------------------------------------------- all of them


class Ledger:
    """Every open request, by key or by who asked; counts what is bounded (H5).

    Attributes:
        devices: by the backend of the engines that share one.
        waiting: requests that are queued and have not begun, over all models.
        waiting_by_account: the same, by account.
        running_by_account: those that were dispatched and do not wait again.
        has_freed: whether a request of an account with a `max_running` has ended or waits again
            since this was last set to false.
        has_filled: whether an account has reached its `max_running` since then.
    """

    def __init__(self, settings: CoreSettings, deadlines: Deadlines) -> None:
        self.terms = Terms(settings)
        # Bounded: there are three backends, and the fake one.
        self.devices: defaultdict[str, DeviceTime] = defaultdict(DeviceTime)
        self._deadlines = deadlines
        # All bounded by admission: `max_queue` waiting, and a share of it for each model beyond
        # that, plus the rows of every engine, plus paused ones by `max_queue_bytes`.
        self._by_key: dict[RequestKey, Request] = {}
        self._by_connection: dict[ConnectionId, dict[RequestId, Request]] = {}
        self.waiting_by_account: Counter[Account] = Counter()
        self.running_by_account: Counter[Account] = Counter()
        self.has_freed = self.has_filled = False
        self.waiting = 0
        self._held_bytes = 0
        self._listening = 0
        self._last_key = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_key.values())

    @property
    def held_bytes(self) -> int:
        """Return the bytes of bodies and resume data of all open requests."""
        return self._held_bytes

    @property
    def has_listeners(self) -> bool:
        """True if any request wants notices."""
        return self._listening > 0

    def may_run(self, account: Account) -> bool:
        """True if one more request of the account may run."""
        most = self.terms.of(account).max_running
        return not most or self.running_by_account[account] < most

    def may_run_more(self, account: Account) -> float:
        """Return how many more requests of the account may run; infinity for any number."""
        most = self.terms.of(account).max_running
        return max(most - self.running_by_account[account], 0) if most else math.inf

    @property
    def next_key(self) -> RequestKey:
        """Return the key of the next request that is added: they count those that were admitted."""
        return RequestKey(self._last_key + 1)

    def add(self, request: Request) -> None:
        """Count a request that was admitted; it is queued."""
        self._last_key = request.key
        self._by_key[request.key] = request
        self._by_connection.setdefault(request.connection, {})[request.id] = request
        self._count_waiting(request, 1)
        self._listening += request.wants_notices
        self._held_bytes += request.held_bytes
        self._deadlines.set(request.key, request.next_deadline)

    def remove(self, request: Request) -> None:
        """Forget a request that got its terminal message."""
        del self._by_key[request.key]
        of_connection = self._by_connection[request.connection]
        del of_connection[request.id]
        if not of_connection:
            del self._by_connection[request.connection]
        if request.is_counted:
            self._count_waiting(request, -1)
        elif request.has_row:
            self._count_running(request, -1)
        self._listening -= request.wants_notices
        self._held_bytes -= request.held_bytes
        self._deadlines.set(request.key, None)

    def get(self, key: RequestKey) -> Request | None:
        """Return an open request by its key."""
        return self._by_key.get(key)

    def find(self, connection: ConnectionId, id: RequestId) -> Request | None:
        """Return an open request by its client's name for it."""
        return self._by_connection.get(connection, {}).get(id)

    def of_connection(self, connection: ConnectionId) -> list[Request]:
        """Return the open requests of one connection, oldest first."""
        return list(self._by_connection.get(connection, {}).values())

    def move(self, request: Request, stage: Stage) -> None:
        """Give a request another stage: it was dispatched, must leave, or waits again."""
        was_counted, had_row = request.is_counted, request.has_row
        self._held_bytes -= request.held_bytes
        request.stage = stage
        self._held_bytes += request.held_bytes
        if request.has_row is not had_row:
            self._count_running(request, 1 if request.has_row else -1)
        if request.is_counted is not was_counted:
            self._count_waiting(request, 1 if request.is_counted else -1)
        self._deadlines.set(request.key, request.next_deadline)

    def accept(self, request: Request, acceptance: Acceptance) -> None:
        """Keep what the worker made of a request, in place of its body, unless that has
        pictures."""
        self._held_bytes -= request.held_bytes
        request.acceptance = acceptance
        request.cost.acceptance_bytes = len(acceptance.prompt_tokens) + len(
            repr(acceptance.parameters)
        )
        if not acceptance.needs_body:
            request.body = b""
        self._held_bytes += request.held_bytes

    def speaks(self, request: Request, now: float) -> None:
        """Note the first token of a request: the limit until then no longer counts."""
        request.cost.first_token_at = now
        self._deadlines.set(request.key, request.next_deadline)

    def deliver(self, request: Request, tokens: bytes) -> None:
        """Keep tokens that the client is sent, so that the answer can be resumed."""
        request.sent.tokens += tokens
        self._held_bytes += len(tokens)

    def check_invariants(self) -> None:
        """Raise AssertionError if the counts and the requests disagree."""
        requests = list(self)
        assert self._held_bytes == sum(r.held_bytes for r in requests)
        waiting = Counter(r.account for r in requests if r.is_counted)
        assert dict(self.waiting_by_account) == dict(waiting)
        assert self.waiting == waiting.total()
        running = Counter(r.account for r in requests if r.has_row)
        assert dict(self.running_by_account) == dict(running)
        assert self._listening == sum(r.wants_notices for r in requests)
        assert all(self._deadlines.of(r.key) == r.next_deadline for r in requests)
        assert len(requests) == sum(map(len, self._by_connection.values()))
        assert all(self._by_connection.values())

    def _count_waiting(self, request: Request, change: int) -> None:
        self.waiting += change
        self.waiting_by_account[request.account] += change
        if not self.waiting_by_account[request.account]:
            del self.waiting_by_account[request.account]

    def _count_running(self, request: Request, change: int) -> None:
        account = request.account
        self.running_by_account[account] += change
        if not self.running_by_account[account]:
            del self.running_by_account[account]
        most = self.terms.of(account).max_running
        if most and change < 0:
            self.has_freed = True
        elif most and self.running_by_account[account] >= most:
            self.has_filled = True


# ---------------------------------------------------------------- the line of a model

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
        self._aging_s = counters.terms.settings.aging_s
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
        if self._aging_s != self.counters.terms.settings.aging_s:
            self._age_anew(now)
        for subject in self._aging.take_due(now):
            assert isinstance(subject, int)
            request = self._requests[subject]
            _wait_until(request, now)
            self._stand_anew(request, self._standing(request))

    def _age_anew(self, now: float) -> None:
        self._aging_s = self.counters.terms.settings.aging_s
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
