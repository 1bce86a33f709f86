"""Rows as tests write them: the parameters of `Sampling` stand among the others."""

from __future__ import annotations

from typing import Any

from mlxsup.protocol.parameters import SAMPLING, Sampling


def row_values(**values: Any) -> dict[str, Any]:
    """The fields of a row, with those that belong to its sampling put there."""
    sampling = {name: values.pop(name) for name in SAMPLING if name in values}
    return {**values, "sampling": Sampling(**sampling)}
