"""How often an answer stays the same, bit by bit, after a pause (`bench/equality.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from ..equality import BATCH, PAUSED, RESUMED, SAMPLINGS, Rates
from ..fast_path.results import Found
from ..fast_path.stages import Rows, Setting, Stage
from .models import model
from support.worker_harness import WorkerHarness

PROMPTS = 100
LOAD_TIMEOUT_S = 600
KINDS = {"kept": PAUSED, "dropped": RESUMED}
"""With its state dropped, an answer continues as one that a crash has interrupted."""


async def equality(setting: Setting, wanted: Sequence[str]) -> Rows:
    """A trained model if there is one, else one with random weights, which is never sure."""
    folder = setting.trained or model(setting, "drawn")
    name = "random weights" if setting.trained is None else folder.name
    prompts = setting.runs(PROMPTS)
    found = {}
    with WorkerHarness(
        engine="mlx", path=str(folder), max_concurrency=BATCH, step_timeout_s=120.0
    ) as worker:
        worker.wait_until_ready(timeout_s=LOAD_TIMEOUT_S)
        rates = Rates(worker, prompts)
        for drawn, sampling in zip(("greedy", "sampled"), SAMPLINGS, strict=True):
            counts = rates.equal(sampling)
            others = {way: [count] for way, count in counts.items() if way not in KINDS.values()}
            note = f"{prompts} answers of {name}"
            for kind, way in KINDS.items():
                found[f"equality_{kind}_{drawn}"] = Found(
                    values=[counts[way] / prompts], sides=others, unit="answers", note=note
                )
    yield "equality", found


STAGES = (Stage(name="equality", rows=("equality",), measure=equality),)
