"""Sizes of the models and rows of a run, as the shell would report them."""

from __future__ import annotations

from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.supervisor.core.memory.budget import Budget
from mlxsup.supervisor.core.memory.need import Figure, Need, Source

LAYERS = (CacheLayers(layers=1, token_bytes=1),)
LEAST_TOKENS = 1100
"""Rows are never longer, with a step of growth: what a model needs does not change."""

CONTEXT_TOKENS = 1200
PROMPT_TOKENS = (0, 0, 300, 700)
"""Beside those that tell a prompt from others."""


def row_bytes(layers: tuple[CacheLayers, ...]) -> int:
    """What a model needs for one row."""
    return cache_bytes(layers, rows=1, longest=LEAST_TOKENS)


def prompt_tokens(number: int) -> int:
    """How many tokens a prompt has, beside those that tell it from others."""
    return PROMPT_TOKENS[number // 2 % len(PROMPT_TOKENS)]


def need(
    size_bytes: int,
    layers: tuple[CacheLayers, ...],
    rows: int,
    *,
    weights: int,
    given: int | None,
) -> Need:
    """A model that needs that much with one row, or is given what its entry says."""
    own_bytes = size_bytes - row_bytes(layers) - weights
    return Need(
        weights=Figure(size_bytes=weights, source=Source.MEASURED),
        own=Figure(size_bytes=own_bytes, source=Source.MEASURED),
        layers=layers,
        layers_source=Source.MEASURED,
        context_tokens=CONTEXT_TOKENS,
        least_tokens=LEAST_TOKENS,
        max_rows=rows,
        given_bytes=given,
    )


def budget(size_bytes: int) -> Budget:
    """The memory budget of a run."""
    return Budget(
        size_bytes=size_bytes, machine_bytes=10 * size_bytes, is_given=True, reason="of the plan"
    )
