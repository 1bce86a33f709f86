"""An engine in virtual time: rows that share each step equally, behind the core or behind a peer.

The same arrivals are served by each; what accounts receive is counted here, by the engine, and not
by whoever decides the order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import Acceptance, Accepted, RowDelta, Step, WorkerMessage
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings

from .peers import Job, Order
from support.core_driver import LAUNCH, Driver, entry

STEP_S = 0.25
NEVER_S = 1e9
TOKEN = pack_tokens([9])
ACCEPTANCE = Acceptance(
    prompt_tokens=pack_tokens([1]), opening="", parameters={}, seed=5, fingerprint="f"
)


class Server(Protocol):
    """Decides which request gets a row that is free."""

    def ask(self, job: Job, now: float) -> list[Job]:
        """A request comes; returns those that begin to run now."""

    def step(self, running: Mapping[int, Job], ended: Sequence[int], now: float) -> list[Job]:
        """A step of `STEP_S` has ended, and so have some of its rows; returns who begins now."""


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
        """It waits, or begins."""
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
        """A client asks."""
        self._pass_until(now)
        self._jobs[len(self._jobs) + 1] = job  # keys count arrivals
        self._driver.ask(f"r{job.number}", client=job.account, priority=job.priority)
        return self._begun()

    def step(self, running: Mapping[int, Job], ended: Sequence[int], now: float) -> list[Job]:
        """The worker reports a step."""
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
        """Whether everybody has come and has ended."""
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
    """One server, with its own copy of the arrivals."""
    return Play(server, [job.fresh() for job in arrivals])
