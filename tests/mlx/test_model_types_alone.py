"""What mlx-lm computes of a single text does not depend on the pieces in which it is read.

This is mlx-lm without the worker: what fails here is wrong alone, in any engine, and belongs into
`worker/engines/mlx/known_faults.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxsup.worker.engines.mlx.known_faults import KNOWN_FAULTS
from mlxsup.worker.engines.mlx.load import widen_windows

from support.model_types.build import make_model
from support.model_types.listed import MODEL_TYPES, model_types
from support.model_types.verdict import BOUND

pytestmark = pytest.mark.mlx

LENGTH = 60
CHANGED = 40
"""The place of a token that is changed; what is computed before it must not notice."""
PIECES = ([16, 16, 16, 12], [7, 17, 20, 16], [LENGTH - 1, 1], [1] * LENGTH)

NEED_METAL = {"bitnet", "muse_spark"}
WRONG = {fault.model_type for fault in KNOWN_FAULTS}
QUICK = ["llama", "gemma3_text", "mamba2", "deepseek_v3"]

Logprobs = np.ndarray[Any, Any]


def logprobs(model: Any, tokens: list[int], pieces: list[int]) -> Logprobs:
    """Of every token after every beginning of a text that is read in pieces."""
    cache = make_prompt_cache(model)
    parts = []
    start = 0
    for size in pieces:
        logits = model(mx.array([tokens[start : start + size]]), cache=cache)[0]
        parts.append(logits.astype(mx.float32))
        start += size
    together = mx.concatenate(parts)
    return np.array(together - mx.logsumexp(together, axis=-1, keepdims=True))


def largest_difference(one: Logprobs, other: Logprobs) -> float:
    """Infinite where one has a probability and the other has none."""
    with np.errstate(invalid="ignore"):
        differences = np.where(one == other, 0.0, np.abs(one - other))
    return float(np.nan_to_num(differences, nan=np.inf).max())


def find_differences(model: Any, vocabulary_size: int = 2048) -> dict[str, float]:
    """How far readings of the same text are apart, by what is different; only what is too far."""
    tokens = np.random.default_rng(5).integers(256, vocabulary_size, LENGTH).tolist()
    at_once = logprobs(model, tokens, [LENGTH])
    found = {
        f"in pieces of {pieces[0]}": largest_difference(logprobs(model, tokens, pieces), at_once)
        for pieces in PIECES
    }
    changed = [*tokens[:CHANGED], tokens[CHANGED] ^ 1, *tokens[CHANGED + 1 :]]
    unchanged = slice(0, CHANGED)
    found["before a changed token"] = largest_difference(
        logprobs(model, changed, [LENGTH])[unchanged], at_once[unchanged]
    )
    return {name: difference for name, difference in found.items() if not difference <= BOUND}


def make(name: str, folder: Path) -> Any:
    (model_type,) = model_types([name])
    return load_model(make_model(folder, model_type))[0]


@pytest.mark.parametrize("name", QUICK)
def test_a_text_means_the_same_in_any_pieces(name: str, tmp_path: Path) -> None:
    assert find_differences(make(name, tmp_path)) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [m.name for m in MODEL_TYPES if m.name not in NEED_METAL | WRONG | set(QUICK)]
)
def test_a_text_means_the_same_in_any_pieces_to_every_type(name: str, tmp_path: Path) -> None:
    assert find_differences(make(name, tmp_path)) == {}


def test_phi3small_sees_the_future(tmp_path: Path) -> None:
    assert "before a changed token" in find_differences(make("phi3small", tmp_path))


def test_plamo3_depends_on_the_pieces_until_its_windows_are_wider(tmp_path: Path) -> None:
    model = make("plamo3", tmp_path)
    assert set(find_differences(model)) == {f"in pieces of {pieces[0]}" for pieces in PIECES}
    widen_windows(model)
    assert find_differences(model) == {}
