"""`python -m chaos [--requests N] [--seed N] [--real] [--without-resume]`: it must reconcile."""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from support.tiny_model import make_tiny_model

from .run import run_chaos
from .setting import fake_setting, real_setting

REQUESTS = 100_000
REAL_REQUESTS = 500


def main() -> int:
    """Runs it once."""
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--requests", type=int, help=f"{REQUESTS}; {REAL_REQUESTS} with --real")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="MLX and a tiny model, not the fake")
    parser.add_argument("--without-resume", action="store_true")
    given = parser.parse_args()
    requests = given.requests or (REAL_REQUESTS if given.real else REQUESTS)
    tell = partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        is_real = given.real
        setting = real_setting(make_tiny_model(Path(folder))) if is_real else fake_setting()
        figures = run_chaos(
            setting, requests, given.seed, resume=not given.without_resume, tell=tell
        )
        print(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
