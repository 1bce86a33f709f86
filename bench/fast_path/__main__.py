"""`python -m bench.fast_path FOLDER [--rows NAME …]`: what a CPU can show of the fast path.

Each row is saved in FOLDER as soon as it has been measured; called again, the script measures what
lacks. It waits until nothing else runs on the machine. `--keep` puts the rows into docs/.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from .cpu import STAGES
from .document import FAST_PATH
from .stages import main

if __name__ == "__main__":
    sys.exit(main(STAGES, "bench.fast_path", __doc__, sheet=FAST_PATH))
