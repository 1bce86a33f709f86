"""What a load says about the device, the files and the memory, word for word."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxsup.worker.engine import BadModelError, GpuFaultElsewhereError, NoDeviceError
from mlxsup.worker.engines.mlx import load as mlx_load
from mlxsup.worker.engines.mlx.folder import ModelFolder
from mlxsup.worker.engines.mlx.load import (
    is_memory_text,
    iterate_arrays,
    load_lazily,
    materialise,
    open_stream,
    raise_if_innocent,
    raise_if_memory,
    raise_if_passing,
    shorten,
    widen_windows,
)

pytestmark = pytest.mark.mlx


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


def test_an_error_is_shortened_to_one_line_of_at_most_300_characters() -> None:
    assert shorten(ValueError(" one\n\ttwo  three ")) == "one two three"
    assert shorten(KeyError()) == "KeyError"
    assert shorten(ValueError("n" * 300)) == "n" * 300
    assert shorten(ValueError("n" * 301)) == "n" * 300 + "…"


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


def test_the_fault_of_another_process_keeps_its_text() -> None:
    with pytest.raises(GpuFaultElsewhereError) as caught:
        raise_if_innocent(RuntimeError("Innocent Victim\n(00000005)"))
    assert str(caught.value) == "Innocent Victim (00000005)"


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (RuntimeError("cuStreamSynchronize(s) failed: 700"), True),
        (RuntimeError("cudnn failed with 3"), True),
        (RuntimeError("the model says cudnn failed"), False),
        (RuntimeError("the model called cuFFT(x) failed"), False),
        (ValueError("[METAL] Command buffer execution failed: Timeout"), False),
    ],
)
def test_only_a_gpu_that_fails_is_worth_another_attempt(error: Exception, passes: bool) -> None:
    if not passes:
        raise_if_passing(error)
        return
    with pytest.raises(RuntimeError) as caught:
        raise_if_passing(error)
    assert caught.value is error


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, *, has_metal: bool) -> None:
    """Work runs on the CPU; MLX says that it is a GPU."""
    cpu = mx.new_stream(mx.cpu)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    monkeypatch.setattr(mx, "new_stream", lambda device: cpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: has_metal)


@pytest.mark.parametrize(("has_metal", "name"), [(True, "metal"), (False, "cuda")])
def test_a_gpu_is_named_after_its_interface(
    monkeypatch: pytest.MonkeyPatch, has_metal: bool, name: str
) -> None:
    pretend_gpu(monkeypatch, has_metal=has_metal)
    assert open_stream()[0] == name


def test_the_cpu_is_named_and_its_stream_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    (backend, first), (_, second) = open_stream(), open_stream()
    assert backend == "cpu"
    assert first != second
    assert first != mx.default_stream(mx.cpu)


def test_the_stream_is_tried_before_anything_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[Any, Any]] = []
    monkeypatch.setattr(
        mx,
        "eval",
        lambda array: tried.append((array.shape, mx.default_stream(mx.default_device()))),
    )
    _, stream = open_stream()
    assert tried == [((1,), stream)]


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
            "config.json: mlx-lm gave up on model type llama; what it printed is in the log",
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

    monkeypatch.setattr(mlx_load, "load_model", fail)
    with pytest.raises(BadModelError) as caught:
        load_lazily(folder)
    place = "" if message.startswith(":") else "/"
    assert str(caught.value) == f"/models/m{place}{message}"


def test_memory_that_runs_out_in_python_is_no_fault_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = MemoryError("no room")

    def fail(path: Path, *, lazy: bool) -> None:
        raise error

    monkeypatch.setattr(mlx_load, "load_model", fail)
    with pytest.raises(MemoryError) as caught:
        load_lazily(ONE)
    assert caught.value is error


def test_only_sliding_windows_are_widened_and_by_one_key() -> None:
    model: Any = SimpleNamespace(make_cache=lambda: [KVCache(), RotatingKVCache(max_size=8)])
    widen_windows(model)
    for _ in range(2):
        plain, window = model.make_cache()
        assert (type(plain), hasattr(plain, "max_size"), window.max_size) == (KVCache, False, 9)


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
    assert shares == [0.3, 0.6, 0.9, 1.0]
    shares.clear()
    materialise([], ONE, shares.append)
    assert shares == [1.0]


def test_a_group_is_128_mebibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger ones would leave a load of a minute silent."""
    shares: list[float] = []
    monkeypatch.setattr(mx, "eval", lambda group: None)
    half = mx.zeros((64, 1024, 1024), dtype=mx.uint8)
    materialise([half, half + 1, half + 2, half + 3], ONE, shares.append)
    assert shares == [0.5, 1.0, 1.0]


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
def test_what_goes_wrong_while_arrays_are_read_says_whose_fault_it_is(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception], message: str
) -> None:
    def fail(group: list[mx.array]) -> None:
        raise error

    monkeypatch.setattr(mx, "eval", fail)
    shares: list[float] = []
    with pytest.raises(expected) as caught:
        materialise([mx.zeros(1)], TWO, shares.append)
    assert (caught.type, str(caught.value), shares) == (expected, message, [])


def test_an_array_that_several_hold_is_found_once_and_classes_are_not_searched() -> None:
    shared = mx.ones(3)

    class Holder:
        of_the_class = mx.ones(7)

        def __init__(self) -> None:
            self.inner = frozenset({1})
            self.text = "text"
            self.kind = Holder
            self.again = {"a": [shared, (shared,)], "b": {shared.shape}}

    assert [array.shape for array in iterate_arrays([Holder(), shared])] == [(3,)]
