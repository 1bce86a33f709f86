"""Every model type of mlx-lm, by a tiny random model of it: its answers are the same alone, beside
others, joined late, cancelled around, read in pieces, continued and resumed.

In float32 on the CPU; docs/models.md is the table of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import RowLogprobs, RowToken
from mlxsup.worker.engines.mlx.batching import Finding, WayFinder

from support.model_types.build import make_model
from support.model_types.listed import MODEL_TYPES, model_types
from support.model_types.run import try_folder, try_model_type
from support.model_types.scenarios import TOKENS, prompt
from support.model_types.scenarios import Trial as ModelTrial
from support.model_types.table import UNEQUAL_ALONE, UNLOADABLE
from support.model_types.verdict import Kind, compare

pytestmark = [pytest.mark.mlx, pytest.mark.bits]

# One with state alone, Mamba: tests/contract.
ONE_OF_EACH_CACHE = [
    "llama",  # key-value
    "gemma3_text",  # key-value and window
    "qwen3_next",  # state and key-value
    "deepseek_v32",  # lists of key-value caches
    "falcon_h1",  # lists of state and key-value
]
PLAIN = ("alone", "batched", "late", "chunks", "seeded")
"""What a key-value cache leaves equal bit for bit."""

MOVED = 1e-2
"""By how much a changed token must at least move a log-probability: ten times the bound."""

SLOW_TIMEOUT_S = 600
"""A type takes 5 s on an idle machine."""


def check(name: str) -> None:
    """Tries a model type and compares with what is known of it."""
    (model_type,) = model_types([name])
    result = try_model_type(model_type)
    assert (result.load == "ok") == (name not in UNLOADABLE), result.load
    allowed = {"alone"} if name in UNEQUAL_ALONE else set()
    wrong = {column: str(v) for column, v in result.verdicts.items() if not v.is_right}
    assert set(wrong) <= allowed, wrong
    if result.load == "ok" and result.caches == "KV":
        verdicts = {column: str(result.verdicts[column]) for column in PLAIN}
        assert verdicts == dict.fromkeys(PLAIN, "bits")


@pytest.mark.parametrize("name", ONE_OF_EACH_CACHE)
@pytest.mark.timeout(SLOW_TIMEOUT_S)
def test_one_model_of_each_kind_of_cache_answers_alike_in_any_company(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [model_type.name for model_type in MODEL_TYPES])
@pytest.mark.timeout(SLOW_TIMEOUT_S)
def test_every_model_type_answers_alike_in_any_company(name: str) -> None:
    check(name)


def check_attends(name: str, folder: Path) -> None:
    """An early token changes the answer, so that a lost state or a wrong mask would show."""
    (model_type,) = model_types([name])
    trial = ModelTrial(make_model(folder, model_type))
    try:
        tokens = prompt(40)
        changed = [*tokens[:3], tokens[3] ^ 1, *tokens[4:]]
        answers = [trial.answer_to(each) for each in (tokens, changed)]
    finally:
        trial.close()
    first = compare("changed", answers[1], answers[0])
    assert first.kind is Kind.WRONG
    logprobs = [[t.logprobs.logprob for t in answer if t.logprobs] for answer in answers]
    assert np.all(np.isfinite(logprobs))
    assert max(abs(one - two) for one, two in zip(*logprobs, strict=True)) > MOVED
    # Not the same token over and over, which a wrong position would not change.
    assert len({token.token for token in answers[0]}) > TOKENS // 3


@pytest.mark.parametrize("name", ONE_OF_EACH_CACHE)
def test_the_tiny_models_attend_to_early_tokens(name: str, tmp_path: Path) -> None:
    check_attends(name, tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in MODEL_TYPES if each.name not in UNLOADABLE])
def test_every_tiny_model_attends_to_early_tokens(name: str, tmp_path: Path) -> None:
    check_attends(name, tmp_path / name)


def test_the_scenarios_see_a_model_that_is_wrong_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose logits grow with the rows of a pass: the probe at the end of a load notices,
    and without that the answers are wrong in company alone."""
    from mlx_lm.models import llama

    plain = llama.Model.__call__

    def leaking(self: llama.Model, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        logits: mx.array = plain(self, inputs, *args, **kwargs)
        return logits * (1.0 + 0.1 * (inputs.shape[0] - 1))

    (model_type,) = model_types(["llama"])
    folder = make_model(tmp_path / "llama", model_type)
    monkeypatch.setattr(llama.Model, "__call__", leaking)
    columns = ["alone", "batched", "late", "chunks"]

    noticed = try_folder(model_type, folder, columns)
    assert (noticed.batching, noticed.is_right) == (Batching.ONE_ROW, True)

    monkeypatch.setattr(WayFinder, "find", lambda finder: Finding(way=Batching.TOGETHER))
    unnoticed = try_folder(model_type, folder, columns)
    kinds = {column: verdict.kind for column, verdict in unnoticed.verdicts.items()}
    assert unnoticed.batching is Batching.TOGETHER
    assert kinds["alone"] == kinds["chunks"] == Kind.BITS
    assert {kinds["batched"], kinds["late"]} == {Kind.WRONG}


def token(number: int, logprob: float) -> RowToken:
    return RowToken(
        key=RequestKey(1),
        token=number,
        logprobs=RowLogprobs(logprob=logprob, top=[(number, logprob), (9, -8.0)]),
    )


def test_a_verdict_tells_bits_rounding_and_wrong_answers_apart() -> None:
    wanted = [token(1, -1.0), token(2, -1.0)]

    assert compare("a", wanted, wanted).kind is Kind.BITS
    near = compare("a", [token(1, -1.0), token(2, -1.0005)], wanted)
    assert (near.kind, round(near.difference, 6)) == (Kind.ROUNDING, 0.0005)
    assert compare("a", [token(1, -1.0), token(2, -1.002)], wanted).kind is Kind.WRONG
    assert compare("a", [token(1, -1.0), token(3, -1.0)], wanted).kind is Kind.WRONG
    assert compare("a", [*wanted, token(3, -1.0)], wanted).kind is Kind.WRONG
    assert compare("a", [token(1, -9999.0)], wanted).kind is Kind.WRONG
    assert compare("a", wanted[:1], wanted).kind is Kind.BITS  # cancelled after its first token
