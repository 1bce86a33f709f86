"""A model folder becomes another one: what is written, what is said, and what is refused."""

from __future__ import annotations

import errno
import io
import json
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from safetensors.numpy import load_file

from mlxsup.worker.engine import BadModelError, ModelMissingError
from mlxsup.worker.engines.mlx import conversion
from mlxsup.worker.engines.mlx.conversion import convert, main

from support.models.tiny_model import as_4_bit, make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture(autouse=True)
def the_process_of_before() -> Iterator[None]:
    """`main` replaces the handler of SIGTERM and limits memory: its process is its own."""
    before, limits = signal.getsignal(signal.SIGTERM), resource.getrlimit(resource.RLIMIT_DATA)
    yield
    signal.signal(signal.SIGTERM, before)
    resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def quietly(line: str) -> None:
    """Says nothing."""


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fails_with(error: Exception) -> Callable[..., None]:
    """Stands for mlx-lm's conversion; it has begun to write when it fails."""

    def fail(source: str, target: str, **_: Any) -> None:
        Path(target).mkdir()
        (Path(target) / "model.safetensors").write_bytes(b"half")
        raise error

    return fail


def free_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> list[Path]:
    """Has every disk this many free bytes; returns the folders that are asked about."""
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return asked


@pytest.mark.parametrize("name", ["quantization", "quantization_config"])
def test_a_model_that_says_its_weights_are_packed_is_not_packed_again(
    tmp_path: Path, name: str
) -> None:
    config = {name: {"bits": 4, "group_size": 64}}
    model = make_tiny_model(tmp_path / "model", config=config)
    with pytest.raises(BadModelError) as caught:
        convert(model, tmp_path / "new", 8, quietly)
    assert str(caught.value) == f"{model} is quantised already"
    assert names(tmp_path) == ["model"]


def test_a_quantised_model_is_copied(tmp_path: Path) -> None:
    model = as_4_bit(make_tiny_model(tmp_path / "model"))
    convert(model, tmp_path / "new", None, quietly)
    assert config_of(tmp_path / "new")["quantization"]["bits"] == 4


def test_a_folder_that_exists_is_left_as_it_is(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    target.mkdir()
    with pytest.raises(FileExistsError) as caught:
        convert(model, target, 4, quietly)
    assert str(caught.value) == f"{target} exists already"
    assert names(target) == []


def test_a_folder_without_a_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match="nothing"):
        convert(tmp_path / "nothing", tmp_path / "deep" / "new", 4, quietly)
    assert names(tmp_path) == []


def test_a_conversion_that_fails_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """The weights are written when a file beside them turns out to be gone."""
    (model / "code.py").symlink_to("gone")
    said: list[str] = []
    with pytest.raises(OSError, match=r"code\.py"):
        convert(model, tmp_path / "new", 4, said.append)
    assert said[-1].startswith("quantized")
    assert names(tmp_path) == ["model"]


def test_a_model_is_written_beside_its_place_under_a_hidden_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def write(source: str, target: str, **_: Any) -> None:
        Path(target).mkdir()
        seen.extend(names(tmp_path / "deep"))

    monkeypatch.setattr(conversion, "convert_folder", write)
    for name in ("new", "other"):
        convert(model, tmp_path / "deep" / name, 4, quietly)
    assert seen[0].startswith(".new.")
    assert seen[0].endswith(".partial")
    assert names(tmp_path / "deep") == ["new", "other"]


def test_a_model_type_that_mlx_lm_does_not_know_is_a_bad_model(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", config={"model_type": "of_tomorrow"})
    with pytest.raises(BadModelError) as caught:
        convert(model, tmp_path / "new", 4, quietly)
    begin, cause = str(caught.value).split(" cannot be converted: ")
    assert begin == str(model)
    assert "of_tomorrow" in cause
    assert names(tmp_path) == ["model"]


def test_a_conversion_for_which_there_is_no_memory_says_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("[metal::malloc] Unable to allocate 8 bytes")
    monkeypatch.setattr(conversion, "convert_folder", fails_with(error))
    free_disk(monkeypatch, 0)
    with pytest.raises(MemoryError, match="Unable to allocate 8 bytes"):
        convert(model, tmp_path / "new", 4, quietly)
    assert names(tmp_path) == ["model"]


def test_less_than_a_mebibyte_of_disk_is_why_nothing_could_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX only says that it could not."""
    error = RuntimeError("[write] Unable to write 9 bytes")
    monkeypatch.setattr(conversion, "convert_folder", fails_with(error))
    asked = free_disk(monkeypatch, 2**20 - 1)
    with pytest.raises(OSError) as full:
        convert(model, tmp_path / "new", 4, quietly)
    assert str(full.value) == f"{tmp_path}: no space left: {error}"
    assert asked == [tmp_path]
    free_disk(monkeypatch, 2**20)
    with pytest.raises(BadModelError) as bad:
        convert(model, tmp_path / "new", 4, quietly)
    assert str(bad.value) == f"{model} cannot be converted: {error}"
    assert names(tmp_path) == ["model"]


def test_output_of_libraries_goes_to_standard_error(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def talk(source: str, target: str, **_: Any) -> None:
        print("[INFO] Using dtype:", "bfloat16", flush=True)
        print("a word of a library")
        Path(target).mkdir()

    monkeypatch.setattr(conversion, "convert_folder", talk)
    assert main([str(model), str(tmp_path / "new")]) == 0
    assert capsys.readouterr() == ("using dtype: bfloat16\n", "a word of a library\n")


def test_the_command_converts_with_bits_or_without(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(model), str(tmp_path / "packed"), "8"]) == 0
    stages = "loading\nquantizing\nquantized model with 9.021 bits per weight.\n"
    assert capsys.readouterr() == (stages, "")
    assert config_of(tmp_path / "packed")["quantization"]["bits"] == 8
    assert main([str(model), str(tmp_path / "plain")]) == 0
    assert capsys.readouterr() == ("loading\n", "")
    assert "quantization" not in config_of(tmp_path / "plain")
    before, after = (load_file(at / "model.safetensors") for at in (model, tmp_path / "plain"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def test_a_file_goes_to_the_reader_of_gguf(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "m.gguf"
    arrays = {"token_embd.weight": mx.zeros((8, 32))}
    mx.save_gguf(str(source), arrays, {"general.architecture": "mamba"})
    assert main([str(source), str(tmp_path / "new")]) == 65
    out, err = capsys.readouterr()
    assert out.startswith("reading m.gguf")
    assert err == f"error: {source} is a mamba model; only llama models can be converted\n"
    assert names(tmp_path) == ["m.gguf"]


def test_a_failed_conversion_has_one_line_and_an_exit_code(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("there", "empty"):
        (tmp_path / name).mkdir()
    new = str(tmp_path / "new")

    def fails(source: Path, target: str, code: int, error: str) -> None:
        assert main([str(source), target, "4"]) == code
        out, err = capsys.readouterr()
        assert (out, err[: len(error) + 7]) == ("", f"error: {error}")

    fails(tmp_path / "empty", new, 66, str(tmp_path / "empty"))
    fails(model, str(tmp_path / "there"), 1, f"{tmp_path / 'there'} exists already\n")
    full = OSError(errno.ENOSPC, "No space left on device")
    for error, code, text in (
        (RuntimeError("out of memory"), 75, "out of memory\n"),
        (full, 1, "[Errno 28] No space left on device\n"),
        (RuntimeError("odd shapes"), 65, f"{model} cannot be converted: odd shapes\n"),
    ):
        monkeypatch.setattr(conversion, "convert_folder", fails_with(error))
        fails(model, new, code, text)


class Interrupted(io.StringIO):
    """A standard output at whose first line a signal comes."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        signal.raise_signal(self._number)
        return super().write(text)


def test_an_interrupted_conversion_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(model), str(tmp_path / "new"), "4"]
    monkeypatch.setattr(sys, "stdout", Interrupted(signal.SIGINT))
    assert main(arguments) == 130
    assert names(tmp_path) == ["model"]
    monkeypatch.setattr(sys, "stdout", Interrupted(signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 130
    assert names(tmp_path) == ["model"]
