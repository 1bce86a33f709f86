"""Resume on a real model, quantised as people use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.demo_model import demo_model_folder
from support.loop_driver import LoopDriver, check_every_resume
from support.mlx_rows import make_spec

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.timeout(3600)]

LENGTH = 48
QUESTION = [{"role": "user", "content": "Name three animals, with an emoji for each 🦊."}]


@pytest.fixture(scope="module")
def worker() -> Iterator[LoopDriver]:
    from mlxsup.worker.mlx_engine import MlxEngine

    engine = MlxEngine(make_spec(demo_model_folder()))
    driver = LoopDriver(engine, engine.load(lambda phase, at: None), 8)
    yield driver
    driver.close()
    engine.close()


@pytest.mark.bits
@pytest.mark.parametrize("parameters", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 7}])
def test_resumed_at_every_token_equals_the_undisturbed_answer_F10(
    worker: LoopDriver, parameters: dict[str, Any]
) -> None:
    whole = worker.answer(messages=QUESTION, max_tokens=LENGTH, **parameters)
    assert len(whole.tokens) > 10
    check_every_resume(worker, whole, at_once=8)
