"""`python -m bench.gpu FOLDER [--rows NAME …] [--small]`: what only a GPU can show.

The rows are in order of importance and take less than eight minutes each. Each is saved in FOLDER
as soon as it has been measured; called again, the script measures what lacks. Nothing is
downloaded: the models have random weights and are made in seconds. `--small` tries every row on any
machine, `--render` prints the table, and `--keep` puts the rows into docs/.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from ..fast_path.claims import ON_GPU
from ..fast_path.document import FAST_PATH
from ..fast_path.stages import Stage, main
from . import against, equal, leases, loads, recovery, shared, together

EVERY = (
    *against.STAGES, *recovery.STAGES, *loads.STAGES, *together.STAGES, *leases.STAGES,
    *equal.STAGES,
)  # fmt: skip
IN_ORDER = [row.name for row in ON_GPU]
STAGES: tuple[Stage, ...] = tuple(
    sorted(EVERY, key=lambda stage: min(IN_ORDER.index(row) for row in stage.rows))
)

if __name__ == "__main__":
    sys.exit(main(STAGES, "bench.gpu", __doc__, sheet=FAST_PATH, kept=shared.share))
