"""`python -m mutation`: the mutation score of each part, and docs/mutants.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from .campaign import Kept, run_part
from .document import Score, document_of
from .equivalent import Equivalent, read_equivalents, stale_ones
from .interpreter import Interpreter
from .parts import PARTS, Project
from .pytest_run import KERNELS, copy_missing
from .reach import Reach, measure
from .tree import commit_of, copy_of, digest_of
from .trial import LIMIT_S, Limits
from support.verdict import EXIT_CODES, NotShown, Verdict

ROOT = Path(__file__).parents[2]
WANTED = 50


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", choices=names, help="only this one; repeatable")
    parser.add_argument("--mutants", type=int, default=WANTED, help="of each part")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried side by side")
    parser.add_argument("--seed", type=lambda text: int(text, 16), help="default: of the commit")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of the tests of a mutant")
    parser.add_argument("--dirty", action="store_true", help="measure files that are not committed")
    parser.add_argument(
        "--again",
        choices=("changed", "survivors", "all"),
        default="changed",
        help="which to try again: all if code or tests changed, all but the killed, or all",
    )
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "mutation")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "mutants.md")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Verdict:
    """Measure, and write the document.

    Raises:
        NotShown: if the tests fail on the right code, or nothing can be measured.
    """
    options = parse(arguments)
    commit = commit_of(ROOT, is_dirty_allowed=options.dirty)
    seed = int(commit[:8], 16) if options.seed is None else options.seed
    listed = read_equivalents()
    if stale := stale_ones(ROOT, listed):
        raise NotShown(f"listed as equivalent, but can no longer be planted: {stale}")
    options.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [
            copy_of(Project(root=ROOT), Path(folder).resolve() / str(job))
            for job in range(options.jobs)
        ]
        copy_missing(Path(tempfile.gettempdir()) / KERNELS, Path(folder) / KERNELS)
        with ExitStack() as stack:
            warm = [stack.enter_context(Interpreter.start(copy)) for copy in copies]
            scores = measure_parts(options, warm, seed, listed)
    mark = "" if not options.dirty else " and files that differ from it"
    options.out.write_text(
        document_of(scores, commit=commit + mark, seed=seed, run_s=options.limit_s)
    )
    for score in scores:
        say(f"{score.name}: {score.share:.1%} of {len(score.mutants)}: {score.verdict}")
    verdicts = {score.verdict for score in scores}
    if Verdict.NOT_SHOWN in verdicts:
        return Verdict.NOT_SHOWN
    return Verdict.MISSED if Verdict.MISSED in verdicts else Verdict.KEPT


def measure_parts(
    options: argparse.Namespace, warm: list[Interpreter], seed: int, listed: list[Equivalent]
) -> list[Score]:
    """Part by part; what each test reaches comes first."""
    copy = warm[0].copy
    tree = digest_of(copy.root, [*copy.packages, "tests"])
    scores = []
    for part in PARTS:
        if options.part and part.name not in options.part:
            continue
        reach = Reach()
        for file, measured in measure(warm, part, options.cache / "reach"):
            reach.add(measured)
            say(f"{part.name}: {file}")
        place = options.cache / f"{part.name}.json"
        if options.again == "all":
            place.unlink(missing_ok=True)
        tried = run_part(
            warm,
            part,
            seed=seed,
            wanted=options.mutants,
            reach=reach,
            limits=Limits(run_s=options.limit_s, test_s=options.limit_s / 2),
            kept=Kept.read(place, tree, is_kill_kept=options.again == "survivors"),
            say=say,
        )
        scores.append(Score.of(part.name, tried, listed, options.mutants))
    return scores


def say(text: str) -> None:
    """To whoever watches."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        verdict = main()
    except NotShown as reason:
        say(f"not shown: {reason}")
        verdict = Verdict.NOT_SHOWN
    sys.exit(EXIT_CODES[verdict])
