"""The figures of a GPU that docs/sharing.md claims as well."""

from __future__ import annotations

from collections.abc import Mapping

from ..claim import range_of
from ..fast_path.results import Result
from ..sharing.document import render
from ..sharing.figures import BY_ID, Figure, keep

SHARED = {
    "bits_gpu_kept": ("equality", "equality_kept_sampled"),
    "bits_gpu_dropped": ("equality", "equality_dropped_sampled"),
    "leases_gap": ("leases", "leases_gap"),
}
"""Claims of sharing: the row that measures it, and the claim there."""


def share(results: Mapping[str, Result]) -> None:
    """Puts what was measured of them into docs/sharing.md."""
    figures = []
    for name, (row, measured) in SHARED.items():
        result = results.get(row)
        if result is None:
            continue
        claim, found = BY_ID[name], result.found[measured]
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
    if figures:
        keep(figures)
        render()
