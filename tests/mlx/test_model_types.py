"""Every model type of mlx-lm as a tiny model with random weights: real loads and real answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING, load_model

from mlxsup.protocol.states import Batching
from mlxsup.store.local_models import served_types
from mlxsup.worker.engine import BadModelError
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.folder import check_folder
from mlxsup.worker.engines.mlx.loader import load_lazily, widen_windows
from mlxsup.worker.engines.mlx.quirks import KNOWN_FAULTS

from support.model_types.build import make_model
from support.model_types.configs import WINDOW
from support.model_types.listed import (
    MODEL_TYPES,
    NO_MODEL,
    NOT_TRIED,
    UNEQUAL_ALONE,
    UNLOADABLE,
    model_file,
    model_types,
)
from support.model_types.scenarios import (
    BOUND,
    SCENARIOS,
    TOKENS,
    Kind,
    Trial,
    compare,
    prompt,
    try_model_type,
)
from support.models.tiny_model import VOCABULARY_SIZE, make_tiny_model
from support.worker.mlx_rows import loaded_engine, make_row, make_spec, run_rows, solo, token_ids

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(600)]

NAMES = [model_type.name for model_type in MODEL_TYPES]

PLAIN = {"alone", "batched", "late", "chunks", "seeded"}
"""What a key-value cache leaves equal bit for bit."""

WAYS = {
    "mamba": Batching.SERIAL_PREFILL,
    "nemotron_h": Batching.SERIAL_PREFILL,
    "baichuan_m1": Batching.SERIAL_PREFILL,
    "lfm2": Batching.SERIAL_PREFILL,
    "recurrent_gemma": Batching.ONE_ROW,
    "afm7": Batching.ONE_ROW,
    "gpt_bigcode": Batching.ONE_ROW,
    "internlm2_dynamic": Batching.ONE_ROW,
    "gemma2": Batching.ONE_ROW,
    "gemma3_text": Batching.TOGETHER,
    "qwen3": Batching.TOGETHER,
}
"""How the rows of some types run; those of every other are right in whatever way was found."""

QUICK: dict[str, Sequence[str]] = {
    "gemma3_text": ("alone", "late", "resume", "shared prefix"),
    "gpt_bigcode": ("batched",),
    "mamba": ("batched", "late"),
    "recurrent_gemma": ("batched", "late"),  # a prompt of one token, too
}
"""What `make test` tries; tests/contract does it with llama in each way of running rows."""


def slow_unless(quick: Sequence[str], names: Sequence[str] = NAMES) -> pytest.MarkDecorator:
    """Parametrise over types, all of which are slow but a few."""
    slow = pytest.mark.slow
    cases = [pytest.param(name, marks=[] if name in quick else slow) for name in names]
    return pytest.mark.parametrize("name", cases)


def check(name: str, scenarios: Sequence[str] = ()) -> None:
    [model_type] = model_types([name])
    result = try_model_type(model_type, scenarios)
    assert (result.load == "ok") == (name not in UNLOADABLE), result.load
    assert result.batching is WAYS.get(name, result.batching)
    wrong = {column: str(v) for column, v in result.verdicts.items() if not v.is_right}
    assert set(wrong) <= ({"alone"} if name in UNEQUAL_ALONE else set()), wrong
    if result.caches == "KV":
        plain = {column: v.kind for column, v in result.verdicts.items() if column in PLAIN}
        assert set(plain.values()) <= {Kind.BITS}, plain


@pytest.mark.bits
@pytest.mark.parametrize("name", QUICK)
def test_a_type_of_each_way_answers_alike_in_any_company(name: str) -> None:
    check(name, QUICK[name])


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_type_answers_alike_in_any_company(name: str) -> None:
    check(name, tuple(SCENARIOS))


@pytest.mark.bits
@slow_unless(["gemma3_text"], [name for name in NAMES if name not in UNLOADABLE])
def test_an_early_token_changes_the_answer_of_a_tiny_model(name: str, tmp_path: Path) -> None:
    """So that a lost state or a wrong mask would show in the tests above."""
    trial = Trial(make_model(tmp_path / name, name))
    try:
        tokens = prompt(40)
        changed = [*tokens[:3], tokens[3] ^ 1, *tokens[4:]]
        answers = [trial.answer_to(each) for each in (tokens, changed)]
    finally:
        trial.close()
    assert compare("changed", answers[1], answers[0]).kind is Kind.WRONG
    logprobs = [[t.logprobs.logprob for t in answer if t.logprobs] for answer in answers]
    assert np.all(np.isfinite(logprobs))
    moved = max(abs(one - two) for one, two in zip(*logprobs, strict=True))
    assert moved > 10 * BOUND
    # Not the same token over and over, which a wrong position would not change.
    assert len({token.token for token in answers[0]}) > TOKENS // 3


# ---------------------------------------------------------------- a text in pieces

LENGTH, CHANGED = 60, 40
"""Of a text, and the place of a token that what is computed before it must not notice."""

PIECES = ([16, 16, 16, 12], [7, 17, 20, 16], [LENGTH - 1, 1], [1] * LENGTH)

Logprobs = np.ndarray[Any, Any]


def logprobs(model: Any, tokens: list[int], pieces: list[int]) -> Logprobs:
    """Return those of every token after every beginning of a text that is read in pieces."""
    cache = make_prompt_cache(model)
    parts, start = [], 0
    for size in pieces:
        parts.append(model(mx.array([tokens[start : start + size]]), cache=cache)[0])
        start += size
    together = mx.concatenate(parts).astype(mx.float32)
    return np.array(together - mx.logsumexp(together, axis=-1, keepdims=True))


def largest_difference(one: Logprobs, other: Logprobs) -> float:
    """Return infinity where one has a probability and the other has none."""
    with np.errstate(invalid="ignore"):
        differences = np.where(one == other, 0.0, np.abs(one - other))
    return float(np.nan_to_num(differences, nan=np.inf).max())


def find_differences(model: Any, ways: Sequence[list[int]] = PIECES) -> set[str]:
    """Return what of a reading makes the same text mean something else."""
    tokens = np.random.default_rng(5).integers(256, VOCABULARY_SIZE, LENGTH).tolist()
    at_once = logprobs(model, tokens, [LENGTH])
    found = {
        f"in pieces of {pieces[0]}": largest_difference(logprobs(model, tokens, pieces), at_once)
        for pieces in ways
    }
    changed = [*tokens[:CHANGED], tokens[CHANGED] ^ 1, *tokens[CHANGED + 1 :]]
    found["before a changed token"] = largest_difference(
        logprobs(model, changed, [LENGTH])[:CHANGED], at_once[:CHANGED]
    )
    return {name for name, difference in found.items() if not difference <= BOUND}


NEED_METAL = {name for name, why in UNLOADABLE.items() if why == "needs Metal"}
WRONG = {fault.model_type for fault in KNOWN_FAULTS}


@slow_unless(["gemma3_text", "mamba2", "deepseek_v3"], sorted(set(NAMES) - NEED_METAL - WRONG))
def test_a_text_means_the_same_in_any_pieces(name: str, tmp_path: Path) -> None:
    assert find_differences(load_model(make_model(tmp_path, name))[0]) == set()


@pytest.mark.slow
def test_phi3small_sees_the_future(tmp_path: Path) -> None:
    model = load_model(make_model(tmp_path, "phi3small"))[0]
    assert find_differences(model, []) == {"before a changed token"}


def test_plamo3_depends_on_the_pieces_until_its_windows_are_wider(tmp_path: Path) -> None:
    model = load_model(make_model(tmp_path, "plamo3"))[0]
    assert find_differences(model) == {f"in pieces of {pieces[0]}" for pieces in PIECES}
    widen_windows(model)
    assert find_differences(model) == set()


ANSWER_TOKENS = 10


def answer_without_cache(model: Any, tokens: list[int]) -> list[int]:
    """Return the greedy answer when each token is computed from the whole text anew."""
    answer: list[int] = []
    for _ in range(ANSWER_TOKENS):
        logits = model(mx.array([tokens + answer]))
        likeliest: Any = mx.argmax(logits[0, -1]).item()
        answer.append(int(likeliest))
    return answer


def test_plamo3_answers_the_same_past_its_window(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "plamo3")
    model = load_model(folder)[0]
    lengths = (WINDOW - 1, WINDOW, WINDOW + 1, 40)
    expected = {length: answer_without_cache(model, prompt(length)) for length in lengths}
    rows = {length: make_row(length, prompt(length), ANSWER_TOKENS) for length in lengths}
    second_turn = prompt(40) + expected[40] + prompt(7)
    with loaded_engine(folder, prefix_cache_bytes=64 << 20) as engine:
        assert {length: solo(engine, row) for length, row in rows.items()} == expected
        together = run_rows(engine, rows.values())
        assert {key: token_ids(got) for key, got in together.items()} == expected
        turn = solo(engine, make_row(1, second_turn, ANSWER_TOKENS))
    assert turn == answer_without_cache(model, second_turn)


# ---------------------------------------------------------------- types that are refused


@pytest.mark.parametrize("model_type", ["phi3small", "olmo"])
def test_a_type_that_cannot_be_right_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    engine = MlxEngine(make_spec(make_tiny_model(tmp_path, config={"model_type": model_type})))
    with pytest.raises(BadModelError, match=rf"{model_type} is refused: .*{model_type}\.py:\d+"):
        engine.load(lambda phase, progress: None)


def test_a_model_file_that_ends_the_process_is_a_bad_model(tmp_path: Path) -> None:
    folder = check_folder(make_tiny_model(tmp_path), lambda share: None)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "olmo"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModelError, match=r"config\.json: mlx-lm failed to load"):
        load_lazily(folder)


# ---------------------------------------------------------------- what is tried


def test_every_model_file_of_mlx_lm_has_a_row_or_a_reason() -> None:
    folder = Path(mlx_lm.__file__).parent / "models"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    tried = {model_file(model_type.config) for model_type in MODEL_TYPES}
    assert files - tried == NO_MODEL | NOT_TRIED
    assert tried <= files


def test_served_types_are_those_of_mlx_lm() -> None:
    served = served_types()
    assert served is not None
    assert all(kind in served for kind in ("llama", "qwen3", "gemma3", *MODEL_REMAPPING))
    assert "bert" in served  # by code of our own
    assert "t5" not in served
