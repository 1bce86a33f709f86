"""How an engine finds the way its rows run, and what each way does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import BadModelError
from mlxsup.worker.engines.mlx.batching import ONLY_ROW, TOO_SHORT
from mlxsup.worker.engines.mlx.engine import NO_NUMBERS, MlxEngine
from mlxsup.worker.engines.mlx.logits import FloatLogits

from support.mlx_rows import loaded_engine, make_row, make_spec, run_rows, solo
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

TOGETHER, SERIAL, ONE_ROW = Batching.TOGETHER, Batching.SERIAL_PREFILL, Batching.ONE_ROW


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_a_row_alone_that_raises_is_a_bad_model_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(self: FloatLogits, *args: Any, **named: Any) -> mx.array:
        raise RuntimeError("[GatherMM::eval] Currently only supports float32.")

    monkeypatch.setattr(FloatLogits, "__call__", call)
    for max_concurrency in (1, 4):
        engine = MlxEngine(make_spec(folder, max_concurrency=max_concurrency))
        with pytest.raises(BadModelError, match=r"cannot run: \[GatherMM") as caught:
            engine.load(lambda phase, progress: None)
        assert str(folder) in str(caught.value)
        engine.close()


def test_the_gpu_that_fails_in_a_load_is_not_the_models_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(self: FloatLogits, *args: Any, **named: Any) -> mx.array:
        raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Hang Error")

    monkeypatch.setattr(FloatLogits, "__call__", call)
    engine = MlxEngine(make_spec(folder))
    with pytest.raises(RuntimeError, match="GPU Hang") as caught:
        engine.load(lambda phase, progress: None)
    assert caught.type is RuntimeError


def test_the_probe_leaves_nothing_behind(folder: Path) -> None:
    with loaded_engine(folder, prefix_cache_bytes=1 << 24) as engine:
        assert not engine.has_rows()
        assert engine.prefixes is not None
        assert len(engine.prefixes) == 0
        assert (engine.facts.batching, engine.facts.batching_reason) == (TOGETHER, "")


def test_the_load_goes_on_during_the_probe(folder: Path) -> None:
    reports: list[float] = []
    engine = MlxEngine(make_spec(folder))
    engine.load(lambda phase, progress: reports.append(progress))
    engine.close()
    known: list[float] = []
    engine = MlxEngine(make_spec(folder, known_batching=found_in(folder, SERIAL)))
    facts = engine.load(lambda phase, progress: known.append(progress))
    engine.close()
    assert len(reports) > len(known) + 10, "each step of the probe is a report"
    assert (facts.batching, facts.batching_reason) == (SERIAL, "an earlier life")


def found_in(folder: Path, way: str, **changes: str) -> dict[str, str]:
    engine = MlxEngine(make_spec(folder, max_concurrency=1))
    facts = engine.load(lambda phase, progress: None)
    engine.close()
    known = {"fingerprint": facts.fingerprint, "batching": way, "reason": "an earlier life"}
    return known | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "another"},
        {"batching": "sideways"},
        {"reason": ONLY_ROW},
        {"reason": TOO_SHORT},
    ],
    ids=["another model", "an unknown way", "one row by configuration", "a short context"],
)
def test_what_is_not_known_of_this_model_is_probed(folder: Path, changes: dict[str, str]) -> None:
    with loaded_engine(folder, known_batching=found_in(folder, ONE_ROW, **changes)) as engine:
        assert engine.facts.batching is TOGETHER


def test_one_row_at_a_time_gives_each_row_a_token_in_each_step(folder: Path) -> None:
    """Twice as many rows as fit come one after the other; nobody who decodes is passed over."""
    with loaded_engine(folder, known_batching=found_in(folder, ONE_ROW)) as engine:
        alone = [solo(engine, make_row(key, [key + 1, 7, 9], max_tokens=9)) for key in range(16)]
        waiting = list(range(16))
        decoding: set[int] = set()
        got: dict[int, list[int]] = {key: [] for key in waiting}
        while waiting or engine.has_rows():
            while waiting and engine.row_count() < 8:
                key = waiting.pop(0)
                engine.insert(make_row(key, [key + 1, 7, 9], max_tokens=9))
            result = engine.step()
            keys = {int(token.key) for token in result.tokens}
            assert decoding <= keys, "a row that decodes got no token"
            decoding |= {int(read.key) for read in result.prefill if read.done == read.total}
            for token in result.tokens:
                assert token.token is not None
                got[int(token.key)].append(token.token)
                if token.finish is not None:
                    decoding.discard(int(token.key))
        assert [got[key] for key in range(16)] == alone
        assert run_rows(engine) == {}
        assert engine.batch is not None
        passes: Any = engine.batch.passes
        assert (passes.waiting, passes.decode.new, passes.decode.rows) == ({}, {}, {})


def test_rows_that_end_are_forgotten_where_prompts_are_read_alone(folder: Path) -> None:
    with loaded_engine(folder, known_batching=found_in(folder, SERIAL)) as engine:
        run_rows(engine, [make_row(key, [key + 1, 7, 9], max_tokens=3 + key) for key in range(4)])
        assert engine.batch is not None
        passes: Any = engine.batch.passes
        assert (passes.waiting, passes.decode.uids, passes.decode.own_uids) == ({}, {}, {})


def test_a_model_without_numbers_warns_in_every_life(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    weights["model.norm.weight"] *= float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    for known in (None, found_in(folder, TOGETHER)):
        with loaded_engine(folder, known_batching=known) as engine:
            assert engine.facts.warnings == (NO_NUMBERS,)
