"""What a load finds wrong, reports and measures."""

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
    ModelMissingError,
    StepResult,
)
from mlxsup.worker.engines.mlx import batch as mlx_batch
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.folder import check_folder
from mlxsup.worker.engines.mlx.load import iterate_arrays
from mlxsup.worker.engines.mlx.logits import FloatLogits

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
