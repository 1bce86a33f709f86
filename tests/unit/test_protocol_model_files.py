"""Which files of a model folder count."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.protocol.model_files import (
    is_pointer,
    is_tokenizer_file,
    is_weight_file,
    pointer_problem,
)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "qwen.tiktoken",
        "tokenizer.model",
        "merges.txt",
        "rules.jsonl",
    ],
)
def test_what_may_decide_how_text_becomes_tokens(name: str) -> None:
    assert is_tokenizer_file(name)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "README.md", "json", "a.py"]
)
def test_what_decides_nothing_of_it(name: str) -> None:
    assert not is_tokenizer_file(name)


def test_weights_are_the_files_that_mlx_lm_loads() -> None:
    assert is_weight_file("model.safetensors")
    assert is_weight_file("model-00001-of-00002.safetensors")
    assert not is_weight_file("model.safetensors.index.json")
    assert not is_weight_file("adapters.safetensors")
    assert not is_weight_file("model.bin")


def test_a_pointer_of_git_lfs_is_told_from_the_file_itself(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert is_pointer(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec")
    assert not is_pointer(file)
    file.write_bytes(b"")
    assert not is_pointer(file)
    with pytest.raises(OSError, match="No such file"):
        is_pointer(tmp_path / "missing")


def test_how_to_fetch_what_a_pointer_stands_for_can_be_pasted() -> None:
    assert pointer_problem(Path("/my models/m/model.safetensors")) == (
        "/my models/m/model.safetensors is a Git LFS pointer, not the file itself",
        "fetch the files with `git -C '/my models/m' lfs pull`",
    )
