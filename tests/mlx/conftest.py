"""What every test of the MLX engine shares."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from mlxsup.worker.engines.mlx import warm_up


@pytest.fixture(scope="module", autouse=True)
def short_warm_up() -> Iterator[None]:
    """A load shows the cost model 128 tokens: the 1,024 after them take four fifths of its time."""
    with mock.patch.object(warm_up, "SHOWN", warm_up.SHOWN[:1]):
        yield
