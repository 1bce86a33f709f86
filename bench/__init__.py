"""Benchmarks, run side by side with what they are compared to: `make bench`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the daemon and the tiny model that tests use, too
