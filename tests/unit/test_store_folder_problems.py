"""A path that is no model folder is named for what it is, with what to name instead."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlxsup.store.model_folder import (
    MAX_LOOKED_AT,
    damage,
    folder_problem,
    folders_below,
    repository_problem,
)

from support.daemon.hub_caches import MODEL, REPO, index_of, write_folder, write_repository

Files = Mapping[str, bytes]

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
TOKENIZER = b'{"model": {}}'
HUB = f"models--{REPO.replace('/', '--')}"


def without(name: str) -> Files:
    return {one: text for one, text in MODEL.items() if one != name}


LOST_SHARD = {
    **without("model.safetensors"),
    "model-1.safetensors": MODEL["model.safetensors"],
    "model.safetensors.index.json": index_of(*(f"model-{n}.safetensors" for n in (1, 2, 3))),
}
PYTORCH = {**without("model.safetensors"), "pytorch_model.bin": b"PK"}


@pytest.mark.parametrize(
    ("files", "path", "text", "hint"),
    [
        ({}, "m", "/m does not exist", "`mlxsup models`"),
        ({}, HUB, "does not exist", f"`mlxsup pull {REPO}`"),
        ({"m.gguf": b"GGUF"}, "m.gguf", "m.gguf is a GGUF file", "/m.gguf`"),
        (MODEL, "model.safetensors", "is a file, not a folder", "the folder that contains it"),
        ({"m-Q4_0.gguf": b"GGUF"}, "", "has GGUF files", "`mlxsup convert "),
        ({}, "", "is not a model folder", "`mlxsup models`"),
        (without("config.json"), "", "config.json does not exist", "not only its weights"),
        (
            {**MODEL, "model.safetensors": POINTER}, "",
            "model.safetensors is a Git LFS pointer", "lfs pull`",
        ),
        (
            {**MODEL, "tokenizer.json": POINTER}, "",
            "tokenizer.json is a Git LFS pointer", "lfs pull`",
        ),
        (
            LOST_SHARD, "",
            "model-2.safetensors does not exist, nor 1 more", "the rest of the model",
        ),
        (PYTORCH, "", "(pytorch_model.bin)", "safetensors format"),
        (without("tokenizer.json"), "", "tokenizer.json does not exist", "the rest of the model"),
        (
            {f"{place}/{name}": text for place in ("a", "b/c") for name, text in MODEL.items()}, "",
            "but contains some: a, b/c", "/a",
        ),
    ],
    ids=[
        "nothing", "a repository that is not there", "a GGUF file", "a weight file",
        "a folder of GGUF files", "an empty folder", "weights alone", "a pointer",
        "a pointer for the tokenizer", "a lost shard", "weights of PyTorch", "no tokenizer",
        "a parent folder",
    ],
)  # fmt: skip
def test_problem_of_a_path_is_named(
    tmp_path: Path, files: Files, path: str, text: str, hint: str
) -> None:
    check(write_folder(tmp_path, files) / path, text, hint)


def check(path: Path, text: str, hint: str) -> None:
    found = folder_problem(path)
    assert found is not None
    assert str(path) in found.text
    assert text in found.text
    assert hint in found.hint


def test_problem_of_a_place_in_the_cache_is_named(tmp_path: Path) -> None:
    half = write_repository(tmp_path, files=without("model.safetensors"))
    check(half, "model.safetensors does not exist", f"`mlxsup pull {REPO}`")
    check(tmp_path / HUB, f"is the cache folder of {REPO}", f'repo = "{REPO}"')
    check(tmp_path, "is a Hugging Face cache", "`mlxsup models`")


def test_weights_of_another_folder_are_named(tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    write_folder(folder, without("model.safetensors"))
    (tmp_path / "x.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "../x.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check(folder, "names a file of another folder: ../x.safetensors", "put it into this one")


def test_device_for_a_file_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, without("tokenizer.json"))
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    check(tmp_path, "tokenizer.json is a device, not a regular file", "the file itself")


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "qwen.tiktoken"])
def test_model_folder_has_no_problem(tmp_path: Path, name: str) -> None:
    assert folder_problem(write_folder(tmp_path / "m")) is None
    other = {**without("tokenizer.json"), name: b""}
    assert folder_problem(write_folder(tmp_path / "other", other)) is None
    assert folder_problem(write_repository(tmp_path / "hub")) is None


def header(shape: list[float], offsets: list[int] | None = None) -> Callable[[bytes], bytes]:
    """Return what makes a weight file of one array whose header says so."""
    entry = {"dtype": "F32", "shape": shape} | ({"data_offsets": offsets} if offsets else {})
    text = json.dumps({"a": entry}).encode()
    return lambda content: struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (
            "model.safetensors",
            lambda content: content[:-1],
            "is incomplete: {short} of {whole} bytes",
        ),
        ("model.safetensors", lambda content: content + b"x", "is damaged: it has "),
        ("model.safetensors", lambda content: content[:40], "cannot read the header"),
        ("model.safetensors", lambda content: content[:8] + b"x" * len(content), "header"),
        ("model.safetensors", lambda content: b"", "is not a safetensors file"),
        ("model.safetensors", lambda content: b"GGUF" * 8, "is not a safetensors file"),
        ("model.safetensors", header([1], [10, 0]), "its header has impossible sizes"),
        ("model.safetensors", header([10**30, 10**30], [0, 0]), "its header has impossible sizes"),
        ("model.safetensors", header([float("inf")], [0, 0]), "cannot read the header of "),
        ("model.safetensors", header([1]), "cannot read the header of "),
        ("tokenizer.json", lambda content: b"{", "is not a tokenizer in JSON"),
        ("model.safetensors.index.json", lambda content: b"[[", "is no list of weight files"),
    ],
)
def test_damaged_file_is_named(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes], text: str
) -> None:
    folder = write_folder(tmp_path, {**MODEL, "tokenizer.json": TOKENIZER})
    whole = MODEL.get(name, b"")
    assert damage(folder) is None
    (folder / name).write_bytes(change(whole))
    found = damage(folder)
    assert found is not None
    assert str(folder / name) in found.text
    assert text.format(short=len(whole) - 1, whole=len(whole)) in found.text


def test_a_few_folders_below_are_looked_at(tmp_path: Path) -> None:
    for number in range(MAX_LOOKED_AT + 1):
        (tmp_path / f"{number:04}").mkdir()
    for place in (f"{MAX_LOOKED_AT - 1:04}", f"{MAX_LOOKED_AT:04}", "0000/below"):
        write_folder(tmp_path / place)
    assert list(folders_below(tmp_path)) == [tmp_path / f"{MAX_LOOKED_AT - 1:04}"]


def test_folders_of_models_are_looked_for_two_levels_down(tmp_path: Path) -> None:
    for place in ("a", "b/c", "d/e/f"):
        write_folder(tmp_path / place)
    assert list(folders_below(tmp_path)) == [tmp_path / "a", tmp_path / "b/c"]


def test_unreadable_folder_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    found = folder_problem(tmp_path / "loop" / "m")
    assert found is not None
    assert "loop" in found.text


def test_missing_repository_is_named_with_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = repository_problem(REPO, "main")
    assert found.text == f"{REPO} is not in the Hugging Face cache {tmp_path}"
    assert found.hint == f"download it with `mlxsup pull {REPO}`"
    assert repository_problem(REPO, "v 1").hint.endswith("--revision 'v 1'`")
