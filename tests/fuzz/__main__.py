"""`python -m fuzz [--decoder N] [--socket N] [--seed N]`: prints the figures of P17.

Exits with the code of its verdict; see `support.verdict`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .client_socket import fuzz_socket
from .decoder import fuzz_decoder
from support.verdict import EXIT_CODES, NotShown, Verdict


def main() -> int:
    """Both, with their figures."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--decoder", type=int, default=1_000_000)
    parser.add_argument("--socket", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            decoded = fuzz_decoder(given.decoder, given.seed)
            print(decoded.text(), flush=True)
            through = fuzz_socket(given.socket, given.seed, folder=Path(folder))
            print(through.text())
    except AssertionError as error:
        print(f"MISSED: {error}")
        return EXIT_CODES[Verdict.MISSED]
    except (NotShown, OSError) as reason:
        print(f"not shown: {reason}")
        return EXIT_CODES[Verdict.NOT_SHOWN]
    problems = [*decoded.problems, *through.problems]
    for problem in problems:
        print(f"MISSED: {problem}")
    return EXIT_CODES[Verdict.MISSED if problems else Verdict.KEPT]


if __name__ == "__main__":
    sys.exit(main())
