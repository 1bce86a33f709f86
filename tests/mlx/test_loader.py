"""What a load reports and measures, what it finds wrong, and whose fault it says that is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import LoadPhase
from mlxsup.worker.engine import (
    BadModelError,
    EngineFacts,
    GpuFaultElsewhereError,
    ModelMissingError,
    NoDeviceError,
    Row,
    StepResult,
)
from mlxsup.worker.engines.mlx import batch as mlx_batch
from mlxsup.worker.engines.mlx import batch_modes as mlx_passes
from mlxsup.worker.engines.mlx import capability_probe as mlx_way
from mlxsup.worker.engines.mlx import engine as mlx_engine
from mlxsup.worker.engines.mlx import loader as mlx_load
from mlxsup.worker.engines.mlx import pictures
from mlxsup.worker.engines.mlx import prefix_cache as mlx_prefix_size
from mlxsup.worker.engines.mlx import text as mlx_text
from mlxsup.worker.engines.mlx.batch import MlxBatch
from mlxsup.worker.engines.mlx.capability_probe import CapabilityProbe
from mlxsup.worker.engines.mlx.engine import MlxEngine, model_fingerprint
from mlxsup.worker.engines.mlx.folder import ModelFolder, check_folder
from mlxsup.worker.engines.mlx.loader import (
    is_memory_text,
    iterate_arrays,
    load_lazily,
    materialise,
    open_stream,
    raise_if_memory,
    raise_if_passing,
    read_weights,
)
from mlxsup.worker.engines.mlx.logits import FloatLogits
from mlxsup.worker.engines.mlx.prefill import LARGEST_CPU_CHUNK, CostModel
from mlxsup.worker.engines.mlx.text import MlxText, load_text

from support.models.tiny_model import CONTEXT_LENGTH, VOCABULARY_SIZE, make_tiny_model
from support.worker.mlx_rows import loaded_engine, make_spec

pytestmark = pytest.mark.mlx


def load_with(
    path: Path, report: Callable[..., None] = lambda *_: None, **changes: Any
) -> EngineFacts:
    """Load a folder; by this clock, no step takes any time."""
    engine = MlxEngine(make_spec(path, **({"max_concurrency": 1} | changes)), lambda: 0.0)
    still = SimpleNamespace(perf_counter=lambda: 0.0)
    try:
        with mock.patch.object(mlx_passes, "time", still):
            return engine.load(report)
    finally:
        engine.close()


# ---------------------------------------------------------------- what a load reports


def test_a_path_is_never_taken_for_a_hub_id_B6(tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match="does not exist"):
        load_with(tmp_path / "mlx-community" / "some-model")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["TRANSFORMERS_OFFLINE"] == "1"


def test_progress_names_the_phases_and_grows_with_each_step_of_probe_and_warm_up_B1(
    tiny: Path,
) -> None:
    """A report that repeats the one before does not renew the limit of a load that stalls."""
    seen: list[tuple[LoadPhase, float]] = []
    load_with(tiny, lambda *step: seen.append(step), max_concurrency=2)
    phases = [LoadPhase.IMPORT, LoadPhase.WEIGHTS, LoadPhase.MATERIALISE, LoadPhase.WARMUP]
    assert list(dict.fromkeys(phase for phase, _ in seen)) == phases
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    warm_up = [share for phase, share in seen if phase is LoadPhase.WARMUP]
    assert all(before < after for before, after in pairwise(warm_up))
    assert (warm_up[0], warm_up[-1]) == (0.75, 1.0)
    assert len(warm_up) > 20


def test_an_adapter_beside_the_weights_is_named(tmp_path: Path) -> None:
    (make_tiny_model(tmp_path) / "adapters.safetensors").touch()
    [warning] = load_with(tmp_path).warnings
    assert warning.startswith("adapters.safetensors is ignored")


def test_a_model_with_a_head_for_drafts_beside_its_weights_loads(tmp_path: Path) -> None:
    """mlx-lm would load the file, and refuse an array that is no parameter of the model."""
    path = make_tiny_model(tmp_path / "m")
    mx.save_safetensors(str(path / "model-mtp.safetensors"), {"mtp.fc.weight": mx.zeros((2, 2))})
    assert load_with(path).context_length == CONTEXT_LENGTH


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
    assert not engine.row_count()
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
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration's own number may say too much, and so may a tokenizer."""
    whole = FloatLogits.__call__

    def narrow(model: FloatLogits, *arguments: Any, **named: Any) -> mx.array:
        return whole(model, *arguments, **named)[..., :-5]

    monkeypatch.setattr(FloatLogits, "__call__", narrow)
    with loaded_engine(tiny) as engine:
        assert engine.facts.vocabulary_size == VOCABULARY_SIZE - 5
        with pytest.raises(RemoteError, match=f"vocabulary of {VOCABULARY_SIZE - 5}"):
            engine.text.encode(RequestBody(prompt_tokens=[VOCABULARY_SIZE - 5]))


# ---------------------------------------------------------------- whose fault an error is


def folder_of(shards: dict[str, list[str]], model_type: str = "llama") -> ModelFolder:
    """A folder with these shards, each of which has these arrays."""
    path = Path("/models/m")
    return ModelFolder(
        path=path,
        config={"model_type": model_type},
        shards=[path / name for name in shards],
        shard_of={array: path / name for name, arrays in shards.items() for array in arrays},
        weight_bytes=0,
    )


ONE = folder_of({"model.safetensors": ["a.weight"]})

TWO = folder_of({"1.safetensors": ["a.weight"], "2.safetensors": ["a.weight.scales", "b.weight"]})


@pytest.mark.parametrize(
    "text",
    [
        "Out of memory",
        "kIOGPUCommandBufferCallbackErrorOutOfMemory",
        "Insufficient Memory",
        "Unable to allocate 9 bytes",
        "failed to allocate",
        "greater than the maximum allowed buffer size",
        "std::bad_alloc",
    ],
)
def test_every_way_of_saying_that_memory_ran_out_is_understood(text: str) -> None:
    assert is_memory_text(text)
    with pytest.raises(MemoryError) as caught:
        raise_if_memory(RuntimeError(f"[x]\n{text}"))
    assert str(caught.value) == f"[x] {text}"
    assert not is_memory_text("There is no Stream(gpu, 1) in current thread.")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("[METAL] Command buffer execution failed: Caused GPU Timeout Error", RuntimeError),
        ("cudaStreamSynchronize(stream_) failed: unspecified launch failure", RuntimeError),
        ("cudnn failed with 3", RuntimeError),
        ("Failed to load compiled binary_Add kernel: it is invalid.", RuntimeError),
        ("There is no kernel named mlx::core::cu::binary_vv.", RuntimeError),
        ("[METAL] (5:kIOGPUCommandBufferCallbackErrorInnocentVictim)", GpuFaultElsewhereError),
        ("[METAL] Command buffer execution failed: Innocent Victim", GpuFaultElsewhereError),
        ("[malloc] Unable to allocate 99 bytes.", MemoryError),
        ("the model says cudnn failed", None),
        ("the model called cuFFT(x) failed", None),
        ("[GatherMM::eval] Currently only supports float32.", None),
        ("[metal_kernel] No Metal back-end.", None),
        (ValueError("[METAL] Command buffer execution failed: Timeout"), None),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_only_a_gpu_that_fails_is_worth_another_attempt(
    error: str | Exception, kind: type[Exception] | None
) -> None:
    fault = RuntimeError(error) if isinstance(error, str) else error
    if kind is None:
        raise_if_passing(fault)
        return
    with pytest.raises(kind) as caught:
        raise_if_passing(fault)
    assert caught.type is kind


def test_a_machine_without_a_working_device_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mx, "is_available", lambda device: False)
        with pytest.raises(NoDeviceError) as caught:
            open_stream()
        assert str(caught.value) == (
            f"MLX's default device {mx.default_device()} is not available on this machine"
        )

    def fail_with(text: str) -> Any:
        def fail(array: mx.array) -> None:
            raise RuntimeError(text)

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", fail_with("no\ndriver"))
        with pytest.raises(NoDeviceError) as caught:
            open_stream()
        assert str(caught.value) == "MLX has no usable device: no driver"
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", fail_with("[malloc] Unable to allocate 4 bytes."))
        with pytest.raises(MemoryError):
            open_stream()


@pytest.mark.parametrize(
    ("folder", "error", "message"),
    [
        (ONE, KeyError("hidden_size"), "config.json: 'hidden_size' is missing"),
        (ONE, TypeError("bad"), "config.json: a value is not what mlx-lm expects (bad)"),
        (ONE, AttributeError("bad"), "config.json: a value is not what mlx-lm expects (bad)"),
        (ONE, IndexError("bad"), "config.json: a value is not what mlx-lm expects (bad)"),
        (ONE, ZeroDivisionError("bad"), "config.json: a value is not what mlx-lm expects (bad)"),
        (ONE, AssertionError("bad"), "config.json: a value is not what mlx-lm expects (bad)"),
        (ONE, ValueError("two\nlines"), "config.json: two lines"),
        (ONE, ValueError("Missing 3 parameters"), "model.safetensors: Missing 3 parameters"),
        (TWO, ValueError("Missing 3 parameters"), ": Missing 3 parameters"),
        (TWO, ValueError("config says Missing"), "config.json: config says Missing"),
        (TWO, ValueError("shape of b.weight"), "2.safetensors: shape of b.weight"),
        # The longest name of an array is the one that is meant.
        (TWO, ValueError("a.weight.scales"), "2.safetensors: a.weight.scales"),
        (TWO, RuntimeError("[load_safetensors] x"), ": [load_safetensors] x"),
        (TWO, RuntimeError("[load] 2.safetensors"), "2.safetensors: [load] 2.safetensors"),
        (TWO, RuntimeError("[load] end of file"), ": [load] end of file"),
        (TWO, RuntimeError("no safetensors in it"), ": no safetensors in it"),
        (
            ONE,
            SystemExit(1),
            "config.json: mlx-lm failed to load model type llama; see its output in the log",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_model_that_cannot_be_made_is_blamed_on_a_file_B6(
    monkeypatch: pytest.MonkeyPatch, folder: ModelFolder, error: BaseException, message: str
) -> None:
    def fail(path: Path, *, lazy: bool) -> None:
        assert (path, lazy) == (folder.path, True)
        raise error

    monkeypatch.setattr(mlx_lm.utils, "load_model", fail)
    with pytest.raises(BadModelError) as caught:
        load_lazily(folder)
    place = "" if message.startswith(":") else "/"
    assert str(caught.value) == f"/models/m{place}{message}"


@pytest.mark.parametrize(("files", "streams"), [(1, 8), (20, 3), (100, 1)])
def test_a_file_is_read_by_several_streams_unless_there_are_many_files(
    files: int, streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream opens it once more, and a process on a Mac may open 256."""
    arrays = {f"a{n}": mx.full((3,), n) for n in range(20)}
    mx.save_safetensors(str(tmp_path / "a.safetensors"), arrays)
    used: list[Any] = []
    plain = mx.load

    def load(file: str, stream: Any) -> Any:
        used.append(stream)
        return plain(file, stream=stream)

    monkeypatch.setattr(mx, "load", load)
    with mlx_load.reading_side_by_side(files, 8):
        read: Any = mx.load(str(tmp_path / "a.safetensors"))
    assert len(set(map(str, used))) == len(used) == streams
    assert {name: array.tolist() for name, array in read.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    assert mx.load is load


@pytest.mark.parametrize(("files", "told"), [(1000, []), (1001, [1 / 1001, 2 / 1001])])
def test_of_very_many_files_each_is_read_as_it_is_opened(
    files: int, told: list[float], tmp_path: Path
) -> None:
    """Otherwise all would be open at once, and there is a limit."""
    path = tmp_path / "a.safetensors"
    shares = list[float]()
    mx.save_safetensors(str(path), {"a": mx.full((3,), 7)})
    before = set(os.listdir("/dev/fd"))
    with mlx_load.reading_side_by_side(files, 8, shares.append):
        read: Any = [mx.load(str(path)), mx.load(str(path))]
    assert (len(set(os.listdir("/dev/fd")) - before) >= len(read)) == (not told)
    assert [one["a"].tolist() for one in read] == [[7, 7, 7]] * 2
    assert shares == told


def test_a_model_is_made_of_what_was_read_before_without_another_look(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: array.tolist() for name, array in tree_flatten(load_model(tiny)[0].parameters())}
    folder = check_folder(tiny, lambda share: None)
    shares = list[float]()
    weights = read_weights(folder, folder.weight_bytes, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    monkeypatch.setattr(mx, "load", None)
    model, _ = load_lazily(folder, weights=weights)
    assert {name: array.tolist() for name, array in tree_flatten(model.parameters())} == known
    assert not weights, "arrays that a model leaves out would stay in memory"


@pytest.mark.parametrize(
    ("name", "files", "limit_bytes"),
    [("model.gguf", 1, None), ("a.safetensors", 1001, None), ("a.safetensors", 1, 99)],
)
def test_files_of_another_kind_too_many_or_too_large_are_left_to_the_model(
    name: str, files: int, limit_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "load", None)
    folder = ModelFolder(
        path=Path("/models/m"),
        config={},
        shards=[Path("/models/m") / name] * files,
        shard_of={},
        weight_bytes=100,
    )
    assert read_weights(folder, limit_bytes, lambda share: None) == {}


@pytest.mark.parametrize("left_out", ["a rank", "a tower"])
def test_what_a_model_may_leave_out_is_not_read_before(
    left_out: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[str]()
    real = mlx_load.read_weights

    def read(*args: Any) -> Any:
        reads.append("all")
        return real(*args)

    def end(*_: Any, **__: Any) -> None:
        raise MemoryError("far enough")

    monkeypatch.setattr(mlx_load, "read_weights", read)
    monkeypatch.setattr(mlx_load, "load_lazily", end)
    monkeypatch.setattr(pictures, "is_installed", lambda: False)
    for is_left_out in (False, True):
        engine = MlxEngine(make_spec(tiny))
        if is_left_out and left_out == "a rank":
            monkeypatch.setattr(engine, "_rank", "a rank")
            monkeypatch.setattr(mlx_engine, "join", lambda rank: None)
        elif is_left_out:
            monkeypatch.setattr(pictures, "has_vision_tower", lambda folder: True)
        with pytest.raises(MemoryError, match="far enough"):
            engine.load(lambda phase, progress: None)
        assert reads == ["all"]


def test_no_library_that_another_thread_imports_uses_mlx() -> None:
    """MLX belongs to the thread that loads the model (A2)."""
    look = "import sys; from mlxsup.worker.engines.mlx import imports; "
    look += "[imports.importlib.import_module(name) for name in imports.LIBRARIES]; "
    look += "print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm')])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_arrays_are_read_in_groups_and_each_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 arrays of 4 bytes, each group takes what reaches 12 bytes."""
    read: list[int] = []
    shares: list[float] = []
    real = mx.eval

    def evaluate(group: list[mx.array]) -> None:
        read.append(len(group))
        real(group)

    monkeypatch.setattr(mlx_load, "GROUP_BYTES", 12)
    monkeypatch.setattr(mx, "eval", evaluate)
    materialise([mx.zeros(1) for _ in range(10)], ONE, shares.append)
    assert read == [3, 3, 3, 1]
    assert shares == [0.3, 0.6, 0.9, 1.0, 1.0]
    shares.clear()
    materialise([], ONE, shares.append)
    assert shares == [1.0]


def test_with_cuda_every_array_is_touched_on_the_gpu_before_the_load_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU has read them; their pages move when the GPU first reads them."""
    touched: list[int] = []
    real = mx.sum

    def sum_of(array: mx.array) -> mx.array:
        touched.append(array.size)
        return real(array)

    arrays = [mx.zeros(size, kind) for size in (1, 0, 3) for kind in (mx.uint32, mx.bfloat16)]
    monkeypatch.setattr(mx, "sum", sum_of)
    materialise(arrays, ONE, lambda share: None)
    assert touched == []
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    materialise(arrays, ONE, lambda share: None)
    assert sorted(touched) == [0, 0, 1, 1, 3, 3]


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (ValueError("bad b.weight"), BadModelError, "/models/m/2.safetensors: bad b.weight"),
        (RuntimeError("[read]\nsafetensors"), BadModelError, "/models/m: [read] safetensors"),
        (RuntimeError("Unable to allocate"), MemoryError, "Unable to allocate"),
        (RuntimeError("the driver broke"), RuntimeError, "the driver broke"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_materialise_blame_file_memory_or_driver(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception], message: str
) -> None:
    def fail(group: list[mx.array]) -> None:
        raise error

    monkeypatch.setattr(mx, "eval", fail)
    shares: list[float] = []
    with pytest.raises(expected) as caught:
        materialise([mx.zeros(1)], TWO, shares.append)
    assert (caught.type, str(caught.value), shares) == (expected, message, [])


def test_a_file_that_ends_early_is_named_before_there_is_a_model(
    tiny: Path, tmp_path: Path
) -> None:
    folder = check_folder(Path(shutil.copytree(tiny, tmp_path / "m")), lambda share: None)
    [shard] = folder.shards
    os.truncate(shard, folder.weight_bytes - 100)
    with pytest.raises(BadModelError, match=str(shard)):
        read_weights(folder, None, lambda share: None)


# ---------------------------------------------------------------- what an engine is given


def test_ids_of_the_warm_up_are_in_the_smallest_vocabulary(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Row] = []

    def watch(batch: MlxBatch, row: Row) -> int:
        rows.append(row)
        raise ValueError("seen enough")

    monkeypatch.setattr(MlxBatch, "insert", watch)
    engine = MlxEngine(make_spec(tiny, max_concurrency=1))

    def of_four_ids(folder: Path, *, eos_token_ids: Any, vocabulary_size: int | None) -> MlxText:
        return load_text(folder, eos_token_ids=eos_token_ids, vocabulary_size=4)

    monkeypatch.setattr(mlx_text, "load_text", of_four_ids)
    with pytest.raises(Exception, match="seen enough"):
        engine.load(lambda *_: None)
    engine.close()
    assert rows[0].tokens == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_a_machine_without_mlx_is_said_so(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxsup.worker.engines.mlx.limits", None)
    with pytest.raises(NoDeviceError, match=r"^MLX cannot be imported here: .*mlx\.limits halted"):
        load_with(tiny)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        ("libmlx.so", r"pip install 'mlxsup\[cpu\]', or 'mlxsup\[cuda\]'"),
        ("libcudart.so.13", r"here: libcudart\.so\.13: cannot open"),
    ],
)
def test_a_machine_without_a_library_is_told_which_or_what_to_install(
    library: str, said: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "mlxsup.worker.engines.mlx.limits":
                cause = "cannot open shared object file: No such file or directory"
                raise ImportError(f"{library}: {cause}")

    monkeypatch.delitem(sys.modules, "mlxsup.worker.engines.mlx.limits", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(NoDeviceError, match=said):
        load_with(tiny)


def test_a_fingerprint_depends_on_all_that_answers_depend_on(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every life the same. A GPU continues nothing that a CPU has drawn."""
    facts, folder = load_with(tiny), check_folder(tiny, lambda share: None)
    own = model_fingerprint(folder, facts.backend, facts.versions)
    assert facts.fingerprint == own
    others = {
        model_fingerprint(folder, "cuda", facts.versions),
        model_fingerprint(folder, facts.backend, facts.versions | {"mlx-lm": "0"}),
    }
    monkeypatch.setattr(mlx_way, "PROBE_VERSION", "0")
    others.add(model_fingerprint(folder, facts.backend, facts.versions))
    assert len(others | {own}) == 4


def test_prompts_are_paced_as_the_launch_says(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def noted(**of: Any) -> CostModel:
        asked.append(of)
        return CostModel(**of)

    monkeypatch.setattr(mlx_engine, "CostModel", noted)
    for deterministic in (False, True):
        load_with(tiny, decode_stall_target_ms=125, step_timeout_s=7.0, deterministic=deterministic)
    given = {
        "decode_stall_target_s": 0.125, "step_timeout_s": 7.0, "largest_chunk": LARGEST_CPU_CHUNK,
    }  # fmt: skip
    assert asked == [given | {"is_fixed": is_fixed} for is_fixed in (False, True)]


@pytest.mark.parametrize(("backend", "is_exact"), [("cpu", True), ("cuda", False)])
def test_only_the_cpu_is_probed_as_exact(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, backend: str, is_exact: bool
) -> None:
    asked: list[dict[str, Any]] = []

    def watch(model: Any, **options: Any) -> CapabilityProbe:
        asked.append(options)
        return CapabilityProbe(model, **options)

    monkeypatch.setattr(mlx_way, "CapabilityProbe", watch)
    monkeypatch.setattr(mlx_load, "open_stream", lambda: (backend, mx.new_stream(mx.cpu)))
    monkeypatch.setattr(mlx_prefix_size, "free_memory_bytes", lambda *_: 0)
    load_with(tiny)
    (options,) = asked
    assert (options["is_exact"], options["model_type"]) == (is_exact, "llama")
    assert (options["max_concurrency"], options["context_length"]) == (1, CONTEXT_LENGTH)
    assert options["vocabulary_size"] == VOCABULARY_SIZE
