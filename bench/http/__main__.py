"""`python -m bench.http FOLDER [--rows NAME …]`: how fast the HTTP gateway is, next to others.

Each row is saved in FOLDER as soon as it has been measured; called again, the script measures what
lacks. It waits until nothing else runs on the machine. `--keep` puts the rows into docs/.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from ..fast_path.stages import main
from .document import HTTP
from .stages import STAGES

if __name__ == "__main__":
    sys.exit(main(STAGES, "bench.http", __doc__, sheet=HTTP))
