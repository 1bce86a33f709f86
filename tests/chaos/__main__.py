"""`python -m chaos [--requests N] [--real | --crowded]`: requests under faults must reconcile (P1).

Exits as every campaign does (`support.verdict`): 0 kept, 4 missed, 3 not shown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from .run import run_chaos
from .setting import crowded_setting, fake_setting, real_setting
from support.tiny_model import make_tiny_model
from support.verdict import EXIT_CODES, Verdict

REQUESTS = 100_000
REAL_REQUESTS = 500
CROWDED_REQUESTS = 500


def main() -> int:
    """Runs it once."""
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument(
        "--requests",
        type=int,
        help=f"{REQUESTS}; {REAL_REQUESTS} with --real, {CROWDED_REQUESTS} with --crowded",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="MLX and tiny models, not the fake")
    parser.add_argument("--crowded", action="store_true", help="models that do not fit together")
    given = parser.parse_args()
    usual = REAL_REQUESTS if given.real else CROWDED_REQUESTS if given.crowded else REQUESTS
    requests = given.requests or usual
    tell = partial(print, file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            setting = crowded_setting() if given.crowded else fake_setting()
            if given.real:
                folders = {
                    name: make_tiny_model(Path(folder) / name, seed=seed)
                    for seed, name in enumerate("ab")
                }
                setting = real_setting(folders)
            outcome = run_chaos(setting, requests, given.seed, tell=tell)
    except OSError as error:  # a disk that is full, a process that cannot be started
        print(f"not shown: {error}")
        return EXIT_CODES[Verdict.NOT_SHOWN]
    print(outcome)
    return EXIT_CODES[outcome.verdict]


if __name__ == "__main__":
    sys.exit(main())
