"""What the engine rests on in mlx-lm: each test fails when a new release changes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_sampler
from mlx_lm.utils import load_model

from mlxsup.worker.engines.mlx.decode import LoneRow, computed_ahead
from mlxsup.worker.engines.mlx.sampling import PLAIN

from support.models.tiny_model import make_tiny_model
from support.worker.mlx_rows import random_state

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny")))[0]


@pytest.fixture
def generator(model: Any) -> Iterator[BatchGenerator]:
    generator = BatchGenerator(
        model,
        completion_batch_size=4,
        prefill_batch_size=4,
        stream=mx.new_stream(mx.default_device()),
    )
    yield generator
    generator.close()


def answers(generator: BatchGenerator, steps: int = 100) -> dict[int, list[int]]:
    got: dict[int, list[int]] = {}
    for _ in range(steps):
        for response in generator.next()[1]:
            got.setdefault(response.uid, []).append(response.token)
    return got


def test_next_takes_at_most_one_chunk_of_each_prompt(generator: BatchGenerator) -> None:
    generator.prefill_step_size = 10
    first, second = generator.insert([list(range(25)), list(range(14))], max_tokens=[2, 2])
    prompts, tokens = generator.next()
    assert {response.uid: response.progress for response in prompts} == {
        first: (10, 25),
        second: (10, 14),
    }
    assert tokens == []


def test_the_chunk_size_may_change_between_steps_and_0_pauses(generator: BatchGenerator) -> None:
    (decoding,) = generator.insert([[1, 2, 3]], max_tokens=[50])
    generator.next()
    generator.next()
    (waiting,) = generator.insert([list(range(1, 60))], max_tokens=[5])
    done = []
    for size in (7, 0, 0, 20, 1):
        generator.prefill_step_size = size
        prompts, tokens = generator.next()
        assert [response.uid for response in tokens] == [decoding]
        done += [response.progress[0] for response in prompts if response.uid == waiting]
    assert done == [7, 7, 7, 27, 28]


def test_the_last_prompt_token_is_a_step_of_its_own(generator: BatchGenerator) -> None:
    """The first token of an answer comes out of the step after the one that ends the prompt."""
    (uid,) = generator.insert([[1, 2, 3]], max_tokens=[2])
    prompts, tokens = generator.next()
    assert [(r.progress, r.end_of_prompt) for r in prompts] == [((2, 3), False)]
    prompts, tokens = generator.next()
    assert [(r.progress, r.end_of_prompt) for r in prompts] == [((3, 3), True)]
    assert tokens == []
    prompts, tokens = generator.next()
    assert [(r.uid, r.finish_reason) for r in tokens] == [(uid, None)]
    prompts, tokens = generator.next()
    assert [(r.uid, r.finish_reason) for r in tokens] == [(uid, "length")]
    assert generator.next() == ([], [])


@pytest.mark.parametrize("steps", [0, 2, 6])
def test_a_row_can_be_removed_at_any_time_and_twice(generator: BatchGenerator, steps: int) -> None:
    generator.prefill_step_size = 8
    (alone,) = generator.insert([[5, 6, 7]], max_tokens=[12])
    expected = answers(generator)[alone]
    victim, other = generator.insert([list(range(20)), [5, 6, 7]], max_tokens=[12, 12])
    got: list[int] = []
    for step in range(60):
        if step == steps:
            generator.remove([victim])
            generator.remove([victim])
        responses = generator.next()[1]
        if step >= steps:
            assert all(response.uid == other for response in responses)
        got += [response.token for response in responses if response.uid == other]
    assert got == expected


def test_a_sampler_is_called_once_for_each_token_in_order(generator: BatchGenerator) -> None:
    """One call is ahead of what was returned, so call n draws token n."""
    drawn: list[int] = []

    def sampler(logprobs: mx.array) -> mx.array:
        drawn.append(100 + len(drawn))
        return mx.array([drawn[-1]])

    (uid,) = generator.insert([[1, 2]], max_tokens=[4], samplers=[sampler])
    assert answers(generator, 10)[uid] == [100, 101, 102, 103]
    assert len(drawn) == 5


def drawn_tokens(generator: BatchGenerator, *uids: int) -> dict[int, int]:
    ahead = computed_ahead(generator._generation_batch, uids)
    return {response.uid: response.token for response in ahead}


def test_the_tokens_of_the_next_step_are_drawn_and_can_be_read(generator: BatchGenerator) -> None:
    """The processors of a step come after the draw of what it returns, in the order of `uids`."""
    seen: list[int] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        latest: Any = tokens[-1].item()
        seen.append(latest)
        return logits

    (early,) = generator.insert([[1, 2]], max_tokens=[9], logits_processors=[[processor]])
    generator.next()
    generator.next()
    drawn = drawn_tokens(generator, early)
    assert (list(drawn), seen) == ([early], [2]), "first called behind the prompt's last token"
    (late,) = generator.insert([[3, 4]], max_tokens=[4])
    for _ in range(12):
        pending = drawn_tokens(generator, early, late)
        seen.clear()
        got = {response.uid: response.token for response in generator.next()[1]}
        assert got == pending
        if early in got:
            assert seen == [got[early]]
    assert drawn_tokens(generator, early, late) == {}
    assert late != early


def test_a_stop_token_is_returned_with_its_reason(generator: BatchGenerator) -> None:
    (uid,) = generator.insert([[1, 2]], max_tokens=[9])
    answer = answers(generator)[uid]
    stop = StopSequences([(answer[3],)])
    generator.insert([[1, 2]], max_tokens=[9], stop_sequences=[stop])
    responses = [response for _ in range(20) for response in generator.next()[1]]
    end = answer.index(answer[3])
    assert [response.token for response in responses] == answer[: end + 1]
    assert responses[-1].finish_reason == "stop"


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
