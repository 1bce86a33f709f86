"""Single numbers out of arrays."""

from __future__ import annotations

import mlx.core as mx


def number_of(array: mx.array) -> float:
    """The only number that an array holds."""
    number = array.item()
    assert not isinstance(number, complex)
    return number
