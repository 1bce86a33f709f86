"""How often an answer stays the same, bit by bit, after a pause (`bench/equality.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..claim import range_of
from ..equality import BATCH, PAUSED, RESUMED, SAMPLINGS, Rates
from ..fast_path.results import Found, Result
from ..fast_path.stages import Rows, Setting, Stage
from ..sharing.document import render
from ..sharing.figures import BY_ID, Figure, keep
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


def share(results: Mapping[str, Result]) -> None:
    """Puts the rates of answers that were drawn into docs/sharing.md, which claims them as well."""
    result = results.get("equality")
    if result is None:
        return
    figures = []
    for kind in KINDS:
        claim = BY_ID[f"bits_gpu_{kind}"]
        found = result.found[f"equality_{kind}_sampled"]
        figures.append(
            Figure(
                claim=claim.id,
                found=range_of(claim, found.values),
                runs=len(found.values),
                peers={},
                target=claim.target,
                unit=claim.unit,
                commit=result.commit,
                machine=result.machine,
                note=found.note,
            )
        )
    keep(figures)
    render()


STAGES = (Stage(name="equality", rows=("equality",), measure=equality),)
