"""`python -m bench.sharing [NAME …] [--short] [--render] [--scratch]`: see `main`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from .document import render
from .figures import ROOT, UNCLEAN, load
from promises.results import UncleanTreeError, clean_commit
from support.verdict import EXIT_CODES, Verdict

HERE = Path(__file__).parent


def measures() -> list[str]:
    """The modules of this folder that measure something, those in virtual time first."""
    names = [
        path.stem for path in HERE.glob("*.py") if f'parser_of("{path.stem}"' in path.read_text()
    ]
    return sorted(names, key=lambda name: (not name.startswith("virtual_"), name))


def run(name: str, options: list[str]) -> bool:
    """Runs one in a process; returns whether it could measure."""
    print(f"\n## {name}\n", flush=True)
    tests = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", f"bench.sharing.{name}", *options],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": tests.rstrip(os.pathsep)}, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        print(f"{name} ended with exit code {done.returncode}", file=sys.stderr)
    return done.returncode == 0


def draw() -> None:
    """Draws the plots, if the extra that it takes is installed."""
    try:
        from .plots import draw_all
    except ImportError as error:
        print(f"no plots: {error}. `make sharing` installs what they need.", file=sys.stderr)
    else:
        draw_all()


def main() -> int:
    """Measures what sharing one machine promises, and writes docs/sharing.md and its plots.

    Figures are kept in docs/sharing.json with the commit that they were measured at; each measure
    replaces its own. So a run can be made in pieces.
    """
    known = measures()
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--short", action="store_true", help="fewer runs of each measure")
    parser.add_argument("--render", action="store_true", help="measure nothing, write docs/")
    parser.add_argument("--scratch", action="store_true", help="print figures, keep nothing")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(known)):
        parser.error(f"{', '.join(unknown)}: known are {', '.join(known)}")
    options = ["--short"] if given.short else []
    failed = []
    if not given.render:
        if not given.scratch:
            try:
                clean_commit()
            except UncleanTreeError as error:
                print(f"bench.sharing: {error}\nWith --scratch nothing is kept.", file=sys.stderr)
                return UNCLEAN
            options.append("--keep")
        failed = [name for name in given.names or known if not run(name, options)]
    if not given.scratch:
        draw()
        render()
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
        return EXIT_CODES[Verdict.NOT_SHOWN]
    is_missed = any(one.verdict is Verdict.MISSED for one in load().values())
    return EXIT_CODES[Verdict.MISSED if is_missed else Verdict.KEPT]


if __name__ == "__main__":
    sys.exit(main())
