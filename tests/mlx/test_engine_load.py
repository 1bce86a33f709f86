"""What a load finds wrong, reports, measures and leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import LoadPhase
from mlxsup.worker.engine import (
    BadModelError,
    GpuFaultElsewhereError,
    ModelMissingError,
    StepResult,
)
from mlxsup.worker.engines.mlx import batch as mlx_batch
from mlxsup.worker.engines.mlx import load as mlx_load
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.folder import check_folder
from mlxsup.worker.engines.mlx.load import iterate_arrays, materialise, raise_if_memory
from mlxsup.worker.engines.mlx.logits import FloatLogits
from mlxsup.worker.engines.mlx.passes import TogetherPasses
from support.mlx_rows import loaded_engine, make_row, make_spec, run_rows
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def load(path: Path) -> None:
    engine = MlxEngine(make_spec(path))
    try:
        engine.load(lambda phase, progress: None)
    finally:
        engine.close()


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def write_index(folder: Path, shard: str) -> None:
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def replace_with_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_with_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


Spoil = Callable[[Path], object]
BAD_FOLDERS: dict[str, tuple[Spoil, type[Exception], str, str]] = {
    "no folder": (shutil.rmtree, ModelMissingError, "model", "does not exist"),
    "a file": (
        lambda f: f.rename(f.with_name("moved")).is_dir() and f.write_text("x"),
        BadModelError,
        "model",
        "not a folder",
    ),
    "no config": (
        lambda f: (f / "config.json").unlink(),
        ModelMissingError,
        "config.json",
        "does not exist",
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        ModelMissingError,
        "tokenizer.json",
        "does not exist",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        ModelMissingError,
        "model.safetensors",
        "does not exist",
    ),
    "missing shard": (
        lambda f: write_index(f, "model-00002-of-00002.safetensors"),
        ModelMissingError,
        "model-00002-of-00002.safetensors",
        "does not exist",
    ),
    "config is not JSON": (
        lambda f: (f / "config.json").write_text("{"),
        BadModelError,
        "config.json",
        "not JSON",
    ),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[]"),
        BadModelError,
        "config.json",
        "JSON object",
    ),
    "tokenizer is not JSON": (
        lambda f: (f / "tokenizer.json").write_text("]"),
        BadModelError,
        "tokenizer.json",
        "not JSON",
    ),
    "tokenizer is another thing": (
        lambda f: (f / "tokenizer.json").write_text('{"version": "1.0"}'),
        BadModelError,
        "tokenizer.json",
        "cannot be used",
    ),
    "config nested too deeply": (
        lambda f: (f / "config.json").write_text("[" * 100_000),
        BadModelError,
        "config.json",
        "not JSON",
    ),
    "config is a folder": (
        lambda f: replace_with_folder(f / "config.json"),
        ModelMissingError,
        "config.json",
        "does not exist",
    ),
    "weights are a dangling link": (
        lambda f: replace_with_dangling_link(f / "model.safetensors"),
        ModelMissingError,
        "model.safetensors",
        "does not exist",
    ),
    "no model_type": (
        lambda f: (f / "config.json").write_text("{}"),
        BadModelError,
        "config.json",
        "model_type",
    ),
    "unknown model_type": (
        lambda f: change_config(f, model_type="perceptron"),
        BadModelError,
        "config.json",
        "perceptron not supported",
    ),
    "code in the folder": (
        lambda f: change_config(f, model_file="model.py"),
        BadModelError,
        "config.json",
        "model.py",
    ),
    "setting of a wrong type": (
        lambda f: change_config(f, hidden_size="large"),
        BadModelError,
        "config.json",
        "",
    ),
    "shape mismatch": (
        lambda f: change_config(f, intermediate_size=512),
        BadModelError,
        "model.safetensors",
        "Expected shape",
    ),
    "missing arrays": (
        lambda f: change_config(f, num_hidden_layers=3),
        BadModelError,
        "model.safetensors",
        "Missing",
    ),
    "empty shard": (
        lambda f: cut(f / "model.safetensors", 0),
        BadModelError,
        "model.safetensors",
        "is empty",
    ),
    "shard cut in its header": (
        lambda f: cut(f / "model.safetensors", 100),
        BadModelError,
        "model.safetensors",
        "cut short",
    ),
    "shard cut in its data": (
        lambda f: cut(f / "model.safetensors", (f / "model.safetensors").stat().st_size - 1),
        BadModelError,
        "model.safetensors",
        "cut short",
    ),
    "shard of something else": (
        lambda f: (f / "model.safetensors").write_bytes(b"GGUF" * 100),
        BadModelError,
        "model.safetensors",
        "not a safetensors file",
    ),
    "shard with a bad header": (
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"[1]x"),
        BadModelError,
        "model.safetensors",
        "header",
    ),
}


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_a_bad_folder_is_a_typed_error_that_names_the_file_B6(folder: Path, kind: str) -> None:
    spoil, error, file, cause = BAD_FOLDERS[kind]
    spoil(folder)
    with pytest.raises(error) as caught:
        load(folder)
    named = folder if file == "model" else folder / file
    assert str(named) in str(caught.value)
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def open_folder(tiny: Path) -> Iterator[Path]:
    """A copy in a place that every user can enter."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        folder = Path(shutil.copytree(tiny, Path(place) / "model"))
        folder.chmod(0o755)
        yield folder


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_without_permission_is_named_B6(open_folder: Path, file: str) -> None:
    (open_folder / file).chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root may read everything
        with pytest.raises(BadModelError, match="no permission") as caught:
            check_folder(open_folder, lambda share: None)
    finally:
        os.seteuid(user)
    assert str(open_folder / file) in str(caught.value)


def test_a_path_is_never_taken_for_a_hub_id_B6(tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match="does not exist"):
        load(tmp_path / "mlx-community" / "some-model")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["TRANSFORMERS_OFFLINE"] == "1"


def test_progress_never_goes_back_and_names_the_phases_B1(tiny: Path) -> None:
    seen: list[tuple[LoadPhase, float]] = []
    engine = MlxEngine(make_spec(tiny))
    engine.load(lambda phase, progress: seen.append((phase, progress)))
    engine.close()
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    phases = [LoadPhase.IMPORT, LoadPhase.WEIGHTS, LoadPhase.MATERIALISE, LoadPhase.WARMUP]
    assert list(dict.fromkeys(phase for phase, _ in seen)) == phases


def test_the_facts_of_a_load(tiny: Path) -> None:
    with loaded_engine(tiny) as engine:
        pass
    engine = MlxEngine(make_spec(tiny, context_length=512))
    facts = engine.load(lambda phase, progress: None)
    engine.close()
    assert facts.context_length == 512
    assert facts.vocabulary_size == VOCABULARY_SIZE
    assert facts.backend in ("cpu", "cuda", "metal")
    assert set(facts.versions) == {"mlx", "mlx-lm"}


def fingerprint_of(path: Path) -> str:
    engine = MlxEngine(make_spec(path))
    facts = engine.load(lambda phase, progress: None)
    engine.close()
    return facts.fingerprint


def test_the_fingerprint_follows_the_files(folder: Path) -> None:
    first = fingerprint_of(folder)
    assert fingerprint_of(folder) == first
    os.utime(folder / "config.json", ns=(1, 1))
    assert fingerprint_of(folder) == first, "configuration counts by content"
    os.utime(folder / "model.safetensors", ns=(10**18, 10**18))
    second = fingerprint_of(folder)
    assert second != first
    change_config(folder, rope_theta=5000.0)
    assert fingerprint_of(folder) != second


def test_the_warm_up_leaves_no_row_and_measures_the_speed_B5_B10(tiny: Path) -> None:
    with loaded_engine(tiny) as engine:
        assert not engine.has_rows()
        engine.insert(make_row(1, list(range(100))))
        assert engine.predict_step_s() > 0
        assert engine.bytes_held().active > 0
        run_rows(engine)


def test_the_warm_up_row_is_removed_even_when_it_fails_B5(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[RequestKey] = []
    real_remove = mlx_batch.MlxBatch.remove

    def step(self: mlx_batch.MlxBatch) -> StepResult:
        raise ValueError("shapes (1,2) and (3,4) cannot be multiplied")

    def remove(self: mlx_batch.MlxBatch, *keys: RequestKey) -> None:
        removed.extend(keys)
        real_remove(self, *keys)

    monkeypatch.setattr(mlx_batch.MlxBatch, "step", step)
    monkeypatch.setattr(mlx_batch.MlxBatch, "remove", remove)
    engine = MlxEngine(make_spec(tiny))
    with pytest.raises(BadModelError, match="cannot run: shapes"):
        engine.load(lambda phase, progress: None)
    assert len(removed) == 1
    assert not engine.has_rows()
    engine.close()


def test_the_walk_finds_underscore_and_hidden_arrays_A4() -> None:
    class Holder:
        def __init__(self) -> None:
            self.inner = [(mx.ones(1),)]

    class Module(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.ones(2)
            self._freqs = mx.ones(3)
            self.layers = [nn.Linear(4, 4), {"table": mx.ones(5)}]
            self.holder = Holder()
            self.itself = self.layers[0]
            self.frozen = nn.Linear(6, 6, bias=False)
            self.frozen.freeze()

    shapes = sorted(array.shape for array in iterate_arrays(Module()))
    assert shapes == sorted([(2,), (3,), (4, 4), (4,), (5,), (1,), (6, 6)])


@pytest.mark.parametrize(
    "text",
    [
        "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum"
        " allowed buffer size of 9 bytes.",
        "[METAL] Command buffer execution failed: Insufficient Memory"
        " (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "[malloc] Unable to allocate 99 bytes.",
    ],
)
def test_errors_about_memory_become_memory_errors(text: str) -> None:
    with pytest.raises(MemoryError):
        raise_if_memory(RuntimeError(text))
    raise_if_memory(RuntimeError("There is no Stream(cpu, 1) in current thread."))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "[METAL] Command buffer execution failed: Innocent Victim"
            " (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
            GpuFaultElsewhereError,
        ),
        (
            "[METAL] Command buffer execution failed: Caused GPU Timeout Error"
            " (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
            RuntimeError,
        ),
    ],
)
def test_a_step_tells_another_process_fault_on_the_gpu_from_its_own(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception]
) -> None:
    """Exit 72 accuses none of the requests; 70 does."""

    def fail() -> None:
        raise RuntimeError(text)

    with loaded_engine(tiny) as engine:
        assert engine.batch is not None
        assert isinstance(engine.batch.passes, TogetherPasses)
        monkeypatch.setattr(engine.batch.passes.generator, "next", fail)
        with pytest.raises(error) as caught:
            engine.step()
        assert caught.type is error


def test_memory_that_runs_out_in_a_load_is_not_the_models_fault(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*args: object, **named: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 99 bytes.")

    monkeypatch.setattr(mlx_load, "load_model", load_model)
    with pytest.raises(MemoryError, match="99 bytes"):
        load(tiny)


def test_memory_that_runs_out_while_arrays_are_read_is_not_the_models_fault(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arrays: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 99 bytes for what was read.")

    monkeypatch.setattr(mx, "eval", fail)
    with pytest.raises(MemoryError, match="99 bytes"):
        materialise(
            {"one": mx.zeros(1)}, check_folder(tiny, lambda share: None), lambda share: None
        )


def test_ids_that_the_model_has_no_output_for_are_not_valid_C7(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the configuration's own number says too much; a tokenizer may as well."""
    folder = make_tiny_model(tmp_path)
    whole = FloatLogits.__call__

    def narrow(model: FloatLogits, *arguments: Any, **named: Any) -> mx.array:
        return whole(model, *arguments, **named)[..., :-5]

    for call, width in ((whole, VOCABULARY_SIZE), (narrow, VOCABULARY_SIZE - 5)):
        monkeypatch.setattr(FloatLogits, "__call__", call)
        with loaded_engine(folder) as engine:
            assert engine.batch is not None
            assert engine.batch.logits_width == engine.facts.vocabulary_size == width
            with pytest.raises(RemoteError, match=f"vocabulary of {width}"):
                engine.text.encode(RequestBody(prompt_tokens=[width]))


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All limits set on a simulated device that can wire 1000 bytes; it began with 7."""
    limits = [7]

    def set_wired_limit(value: int) -> int:
        limits.append(value)
        return limits[-2]

    info = dict(mx.device_info()) | {"max_recommended_working_set_size": 1000}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    return limits


def test_wiring_is_off_and_the_limit_comes_back_E3_I3(tiny: Path, limit: list[int]) -> None:
    """Several workers must not wire all of it each."""
    with loaded_engine(tiny):
        assert 1000 in limit, "mlx-lm's constructor wires what the machine recommends"
        assert limit[-1] == 0
    assert limit[-1] == 7


@pytest.mark.parametrize(("asked", "wired"), [(300, 300), (5000, 1000), (None, 1000)])
def test_wiring_takes_what_the_spec_says_within_the_machine_I3(
    tiny: Path, limit: list[int], asked: int | None, wired: int
) -> None:
    """None is as much as was loaded, here above what the simulated machine recommends."""
    with loaded_engine(tiny, wired_limit_bytes=asked):
        assert limit[-1] == wired
    assert limit[-1] == 7


def test_memory_and_cache_limits_hold_for_a_life_and_come_back_E3(tiny: Path) -> None:
    memory, cache = mx.set_memory_limit(10**10), mx.set_cache_limit(10**9)
    try:
        with loaded_engine(tiny, memory_limit_bytes=2 * 10**9, cache_limit_bytes=0) as engine:
            assert mx.set_memory_limit(2 * 10**9) == 2 * 10**9
            assert mx.set_cache_limit(0) == 0
            run_rows(engine, [make_row(1, list(range(100)))])
            held = engine.bytes_held()
            assert held.cache == 0
            assert 0 < held.active <= held.peak
        assert mx.set_memory_limit(memory) == 10**10
        assert mx.set_cache_limit(cache) == 10**9
    finally:
        mx.set_memory_limit(memory)
        mx.set_cache_limit(cache)


def test_close_is_safe_before_a_load_and_twice_E2(tiny: Path) -> None:
    engine = MlxEngine(make_spec(tiny))
    engine.close()
    engine.load(lambda phase, progress: None)
    engine.insert(make_row(1, [1, 2, 3]))
    engine.close()
    engine.close()
    assert not engine.has_rows()
