"""Needs with round numbers, so that a plan can be checked by hand."""

from __future__ import annotations

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.core.budget import Budget, Figure, Need, Source
from mlxsup.supervisor.memory.placement import Candidate

MIB = 2**20
GIB = 2**30

LAYERS = (CacheLayers(layers=1, token_bytes=MIB // 2),)
"""Each token of a row takes a MiB: half a MiB, and as much while the layer is copied."""

GROWTH = 256 * MIB
"""What a row takes besides its tokens: the step by which its cache grows."""


def need(
    fixed: int = GIB,
    *,
    least: int = 1024,
    context: int = 0,
    rows: int = 4,
    given: int | None = None,
    layers: tuple[CacheLayers, ...] = LAYERS,
    source: Source = Source.MEASURED,
) -> Need:
    """What a model needs that takes `fixed` bytes without requests and a MiB for each token.

    Args:
        fixed: three quarters weights, one quarter its process.
        least: tokens of the row for which memory is reserved.
        context: of the model; 0: the same.
        rows: how many may run.
        given: its `memory`.
        layers: what it keeps for each row.
        source: of all figures.
    """
    return Need(
        weights=Figure(size_bytes=fixed - fixed // 4, source=source),
        own=Figure(size_bytes=fixed // 4, source=source),
        layers=layers,
        layers_source=source,
        context_tokens=context or least,
        least_tokens=least,
        max_rows=rows,
        given_bytes=given,
    )


def candidate(
    name: str, what: Need, *, is_resident: bool = True, is_pinned: bool = False
) -> Candidate:
    """A model of this name."""
    model = ModelName(name)
    return Candidate(model=model, need=what, is_resident=is_resident, is_pinned=is_pinned)


def budget(size_bytes: int, automatic_bytes: int | None = None) -> Budget:
    """A budget, given by a configuration if it could be another one."""
    return Budget(
        size_bytes=size_bytes,
        machine_bytes=max(size_bytes, automatic_bytes or 0),
        reason="for a test",
        automatic_bytes=automatic_bytes,
    )
