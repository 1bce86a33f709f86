"""`make promises`: the proof runs of docs/reliability.md in one go; prints every figure."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Runs each proof in a process of its own; exit code 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="1.0 for the published counts")
    scale = parser.parse_args().scale

    def times(count: int) -> str:
        return str(max(1, int(count * scale)))

    runs = (
        ("P22", ["-m", "simulation", "--seeds", times(10_000)]),
        ("P22, planted bugs", ["-m", "simulation.mutants"]),
        ("P17", ["-m", "fuzz", "--decoder", times(1_000_000), "--socket", times(100_000)]),
        ("P1, P3, P8, P10", ["-m", "chaos", "--requests", times(100_000)]),
    )
    print(f"{date.today()} · {platform.platform()} · Python {platform.python_version()}")
    is_kept = True
    for name, arguments in runs:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT / "tests",
            capture_output=True,
            text=True,
            check=False,
        )
        is_kept &= done.returncode == 0
        print(f"{name}: {'kept' if done.returncode == 0 else 'BROKEN'}", flush=True)
        print("\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines()))
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
