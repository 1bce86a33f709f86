"""Sharing one model between accounts, in virtual time: ours next to two other orders.

Rows share each step equally, behind the real core or behind a reference order; all servers get the
same arrivals, and what accounts receive is counted by the engine. First come, first served is what
most servers do. Deficit round robin is the fair order that is easiest to build; it is charged
afterwards, as ours is.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason, Priority
from mlxsup.protocol.worker_messages import Acceptance, Accepted, RowDelta, Step, WorkerMessage
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings

from .report import print_table, spread
from support.core.driver import LAUNCH, Driver, entry


@dataclass(slots=True, kw_only=True)
class Job:
    """One request; not frozen, because it is being computed.

    Attributes:
        number: counts arrivals.
        account: asked for it.
        cost_s: engine seconds that it takes.
        at: when it comes, in seconds.
        priority: its class.
        left_s: what it has yet to receive.
        began_at: when it got its row; None while it waits.
    """

    number: int
    account: str
    cost_s: float
    at: float
    priority: Priority = Priority.NORMAL
    left_s: float = 0.0
    began_at: float | None = None

    def fresh(self) -> Job:
        """Return the same job for another server, with nothing of it computed."""
        return Job(
            number=self.number, account=self.account, cost_s=self.cost_s, at=self.at,
            priority=self.priority, left_s=self.cost_s,
        )  # fmt: skip


class Order(Protocol):
    """Decides who is next among those that wait."""

    def add(self, job: Job) -> None:
        """Let a job wait."""

    def take(self) -> Job | None:
        """Removes and returns the next one; None if nobody waits."""

    def charge(self, account: str, seconds: float) -> None:
        """Note that an account has received engine seconds."""


class FirstCome:
    """The order of arrivals."""

    def __init__(self) -> None:
        self._line: deque[Job] = deque()

    def add(self, job: Job) -> None:
        """Let a job wait behind all others."""
        self._line.append(job)

    def take(self) -> Job | None:
        """Take the oldest job."""
        return self._line.popleft() if self._line else None

    def charge(self, account: str, seconds: float) -> None:
        """Ignore the seconds: this order does not count them."""


@dataclass(slots=True, kw_only=True)
class RoundRobin:
    """Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995), charged afterwards.

    An account whose turn it is gets a quantum, times its weight, and starts requests while it has
    something left; what they cost is taken off as they are computed.

    Attributes:
        quantum_s: engine seconds for each turn.
        weights: of the accounts; 1 for others.
    """

    quantum_s: float
    weights: Mapping[str, float]
    _lines: dict[str, deque[Job]] = field(default_factory=dict)
    _ring: deque[str] = field(default_factory=deque)
    _left_s: dict[str, float] = field(default_factory=dict)
    _has_turn: str = ""

    def add(self, job: Job) -> None:
        """Let a job wait behind those of its account."""
        line = self._lines.setdefault(job.account, deque())
        if not line and job.account not in self._ring:
            self._ring.append(job.account)
        line.append(job)

    def take(self) -> Job | None:
        """Take the oldest job of the account whose turn it is."""
        while self._ring:
            account = self._ring[0]
            line = self._lines[account]
            if not line:  # whoever leaves takes no credit along
                self._leave(account)
                continue
            if self._has_turn != account:
                self._has_turn = account
                quantum_s = self.quantum_s * self.weights.get(account, 1.0)
                self._left_s[account] = self._left_s.get(account, 0.0) + quantum_s
            if self._left_s[account] > 0:
                return line.popleft()
            self._ring.rotate(-1)
            self._has_turn = ""
        return None

    def charge(self, account: str, seconds: float) -> None:
        """Takes off what was computed."""
        self._left_s[account] = self._left_s.get(account, 0.0) - seconds

    def _leave(self, account: str) -> None:
        self._ring.popleft()
        self._has_turn = ""
        self._left_s[account] = min(self._left_s.get(account, 0.0), 0.0)


STEP_S = 0.25
NEVER_S = 1e9
TOKEN = pack_tokens([9])
ACCEPTANCE = Acceptance(
    prompt_tokens=pack_tokens([1]), opening="", parameters={}, seed=5, fingerprint="f"
)


class Server(Protocol):
    """Decides which request gets a row that is free."""

    def ask(self, job: Job, now: float) -> list[Job]:
        """Take a request; return the jobs that begin to run now."""

    def step(self, running: Mapping[int, Job], ended: Sequence[int], now: float) -> list[Job]:
        """End a step of `STEP_S` and the rows in `ended`; return the jobs that begin now."""


class Peer:
    """A reference order in front of the engine.

    Args:
        order: decides.
        rows: how many run at once.
    """

    def __init__(self, order: Order, rows: int) -> None:
        self._order = order
        self._rows = rows
        self._running = 0

    def ask(self, job: Job, now: float) -> list[Job]:
        """Let a job wait or begin; return the jobs that begin now."""
        self._order.add(job)
        return self._fill()

    def step(self, running: Mapping[int, Job], ended: Sequence[int], now: float) -> list[Job]:
        """Charges everybody, and fills the rows."""
        for job in running.values():
            self._order.charge(job.account, STEP_S / len(running))
        self._running -= len(ended)
        return self._fill()

    def _fill(self) -> list[Job]:
        begun = []
        while self._running < self._rows and (job := self._order.take()) is not None:
            begun.append(job)
            self._running += 1
        return begun


class Ours:
    """The real core, with a played worker.

    Args:
        rows: how many run at once.
        weights: of the accounts.
        aging_s: after how long a wait a request moves up.
    """

    def __init__(self, rows: int, weights: Mapping[str, float], aging_s: float) -> None:
        listed = {name: ClientSettings(weight=weight) for name, weight in weights.items()}
        limits = CoreSettings(
            max_queue=10**6, max_queue_per_client=10**6, queue_timeout_s=0.0, aging_s=aging_s,
            clients=listed,
        )  # fmt: skip
        launch = replace(LAUNCH, max_concurrency=rows, step_timeout_s=NEVER_S)
        self._driver = Driver([entry(launch=launch)], limits)
        self._driver.is_checked = False
        self._driver.load()
        self._driver.come_up()
        self._start = self._driver.now
        self._generation = self._driver.generation()
        self._jobs: dict[int, Job] = {}
        self._keys: dict[int, RequestKey] = {}

    def ask(self, job: Job, now: float) -> list[Job]:
        """Ask as a client."""
        self._pass_until(now)
        self._jobs[len(self._jobs) + 1] = job  # keys count arrivals
        self._driver.ask(f"r{job.number}", client=job.account, priority=job.priority)
        return self._begun()

    def step(self, running: Mapping[int, Job], ended: Sequence[int], now: float) -> list[Job]:
        """Report a step as the worker."""
        self._pass_until(now)
        rows = [
            RowDelta(
                key=self._keys[number], text="x", tokens=TOKEN,
                finish=FinishReason.STOP if number in ended else None,
            )
            for number in running
        ]  # fmt: skip
        self._say(Step(step=1, rows=rows, took_s=STEP_S, decode_s=STEP_S))
        for number in ended:
            del self._keys[number]
        return self._begun()

    def _pass_until(self, now: float) -> None:
        ahead_s = self._start + now - self._driver.now
        if ahead_s > 0:
            self._driver.pass_time(ahead_s)
            assert not self._driver.dispatched(), "a row was free before the step"

    def _begun(self) -> list[Job]:
        keys = self._driver.dispatched()
        jobs = [self._jobs[key] for key in keys]
        self._keys |= {job.number: key for job, key in zip(jobs, keys, strict=True)}
        for key in keys:
            self._say(Accepted(key=key, acceptance=ACCEPTANCE, tokenize_s=0.0))
        return jobs

    def _say(self, message: WorkerMessage) -> None:
        self._driver.worker(message, generation=self._generation)


# ---------------------------------------------------------------- the engine


@dataclass(slots=True)
class Play:
    """One server under some arrivals; not frozen, because time passes.

    Attributes:
        server: decides.
        arrivals: in order of time; the play's own.
        now: virtual seconds.
        received_s: engine seconds, by account.
        waiting: how many wait, by account.
        running: by number.
        began: every job that has begun.
    """

    server: Server
    arrivals: list[Job]
    now: float = 0.0
    received_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waiting: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    running: dict[int, Job] = field(default_factory=dict)
    began: list[Job] = field(default_factory=list)
    _come: int = 0

    @property
    def is_over(self) -> bool:
        """True if every job has arrived and has ended."""
        return self._come == len(self.arrivals) and not self.running

    def step(self) -> None:
        """Lets those in who have come, and computes one step."""
        while self._come < len(self.arrivals) and self.arrivals[self._come].at <= self.now:
            job = self.arrivals[self._come]
            self._come += 1
            self.waiting[job.account] += 1
            self._begin(self.server.ask(job, self.now))
        self.now += STEP_S
        if not self.running:
            return
        share_s = STEP_S / len(self.running)
        for job in self.running.values():
            job.left_s -= share_s
            self.received_s[job.account] += share_s
        ended = [number for number, job in self.running.items() if job.left_s <= 1e-9]
        computed = dict(self.running)
        for number in ended:
            del self.running[number]
        self._begin(self.server.step(computed, ended, self.now))

    def until(self, end: float, look: Callable[[Play], None] | None = None) -> Play:
        """Steps until that time; `look` sees each step."""
        while self.now < end:
            self.step()
            if look is not None:
                look(self)
        return self

    def _begin(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.began_at = self.now
            self.waiting[job.account] -= 1
            self.running[job.number] = job
            self.began.append(job)


def play(server: Server, arrivals: Iterable[Job]) -> Play:
    """Play a server, with its own copy of the arrivals."""
    return Play(server, [job.fresh() for job in arrivals])


QUANTUM_S = 1.0
FCFS = "first come, first served"
DRR = "deficit round robin"
OURS = "mlxsup"
HORIZON_S = 300.0
LONG_S = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """One account.

    Attributes:
        name: of it.
        weight: of it.
        load: how many times the whole engine's time it asks for.
        costs_s: the smallest and the largest cost of its requests.
    """

    name: str
    weight: float
    load: float
    costs_s: tuple[float, float]


def arrivals(askers: Sequence[Asker], rows: int, until: float, dice: random.Random) -> list[Job]:
    """Enough at the beginning for each row, then evenly spread ones, in order of time.

    They are interactive, above which there is no class to move up to.
    """
    found = []
    for asker in askers:
        low, high = asker.costs_s
        gap_s = (low + high) / 2 / asker.load
        at, ahead = 0.0, 2 * rows
        while at < until:
            found.append((at, asker.name, dice.uniform(low, high)))
            ahead -= 1
            at += dice.expovariate(1 / gap_s) if ahead < 0 else 0.0
    found.sort(key=lambda one: one[0])
    return [
        Job(number=number, account=name, cost_s=cost_s, at=at, priority=Priority.INTERACTIVE)
        for number, (at, name, cost_s) in enumerate(found, 1)
    ]


def servers(rows: int, askers: Sequence[Asker]) -> dict[str, Callable[[], Server]]:
    """Ours, and those beside it."""
    weights = {asker.name: asker.weight for asker in askers}
    return {
        OURS: lambda: Ours(rows, weights, aging_s=60.0),
        DRR: lambda: Peer(RoundRobin(quantum_s=QUANTUM_S, weights=weights), rows),
        FCFS: lambda: Peer(FirstCome(), rows),
    }


# ---------------------------------------------------------------- the bound


@dataclass(slots=True)
class Gap:
    """The difference of what two accounts received, over weight, while both wait.

    Attributes:
        askers: the two.
        bound: twice the largest cost, over weight, of as many requests as there are rows.
        parts: the difference after each step, in bounds.
    """

    askers: tuple[Asker, Asker]
    bound: float
    parts: list[float]

    def look(self, seen: Play) -> None:
        """Note the gap after a step."""
        assert all(seen.waiting[asker.name] > 0 for asker in self.askers), "somebody does not wait"
        one, other = (seen.received_s[asker.name] / asker.weight for asker in self.askers)
        self.parts.append((one - other) / self.bound)


def bounds_of(seed: int) -> dict[str, list[float]]:
    """Draw rows, weights and costs; return the gap after each step, in bounds, by server."""
    dice = random.Random(f"bound {seed}")
    rows = dice.randint(1, 6)
    pair = tuple(
        Asker(
            name=name,
            weight=dice.choice((0.5, 1.0, 2.0)),
            load=dice.choice((2.0, 6.0, 20.0)),
            costs_s=(STEP_S, dice.choice((1.0, 4.0, 12.0))),
        )
        for name in "ab"
    )
    one, other = pair
    # A request ends with a step, so it may cost up to one more.
    largest = max((asker.costs_s[1] + STEP_S) / asker.weight for asker in pair)
    jobs = arrivals(pair, rows, HORIZON_S, dice)
    found = {}
    for name, make in servers(rows, pair).items():
        gap = Gap((one, other), 2 * rows * largest, [])
        play(make(), jobs).until(HORIZON_S, gap.look)
        found[name] = gap.parts
    return found


# ---------------------------------------------------------------- weights, and Jain's index


WEIGHED = tuple(
    Asker(name=name, weight=weight, load=load, costs_s=(0.5, 4.0))
    for name, weight, load in (("a", 1.0, 8.0), ("b", 2.0, 2.0), ("c", 4.0, 2.0))
)
TENFOLD = tuple(
    Asker(name=name, weight=1.0, load=load, costs_s=(0.5, 4.0))
    for name, load in (("heavy", 12.0), ("light", 1.2))
)


def received(askers: Sequence[Asker], seed: int) -> dict[str, dict[str, float]]:
    """Return the engine seconds by server and account, for four rows."""
    dice = random.Random(f"received {seed}")
    jobs = arrivals(askers, 4, LONG_S, dice)
    return {
        name: dict(play(make(), jobs).until(LONG_S).received_s)
        for name, make in servers(4, askers).items()
    }


def deviation(askers: Sequence[Asker], by_account: Mapping[str, float]) -> float:
    """Return the largest distance of an account's share from its weight's, as a part of that."""
    whole, weights = sum(by_account.values()), sum(asker.weight for asker in askers)
    return max(
        abs(by_account.get(asker.name, 0.0) / whole / (asker.weight / weights) - 1)
        for asker in askers
    )


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 if all are equal, 1/n if one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def by_server(runs: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the values of each server, one for each run."""
    return {name: [run[name] for run in runs] for name in (OURS, DRR, FCFS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One seed, by server.

    Attributes:
        gaps: as `bounds_of`.
        weighed: engine seconds of accounts with different weights.
        tenfold: engine seconds of two accounts, one of which asks for ten times as much.
    """

    gaps: dict[str, list[float]]
    weighed: dict[str, dict[str, float]]
    tenfold: dict[str, dict[str, float]]


def played(seed: int) -> Run:
    """Play the bounds, the weighed and the tenfold load with one seed."""
    return Run(
        gaps=bounds_of(seed), weighed=received(WEIGHED, seed), tenfold=received(TENFOLD, seed)
    )


def over_seeds(seeds: int) -> list[Run]:
    """Return the runs of the seeds from 1, computed on all cores."""
    with ProcessPoolExecutor() as pool:
        return list(pool.map(played, range(1, seeds + 1)))


def run(seeds: int) -> None:
    """Play and print."""
    runs = over_seeds(seeds)
    largest = by_server([{n: max(map(abs, gap)) for n, gap in one.gaps.items()} for one in runs])
    apart = by_server([{n: deviation(WEIGHED, v) for n, v in one.weighed.items()} for one in runs])
    even = by_server([{n: jain(list(v.values())) for n, v in one.tenfold.items()} for one in runs])
    rows: list[tuple[str, Mapping[str, list[float]], str]] = [
        ("largest gap of two accounts, in bounds", largest, "≤1"),
        ("share apart from the weight's", apart, "≤0.05"),
        ("Jain's index, one account asks for ten times as much", even, "≥0.99"),
    ]
    print("## Sharing one model (virtual time, the real core)\n")
    print(f"{seeds} seeds; median (range)\n")
    print_table(
        ["what", "target", OURS, DRR, FCFS],
        [
            [what, target, *(spread(by[n], digits=3) for n in (OURS, DRR, FCFS))]
            for what, by, target in rows
        ],
    )
