"""Measures a step with adapters: 16 rows of one batch with as many different ones, or with none.

As many adapters as a model may have are in memory all the time.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx.engine import MlxEngine

from .report import order_in_round, print_table, spread
from .shaped_model import Shape, make_shaped_model
from support.models.adapters import make_adapter
from support.worker.mlx_rows import loaded_engine, make_row

SHAPE = Shape(layers=4, hidden=256, intermediate=688, heads=4, key_value_heads=4, dtype="float32")
HOT = 64
RANK = 8
ROWS = 16
TOKENS = 16
PROMPT = [300 + 7 * place for place in range(16)]
ADAPTERS = [f"a{number}" for number in range(HOT)]

SIDES: dict[str, list[str]] = {
    "bare": [""] * ROWS,
    "one adapter": [ADAPTERS[0]] * ROWS,
    "16 adapters": ADAPTERS[:ROWS],
    "8 bare, 8 adapters": [*[""] * 8, *ADAPTERS[:8]],
}


def run(repeats: int) -> None:
    """Print how long a step of each kind of batch takes next to one of a model without adapters."""
    ratios: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as parent:
        folder = make_shaped_model(Path(parent) / "m", SHAPE, seed=0, context_length=512)
        folders = {
            name: str(make_adapter(Path(parent) / name, folder, seed=number, rank=RANK))
            for number, name in enumerate(ADAPTERS)
        }
        with (
            loaded_engine(folder, max_concurrency=ROWS) as plain,
            loaded_engine(folder, max_concurrency=ROWS, adapters=folders) as adapted,
        ):
            for repeat in range(repeats + 1):
                took = {
                    side: _decode(plain if side == "without" else adapted, SIDES.get(side))
                    for side in order_in_round(["without", *SIDES], repeat)
                }
                if repeat:  # the first round warms up
                    for side, own in ratios.items():
                        own.append((took[side][0] / took["without"][0],
                                    took[side][1] / took["without"][1]))  # fmt: skip
    table = [
        (side, spread([cpu for cpu, _ in own]), spread([wall for _, wall in own]))
        for side, own in ratios.items()
    ]
    head = (f"{ROWS} rows, {HOT} adapters of rank {RANK}", "processor time", "clock")
    print_table(head, table)


def _decode(engine: MlxEngine, adapters: list[str] | None) -> tuple[float, float]:
    """Return the processor's seconds and those of the clock that steps take which only decode."""
    rows: list[Row] = [
        make_row(key, [key + 300, *PROMPT], TOKENS, ignore_eos=True, adapter=name)
        for key, name in enumerate(adapters or [""] * ROWS)
    ]
    for given in rows:
        engine.insert(given)
    begun: set[int] = set()
    while len(begun) < ROWS:
        begun |= {int(token.key) for token in engine.step().tokens}
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    while engine.row_count():
        engine.step()
    return time.process_time() - cpu_s, time.perf_counter() - wall_s
