"""What a run says: the score of each part, and every mutant, survivors first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .campaign import Mutant
from .equivalent import MOST_SHARE, Equivalent
from .trial import KILLED, Outcome
from support.verdict import Verdict

TARGET = 0.90
ORDER = (
    Outcome.SURVIVED, Outcome.NOT_SHOWN, Outcome.EXCEPTION, Outcome.TIME_LIMIT, Outcome.ASSERTION,
)  # fmt: skip

PREFACE = (
    "Made by `make mutants`. Small bugs are planted at random, one at a time, and the part's fast",
    "tests that run the changed line have to notice, in the core some hundred seeds of the",
    "simulation among them. A bug with which the module cannot be imported is replaced by the",
    "next one drawn. A kill by a time limit, or by a test outside of tests/unit, counts only if",
    "the same test passes on the right code directly afterwards.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A part's result.

    Attributes:
        name: of the part.
        mutants: those that could be imported.
        uncounted: how many could not, and were replaced by the next.
        equivalents: those of `mutants` that survived and are listed, with their reasons.
        wanted: how many must count.
    """

    name: str
    mutants: list[Mutant]
    uncounted: int
    equivalents: list[tuple[Mutant, Equivalent]]
    wanted: int

    @classmethod
    def of(cls, name: str, tried: list[Mutant], listed: list[Equivalent], wanted: int) -> Score:
        """Judge what was tried."""
        mutants = [one for one in tried if one.result.outcome is not Outcome.NOT_COUNTED]
        equivalents = [
            (mutant, one)
            for mutant in mutants
            if mutant.result.outcome is Outcome.SURVIVED
            for one in listed
            if one.is_of(mutant)
        ]
        return cls(
            name=name,
            mutants=mutants,
            uncounted=len(tried) - len(mutants),
            equivalents=equivalents,
            wanted=wanted,
        )

    def outcomes(self) -> Counter[Outcome]:
        """How many ended in each way; those that are listed are not among the survivors."""
        counts = Counter(mutant.result.outcome for mutant in self.mutants)
        counts[Outcome.SURVIVED] -= len(self.equivalents)
        return counts

    @property
    def killed(self) -> int:
        """How many the tests noticed."""
        return sum(self.outcomes()[outcome] for outcome in KILLED)

    @property
    def share(self) -> float:
        """Killed of all that differ from the right code, not shown ones included."""
        others = len(self.mutants) - len(self.equivalents)
        return self.killed / others if others else 0.0

    @property
    def verdict(self) -> Verdict:
        """Kept at 90 % and more of enough mutants, few of which are called equivalent."""
        if self.outcomes()[Outcome.NOT_SHOWN] or len(self.mutants) < self.wanted:
            return Verdict.NOT_SHOWN
        is_honest = len(self.equivalents) <= MOST_SHARE * len(self.mutants)
        return Verdict.KEPT if self.share >= TARGET and is_honest else Verdict.MISSED


def document_of(scores: list[Score], *, commit: str, seed: int, run_s: float) -> str:
    """The document, as Markdown."""
    return "\n".join(
        [
            "# Mutants",
            "",
            *PREFACE,
            "",
            f"Measured at commit `{commit}` with seed {seed:08x}, the beginning of the commit",
            f"unless another was asked for. The tests of a mutant may take {run_s:g} s together.",
            "",
            "| part | mutants | by assertion | by exception | by time limit | survived | not shown"
            " | equivalent | replaced | score | target | verdict |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
            *map(_row_of, scores),
            "",
            "By exception: a test failed because the code raised what the test did not expect.",
            *[line for score in scores for line in _part_of(score)],
            "",
        ]
    )


def _row_of(score: Score) -> str:
    counts = score.outcomes()
    cells = [
        score.name, len(score.mutants), counts[Outcome.ASSERTION], counts[Outcome.EXCEPTION],
        counts[Outcome.TIME_LIMIT], counts[Outcome.SURVIVED], counts[Outcome.NOT_SHOWN],
        len(score.equivalents), score.uncounted, f"{score.share:.1%}", f"≥{TARGET:.0%}",
        score.verdict,
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _part_of(score: Score) -> list[str]:
    lines = ["", f"## {score.name}"]
    reasons = {id(mutant): one.reason for mutant, one in score.equivalents}
    for outcome in ORDER:
        for mutant in score.mutants:
            if mutant.result.outcome is outcome:
                lines += _mutant_lines(mutant, reasons.get(id(mutant)))
    return lines


def _mutant_lines(mutant: Mutant, reason: str | None) -> list[str]:
    result, mutation = mutant.result, mutant.mutation
    outcome = f"equivalent: {reason}" if reason else str(result.outcome)
    by = f" ({result.test})" if result.test else ""
    why = f": {result.detail}" if result.detail and result.outcome not in KILLED else ""
    title = f"{mutation.path}:{mutation.line}, {mutation.operator}: {outcome}{by}{why}"
    return ["", " ".join(title.split()), "```diff", mutant.diff, "```"]
