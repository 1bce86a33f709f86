"""A path that is no model folder is named for what it is, with what to name instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlxsup.store.folder_problems import folder_problem, repository_problem

from support.daemon.hub_caches import MODEL, REPO, index_of, write_folder, write_repository

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
CASES: dict[str, tuple[Callable[[Path], Path], str, str]] = {}
"""What makes the path in a folder; parts of the sentence and of the hint."""


def case(name: str, text: str, hint: str) -> Callable[[Callable[[Path], Path]], None]:
    def add(make: Callable[[Path], Path]) -> None:
        CASES[name] = make, text, hint

    return add


def without(*names: str, **more: bytes) -> Mapping[str, bytes]:
    return {name: text for name, text in MODEL.items() if name not in names} | more


@case("nothing", "/m does not exist", "`mlxsup models`")
def _(tmp: Path) -> Path:
    return tmp / "m"


@case("a repository that is not there", "does not exist", f"`mlxsup pull {REPO}`")
def _(tmp: Path) -> Path:
    return tmp / f"models--{REPO.replace('/', '--')}"


@case("a GGUF file", "m.gguf is a GGUF file", "/m.gguf`")
def _(tmp: Path) -> Path:
    return write_folder(tmp, {"m.gguf": b"GGUF"}) / "m.gguf"


@case("a weight file", "is a file, not a folder", "the folder around it")
def _(tmp: Path) -> Path:
    return write_folder(tmp) / "model.safetensors"


@case("a hub folder", f"is the cache's folder of {REPO}", f'repo = "{REPO}"')
def _(tmp: Path) -> Path:
    return write_repository(tmp).parent.parent


@case("a whole cache", "is a Hugging Face cache", "`mlxsup models`")
def _(tmp: Path) -> Path:
    write_repository(tmp)
    return tmp


@case("a folder of GGUF files", "holds GGUF files", "`mlxsup convert ")
def _(tmp: Path) -> Path:
    return write_folder(tmp, {"m-Q4_0.gguf": b"GGUF"})


@case("a parent folder", "but holds some: a, b/c", "/a")
def _(tmp: Path) -> Path:
    write_folder(tmp / "a")
    write_folder(tmp / "b" / "c")
    return tmp


@case("an empty folder", "holds no model", "`mlxsup models`")
def _(tmp: Path) -> Path:
    return tmp


@case("weights alone", "config.json does not exist", "not only its weights")
def _(tmp: Path) -> Path:
    return write_folder(tmp, without("config.json"))


@case("a pointer", "model.safetensors is a Git LFS pointer", "lfs pull`")
def _(tmp: Path) -> Path:
    return write_folder(tmp, {**MODEL, "model.safetensors": POINTER})


@case("a pointer for the tokenizer", "tokenizer.json is a Git LFS pointer", "lfs pull`")
def _(tmp: Path) -> Path:
    return write_folder(tmp, {**MODEL, "tokenizer.json": POINTER})


@case("a lost shard", "model-2.safetensors does not exist, nor 1 more", "the rest of the model")
def _(tmp: Path) -> Path:
    index = index_of("model-1.safetensors", "model-2.safetensors", "model-3.safetensors")
    weights = {"model-1.safetensors": MODEL["model.safetensors"]}
    files = {**without("model.safetensors"), **weights, "model.safetensors.index.json": index}
    return write_folder(tmp, files)


@case("a download that was cut", "model.safetensors does not exist", f"`mlxsup pull {REPO}`")
def _(tmp: Path) -> Path:
    return write_repository(tmp, files=without("model.safetensors"))


@case("weights of PyTorch", "(pytorch_model.bin)", "safetensors format")
def _(tmp: Path) -> Path:
    return write_folder(tmp, {**without("model.safetensors"), "pytorch_model.bin": b"PK"})


@case("no tokenizer", "tokenizer.json does not exist", "the rest of the model")
def _(tmp: Path) -> Path:
    return write_folder(tmp, without("tokenizer.json"))


@case("a device for a file", "tokenizer.json is a device, not a regular file", "the file itself")
def _(tmp: Path) -> Path:
    folder = write_folder(tmp, without("tokenizer.json"))
    (folder / "tokenizer.json").symlink_to("/dev/zero")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_problem_of_a_path_is_named(name: str, tmp_path: Path) -> None:
    make, text, hint = CASES[name]
    path = make(tmp_path)
    found = folder_problem(path)
    assert found is not None
    assert str(tmp_path) in found.text
    assert text in found.text
    assert hint in found.hint


def test_model_folder_has_no_problem(tmp_path: Path) -> None:
    assert folder_problem(write_folder(tmp_path / "m")) is None
    assert folder_problem(write_repository(tmp_path / "hub")) is None


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
