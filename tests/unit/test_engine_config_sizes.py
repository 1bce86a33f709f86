"""Folders whose files never end, or whose config.json describes what no weight file holds."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from mlxsup.worker.engine import BadModelError
from mlxsup.worker.engines.mlx.folder import check_folder

LAYERS = {
    f"model.layers.{n}.w": {"dtype": "U8", "shape": [64, 32], "data_offsets": [0, 2048]}
    for n in range(3)
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of three layers whose weights share their bytes."""
    path = tmp_path / "m"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    header = json.dumps(LAYERS).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(2048)
    (path / "model.safetensors").write_bytes(weights)
    return path


def refused(path: Path) -> str:
    with pytest.raises(BadModelError) as caught:
        check_folder(path, lambda share: None)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "chat_template.jinja", "model-2.safetensors", "x.txt"]
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened(
    folder: Path, name: str, kind: str
) -> None:
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    assert refused(folder).startswith(f"{folder / name} is not a regular file")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_text_of_a_gigabyte_is_refused_before_it_is_read(folder: Path, name: str) -> None:
    with open(folder / name, "wb") as file:
        file.truncate(2**30)
    assert refused(folder) == (
        f"{folder / name} has 1.00 GiB; a file of its kind has 100.0 MiB at most"
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000; the weight files hold 3 l",
        ),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; the weight files hold 3 l"),
        ({"num_hidden_layers": 1e300}, "num_hidden_layers is 1e+300; the weight files hold 3"),
        ({"n_layer": 10**9}, "n_layer is 1000000000; "),
        ({"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers is 1000000"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000; the longest side of an array in the"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000; the longest side of an array in the w"),
        ({"num_attention_heads": 10**9}, "num_attention_heads is 1000000000; the longest side of"),
        ({"intermediate_size": [64, 10**9]}, "intermediate_size is 1000000000; the longest side"),
        ({"hidden_size": -1}, "hidden_size is -1; it takes a whole number from 0"),
        ({"hidden_size": "64"}, 'hidden_size is "64"; it takes a whole number from 0'),
        ({"hidden_size": float("nan")}, "hidden_size is NaN; it takes a whole number from 0"),
        ({"hidden_size": float("inf")}, "hidden_size is Infinity; "),
        ({"hidden_size": True}, "hidden_size is true; it takes a whole number from 0"),
        ({"hidden_size": {"a": 1}}, 'hidden_size is {"a": 1}; it takes a whole number from 0'),
    ],
)
def test_a_size_that_no_weight_file_has_is_refused_by_its_key(
    folder: Path, config: dict[str, Any], said: str
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    error = refused(folder)
    assert error.startswith(f"{folder / 'config.json'}: {said}")


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 3, "hidden_size": 64, "num_key_value_heads": None, "n_layer": 106},
        {"num_hidden_layers": 3.0, "num_experts": 0, "vocab_size": 4096},
        {"intermediate_size": [64, 64, None], "vision_config": {"hidden_size": 10**9}},
    ],
)
def test_sizes_that_cost_nothing_are_left_to_the_loader(
    folder: Path, config: dict[str, Any]
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    assert check_folder(folder, lambda share: None).config["model_type"] == "llama"
