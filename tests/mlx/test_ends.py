"""What ends an answer of a real model: its own end-of-text, the request's tokens, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.states import FinishReason
from mlxsup.worker.engines.mlx.batch_sampler import BatchSampler
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.sampling import make_draws

from support.loop_driver import LoopDriver, check_every_resume
from support.mlx_draws import drawer, shape, weigh
from support.mlx_rows import make_row, make_spec
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

pytestmark = pytest.mark.mlx

EOS = 300
ALWAYS: dict[str, Any] = {"logit_bias": {str(EOS): 100}}
"""Makes the model draw its end-of-text token wherever it may."""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDriver]:
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("tiny"), eos_token_id=EOS)
    engine = MlxEngine(make_spec(folder))
    driver = LoopDriver(engine, engine.load(lambda phase, at: None), 8)
    yield driver
    driver.close()
    engine.close()


def test_a_model_that_always_draws_its_end_answers_nothing(worker: LoopDriver) -> None:
    got = worker.answer(prompt="x", max_tokens=8, **ALWAYS)
    assert (got.tokens, got.finish) == ([], FinishReason.STOP)


@pytest.mark.bits
def test_an_end_that_is_ignored_is_a_token_like_any_other(worker: LoopDriver) -> None:
    got = worker.answer(prompt="x", max_tokens=8, ignore_eos=True, **ALWAYS)
    assert (got.tokens, got.finish) == ([EOS] * 8, FinishReason.LENGTH)
    assert got.text == worker.engine.text.token_alone(EOS)[0] * 8
    check_every_resume(worker, got)


def test_all_else_still_ends_an_answer_that_ignores_the_end(worker: LoopDriver) -> None:
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 8, "ignore_eos": True}
    by_token = worker.answer(stop_token_ids=[EOS], **asked, **ALWAYS)
    assert (by_token.tokens, by_token.finish) == ([], FinishReason.STOP)
    text = worker.engine.text.token_alone(EOS)[0]
    by_text = worker.answer(stop=[text + text], **asked, **ALWAYS)
    assert (by_text.tokens, by_text.text) == ([EOS, EOS], "")
    assert by_text.finish is FinishReason.STOP


@pytest.mark.bits
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_is_not_drawn_before_min_tokens(worker: LoopDriver, temperature: float) -> None:
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 20, "temperature": temperature, "seed": 2}
    got = worker.answer(min_tokens=7, **asked, **ALWAYS)
    assert len(got.tokens) == 7
    assert EOS not in got.tokens
    assert got.finish is FinishReason.STOP
    check_every_resume(worker, got)
    beside = [worker.dispatch(prompt=f"{n}", max_tokens=20, **ALWAYS) for n in range(3)]
    together = worker.dispatch(min_tokens=7, **asked, **ALWAYS)
    worker.finish(*beside)
    assert worker.finish(together)[0].tokens == got.tokens


def test_an_ignored_end_is_not_forbidden_before_min_tokens(worker: LoopDriver) -> None:
    got = worker.answer(prompt="x", max_tokens=6, min_tokens=4, ignore_eos=True, **ALWAYS)
    assert (got.tokens, got.finish) == ([EOS] * 6, FinishReason.LENGTH)


def test_min_tokens_may_equal_max_tokens(worker: LoopDriver) -> None:
    got = worker.answer(prompt="x", max_tokens=5, min_tokens=5, **ALWAYS)
    assert (len(got.tokens), got.finish) == (5, FinishReason.LENGTH)


def test_a_grammar_that_can_only_end_wins_over_min_tokens(worker: LoopDriver) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "regex", "regex": "ab"}
    got = worker.answer(prompt="x", max_tokens=9, min_tokens=9, response_format=form)
    assert (got.text, got.finish) == ("ab", FinishReason.STOP)


def test_a_grammar_that_may_end_goes_on_until_min_tokens(worker: LoopDriver) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "regex", "regex": "[ab]+"}
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 9, "response_format": form}
    assert len(worker.answer(**asked, **ALWAYS).tokens) == 1
    got = worker.answer(min_tokens=6, **asked, **ALWAYS)
    assert (len(got.tokens), got.finish) == (6, FinishReason.STOP)
    assert set(got.text) <= {"a", "b"}
    for ends in ([EOS], []):
        ended = worker.answer(ignore_eos=True, stop_token_ids=ends, **asked, **ALWAYS)
        assert (len(ended.tokens), ended.finish) == (1, FinishReason.STOP), "the form ends it"


def test_a_stop_token_that_a_grammar_leaves_alone_is_drawn(worker: LoopDriver) -> None:
    pytest.importorskip("llguidance")
    letter = worker.engine.text.encode(_body("q")).tokens
    form = {"type": "regex", "regex": "abqqqqqq"}
    got = worker.answer(
        prompt="x", max_tokens=9, min_tokens=8, stop_token_ids=letter, response_format=form
    )
    assert (got.text, got.finish) == ("ab", FinishReason.STOP)


def test_no_id_beyond_the_logits_is_written_to() -> None:
    """A tokenizer may know ids that the model has no output for."""
    logits = [1.0, 2.0, 3.0, 4.0]
    row = make_row(1, [1], min_tokens=1)
    assert shape(row, [0], logits, ending=[3, 4, 4_000_000]) == [1.0, 2.0, 3.0, -math.inf]
    assert shape(row, [0], logits, ending=[9]) == logits
    row = make_row(1, [1], logit_bias={1: 2.0, 4: 9.0, 4_000_000: 9.0})
    assert shape(row, [0], logits) == [1.0, 4.0, 3.0, 4.0]
    row = make_row(1, [1], temperature=1.0, xtc_probability=1.0, xtc_threshold=0.0, seed=1)
    weights = weigh(make_draws(row, spared=[9]), logits)
    assert [weight > 0 for weight in weights] == [True, False, False, False]


@pytest.mark.parametrize("delivered", [0, 2, 3])
def test_ends_are_forbidden_by_the_number_of_the_token(delivered: int) -> None:
    row = make_row(1, [1], min_tokens=3, delivered=[5] * delivered)
    sampler = BatchSampler([make_draws(row, ending=[6])], [[]], 8)
    is_allowed = []
    for _ in range(delivered, 5):
        logits = sampler.shape(mx.zeros((1, 8)), mx.array([1]))
        value: Any = logits[0, 6].item()
        is_allowed.append(value == 0)
        sampler.draw(logits)
    assert is_allowed == [number >= 3 for number in range(delivered, 5)]


def test_where_only_ends_are_left_they_stay() -> None:
    logits = [-math.inf, 1.0, 2.0, -math.inf]
    assert shape(make_row(1, [1], min_tokens=9), [0], logits, ending=[1, 2]) == logits


def test_xtc_never_leaves_out_a_stop_token() -> None:
    def drawn(stop_token_ids: tuple[int, ...]) -> set[int]:
        row = make_row(
            1,
            [1],
            temperature=1.0,
            xtc_probability=1.0,
            xtc_threshold=0.1,
            stop_token_ids=stop_token_ids,
        )
        draw = drawer(make_draws(row))
        logprobs = mx.log(mx.array([[0.6, 0.2, 0.2]]))
        return {draw(logprobs)[0] for _ in range(40)}

    assert 0 not in drawn(())
    assert 0 in drawn((0,))


def test_every_id_may_end_an_answer(worker: LoopDriver) -> None:
    got = worker.answer(
        prompt="x", max_tokens=4, stop_token_ids=[0, VOCABULARY_SIZE - 1], min_tokens=4
    )
    assert len(got.tokens) == 4


def _body(prompt: str) -> Any:
    from mlxsup.protocol.body import RequestBody

    return RequestBody(prompt=prompt)
