"""No starvation, in virtual time: what waits below a flood of a higher class, in many seeds.

One or two accounts flood the engine with interactive requests, at a multiple of what it can
compute. A few requests of lower classes come from them and from others. After twice `aging_s` each
of these stands in the highest class, where the counters decide. How long they may take from there:

- An account stands at most twice the cost of all rows above the smallest counter when it comes, by
  the bound, and each other account may pass it by the cost of all rows;
- what the account itself has asked for before goes first, and each other account receives as much;
- so it waits for at most that many times the number of accounts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mlxsup.protocol.states import Priority

from .curves import save
from .figures import figure, finish, parser_of
from .peers import ByClass, FirstCome, Job, RoundRobin
from .played import STEP_S, Ours, Peer, Server, play
from .seeds import over_seeds
from .virtual_order import DRR, FCFS, OURS, QUANTUM_S

CLASSES = "classes without aging"
SEEDS = 10_000
FEW = 100
COSTS_S = (STEP_S, 2.0)
LOWER = (Priority.NORMAL, Priority.BATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What one seed draws.

    Attributes:
        rows: of the engine.
        aging_s: after this wait a request moves up.
        limits_s: the longest that each request of a lower class may wait, by its number.
        jobs: all arrivals, in order of time.
    """

    rows: int
    aging_s: float
    limits_s: dict[int, float]
    jobs: list[Job]


def scene_of(seed: int) -> Scene:
    """Draws a scene; the flood lasts until the last of the lower requests must have begun."""
    dice = random.Random(f"waits {seed}")
    rows, flooding, quiet = dice.randint(1, 3), dice.randint(1, 2), dice.randint(1, 3)
    aging_s, load = dice.choice((2.0, 4.0, 8.0)), dice.choice((1.5, 3.0, 6.0))
    accounts = [f"flood {number}" for number in range(flooding)]
    accounts += [f"quiet {number}" for number in range(quiet)]
    lower = []
    for _ in range(dice.randint(1, 5)):
        account = dice.choice(accounts)
        soon_s = 1.0 if account in accounts[:flooding] else 4.0 + aging_s
        lower.append((dice.uniform(0.0, soon_s), account, dice.choice(LOWER)))
    gap_s = sum(COSTS_S) / 2 / load * flooding

    def flood(until: float) -> list[tuple[float, str, Priority]]:
        found = []
        for account in accounts[:flooding]:
            at = 0.0
            while at < until:
                found.append((at, account, Priority.INTERACTIVE))
                at += dice.expovariate(1 / gap_s)
        return found

    largest = COSTS_S[1] + STEP_S  # it ends with a step
    soon = flood(max(at for at, _, _ in lower))
    start = len(soon) and max(at for at, _, _ in soon)
    limits = [
        2 * aging_s
        + len(accounts) * largest * (3 * rows + sum(b == a and t <= at for t, b, _ in soon + lower))
        for at, a, _ in lower
    ]
    end = max(at + limit_s for (at, _, _), limit_s in zip(lower, limits, strict=True)) + STEP_S
    later = [(at + start, account, priority) for at, account, priority in flood(end - start)]
    numbered = sorted(soon + lower + later, key=lambda one: one[0])
    limits_s = {
        numbered.index(one) + 1: limit_s for one, limit_s in zip(lower, limits, strict=True)
    }
    jobs = [
        Job(number=number, account=name, cost_s=dice.uniform(*COSTS_S), at=at, priority=priority)
        for number, (at, name, priority) in enumerate(numbered, 1)
    ]
    return Scene(rows=rows, aging_s=aging_s, limits_s=limits_s, jobs=jobs)


def waits_of(scene: Scene, server: Server) -> dict[int, float]:
    """How long each request of a lower class waited, in seconds, by its number; one that never
    began waited until the end of the flood."""
    played = play(server, scene.jobs).until(scene.jobs[-1].at)
    return {
        job.number: (played.now if job.began_at is None else job.began_at) - job.at
        for job in played.arrivals
        if job.number in scene.limits_s
    }


def servers(scene: Scene) -> dict[str, Server]:
    """Ours, and those beside it."""
    rows = scene.rows
    weights = dict.fromkeys((job.account for job in scene.jobs), 1.0)
    return {
        OURS: Ours(rows, weights, scene.aging_s),
        CLASSES: Peer(ByClass(), rows),
        DRR: Peer(RoundRobin(quantum_s=QUANTUM_S, weights=weights), rows),
        FCFS: Peer(FirstCome(), rows),
    }


def played(seed: int) -> dict[str, tuple[int, float]]:
    """By server: how many requests waited longer than they may, and the longest wait, in units of
    twice `aging_s`."""
    scene, found = scene_of(seed), {}
    for name, server in servers(scene).items():
        waits_s = waits_of(scene, server)
        late = sum(wait_s > scene.limits_s[number] + STEP_S for number, wait_s in waits_s.items())
        found[name] = late, max(waits_s.values()) / (2 * scene.aging_s)
    return found


def main() -> int:
    """Plays all seeds."""
    given = parser_of("virtual_waits", __doc__).parse_args()
    runs = over_seeds(played, FEW if given.short else SEEDS)
    names = (OURS, CLASSES, DRR, FCFS)
    starved = {name: [float(run[name][0]) for run in runs] for name in names}
    longest = {name: [run[name][1] for run in runs] for name in names}
    others = names[1:]
    figures = [
        figure("starved", starved[OURS], {name: starved[name] for name in others}),
        figure("longest_wait", longest[OURS], {name: longest[name] for name in others}),
    ]
    save("waits", longest)
    return finish(figures, is_kept=given.keep)


if __name__ == "__main__":
    raise SystemExit(main())
