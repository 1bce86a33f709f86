"""What every test of the MLX engine shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from mlxsup.worker.engines.mlx import warm_up

from support.models.tiny_model import make_tiny_model
from support.worker.loop_driver import LoopDriver
from support.worker.mlx_rows import driven_engine


@pytest.fixture(scope="module", autouse=True)
def short_warm_up() -> Iterator[None]:
    """A load shows the cost model 128 tokens: the 1,024 after them take four fifths of its time."""
    with mock.patch.object(warm_up, "SHOWN", warm_up.SHOWN[:1]):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, which no test changes."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def worker(tiny: Path) -> Iterator[LoopDriver]:
    """The step loop over that model, which runs eight rows."""
    with driven_engine(tiny, 8) as driver:
        yield driver
