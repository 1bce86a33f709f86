"""Model types of mlx-lm, each as a tiny random model: alone, in company and in pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import BadModelError, Row, RowLogprobs, RowToken
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.folder import check_folder
from mlxsup.worker.engines.mlx.known_faults import KNOWN_FAULTS
from mlxsup.worker.engines.mlx.load import load_lazily, widen_windows

from support.bad.odd_models import CONFIGS, make_odd_model
from support.model_types.build import make_model
from support.model_types.faults import BATCH_FAULTS, LOAD_FAULTS, BatchFault
from support.model_types.listed import MODEL_TYPES, NO_MODEL, NOT_TRIED, model_file, model_types
from support.model_types.llama_configs import WINDOW
from support.model_types.run import try_model_type
from support.model_types.scenarios import TOKENS, prompt
from support.model_types.scenarios import Trial as ModelTrial
from support.model_types.table import UNEQUAL_ALONE, UNLOADABLE
from support.model_types.verdict import BOUND, Kind, compare
from support.models.tiny_model import VOCABULARY_SIZE, make_tiny_model
from support.worker.mlx_numbers import number_of
from support.worker.mlx_rows import loaded_engine, make_row, make_spec, run_rows, solo, token_ids

pytestmark = pytest.mark.mlx


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


@pytest.mark.bits
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "gemma3_text" else pytest.mark.slow)
        for name in ONE_OF_EACH_CACHE
    ],
)
@pytest.mark.timeout(SLOW_TIMEOUT_S)
def test_one_model_of_each_kind_of_cache_answers_alike_in_any_company(name: str) -> None:
    check(name)


@pytest.mark.bits
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


@pytest.mark.bits
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "gemma3_text" else pytest.mark.slow)
        for name in ONE_OF_EACH_CACHE
    ],
)
def test_the_tiny_models_attend_to_early_tokens(name: str, tmp_path: Path) -> None:
    check_attends(name, tmp_path / name)


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in MODEL_TYPES if each.name not in UNLOADABLE])
def test_every_tiny_model_attends_to_early_tokens(name: str, tmp_path: Path) -> None:
    check_attends(name, tmp_path / name)


def token(number: int, logprob: float) -> RowToken:
    return RowToken(
        key=RequestKey(1),
        token=number,
        logprobs=RowLogprobs(logprob=logprob, top=[(number, logprob), (9, -8.0)]),
    )


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


LENGTHS = (7, WINDOW - 1, WINDOW, WINDOW + 1, 40)

ANSWER_TOKENS = 10


def make_prompt(length: int) -> list[int]:
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


def test_plamo3_answers_the_same_past_its_window(plamo3: Path) -> None:
    model = load_model(plamo3)[0]
    expected = {length: answer_without_cache(model, make_prompt(length)) for length in LENGTHS}
    with loaded_engine(plamo3, prefix_cache_bytes=64 << 20) as engine:
        alone = {
            length: solo(engine, make_row(length, make_prompt(length), ANSWER_TOKENS))
            for length in LENGTHS
        }
        got = run_rows(
            engine,
            [make_row(length, make_prompt(length), ANSWER_TOKENS) for length in LENGTHS],
        )
        together = {length: token_ids(got[length]) for length in LENGTHS}
        second_turn = make_prompt(40) + expected[40] + make_prompt(7)
        turn = solo(engine, make_row(1, second_turn, ANSWER_TOKENS))
    assert alone == expected
    assert together == expected
    assert turn == answer_without_cache(model, second_turn)


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
            length: solo(engine, make_row(length, make_prompt(length), ANSWER_TOKENS))
            for length in lengths
        }
        got = run_rows(
            engine,
            [make_row(length, make_prompt(length), ANSWER_TOKENS) for length in lengths],
        )
    assert {length: token_ids(tokens) for length, tokens in got.items()} == alone


WAYS = {
    "mamba": Batching.SERIAL_PREFILL,
    "nemotron_h": Batching.SERIAL_PREFILL,
    "baichuan_m1": Batching.SERIAL_PREFILL,
    "recurrent_gemma": Batching.ONE_ROW,
    "lfm2": Batching.SERIAL_PREFILL,
    "afm7": Batching.ONE_ROW,
    "gpt_bigcode": Batching.ONE_ROW,
    "internlm2": Batching.ONE_ROW,
    "gemma2": Batching.ONE_ROW,
    "gemma3_text": Batching.TOGETHER,
    "qwen3": Batching.TOGETHER,
}

PROMPT_LENGTHS = (1, 7, 40, 100)


QUICK_WAYS = {"mamba", "recurrent_gemma", "gpt_bigcode", "gemma3_text"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in QUICK_WAYS else pytest.mark.slow) for name in WAYS
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlxEngine]:
    folder = make_odd_model(tmp_path_factory.mktemp(name), name)
    with loaded_engine(folder, max_concurrency=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine: MlxEngine) -> dict[int, list[int]]:
    got = {}
    for key in range(len(PROMPT_LENGTHS)):
        got[key] = token_ids(run_rows(engine, [make_mixed_row(key)])[key])
    assert len({tuple(tokens) for tokens in got.values()}) == len(PROMPT_LENGTHS)
    return got


def make_mixed_row(key: int, max_tokens: int = 24) -> Row:
    """Every other row is seeded, the rest are greedy."""
    numbers = random.Random(key)
    prompt = [numbers.randrange(VOCABULARY_SIZE) for _ in range(PROMPT_LENGTHS[key])]
    return make_row(key, prompt, max_tokens, temperature=key % 2, seed=key)


@pytest.mark.bits
def test_the_way_and_its_reason(name: str, engine: MlxEngine) -> None:
    facts = engine.facts
    assert facts.batching is WAYS[name]
    assert (name in facts.batching_reason) == (WAYS[name] is not Batching.TOGETHER)
    assert sorted(WAYS) == sorted(CONFIGS)


@pytest.mark.bits
def test_rows_that_join_late_and_stay_beside_cancelled_ones_C2_D8(
    engine: MlxEngine, alone: dict[int, list[int]]
) -> None:
    engine.insert(make_mixed_row(3))
    engine.insert(make_mixed_row(0))
    got: dict[int, list[int]] = {key: [] for key in alone}

    def step_until(key: int, count: int) -> None:
        while len(got[key]) < count:
            for token in engine.step().tokens:
                assert token.token is not None
                got[int(token.key)].append(token.token)

    step_until(0, 5)
    engine.insert(make_mixed_row(2))
    step_until(2, 3)
    engine.insert(make_mixed_row(1))
    engine.remove(RequestKey(0))
    step_until(1, 24)
    step_until(2, 24)
    step_until(3, 24)
    cancelled = got.pop(0)
    assert cancelled == alone[0][: len(cancelled)]
    assert got == {key: tokens for key, tokens in alone.items() if key}
    assert not engine.has_rows()


PACKAGE = Path(mlx_lm.__file__).parent


def test_every_model_file_of_mlx_lm_has_a_row_or_a_reason() -> None:
    files = {path.stem for path in (PACKAGE / "models").glob("*.py")} - {"__init__"}
    tried = {model_file(model_type.config) for model_type in MODEL_TYPES}

    assert files - tried == set(NO_MODEL) | set(NOT_TRIED)
    assert tried <= files


@pytest.mark.parametrize("fault", [*BATCH_FAULTS, *LOAD_FAULTS], ids=lambda f: f"{f.file}:{f.line}")
def test_fault_is_at_its_line(fault: BatchFault) -> None:
    """A release that fixes or moves a fault fails here, so that the list stays true."""
    path = PACKAGE / fault.file
    assert fault.symbol in path.read_text(encoding="utf-8").splitlines()[fault.line - 1]
    assert set(fault.rows) <= {model_type.name for model_type in MODEL_TYPES}
