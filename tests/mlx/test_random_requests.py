"""Hundreds of requests at random, on real MLX: every survivor gets what it gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.worker.engines.mlx.engine import MlxEngine

from support.loop_driver import Answer, LoopDriver
from support.mlx_rows import check_no_row_is_left, make_spec
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

ROWS = 8
SLACK_BYTES = 256 * 1024
"""What is left of a few small arrays: less than the cache of one short prompt."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a run.

    Attributes:
        parameters: of `generate`.
        turns: made between its arrival and the next one's.
        cancel_after: turns after its arrival, None for never.
        resume_at: how much of its answer an earlier life has given, in tenths; None: it is new.
    """

    parameters: dict[str, Any]
    turns: int
    cancel_after: int | None
    resume_at: int | None


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["tide", "moor"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
PROMPTS = st.one_of(
    st.sampled_from(["the tide", "the tide and the moor", "🦊 über allem", "x"]),
    st.integers(1, 150).map(lambda length: "moor " * length),
)
PARAMETERS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.integers(1, 30),
        "seed": st.integers(0, 2**63 - 1),
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.0, 2.0]),
    },
    optional={
        "top_k": st.integers(0, 3000),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.9),
        "xtc_probability": st.floats(0.0, 1.0),
        "xtc_threshold": st.floats(0.0, 0.5),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "penalty_window": st.integers(0, 60),
        "logit_bias": st.dictionaries(
            st.integers(0, 255).map(str), st.floats(-100, 60), max_size=6
        ),
        "stop": st.lists(st.sampled_from(["a", "ti", "o r", "🦊", "zz"]), max_size=2),
        "logprobs": st.booleans(),
        "response_format": st.sampled_from(
            [
                {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
                {"type": "regex", "regex": "[a-z ]{3,20}🦊"},
            ]
        ),
    },
)
PLANNED = st.builds(
    Planned,
    parameters=PARAMETERS,
    turns=st.integers(0, 6),
    cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 12)),
    resume_at=st.one_of(st.none(), st.none(), st.integers(0, 9)),
)


def load(folder: Path, **changes: Any) -> LoopDriver:
    engine = MlxEngine(make_spec(folder, max_concurrency=ROWS, **changes))
    return LoopDriver(engine, engine.load(lambda phase, at: None), ROWS)


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LoopDriver, LoopDriver]]:
    """One that gets everything at once and keeps prompts, one that answers each alone."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    busy, plain = load(folder, prefix_cache_bytes=2**24), load(folder)
    yield busy, plain
    for driver in (busy, plain):
        driver.close()
        driver.engine.close()


def run(driver: LoopDriver, plan: list[Planned], alone: list[Answer]) -> list[int]:
    """Lets them arrive and go as planned; returns their keys."""
    keys: list[int] = []
    cancels: dict[int, list[int]] = {}
    turn = 0

    def make_turn() -> None:
        nonlocal turn
        for key in cancels.pop(turn, ()):
            driver.cancel(key)
        driver.turn()
        turn += 1

    for planned, whole in zip(plan, alone, strict=True):
        while len(driver.loop.open_keys) >= ROWS:
            make_turn()
        if planned.resume_at is None:
            key = driver.dispatch(**planned.parameters)
        else:
            key = driver.dispatch(whole.resume_after(kept_of(planned, whole)))
        keys.append(key)
        if planned.cancel_after is not None:
            cancels.setdefault(turn + planned.cancel_after, []).append(key)
        for _ in range(planned.turns):
            make_turn()
    while not all(driver.answers[key].is_over for key in keys):
        make_turn()
    return keys


def kept_of(planned: Planned, whole: Answer) -> int:
    return len(whole.tokens) * (planned.resume_at or 0) // 10


def check(planned: Planned, whole: Answer, got: Answer) -> None:
    assert got.error is None
    kept = kept_of(planned, whole)
    expected = whole.tokens[kept:]
    if got.finish is FinishReason.CANCELLED:
        assert got.tokens == expected[: len(got.tokens)]
        return
    assert (got.tokens, got.finish) == (expected, whole.finish)
    before = Answer(deltas=whole.until(kept)).text_of(Channel.CONTENT)
    assert before + got.text == whole.text


@pytest.mark.bits
@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(plan=st.lists(PLANNED, min_size=20, max_size=20))
def test_200_random_requests_get_what_they_get_alone_C8_C10_D9(
    drivers: tuple[LoopDriver, LoopDriver], plan: list[Planned]
) -> None:
    busy, plain = drivers
    pytest.importorskip("llguidance")
    mx.synchronize()
    busy.engine.give_back()
    before = busy.engine.bytes_held().active
    alone = [plain.answer(**planned.parameters) for planned in plan]
    assert all(whole.error is None for whole in alone)
    keys = run(busy, plan, alone)
    for planned, whole, key in zip(plan, alone, keys, strict=True):
        check(planned, whole, busy.answers.pop(key))
    plain.answers.clear()
    check_nothing_is_left(busy)
    busy.engine.give_back()
    plain.engine.give_back()
    assert busy.engine.bytes_held().active <= before + SLACK_BYTES


def check_nothing_is_left(driver: LoopDriver) -> None:
    assert not driver.loop.open_keys
    assert not driver.engine.has_rows()
    assert isinstance(driver.engine, MlxEngine)
    check_no_row_is_left(driver.engine)
