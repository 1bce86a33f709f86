"""What the files of a model folder say before mlx-lm is asked, kept answers, and bad files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.estimate import (
    MAX_BYTES,
    MAX_KEPT,
    ModelMemory,
    estimates_folder,
    find_kept,
    keep,
)
from mlxsup.store.model_folder import MAX_HEADERS_BYTES, FolderError
from mlxsup.supervisor.memory import folder as folder_module
from mlxsup.supervisor.memory.folder import (
    UNASKED,
    Estimate,
    estimate,
    fingerprint,
    read_bytes,
    stamp,
)
from mlxsup.supervisor.memory.folder_reader import read_folder
from mlxsup.supervisor.memory.needs import estimate_folders

from support.daemon.estimates_here import estimates_here
from support.models.safetensors_files import (
    Arrays,
    llama_arrays,
    llama_config,
    write_folder,
    write_weights,
)

__all__ = ["estimates_here"]

KEYS: Arrays = {f"model.layers.0.self_attn.{one}.weight": ("BF16", (8, 8)) for one in "kv"}

# Arrays, and the bytes of the weights once loaded.
WEIGHTS: dict[str, tuple[Arrays, int]] = {
    "bf16": (KEYS, 256),
    "packed": ({"a.weight": ("U32", (16, 4)), "a.scales": ("F16", (16, 1))}, 256 + 32),
    "no arrays": ({}, 0),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_estimate_of_weights(tmp_path: Path, name: str) -> None:
    arrays, weight_bytes = WEIGHTS[name]
    write_folder(tmp_path, {"model_type": "llama"}, arrays)
    found = estimate(read_bytes(tmp_path))
    assert (found.weight_bytes, found.layers, found.remark) == (weight_bytes, (), UNASKED)


@pytest.mark.parametrize("shards", [1, 2])
def test_estimate_leaves_out_a_head_for_drafts_that_a_load_leaves_out(
    tmp_path: Path, shards: int
) -> None:
    arrays = llama_arrays()
    size = write_folder(tmp_path, {}, arrays, *[{"x": ("BF16", (5,))}] * (shards - 1))
    write_weights(tmp_path / "model-mtp.safetensors", arrays)
    assert estimate(read_bytes(tmp_path)).weight_bytes == size


def test_estimate_adds_up_all_shards_of_a_nested_text_model(tmp_path: Path) -> None:
    arrays = list(llama_arrays(layers=3).items())
    shards = dict(arrays[:2]), dict(arrays[2:5]), dict(arrays[5:])
    config = {"model_type": "gemma3", "hidden_size": 1, "text_config": llama_config()}
    size = write_folder(tmp_path, config, *shards)
    found = estimate(read_bytes(tmp_path))
    assert (found.weight_bytes, found.context_length) == (size, 8192)


# ---------------------------------------------------------------- kept answers

SAID = ModelMemory(
    weight_bytes=7, layers=(CacheLayers(layers=2, token_bytes=3, row_bytes=4, window=5),)
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimates_here: None) -> Path:
    """The folder of kept answers, of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return estimates_folder()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/mlxsup/estimates"),
        ({"XDG_CACHE_HOME": ""}, "~/.cache/mlxsup/estimates"),
        ({}, "~/.cache/mlxsup/estimates"),
    ],
)
def test_answers_are_kept_in_the_users_cache(environment: dict[str, str], expected: str) -> None:
    assert estimates_folder(environment) == Path(expected).expanduser()


def test_mlx_lm_is_asked_unless_an_answer_is_kept(tmp_path: Path, kept: Path) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    asked: list[int] = []
    paths = [str(tmp_path / "m"), str(tmp_path / "gone")]
    first = estimate_folders(dict.fromkeys(paths, ()), asked.append)
    assert asked == [1]
    found = first[paths[0]]
    assert isinstance(found, Estimate)
    assert (found.layers, found.remark) == ((CacheLayers(layers=2, token_bytes=128),), "")
    assert isinstance(first[paths[1]], FolderError)
    keep(found.key, SAID, kept)
    known = estimate_folders(dict.fromkeys(paths, ()), asked.append)[paths[0]]
    assert known == replace(found, weight_bytes=7, layers=SAID.layers)
    assert asked == [1]


def test_an_answer_is_kept_for_the_same_content_and_versions_alone(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    write_folder(tmp_path / "copy", llama_config(), llama_arrays())
    found = [read_folder(tmp_path / "m").key]
    assert read_folder(tmp_path / "copy").key == found[0]
    write_folder(tmp_path / "m", llama_config(head_dim=8), llama_arrays())
    found.append(read_folder(tmp_path / "m").key)
    write_folder(tmp_path / "m", llama_config(head_dim=8), llama_arrays(dtype="F16"))
    found.append(read_folder(tmp_path / "m").key)
    (tmp_path / "m" / "hf_quant_config.json").write_text("{}")
    found.append(read_folder(tmp_path / "m").key)
    monkeypatch.setattr(folder_module, "_engine_versions", lambda: ["mlx_lm-9.dist-info"])
    found.append(read_folder(tmp_path / "m").key)
    assert len(set(found)) == 5


DAMAGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "of another model": lambda value: value | {"key": "other"},
    "no object": lambda value: [],
    "a negative size": lambda value: value | {"memory": {"weight_bytes": -1, "layers": []}},
    "a size that no model has": lambda value: (
        value | {"memory": {"weight_bytes": MAX_BYTES + 1, "layers": []}}
    ),
    "layers of no model": lambda value: (
        value | {"memory": {"weight_bytes": 1, "layers": [{"layers": 2, "token_bytes": 2**30}]}}
    ),
}


def test_the_versions_are_those_that_are_installed() -> None:
    names = [version.partition("-")[0] for version in folder_module._engine_versions()]
    assert sorted(set(names)) == ["mlx", "mlx_lm"]


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_answer_is_none(kept: Path, what: str) -> None:
    keep("k", SAID, kept)
    assert find_kept("k", kept) == SAID
    file = kept / "k.json"
    file.write_text(json.dumps(DAMAGED[what](json.loads(file.read_text()))))
    assert find_kept("k", kept) is None
    file.unlink()
    os.mkfifo(file)
    assert find_kept("k", kept) is None, "it is not waited for"


def test_the_newest_answers_are_kept_and_a_full_disk_is_no_error(kept: Path) -> None:
    kept.mkdir(parents=True)
    for number in range(MAX_KEPT):
        path = kept / f"{number}.json"
        path.write_text("")
        os.utime(path, ns=(number, number))
    keep("k", SAID, kept)
    assert find_kept("k", kept) == SAID
    assert {path.name for path in kept.iterdir()} == {
        "k.json", *(f"{number}.json" for number in range(1, MAX_KEPT)),
    }  # fmt: skip
    keep("k", SAID, kept / "k.json")  # no folder
    assert find_kept("k", kept) == SAID


def test_fingerprint_follows_name_size_and_time_of_each_model_file(tmp_path: Path) -> None:
    write_folder(tmp_path, llama_config(), llama_arrays())
    path = tmp_path / "model.safetensors"

    def seen() -> str:
        os.utime(path, ns=(1, 1))
        os.utime(tmp_path / "config.json", ns=(1, 1))
        return fingerprint(stamp(tmp_path))

    found = [fingerprint(stamp(tmp_path)), seen()]
    os.truncate(path, path.stat().st_size + 1)
    found.append(seen())
    path = path.rename(tmp_path / "model-1.safetensors")
    found.append(seen())
    (tmp_path / "config.json").write_text("{}")
    found.append(seen())
    assert len(set(found)) == 5
    (tmp_path / "notes.txt").touch()
    assert seen() == found[-1]


# ---------------------------------------------------------------- wrong files


def header(text: bytes) -> Callable[[Path], object]:
    data = struct.pack("<Q", len(text)) + text
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def tensor(shape: list[Any], offsets: list[Any]) -> Callable[[Path], object]:
    name = "model.layers.0.self_attn.k_proj.weight"
    values = {name: {"dtype": "F32", "shape": shape, "data_offsets": offsets}}
    return header(json.dumps(values).encode())


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def size(change: int | None) -> Callable[[Path], None]:
    def resize(folder: Path) -> None:
        path = folder / "model.safetensors"
        os.truncate(path, 0 if change is None else path.stat().st_size + change)

    return resize


def many_headers(folder: Path) -> None:
    content = b" " * (MAX_HEADERS_BYTES // 2 - 1) + b"{}"
    for number in (1, 2):
        path = folder / f"model-{number}.safetensors"
        path.write_bytes(struct.pack("<Q", len(content)) + content)
    (folder / "model.safetensors").unlink()


INDEX = "model.safetensors.index.json"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("gone")),
                  "the model folder {folder} does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(),
                  "{folder}/config.json: No such file or directory"),
    "config is no JSON": (text("config.json", "{"), "{folder}/config.json is not JSON"),
    "config is a list": (text("config.json", "[]"),
                         "{folder}/config.json does not hold a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(),
                   "{folder}/model.safetensors does not exist, and there are no shards"),
    "cut short": (size(-1), "{folder}/model.safetensors is incomplete: {less} of {whole} bytes"),
    "a byte too long": (size(1), "{folder}/model.safetensors is damaged: it has "),
    "empty": (size(None), "{folder}/model.safetensors is not a safetensors file"),
    "another format": (lambda f: (f / "model.safetensors").write_bytes(b"GGUF" * 8),
                       "{folder}/model.safetensors is not a safetensors file"),
    "header is a list": (header(b"[]"), "cannot read the header of {folder}/model.safetensors"),
    "header without offsets": (header(b'{"a": {"dtype": "F32", "shape": [1]}}'),
                               "cannot read the header of {folder}/model.safetensors"),
    "negative size": (tensor([1], [10, 0]), "{folder}/model.safetensors: its header has"),
    "huge shape": (tensor([10**30, 10**30], [0, 0]), "{folder}/model.safetensors: its header"),
    "infinite shape": (tensor([float("inf")], [0, 0]),
                       "cannot read the header of {folder}/model.safetensors: "),
    "many headers": (many_headers,
                     "{folder}: the headers of its weight files have more than the 64 MiB"),
    "missing shard": (text(INDEX, '{"weight_map": {"a": "model-2.safetensors"}}'),
                      "{folder}/model-2.safetensors does not exist; " + INDEX + " names it"),
    "index without a map": (text(INDEX, "{}"), "{folder}/" + INDEX + " has no weight_map"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_estimate_names_the_wrong_file(tmp_path: Path, what: str) -> None:
    damage, message = WRONG[what]
    folder = tmp_path / "model"
    write_folder(folder, llama_config(), llama_arrays())
    whole = (folder / "model.safetensors").stat().st_size
    damage(folder)
    with pytest.raises(FolderError) as raised:
        estimate(read_bytes(folder))
    expected = message.format(folder=folder, less=whole - 1, whole=whole)
    assert str(raised.value).startswith(expected)


def test_an_estimate_with_another_adapter_has_another_fingerprint(tmp_path: Path) -> None:
    """What was measured with the one does not count for the other."""
    write_folder(tmp_path / "model", llama_config(), llama_arrays())
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_weights(tmp_path / name / "adapters.safetensors", {"q.lora_a": ("F32", (2, 4))})
    choices = [[], [str(tmp_path / "one")], [str(tmp_path / "two")]]
    found = {read_folder(tmp_path / "model", adapters).fingerprint for adapters in choices}
    assert len(found) == 3


def test_adapters_take_as_much_for_each_and_for_none_as_the_largest(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", llama_config(), llama_arrays())
    for name, rank in {"small": 2, "large": 5}.items():
        (tmp_path / name).mkdir()
        halves: Arrays = {"q.lora_a": ("F32", (rank, 4)), "q.lora_b": ("F32", (4, rank))}
        write_weights(tmp_path / name / "adapters.safetensors", halves)
    adapters = [str(tmp_path / name) for name in ("small", "large", "missing")]
    found = estimate(read_bytes(tmp_path / "model", adapters))
    assert found.adapter_bytes == 3 * 2 * 5 * 4 * 4
