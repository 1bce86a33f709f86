"""What a model needs is more than it was appraised at if its processes run out of memory.

A raise never keeps out a model that fits as it was appraised: it is cut to what the budget has
next to the pinned models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from mlxsup.protocol.ids import ModelName

from .need import Need

LEAST_SHARE = 10
"""An estimate is raised by at least a tenth of what it says besides the weights: they are known,
and what a process held when it died was last measured up to a second before."""


def raised(need: Need, *, planned_bytes: int, held_bytes: int) -> Need:
    """The need of a model once a process of it has run out of memory.

    It is higher by what that process held beyond the plan, and at least by a fixed share. It stays
    the same if the entry gives the memory, and if it is all that there may be.

    Args:
        need: what it was until now.
        planned_bytes: what the process was to hold at most.
        held_bytes: what it was last measured at, without what it kept for reuse.
    """
    besides_bytes = need.needed_bytes - need.weights.size_bytes
    more_bytes = max(held_bytes - planned_bytes, besides_bytes // LEAST_SHARE)
    higher = replace(need, raised_bytes=need.raised_bytes + more_bytes)
    # What has no effect is not remembered, nor is anything forgotten that has none at the moment.
    return replace(need, raised_bytes=max(need.raised_bytes, higher.raise_for(0)))


def bounded(
    needs: Mapping[ModelName, Need], pinned: Collection[ModelName], budget_bytes: int
) -> dict[ModelName, Need]:
    """The needs, each raised no further than it fits into the budget next to the pinned models. If
    a model can be loaded as all were appraised, it can be loaded whatever was raised.

    Args:
        needs: of the models, in the order of the configuration.
        pinned: the models that always hold what they need.
        budget_bytes: what all models may take together.
    """
    found = {}
    fixed_bytes = sum(need.unraised_bytes for name, need in needs.items() if name in pinned)
    left_bytes = budget_bytes - fixed_bytes
    others = (need.unraised_bytes for name, need in needs.items() if name not in pinned)
    largest_bytes = max((size for size in others if size <= left_bytes), default=0)
    for name, need in needs.items():
        if name in pinned:
            more_bytes = max(0, left_bytes - largest_bytes)
            found[name] = replace(need, most_bytes=need.unraised_bytes + more_bytes)
            left_bytes -= found[name].raise_for(0)
    for name, need in needs.items():
        if name not in pinned:
            found[name] = replace(need, most_bytes=max(0, left_bytes))
    return {name: found[name] for name in needs}
