"""Whether a model fits into the memory that its entry allows it."""

from __future__ import annotations

import math
from pathlib import Path

from mlxsup.protocol.text import size_text

from ...engine import BadLaunchError

COMFORTABLE_SHARE = 0.8
"""A share of `memory`: if more is in use before the first request, MLX constantly frees and takes
memory, which doubles the time of a step."""


def check_weights(path: Path, weight_bytes: int, limit_bytes: int | None) -> None:
    """Refuses a model that cannot fit, before its weights are read.

    Args:
        path: the model folder.
        weight_bytes: size of its arrays.
        limit_bytes: the entry's `memory`; None: no limit.

    Raises:
        BadLaunchError: names both numbers, and what would be enough.
    """
    if limit_bytes is not None and weight_bytes > limit_bytes:
        raise BadLaunchError(
            f"the weights of {path} need {size_text(weight_bytes)}, but memory is limited to "
            f'{size_text(limit_bytes)}; set memory to at least "{_enough_for(weight_bytes)}"'
        )


def memory_warnings(active_bytes: int, limit_bytes: int | None) -> tuple[str, ...]:
    """The warning for a model that is loaded and leaves too little of its `memory`."""
    if limit_bytes is None or active_bytes <= COMFORTABLE_SHARE * limit_bytes:
        return ()
    return (
        f"{size_text(active_bytes)} of the memory limit of {size_text(limit_bytes)} are in use "
        "before the first request, which makes answers slow; set memory to at least "
        f'"{_enough_for(active_bytes)}"',
    )


def _enough_for(count: int) -> str:
    return size_text(math.ceil(count / COMFORTABLE_SHARE))
