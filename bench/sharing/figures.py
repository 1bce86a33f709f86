"""The figures of docs/sharing.md, as docs/sharing.json keeps them.

A measure is a module of this folder that runs as `python -m bench.sharing.NAME [--short] [--keep]`
with `tests` in PYTHONPATH; it is known by calling `parser_of` with its own name. It makes a
`Figure` for each claim that it can measure, and hands them to `finish`. What it cannot measure it
leaves out, and prints why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..claim import Range, range_of, shown
from .claims import CLAIMS
from promises.results import UncleanTreeError, clean_commit, machine
from support.verdict import Verdict

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "sharing.json"
BY_ID = {claim.id: claim for claim in CLAIMS}
UNCLEAN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was measured for one claim.

    Attributes:
        claim: its id.
        found: ours.
        runs: how many rounds or seeds.
        peers: the same of others in the same runs, by their names.
        target: the limit as it was when this was measured, for people.
        unit: of all its values; "%" for fractions.
        commit: the tree that was measured.
        machine: that it was measured on.
        note: what a reader must know, one sentence; may be empty.
    """

    claim: str
    found: Range
    runs: int
    peers: Mapping[str, Range]
    target: str
    unit: str
    commit: str = ""
    machine: str = ""
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """How its claim stands."""
        return BY_ID[self.claim].verdict(self.found.value)


def figure(
    claim: str,
    values: Sequence[float],
    peers: Mapping[str, Sequence[float]] | None = None,
    *,
    runs: int | None = None,
    note: str = "",
) -> Figure:
    """Makes a figure of one value for each run.

    Args:
        claim: the id of one of `CLAIMS`.
        values: ours; at least one.
        peers: those of others, by name.
        runs: how many there were, if a value stands for several.
        note: what a reader must know.
    """
    about = BY_ID[claim]
    return Figure(
        claim=claim,
        found=range_of(about, values),
        runs=len(values) if runs is None else runs,
        peers={name: range_of(about, theirs) for name, theirs in (peers or {}).items()},
        target=about.target,
        unit=about.unit,
        note=note,
    )


# ---------------------------------------------------------------- the file


def load(path: Path = KEPT) -> dict[str, Figure]:
    """The figures that are kept, by claim."""
    if not path.exists():
        return {}
    return {claim: _figure(entry) for claim, entry in json.loads(path.read_text()).items()}


def _figure(entry: dict[str, Any]) -> Figure:
    peers = {name: Range(**theirs) for name, theirs in entry["peers"].items()}
    return Figure(**{**entry, "found": Range(**entry["found"]), "peers": peers})


def keep(figures: Sequence[Figure], path: Path = KEPT) -> None:
    """Puts figures in the place of earlier ones: of this tree on this machine, unless they say so.

    Raises:
        UncleanTreeError: no commit can be named for them.
    """
    of_this_tree = {}
    if not all(one.commit for one in figures):
        of_this_tree = {"commit": clean_commit(), "machine": machine()}
    kept = {claim: asdict(one) for claim, one in load(path).items()}
    for one in figures:
        kept[one.claim] = asdict(one) if one.commit else {**asdict(one), **of_this_tree}
    in_order = {claim.id: kept[claim.id] for claim in CLAIMS if claim.id in kept}
    path.write_text(json.dumps(in_order, indent=1, ensure_ascii=False) + "\n")


# ---------------------------------------------------------------- for people


def line_of(one: Figure) -> str:
    """A figure in one line."""
    claim = BY_ID[one.claim]
    peers = "".join(f"; {name} {shown(claim, theirs)}" for name, theirs in one.peers.items())
    found = f"{shown(claim, one.found)}, target {one.target}, {one.runs:,} runs{peers}"
    return f"{one.verdict}: {one.claim}: {found}{one.note and '. '}{one.note}"


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """The options that every measure has; more may be added."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.sharing.{name}", description=about)
    parser.add_argument("--short", action="store_true", help="fewer runs, to try it")
    parser.add_argument("--keep", action="store_true", help="put figures into docs/sharing.json")
    return parser


def finish(figures: Sequence[Figure], *, is_kept: bool) -> int:
    """Prints figures, keeps them if that is wanted; returns the exit code."""
    for one in figures:
        print(line_of(one), flush=True)
    if is_kept:
        try:
            keep(figures)
        except UncleanTreeError as error:
            print(f"not kept: {error}", file=sys.stderr)
            return UNCLEAN
    return 0
