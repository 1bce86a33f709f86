"""What the files of a model say about its memory, and what is said of files that are wrong."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxsup.supervisor.memory.folder import FolderError, Tensor, fingerprint, read_folder, stamp
from mlxsup.supervisor.memory.weights import loaded_bytes, number_bytes

from support.safetensors_files import Arrays, llama_arrays, llama_config, write_folder


def test_the_arrays_of_one_file_are_read(tmp_path: Path) -> None:
    size = write_folder(tmp_path, llama_config(), llama_arrays(vocabulary=1000))
    files = read_folder(tmp_path)
    assert files.config["model_type"] == "llama"
    assert loaded_bytes(files.tensors) == size == 2 * (1000 * 64 + 2 * (64 + 32 + 32) * 64)
    assert {tensor.name for tensor in files.tensors} == set(llama_arrays())


def test_the_arrays_of_all_shards_are_added_up(tmp_path: Path) -> None:
    arrays = list(llama_arrays(layers=3).items())
    size = write_folder(
        tmp_path, llama_config(), dict(arrays[:2]), dict(arrays[2:5]), dict(arrays[5:])
    )
    assert loaded_bytes(read_folder(tmp_path).tensors) == size


def test_the_towers_that_mlx_lm_leaves_out_do_not_count(tmp_path: Path) -> None:
    tower: Arrays = {"vision_tower.layers.0.self_attn.k_proj.weight": ("F32", (64, 64))}
    write_folder(tmp_path, llama_config(), {**llama_arrays(), **tower})
    files = read_folder(tmp_path)
    assert loaded_bytes(files.tensors) == sum(
        tensor.size_bytes for tensor in files.tensors if "vision" not in tensor.name
    )
    assert number_bytes(files.config, files.tensors) == 2


def test_numbers_of_eight_bits_take_two_bytes_once_they_are_loaded(tmp_path: Path) -> None:
    narrow: Arrays = {
        "model.layers.0.self_attn.k_proj.weight": ("F8_E4M3", (10, 10)),
        "model.layers.0.self_attn.k_proj.weight_scale_inv": ("F32", (1, 1)),
    }
    write_folder(tmp_path, llama_config(torch_dtype="bfloat16"), narrow)
    files = read_folder(tmp_path)
    assert loaded_bytes(files.tensors) == 204
    assert number_bytes(files.config, files.tensors) == 2


@pytest.mark.parametrize(("dtype", "size"), [("F32", 4), ("F16", 2), ("BF16", 2)])
def test_a_model_computes_in_the_type_of_most_arrays(tmp_path: Path, dtype: str, size: int) -> None:
    packed: Arrays = {"model.layers.0.mlp.up_proj.weight": ("U32", (8, 8))}
    few: Arrays = {"model.layers.0.router.bias": ("F64", (8,))}
    write_folder(tmp_path, llama_config(), {**llama_arrays(dtype=dtype), **packed, **few})
    files = read_folder(tmp_path)
    assert number_bytes(files.config, files.tensors) == size


def test_a_nested_text_model_is_on_top_but_the_type_is_that_of_the_whole(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "hidden_size": 1, "text_config": llama_config()}
    write_folder(tmp_path, config, llama_arrays())
    text = read_folder(tmp_path).text_config
    assert (text["model_type"], text["hidden_size"], text["num_hidden_layers"]) == ("gemma3", 64, 2)


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    write_folder(tmp_path, llama_config(), llama_arrays())
    first = fingerprint(stamp(tmp_path))
    assert first == fingerprint(stamp(tmp_path))
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    second = fingerprint(stamp(tmp_path))
    write_folder(tmp_path, llama_config(rope_theta=1), llama_arrays())
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert len({first, second, fingerprint(stamp(tmp_path))}) == 3


def test_the_fingerprint_follows_the_name_and_the_size_of_each_file(tmp_path: Path) -> None:
    write_folder(tmp_path, llama_config(), llama_arrays())
    path = tmp_path / "model.safetensors"

    def seen() -> str:
        os.utime(path, ns=(1, 1))
        return fingerprint(stamp(tmp_path))

    found = [seen()]
    os.truncate(path, path.stat().st_size + 1)
    found.append(seen())
    path = path.rename(tmp_path / "model-1.safetensors")
    found.append(seen())
    assert len(set(found)) == 3
    (tmp_path / "notes.txt").touch()
    assert seen() == found[-1]


def test_a_weight_file_may_be_without_arrays(tmp_path: Path) -> None:
    write_folder(tmp_path, llama_config(), {})
    assert read_folder(tmp_path).tensors == ()
    _header(b"{}")(tmp_path)
    assert read_folder(tmp_path).tensors == ()


def test_each_array_has_its_shape_its_type_and_its_size(tmp_path: Path) -> None:
    arrays: Arrays = {"a.weight": ("F32", (3, 5)), "b.scales": ("BF16", (7,)), "c": ("U8", ())}
    write_folder(tmp_path, llama_config(), arrays)
    assert read_folder(tmp_path).tensors == (
        Tensor(name="a.weight", shape=(3, 5), dtype="F32", size_bytes=60),
        Tensor(name="b.scales", shape=(7,), dtype="BF16", size_bytes=14),
        Tensor(name="c", shape=(), dtype="U8", size_bytes=1),
    )


# ---------------------------------------------------------------- wrong files


def _no_folder(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)


def _other_format(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"GGUF" * 8)


def _header(text: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)

    return write


def _index(value: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(value))

    return write


def _config(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return write


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "no folder": (_no_folder, "the model folder {folder} does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(),
                  "{folder}/config.json: No such file or directory"),
    "config is no JSON": (_config("{"), "{folder}/config.json is not JSON"),
    "config is a list": (_config("[]"), "{folder}/config.json does not hold a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(),
                   "{folder}/model.safetensors does not exist, nor any shard"),
    "cut short": (_cut, "{folder}/model.safetensors is cut short: "),
    "empty": (lambda f: os.truncate(f / "model.safetensors", 0),
              "{folder}/model.safetensors is not a safetensors file"),
    "another format": (_other_format, "{folder}/model.safetensors is not a safetensors file"),
    "header is a list": (_header(b"[]"), "{folder}/model.safetensors has a header that cannot"),
    "header without offsets": (_header(b'{"a": {"dtype": "F32", "shape": [1]}}'),
                               "{folder}/model.safetensors has a header that cannot"),
    "missing shard": (_index({"weight_map": {"a": "model-2.safetensors"}}),
                      "{folder}/model-2.safetensors does not exist; "
                      "model.safetensors.index.json names it"),
    "index without a map": (_index({}), "{folder}/model.safetensors.index.json has no weight_map"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_folder_is_named_with_its_file(tmp_path: Path, what: str) -> None:
    damage, message = WRONG[what]
    folder = tmp_path / "model"
    write_folder(folder, llama_config(), llama_arrays())
    damage(folder)
    with pytest.raises(FolderError) as raised:
        read_folder(folder)
    assert str(raised.value).startswith(message.format(folder=folder))


def test_a_file_that_is_cut_short_is_named_with_both_sizes(tmp_path: Path) -> None:
    write_folder(tmp_path, llama_config(), llama_arrays())
    whole = (tmp_path / "model.safetensors").stat().st_size
    _cut(tmp_path)
    with pytest.raises(FolderError, match=f"is cut short: {whole - 1} bytes of {whole}$"):
        read_folder(tmp_path)
