"""The runs that judge themselves: simulation, fuzz, chaos and so on; each in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support.verdict import Verdict, verdict_of

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DEMO = tuple(str(TESTS / f"mlx/test_{name}.py") for name in ("pacing", "resume_demo", "structured"))
"""What `make slow` does with the demo model, which two cores need an hour for."""
LAST_LINES = 20
"""Of the complaint of a run that could not judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A run that judges itself.

    Attributes:
        promises: their ids; empty where it speaks for all.
        name: of its results.
        what: for people.
        arguments: after `python -m`.
        is_pytest: pytest has its own exit codes.
        document: what else it writes, from docs/.
    """

    promises: tuple[str, ...]
    name: str
    what: str
    arguments: tuple[str, ...]
    is_pytest: bool = False
    document: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A campaign that has ended.

    Attributes:
        campaign: it.
        verdict: by its exit code.
        lines: what it printed; of one that could not judge, its last words too.
        took_s: until its end.
    """

    campaign: Campaign
    verdict: Verdict
    lines: tuple[str, ...]
    took_s: float


CAMPAIGNS = (
    Campaign(
        promises=("P22",),
        name="simulation",
        what="the core against played workers and clients in virtual time",
        arguments=("simulation", "--seeds", "10000"),
    ),
    Campaign(
        promises=("P22",),
        name="simulation.mutants",
        what="bugs planted in the core that the simulation must see",
        arguments=("simulation.mutants",),
    ),
    Campaign(
        promises=("P17",),
        name="fuzz",
        what="hostile bytes at the decoder and through the socket",
        arguments=("fuzz", "--decoder", "1000000", "--socket", "100000"),
    ),
    Campaign(
        promises=("P1",),
        name="chaos.real",
        what="requests under a mix of faults, MLX on the CPU",
        arguments=("chaos", "--real", "--requests", "500"),
    ),
    Campaign(
        promises=("P1",),
        name="chaos",
        what="requests under a mix of faults, fake engine",
        arguments=("chaos", "--requests", "100000"),
    ),
    Campaign(
        promises=("P1",),
        name="chaos.crowded",
        what="requests under a mix of faults, models that do not fit together, fake engine",
        arguments=("chaos", "--crowded"),
    ),
    Campaign(
        promises=("P1",),
        name="chaos.mutants",
        what="bugs planted in the product that chaos must see",
        arguments=("chaos.mutants",),
    ),
    Campaign(
        promises=(),
        name="soak",
        what="ordinary use with crashes for 30 minutes: nothing grows",
        arguments=("soak", "--minutes", "30", "--out", "../docs/soak"),
        document="soak/soak.md",
    ),
    Campaign(
        promises=(),
        name="mutation",
        what="random bugs that the fast tests and the simulation must see",
        arguments=("mutation",),
        document="mutants.md",
    ),
    Campaign(
        promises=(),
        name="slow",
        what="`make slow`: the tests that take minutes each, but those of the demo model",
        arguments=("pytest", "-q", "-m", "slow", str(TESTS), *(f"--ignore={one}" for one in DEMO)),
        is_pytest=True,
    ),
    Campaign(
        promises=(),
        name="slow.demo",
        what="`make slow`: those of the demo model",
        arguments=("pytest", "-q", "-m", "slow", *DEMO),
        is_pytest=True,
    ),
)


def environment() -> dict[str, str]:
    """Of a child process: it finds the tests' packages, and whatever this process was given."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_campaign(campaign: Campaign) -> Run:
    """Runs it to its end; what it complains of is passed on to standard error as well."""
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *campaign.arguments],
        cwd=ROOT if campaign.is_pytest else TESTS,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stderr)
    judge = verdict_of_pytest if campaign.is_pytest else verdict_of
    verdict = judge(done.returncode)
    return Run(
        campaign=campaign,
        verdict=verdict,
        lines=tuple(public(line) for line in lines_of(campaign, verdict, done)),
        took_s=time.monotonic() - start_s,
    )


def lines_of(
    campaign: Campaign, verdict: Verdict, done: subprocess.CompletedProcess[str]
) -> list[str]:
    """What is published of its output."""
    lines = done.stdout.splitlines()
    if campaign.is_pytest:
        return lines[-1:] if verdict is Verdict.KEPT else lines[-LAST_LINES:]
    if verdict is Verdict.NOT_SHOWN:
        lines = [
            *lines[-LAST_LINES:],
            f"exit code {done.returncode}",
            *done.stderr.splitlines()[-1:],
        ]
    return lines


def public(line: str) -> str:
    """A line without the place of this checkout."""
    return line.replace(f"{ROOT}/", "").replace(str(ROOT), ".")


def verdict_of_pytest(exit_code: int) -> Verdict:
    """All passed, some failed, or it did not come to a judgement."""
    return {0: Verdict.KEPT, 1: Verdict.MISSED}.get(exit_code, Verdict.NOT_SHOWN)
