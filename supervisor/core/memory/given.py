"""Whether the `memory` of a model's entry is enough for the model and one short request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.text import size_text

from .need import Need, Source

if TYPE_CHECKING:
    from mlxsup.protocol.worker_messages import Ready


def loaded_problem(need: Need | None, ready: Ready) -> str:
    """What is wrong with the `memory` of a model that a worker has loaded, a clause; empty if it is
    enough, or if the entry gives none.

    Args:
        need: of the model; its process counts as there if the worker cannot measure that.
        ready: what the worker has measured.
    """
    if need is None:
        return ""
    own_bytes = need.own.size_bytes if ready.own_bytes is None else ready.own_bytes
    return _problem(need, ready.active_bytes, own_bytes, ready.cache_layers)


def known_problem(need: Need, *, is_measured_again: bool = False) -> str:
    """The same before a load, as far as it is known: estimates do not count, because they may be
    too high.

    Args:
        need: of the model.
        is_measured_again: leaves out what was measured of its process, which differs a little from
            one load to the next.
    """
    left_out = {Source.ESTIMATED, Source.MEASURED} if is_measured_again else {Source.ESTIMATED}
    own_bytes = 0 if need.own.source in left_out else need.own.size_bytes
    layers = () if need.remark else need.layers
    return _problem(need, need.weights.size_bytes, own_bytes, layers)


def _problem(need: Need, weight_bytes: int, own_bytes: int, layers: Sequence[CacheLayers]) -> str:
    if need.given_bytes is None:
        return ""
    longest = min(GROWTH_TOKENS, need.context_tokens)
    row_bytes = cache_bytes(layers, rows=1, longest=longest)
    least_bytes = weight_bytes + own_bytes + row_bytes
    if need.given_bytes >= least_bytes:
        return ""
    parts = {"its weights": weight_bytes, "its process": own_bytes, "a short request": row_bytes}
    takes = [f"{size_text(size)} for {what}" for what, size in parts.items() if size]
    return (
        f"its memory is {size_text(need.given_bytes)}, but it needs at least "
        f'{" + ".join(takes)}; set memory to at least "{size_text(least_bytes)}", or to '
        '"auto"'
    )
