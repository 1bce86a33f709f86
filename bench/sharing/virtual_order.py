"""The bound, the weights and Jain's index, in virtual time: ours next to two other orders.

Every server gets the same arrivals. All accounts ask for more than the engine can give them, so
that everybody waits all the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlxsup.protocol.states import Priority

from .curves import save
from .figures import figure, finish, parser_of
from .peers import FirstCome, Job, RoundRobin
from .played import STEP_S, Ours, Peer, Play, Server, play
from .seeds import over_seeds

QUANTUM_S = 1.0
FCFS = "first come, first served"
DRR = "deficit round robin"
OURS = "mlxsup"
SEEDS = 100
FEW = 10
HORIZON_S = 300.0
LONG_S = 1200.0
DRAWN = 20
"""Seeds that the plots show."""


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
        """After each step."""
        assert all(seen.waiting[asker.name] > 0 for asker in self.askers), "somebody does not wait"
        one, other = (seen.received_s[asker.name] / asker.weight for asker in self.askers)
        self.parts.append((one - other) / self.bound)


def bounds_of(seed: int) -> dict[str, list[float]]:
    """The gap after each step, in bounds, by server; rows, weights and costs are drawn."""
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
    """Engine seconds by server and account, four rows."""
    dice = random.Random(f"received {seed}")
    jobs = arrivals(askers, 4, LONG_S, dice)
    return {
        name: dict(play(make(), jobs).until(LONG_S).received_s)
        for name, make in servers(4, askers).items()
    }


def deviation(askers: Sequence[Asker], by_account: Mapping[str, float]) -> float:
    """How far the share of any account is from its weight's, as a part of that."""
    whole, weights = sum(by_account.values()), sum(asker.weight for asker in askers)
    return max(
        abs(by_account.get(asker.name, 0.0) / whole / (asker.weight / weights) - 1)
        for asker in askers
    )


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 if all are equal, 1/n if one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def by_server(runs: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of each server, one for each run."""
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
    """All three."""
    return Run(
        gaps=bounds_of(seed), weighed=received(WEIGHED, seed), tenfold=received(TENFOLD, seed)
    )


def main() -> int:
    """Plays all seeds."""
    given = parser_of("virtual_order", __doc__).parse_args()
    runs = over_seeds(played, FEW if given.short else SEEDS)
    gaps = [run.gaps for run in runs]
    weighed, tenfold = [run.weighed for run in runs], [run.tenfold for run in runs]
    largest = by_server([{n: max(map(abs, gap)) for n, gap in run.items()} for run in gaps])
    apart = by_server([{n: deviation(WEIGHED, got) for n, got in run.items()} for run in weighed])
    even = by_server([{n: jain(list(got.values())) for n, got in run.items()} for run in tenfold])
    figures = []
    for claim, found in (("bound", largest), ("weights", apart), ("jain", even)):
        peers = {DRR: found[DRR], FCFS: found[FCFS]}
        figures.append(figure(claim, found[OURS], peers))
    save("order", {"gaps": gaps[:DRAWN], "weighed": weighed, "jain": even})
    return finish(figures, is_kept=given.keep)


if __name__ == "__main__":
    raise SystemExit(main())
