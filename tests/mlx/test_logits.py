"""Logits are float32 wherever they are used, also of models that compute in less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxsup.worker.engines.mlx.logits import FloatLogits

from support.mlx_rows import loaded_engine, make_row, run_rows
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

PROMPT = [7, 301, 42, 1999, 640]


@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("bf16"))
    weights: Any = mx.load(str(folder / "model.safetensors"))
    halves = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    mx.eval(halves)
    mx.save_safetensors(str(folder / "model.safetensors"), halves, {"format": "mlx"})
    return folder


def test_logits_are_the_models_own_numbers_as_float32(bf16_folder: Path) -> None:
    model: Any = load_model(bf16_folder)[0]
    wrapped = FloatLogits(model)
    own = model(mx.array([PROMPT]), cache=make_prompt_cache(model))
    logits = wrapped(mx.array([PROMPT]), cache=make_prompt_cache(wrapped))
    assert (own.dtype, logits.dtype, wrapped.own_dtype) == (mx.bfloat16, mx.float32, mx.bfloat16)
    assert mx.array_equal(own.astype(mx.float32), logits)


def test_all_else_of_the_model_passes_through(bf16_folder: Path) -> None:
    model: Any = load_model(bf16_folder)[0]
    wrapped = FloatLogits(model)
    assert wrapped.layers is model.layers
    assert wrapped.args.vocab_size == 2048
    with pytest.raises(AttributeError):
        _ = wrapped.no_such_thing


@pytest.mark.bits
def test_logprobs_of_a_bf16_model_equal_a_log_softmax_in_float32(bf16_folder: Path) -> None:
    row = make_row(1, PROMPT, max_tokens=8, top_logprobs=20)
    with loaded_engine(bf16_folder) as engine:
        got = run_rows(engine, [row])[1]
    model: Any = load_model(bf16_folder)[0]
    cache = make_prompt_cache(model)
    tokens = PROMPT
    for token in got:
        assert token.logprobs is not None
        logits = model(mx.array([tokens]), cache=cache)[0, -1].astype(mx.float32)
        expected: Any = (logits - mx.logsumexp(logits)).tolist()
        assert token.token is not None
        for number, logprob in [(token.token, token.logprobs.logprob), *token.logprobs.top]:
            assert logprob == pytest.approx(expected[number], abs=1e-3)
        tokens = [token.token]
