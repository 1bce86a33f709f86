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
    from mlxsup.worker.engines.mlx.engine import MlxEngine

    engine = MlxEngine(make_spec(demo_model_folder()))
    driver = LoopDriver(engine, engine.load(lambda phase, at: None), 8)
    yield driver
    driver.close()
    engine.close()


SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SAMPLED,
    "penalties, bias and stops": SAMPLED
    | {
        "top_k": 40,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {"260": 2.0},
        "stop": ["never to be found", "\n\n\n\n"],
    },
    "a schema": SAMPLED
    | {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "animal": {"type": "string", "minLength": 40, "maxLength": 80},
                        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
                    },
                    "required": ["animal", "legs"],
                    "additionalProperties": False,
                }
            },
        }
    },
}


@pytest.mark.bits
@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES.keys())
def test_an_answer_alone_is_the_one_among_seven_that_come_and_go_C10(
    worker: LoopDriver, parameters: dict[str, Any]
) -> None:
    alone = worker.answer(messages=QUESTION, max_tokens=LENGTH, **parameters)
    neighbours = [
        worker.dispatch(prompt=f"Tale {n}", max_tokens=4 + 3 * n, temperature=n % 2, seed=n)
        for n in range(4)
    ]
    key = worker.dispatch(messages=QUESTION, max_tokens=LENGTH, **parameters)
    while len(worker.answers[key].tokens) < len(alone.tokens) // 2:
        worker.turn()
    neighbours += [worker.dispatch(prompt=f"Late {n}", max_tokens=8, seed=n) for n in range(3)]
    among, *_ = worker.finish(key, *neighbours)
    assert (among.tokens, among.text, among.finish) == (alone.tokens, alone.text, alone.finish)


@pytest.mark.bits
@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES.keys())
def test_resumed_at_every_token_equals_the_undisturbed_answer_F10(
    worker: LoopDriver, parameters: dict[str, Any]
) -> None:
    whole = worker.answer(messages=QUESTION, max_tokens=LENGTH, **parameters)
    assert len(whole.tokens) > 10
    check_every_resume(worker, whole, at_once=8)
