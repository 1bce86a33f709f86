"""`python -m campaign [--list] [--only NAME …] [--repeats N] [--small]`: see `main`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from .chaos import CHAOS
from .groups import GROUPS
from .hostile import HOSTILE
from .scenario import CPU, Place, Result, Scenario, exit_code, table
from .scenarios import ONE_FAULT
from .soak import SOAK
from support.machine import machine_facts

SCENARIOS: tuple[Scenario, ...] = (*ONE_FAULT, *HOSTILE, *GROUPS, CHAOS, SOAK)


def chosen(names: list[str]) -> list[Scenario]:
    """Return the scenarios of these names or promises; all of them if there are none."""
    return [s for s in SCENARIOS if not names or {s.name, *s.promises.split()} & set(names)]


def main() -> int:
    """Run scenarios in rounds, and print one table.

    Each round holds every scenario once, so that other work on the machine disturbs all alike.
    """
    parser = argparse.ArgumentParser(prog="campaign", description=main.__doc__)
    parser.add_argument("--list", action="store_true", help="name the scenarios and their figures")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME",
                        help="scenarios or promises")  # fmt: skip
    parser.add_argument("--repeats", type=int, help="rounds, if not as many as each scenario says")
    parser.add_argument("--small", action="store_true", help="seconds, and no figure to publish")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, help="of chaos and of hostile messages")
    parser.add_argument("--minutes", type=float, help="of the soak")
    given = parser.parse_args()
    if unknown := [name for name in given.only if not chosen([name])]:
        parser.error(f"{', '.join(unknown)}: known are {', '.join(s.name for s in SCENARIOS)}")
    results = [Result(scenario) for scenario in chosen(given.only)]
    if given.list:
        for one in results:
            print(f"{one.scenario.name} ({one.scenario.promises}, {one.scenario.where})")
            for figure in one.scenario.figures:
                print(f"    {figure.what}: {figure.bound.text if figure.bound else 'reported'}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "tiny"
        if any(CPU in one.scenario.where for one in results):
            from support.models.tiny_model import make_tiny_model

            make_tiny_model(tiny)
        place = Place(
            tiny=tiny, is_small=given.small, seed=given.seed, requests=given.requests,
            minutes=given.minutes,
        )  # fmt: skip
        usual = 1 if given.small else max((one.scenario.rounds for one in results), default=0)
        for number in range(given.repeats or usual):
            for one in results:
                if given.repeats or given.small or number < one.scenario.rounds:
                    start_s = time.monotonic()
                    one.run(place)
                    took_s = time.monotonic() - start_s
                    print(f"round {number + 1}: {one.scenario.name} {took_s:.1f} s {one.problem}",
                          file=sys.stderr, flush=True)  # fmt: skip
    print(json.dumps(machine_facts()), table(results), sep="\n\n")
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
