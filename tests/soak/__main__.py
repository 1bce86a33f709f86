"""`python -m soak [--minutes N] [--out FOLDER]`: ordinary use with crashes; nothing may grow.

Exits with the code of its verdict; see `support.verdict`.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from .run import soak
from support.verdict import EXIT_CODES, NotShown, Verdict


def main() -> int:
    """Runs it once."""
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--fake", action="store_true", help="without MLX")
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    given = parser.parse_args()
    try:
        result = soak(
            given.minutes,
            given.seed,
            out=given.out,
            every_s=given.every,
            is_real=not given.fake,
            tell=partial(print, file=sys.stderr, flush=True),
        )
    except NotShown as reason:
        print(f"not shown: {reason}")
        return EXIT_CODES[Verdict.NOT_SHOWN]
    except AssertionError as error:
        print(f"MISSED: {error}")
        return EXIT_CODES[Verdict.MISSED]
    print(result.text())
    for problem in result.problems:
        print(f"MISSED: {problem}")
    return EXIT_CODES[Verdict.MISSED if result.problems else Verdict.KEPT]


if __name__ == "__main__":
    sys.exit(main())
