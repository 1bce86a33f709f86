"""What the engine rests on in mlx-lm: each test fails when a new release changes it."""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_sampler
from mlx_lm.utils import load_model

from mlxsup.worker.engines.mlx.batch_modes import LoneRow
from mlxsup.worker.engines.mlx.sampler import PLAIN

from support.models.tiny_model import make_tiny_model
from support.worker.mlx_rows import random_state

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny")))[0]


def test_the_default_sampler_draws_from_the_global_state_so_ours_does_not_use_it() -> None:
    mx.random.seed(3)
    before = random_state()
    mx.eval(make_sampler(temp=1.0)(mx.zeros((1, 8))))
    assert random_state() != before
    assert make_sampler(temp=0.0) is greedy_sampler


def test_the_constructor_sets_the_wired_limit_and_close_sets_it_back() -> None:
    constructor = inspect.getsource(BatchGenerator.__init__)
    assert "maybe_set_recommended_wired_limit()" in constructor
    close = inspect.getsource(BatchGenerator.close)
    assert "mx.set_wired_limit(self._old_wired_limit)" in close


def test_a_generation_batch_of_one_row_runs_over_a_plain_cache(model: Any) -> None:
    """What `LoneRow` rests on: no cache is merged, and all tokens but the next are in it."""
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2]]), cache=cache)
    batch = LoneRow(
        model=model,
        uids=[7],
        inputs=mx.array([3]),
        prompt_cache=cache,
        tokens=[[1, 2]],
        samplers=[PLAIN],
        fallback_sampler=greedy_sampler,
        logits_processors=[()],
        stop_sequences=[StopSequences()],
        max_tokens=[2],
    )
    (first,) = batch.next()
    assert (first.uid, first.finish_reason) == (7, None)
    (second,) = batch.next()
    assert second.finish_reason == "length"
    assert second.all_tokens == [1, 2, 3, first.token, second.token]
    assert [layer.offset for layer in second.prompt_cache] == [5] * len(model.layers)
    assert [type(layer) for layer in second.prompt_cache] == [KVCache] * len(model.layers)
