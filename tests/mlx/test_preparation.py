"""Prompts are prepared beside the steps of a real engine, and hold none of them up (G1)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mlxsup.worker.engine import StepResult
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.text import MlxText

from support.loop_driver import LoopDriver
from support.mlx_rows import make_spec
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

LONG = "word " * 40_000


def test_a_long_prompt_that_is_tokenised_holds_up_no_step_and_no_short_prompt_G1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenising ends only when the others have: on the owner thread it would never end."""
    may_end, encoding_on = threading.Event(), set()
    encode = MlxText.encode

    def encode_when_told(self: MlxText, body: Any) -> Any:
        if body.prompt == LONG:
            encoding_on.add(threading.get_ident())
            assert may_end.wait(60), "nothing else got through meanwhile"
        return encode(self, body)

    monkeypatch.setattr(MlxText, "encode", encode_when_told)
    engine = MlxEngine(make_spec(make_tiny_model(tmp_path / "tiny"), max_concurrency=4))
    driver = LoopDriver(engine, engine.load(lambda phase, progress: None))
    try:
        runs = driver.dispatch(prompt="Once upon", max_tokens=200)
        while not driver.answers[runs].deltas:
            driver.turn()
        long = driver.dispatch(prompt=LONG, max_tokens=1)
        steps: list[int] = []
        step = engine.step

        def counted() -> StepResult:
            steps.append(1)
            return step()

        monkeypatch.setattr(engine, "step", counted)
        short = driver.dispatch(prompt="short", max_tokens=10)
        answers = driver.finish(runs, short)
        assert [len(answer.tokens) for answer in answers] == [200, 10]
        assert len(steps) < 200 + 10, "they shared the steps"
        assert not driver.answers[long].is_over
        assert encoding_on
        assert threading.get_ident() not in encoding_on
        may_end.set()
        [refused] = driver.finish(long)
        assert refused.error is not None
        assert refused.error["code"] == "context_length_exceeded"
    finally:
        may_end.set()
        driver.close()
        engine.close()
