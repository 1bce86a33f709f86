"""What a long prompt leaves behind: no copy of its caches, little of what these have outgrown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.llama import Model, ModelArgs

from mlxsup.worker.engines.mlx.limits import CACHE_SHARE, MemoryLimits
from mlxsup.worker.engines.mlx.logits import FloatLogits
from mlxsup.worker.engines.mlx.new_row import NewRow
from mlxsup.worker.engines.mlx.passes import TogetherPasses
from mlxsup.worker.engines.mlx.prompt_batch import PromptBatch
from mlxsup.worker.engines.mlx.sampling import PLAIN

from support.mlx_rows import make_spec

pytestmark = pytest.mark.mlx

LAYERS = 16
HEADS = 2
HEAD = 64
LAYER_TOKEN_BYTES = 2 * HEADS * HEAD * 4
"""Keys and values of one token in one layer, in float32."""
TOKENS = 512
CHUNK = 128


@pytest.fixture(scope="module")
def stream() -> mx.Stream:
    return mx.new_stream(mx.default_device())


@pytest.fixture(scope="module")
def model(stream: mx.Stream) -> FloatLogits:
    """Its caches are much larger than anything else of it."""
    with mx.stream(stream):
        model = Model(
            ModelArgs(
                model_type="llama", hidden_size=64, num_hidden_layers=LAYERS, intermediate_size=64,
                num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD,
                rms_norm_eps=1e-5, vocab_size=256,
            )
        )  # fmt: skip
        mx.eval(model.parameters())
    return FloatLogits(model)


def row_of(count: int, answer: int = 4, seed: int = 0) -> NewRow:
    return NewRow(
        tokens=[(seed + 7 * place) % 256 for place in range(count)], known=[], cache=None,
        max_tokens=answer, draws=PLAIN, stops=StopSequences([]),
    )  # fmt: skip


def read(passes: TogetherPasses, uid: int, count: int) -> None:
    for done in range(0, count - 1, CHUNK):
        passes.step({uid: min(CHUNK, count - 1 - done)})


class Watched:
    """A model that notes where the caches are that each pass begins with."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.caches: list[Any] = []
        self.began: list[list[int]] = []

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.caches = cache
        self.began.append(self.places())
        logits: mx.array = self._model(tokens, cache=cache)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def places(self) -> list[int]:
        """Where the keys of each layer are in memory; a copy that is still to be made is made."""
        keys = [layer.keys for layer in self.caches if layer.keys is not None]
        return [np.array(one, copy=False).__array_interface__["data"][0] for one in keys]


def test_an_answer_writes_where_its_prompt_did(model: FloatLogits, stream: mx.Stream) -> None:
    watched = Watched(model)
    passes = TogetherPasses(watched, stream=stream, max_concurrency=4)
    uid = passes.insert(row_of(TOKENS))
    read(passes, uid, TOKENS)
    written = watched.places()
    assert len(written) == LAYERS
    passes.step({uid: 0})
    assert watched.began[-1] == written
    assert watched.places() == written, "nor does the first token move them"
    passes.close()


def test_what_caches_have_outgrown_does_not_pile_up_on_a_gpu(
    model: FloatLogits, stream: mx.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row that comes or goes makes all arrays anew in another size, and MLX keeps the old ones
    to use them again, which it never can: with its own limit more than the caches take."""
    caches_bytes = LAYERS * LAYER_TOKEN_BYTES * (TOKENS + 256)
    limit_bytes = caches_bytes // 4
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": CACHE_SHARE * limit_bytes})
    before = mx.set_cache_limit(2**40)  # as much as it likes, as on a GPU
    limits = MemoryLimits(make_spec(Path("m")), "cuda")
    limits.set()
    mx.clear_cache()
    passes = TogetherPasses(model, stream=stream, max_concurrency=4)
    try:
        base = mx.get_active_memory()
        held = []
        uid = passes.insert(row_of(TOKENS, answer=40))
        read(passes, uid, TOKENS)
        passes.step({uid: 0})
        for seed in range(1, 4):
            short = passes.insert(row_of(3, answer=2, seed=seed))
            for size in (2, 0, 0, 0, 0):
                passes.step({short: size} if size else {})
                mx.synchronize(stream)
                held.append(mx.get_active_memory() - base + mx.get_cache_memory())
    finally:
        passes.close()
        limits.restore()
        mx.set_cache_limit(before)
    # Two rows, both of the same length in a batch, and what is kept.
    assert max(held) < 2 * caches_bytes + 2 * limit_bytes, [one / caches_bytes for one in held]


Arrivals = list[tuple[int, int, int]]
"""For each row: in which step it comes, and how many tokens its prompt and its answer have."""


def answers(generator: BatchGenerator, arrivals: Arrivals) -> dict[int, list[tuple[int, float]]]:
    """The tokens of each row with their log-probabilities."""
    got: dict[int, list[tuple[int, float]]] = {}
    left = sum(answer for _, _, answer in arrivals)
    step = 0
    while left:
        for place, (comes, prompt, answer) in enumerate(arrivals):
            if comes == step:
                tokens = [(11 * place + 7 * n) % 256 for n in range(prompt)]
                generator.insert([tokens], max_tokens=[answer])
        for response in generator.next()[1]:
            logprob = float(response.logprobs[response.token].item())
            got.setdefault(response.uid, []).append((response.token, logprob))
            left -= 1
        step += 1
    return got


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40), st.integers(1, 6)), min_size=1,
             max_size=4)
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_answers_are_what_they_would_be_with_the_copy(
    model: FloatLogits, stream: mx.Stream, arrivals: Arrivals
) -> None:
    """However rows come, with prompts of one length or of many, one by one or together."""
    arrivals.sort()
    found = []
    for hands_over in (False, True):
        with mx.stream(stream):
            generator = BatchGenerator(
                model, completion_batch_size=4, prefill_batch_size=4, prefill_step_size=8,
                stream=stream,
            )  # fmt: skip
        if hands_over:
            vars(generator)["_prompt_batch"] = PromptBatch.empty(
                generator.model, generator.sampler, prefill_step_size=8
            )
        found.append(answers(generator, arrivals))
        generator.close()
    assert found[0] == found[1]
