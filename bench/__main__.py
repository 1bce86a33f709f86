"""`python -m bench [--repeats N] [--model FOLDER]`: every benchmark in one run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the daemon and the tiny model that tests use, too


def main() -> None:
    """Runs them one after the other and prints one report."""
    from support.tiny_model import make_tiny_model

    from . import footprint, throughput
    from .report import machine_lines

    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print("\n".join(machine_lines()) + "\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny_model(Path(folder) / "tiny")
        throughput.run(tiny, arguments.repeats)
        footprint.run(ROOT / "models" / "smollm2", max(3, arguments.repeats // 2))


if __name__ == "__main__":
    main()
