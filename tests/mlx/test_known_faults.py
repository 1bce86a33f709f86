"""Model types that mlx-lm itself computes wrongly are right here, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlxsup.worker.engine import BadModelError
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.folder import check_folder
from mlxsup.worker.engines.mlx.load import load_lazily

from support.mlx_numbers import number_of
from support.mlx_rows import loaded_engine, make_row, make_spec, run_rows, solo, token_ids
from support.model_types.build import make_model
from support.model_types.listed import MODEL_TYPES
from support.model_types.llama_configs import WINDOW
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

LENGTHS = (7, WINDOW - 1, WINDOW, WINDOW + 1, 40)
ANSWER_TOKENS = 10


def prompt(length: int) -> list[int]:
    return [(37 * place + 11 * length) % 2048 for place in range(length)]


def answer_without_cache(model: Any, tokens: list[int]) -> list[int]:
    """The greedy answer when each token is computed from the whole text anew."""
    answer: list[int] = []
    for _ in range(ANSWER_TOKENS):
        logits = model(mx.array([tokens + answer]))
        answer.append(int(number_of(mx.argmax(logits[0, -1]))))
    return answer


@pytest.fixture(scope="module")
def plamo3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (model_type,) = [m for m in MODEL_TYPES if m.name == "plamo3"]
    return make_model(tmp_path_factory.mktemp("plamo3"), model_type)


def test_plamo3_answers_the_same_whatever_is_cached_past_its_window(plamo3: Path) -> None:
    model = load_model(plamo3)[0]
    expected = {length: answer_without_cache(model, prompt(length)) for length in LENGTHS}
    with loaded_engine(plamo3, prefix_cache_bytes=64 << 20) as engine:
        alone = {
            length: solo(engine, make_row(length, prompt(length), ANSWER_TOKENS))
            for length in LENGTHS
        }
        got = run_rows(
            engine, [make_row(length, prompt(length), ANSWER_TOKENS) for length in LENGTHS]
        )
        together = {length: token_ids(got[length]) for length in LENGTHS}
        second_turn = prompt(40) + expected[40] + prompt(7)
        turn = solo(engine, make_row(1, second_turn, ANSWER_TOKENS))
    assert alone == expected
    assert together == expected
    assert turn == answer_without_cache(model, second_turn)


def test_plamo3_says_that_it_deviates_from_mlx_lm(plamo3: Path) -> None:
    engine = MlxEngine(make_spec(plamo3))
    facts = engine.load(lambda phase, progress: None)
    engine.close()
    (warning,) = facts.warnings
    assert "plamo3.py:236" in warning


@pytest.mark.parametrize("model_type", ["phi3small", "olmo"])
def test_a_type_that_cannot_be_right_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    folder = make_tiny_model(tmp_path / "model", config={"model_type": model_type})
    engine = MlxEngine(make_spec(folder))
    with pytest.raises(BadModelError, match=rf"{model_type} is refused: .*{model_type}\.py:\d+"):
        engine.load(lambda phase, progress: None)


def test_a_model_file_that_ends_the_process_is_a_bad_model(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    folder = check_folder(path, lambda share: None)
    config = json.loads((path / "config.json").read_text()) | {"model_type": "olmo"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModelError, match=r"config\.json: mlx-lm gave up"):
        load_lazily(folder)


def test_an_adapter_beside_the_weights_is_named_at_the_load(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (folder / "adapters.safetensors").touch()
    engine = MlxEngine(make_spec(folder))
    facts = engine.load(lambda phase, progress: None)
    engine.close()
    (warning,) = facts.warnings
    assert warning.startswith("adapters.safetensors is not applied")


def test_recurrent_gemma_reads_a_prompt_of_one_token_as_it_does_alone(tmp_path: Path) -> None:
    (model_type,) = [m for m in MODEL_TYPES if m.name == "recurrent_gemma"]
    lengths = (1, 7, 40)
    with loaded_engine(make_model(tmp_path, model_type), prefix_cache_bytes=0) as engine:
        alone = {
            length: solo(engine, make_row(length, prompt(length), ANSWER_TOKENS))
            for length in lengths
        }
        got = run_rows(
            engine, [make_row(length, prompt(length), ANSWER_TOKENS) for length in lengths]
        )
    assert {length: token_ids(tokens) for length, tokens in got.items()} == alone
