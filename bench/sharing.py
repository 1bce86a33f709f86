"""Sharing one model between accounts, in virtual time, behind the real core.

Rows share each step equally, and what accounts receive is counted by the engine. All requests are
interactive, above which there is no class to move up to.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean

from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason, Priority
from mlxsup.protocol.worker_messages import Acceptance, Accepted, RowDelta, Step, WorkerMessage
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings

from .report import print_table, spread
from support.core.driver import LAUNCH, Driver, entry

STEP_S = 0.25
NEVER_S = 1e9
HORIZON_S = 300.0
LONG_S = 1200.0
TOKEN = pack_tokens([9])
ACCEPTANCE = Acceptance(
    prompt_tokens=pack_tokens([1]), opening="", parameters={}, seed=5, fingerprint="f"
)


@dataclass(slots=True)
class Job:
    """One request; not frozen, because it is being computed.

    Attributes:
        at: when it comes, in seconds.
        account: asked for it.
        left_s: engine seconds that it has yet to receive.
    """

    at: float
    account: str
    left_s: float


@dataclass(frozen=True, slots=True)
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

    def arrivals(self, rows: int, until: float, dice: random.Random) -> list[Job]:
        """Return enough requests at the beginning for each row, and evenly spread ones behind."""
        gap_s, at, found = fmean(self.costs_s) / self.load, 0.0, list[Job]()
        while at < until:
            found.append(Job(at, self.name, dice.uniform(*self.costs_s)))
            at += dice.expovariate(1 / gap_s) if len(found) > 2 * rows else 0.0
        return found


class Play:
    """The core with a played worker, under some arrivals.

    Attributes:
        received_s: engine seconds, by account.
        waiting: how many wait, by account.

    Args:
        askers: the accounts.
        rows: how many run at once.
        until: when the last request comes, in seconds.
        dice: draws what comes.
    """

    def __init__(
        self, askers: Sequence[Asker], rows: int, until: float, dice: random.Random
    ) -> None:
        limits = CoreSettings(
            max_queue=10**6, max_queue_per_client=10**6, queue_timeout_s=0.0, aging_s=60.0,
            clients={asker.name: ClientSettings(weight=asker.weight) for asker in askers},
        )  # fmt: skip
        launch = replace(LAUNCH, max_concurrency=rows, step_timeout_s=NEVER_S)
        self._driver = Driver([entry(launch=launch)], limits)
        self._driver.is_checked = False
        self._driver.load()
        self._driver.come_up()
        self._generation = self._driver.generation()
        self._start = self._driver.now
        jobs = [job for asker in askers for job in asker.arrivals(rows, until, dice)]
        self._jobs = sorted(jobs, key=lambda job: job.at)
        self._come = 0
        self._running: dict[RequestKey, Job] = {}
        self.received_s: dict[str, float] = defaultdict(float)
        self.waiting: dict[str, int] = defaultdict(int)

    def until(self, end: float, look: Callable[[Play], None] = lambda play: None) -> Play:
        """Step until that time; `look` sees each step."""
        now = 0.0
        while now < end:
            self._ask_until(now)
            now += STEP_S
            self._driver.pass_time(self._start + now - self._driver.now)
            assert not self._driver.dispatched(), "a row was free before the step"
            if self._running:
                self._step()
            look(self)
        return self

    def _ask_until(self, now: float) -> None:
        while self._come < len(self._jobs) and self._jobs[self._come].at <= now:
            account = self._jobs[self._come].account
            self._come += 1
            self.waiting[account] += 1
            self._driver.ask(f"r{self._come}", client=account, priority=Priority.INTERACTIVE)
            self._begin()

    def _step(self) -> None:
        share_s = STEP_S / len(self._running)
        rows = []
        for key, job in list(self._running.items()):
            job.left_s -= share_s
            self.received_s[job.account] += share_s
            finish = FinishReason.STOP if job.left_s <= 1e-9 else None
            rows.append(RowDelta(key=key, text="x", tokens=TOKEN, finish=finish))
            if finish is not None:
                del self._running[key]
        self._say(Step(step=1, rows=rows, took_s=STEP_S, decode_s=STEP_S))
        self._begin()

    def _begin(self) -> None:
        for key in self._driver.dispatched():
            job = self._running[key] = self._jobs[key - 1]  # keys count arrivals from 1
            self.waiting[job.account] -= 1
            self._say(Accepted(key=key, acceptance=ACCEPTANCE, tokenize_s=0.0))

    def _say(self, message: WorkerMessage) -> None:
        self._driver.worker(message, generation=self._generation)


# ---------------------------------------------------------------- what is measured


def largest_gap(seed: int) -> float:
    """Draw rows, weights and costs of two accounts that always wait; return the largest difference
    of what they received, over weight.

    Returns:
        In bounds: twice the largest cost, over weight, of as many requests as there are rows.
    """
    dice = random.Random(f"bound {seed}")
    rows = dice.randint(1, 6)
    pair = [
        Asker(
            name,
            weight=dice.choice((0.5, 1.0, 2.0)),
            load=dice.choice((2.0, 6.0, 20.0)),
            costs_s=(STEP_S, dice.choice((1.0, 4.0, 12.0))),
        )
        for name in "ab"
    ]
    # A request ends with a step, so it may cost up to one more.
    bound = 2 * rows * max((asker.costs_s[1] + STEP_S) / asker.weight for asker in pair)
    gaps: list[float] = []

    def look(play: Play) -> None:
        assert all(play.waiting[asker.name] > 0 for asker in pair), "an account does not wait"
        one, other = (play.received_s[asker.name] / asker.weight for asker in pair)
        gaps.append(abs(one - other) / bound)

    Play(pair, rows, HORIZON_S, dice).until(HORIZON_S, look)
    return max(gaps)


WEIGHED = [
    Asker(name, weight, load, (0.5, 4.0))
    for name, weight, load in (("a", 1.0, 8.0), ("b", 2.0, 2.0), ("c", 4.0, 2.0))
]
TENFOLD = [Asker(name, 1.0, load, (0.5, 4.0)) for name, load in (("heavy", 12.0), ("light", 1.2))]


def received(askers: Sequence[Asker], seed: int) -> Mapping[str, float]:
    """Return the engine seconds of each account, for four rows."""
    return Play(askers, 4, LONG_S, random.Random(f"received {seed}")).until(LONG_S).received_s


def deviation(seed: int) -> float:
    """Return the largest distance of an account's share from its weight's, as a part of that."""
    seconds, weights = received(WEIGHED, seed), sum(asker.weight for asker in WEIGHED)
    whole = sum(seconds.values())
    shares = (seconds[asker.name] / whole / (asker.weight / weights) for asker in WEIGHED)
    return max(abs(share - 1) for share in shares)


def jain(seed: int) -> float:
    """Return Jain's index of two accounts: 1 if both receive the same, 1/2 if one has all."""
    values = received(TENFOLD, seed).values()
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


FIGURES: dict[str, tuple[Callable[[int], float], str]] = {
    "largest gap of two accounts, in bounds": (largest_gap, "≤1"),
    "share apart from the weight's": (deviation, "≤0.05"),
    "Jain's index, one account asks for ten times as much": (jain, "≥0.99"),
}


def run(seeds: int) -> None:
    """Play the seeds from 1, on all cores, and print."""
    with ProcessPoolExecutor() as pool:
        rows = [
            [what, target, spread(list(pool.map(figure, range(1, seeds + 1))), digits=3)]
            for what, (figure, target) in FIGURES.items()
        ]
    print("## Sharing one model (virtual time, the real core)\n")
    print(f"{seeds} seeds; median (range)\n")
    print_table(["what", "target", "measured"], rows)
