"""A model folder as files: what is read, and what is refused by which name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.model_files import is_tokenizer_file
from mlxsup.worker.engine import BadModelError, ModelMissingError
from mlxsup.worker.engines.mlx import folder as folder_module
from mlxsup.worker.engines.mlx.folder import (
    READ_AS_JSON,
    ModelFolder,
    check_folder,
    fingerprint,
    read_safetensors_header,
)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    """A weight file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def arrays(*names: str, size: int = 4) -> bytes:
    """A weight file with arrays of `size` bytes."""
    header = {
        name: {"dtype": "F32", "shape": [size // 4], "data_offsets": [n * size, (n + 1) * size]}
        for n, name in enumerate(names)
    }
    return safetensors(header, bytes(len(names) * size))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The least that is a model."""
    path = tmp_path / "m"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    # Three layers that share their bytes.
    layers = {f"model.layers.{n}.w": entry([64, 32], 0, 2048) for n in range(3)}
    (path / "model.safetensors").write_bytes(safetensors(layers, bytes(2048)))
    return path


def check(path: Path) -> ModelFolder:
    return check_folder(path, lambda share: None)


def refused(path: Path, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        check(path)
    assert caught.type is error
    return str(caught.value)


# ---------------------------------------------------------------- what is found
def test_a_folder_of_one_weight_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    assert check(folder) == ModelFolder(
        path=folder,
        config={"model_type": "llama"},
        shards=[file],
        shard_of={f"model.layers.{n}.w": file for n in range(3)},
        weight_bytes=file.stat().st_size,
    )


def test_shards_are_read_in_order_of_name_and_reported_by_their_bytes(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first, second = folder / "model-1.safetensors", folder / "model-2.safetensors"
    second.write_bytes(arrays("c"))
    first.write_bytes(arrays("a", "b", size=100))
    (folder / "adapters.safetensors").write_bytes(b"not read")
    (folder / "model.txt").write_bytes(b"not read")
    shares: list[float] = []
    found = check_folder(folder, shares.append)
    assert found.shards == [first, second]
    assert found.shard_of == {"a": first, "b": first, "c": second}
    sizes = [first.stat().st_size, second.stat().st_size]
    assert found.weight_bytes == sum(sizes)
    assert shares == [sizes[0] / sum(sizes), 1.0]


@pytest.mark.parametrize(
    ("config", "names", "number"),
    [
        ({"a": 7}, ("a",), 7),
        ({"a": 1}, ("a",), 1),
        ({"a": 0}, ("a",), None),
        ({"a": -1}, ("a",), None),
        ({"a": True}, ("a",), None),
        ({"a": 7.0}, ("a",), None),
        ({"a": "7"}, ("a",), None),
        ({}, ("a",), None),
        ({"b": 8, "a": 7}, ("a", "b"), 7),
        ({"b": 8}, ("a", "b"), 8),
        ({"a": 7, "text_config": {"a": 9}}, ("a",), 7),
        ({"b": 8, "text_config": {"a": 9}}, ("a", "b"), 8),
        ({"text_config": {"a": 9}}, ("a",), 9),
        ({"text_config": "x"}, ("a",), None),
    ],
)
def test_a_number_of_the_configuration_is_positive_and_that_outside_counts_first(
    config: dict[str, Any], names: tuple[str, ...], number: int | None
) -> None:
    found = ModelFolder(path=Path("m"), config=config, shards=[], shard_of={}, weight_bytes=0)
    assert found.number(*names) == number


# ---------------------------------------------------------------- what is refused
def test_a_missing_folder_or_file_is_named(folder: Path, tmp_path: Path) -> None:
    gone, file = tmp_path / "gone", tmp_path / "file"
    file.touch()
    assert refused(gone, ModelMissingError) == f"the model folder {gone} does not exist"
    expected = f"{file} is not a folder; a model is a folder with a config.json"
    assert refused(file, BadModelError) == expected
    for name, rest in (
        ("model.safetensors", ", and there are no shards"),
        ("tokenizer.json", ", and there is no other tokenizer"),
        ("config.json", ""),
    ):
        place = folder / name
        expected = f"{place} does not exist{rest}"
        place.unlink()
        assert refused(folder, ModelMissingError) == expected
        place.symlink_to("nowhere")
        assert refused(folder, ModelMissingError) == expected
        place.unlink()
        place.mkdir()
        assert refused(folder, ModelMissingError) == expected


@pytest.mark.parametrize("name", READ_AS_JSON)
def test_a_file_that_is_not_json_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    assert refused(folder, BadModelError).startswith(f"{folder / name} is not JSON: Expecting ")
    (folder / name).write_text("[" * 100_000)
    assert refused(folder, BadModelError).startswith(f"{folder / name} is not JSON: ")
    (folder / name).write_text("[]")
    assert refused(folder, BadModelError) == f"{folder / name} does not hold a JSON object"


@pytest.mark.parametrize("config", ["{}", '{"model_type": 7}', '{"model_type": null}'])
def test_a_configuration_without_a_type_is_refused(folder: Path, config: str) -> None:
    (folder / "config.json").write_text(config)
    assert refused(folder, BadModelError) == f"{folder / 'config.json'} has no model_type"


def test_a_type_that_mlx_lm_computes_wrongly_is_refused_and_one_with_a_remedy_is_not(
    folder: Path,
) -> None:
    (folder / "config.json").write_text('{"model_type": "olmo"}')
    error = refused(folder, BadModelError)
    assert error.startswith(f"{folder / 'config.json'}: olmo is refused: mlx-lm adds the name")
    assert error.endswith("(mlx_lm/models/olmo.py:93)")
    (folder / "config.json").write_text('{"model_type": "plamo3"}')
    assert check(folder).config == {"model_type": "plamo3"}


@pytest.mark.parametrize(
    ("names", "indexed", "shards"),
    [
        ("model model-mtp", "", "model"),
        ("model-1 model-2 model-mtp", "model-1 model-2", "model-1 model-2"),
        ("model-1 model-old", "model-1", "model-1"),
        ("model-1 model-mtp", "model-1 model-mtp", "model-1 model-mtp"),
        ("model-mtp-4bit", "", "model-mtp-4bit"),
        ("model", "other", "model"),
    ],
)
def test_head_beside_the_weights_is_not_loaded(
    folder: Path, names: str, indexed: str, shards: str
) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    for name in names.split():
        (folder / f"{name}.safetensors").write_bytes(arrays(name))
    if indexed:
        weight_map = {name: f"{name}.safetensors" for name in indexed.split()}
        index = {"weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = check(folder)
    assert [shard.stem for shard in found.shards] == shards.split()
    strays = set(names.split()) - set(shards.split())
    assert found.strays == {f"{name}.safetensors" for name in strays}


def test_an_index_names_its_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert check(folder).shards == [folder / "model.safetensors"]
    index.write_text('{"weight_map": {"a": "model.safetensors", "b": "z", "c": "y"}}')
    expected = f"{folder / 'y'} does not exist; model.safetensors.index.json names it"
    assert refused(folder, ModelMissingError) == expected
    index.write_text('{"weight_map": ["model.safetensors"]}')
    assert refused(folder, BadModelError) == f"{index} has no weight_map"


@pytest.mark.parametrize("error", [PermissionError, OSError])
@pytest.mark.parametrize("has_name", [True, False])
def test_a_file_that_cannot_be_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError], has_name: bool
) -> None:
    def fail(path: Path) -> list[str]:
        raise error(5, "broken", "/the/file") if has_name else error("broken")

    monkeypatch.setattr(folder_module, "read_safetensors_header", fail)
    what = "no permission to read it" if error is PermissionError else "broken"
    assert refused(folder, BadModelError) == f"{'/the/file' if has_name else folder}: {what}"


def test_every_file_of_the_tokenizer_must_be_readable(folder: Path) -> None:
    """In a place that every user can enter, because root may read everything."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        path = Path(shutil.copytree(folder, Path(place) / "m"))
        path.chmod(0o755)
        merges = path / "merges.txt"
        merges.touch()
        merges.chmod(0)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            error = refused(path, BadModelError)
        finally:
            os.seteuid(user)
    assert error == f"{merges}: no permission to read it"


# ---------------------------------------------------------------- weight files
def header_of(path: Path, content: bytes) -> list[str]:
    path.write_bytes(content)
    return list(read_safetensors_header(path))


BAD_WEIGHTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "{} is empty"),
    "less than a length": (b"1234567", "{} is not a safetensors file"),
    "one byte": (b"1", "{} is not a safetensors file"),
    "a length beyond the specification's": (
        struct.pack("<Q", 100 * 2**20 + 1), "{} is not a safetensors file",
    ),
    "the longest header, which does not exist": (
        struct.pack("<Q", 100 * 2**20),
        "{} is incomplete: it has 8 bytes, less than its header needs",
    ),
    "a header that lacks its last byte": (
        safetensors({})[:-1], "{} is incomplete: it has 9 bytes, less than its header needs",
    ),
    "data that lacks its last byte": (
        safetensors({"a": {"data_offsets": [0, 4]}}, b"123"), "{} is incomplete: 42 of 43 bytes",
    ),
    "a byte behind the data": (
        safetensors({"a": {"data_offsets": [0, 4]}}, b"12345"),
        "{} is damaged: it has 44 bytes, and 43 by its header",
    ),
    "data of an earlier array": (
        safetensors({"a": {"data_offsets": [0, 9]}, "b": {"data_offsets": [0, 1]}}, b"1"),
        "{} is incomplete: 71 of 79 bytes",
    ),
    "no JSON": (safetensors(b"[1]x"), "cannot read the header of {}: "),
    "a list": (safetensors(b"[1]"), "cannot read the header of {}: it is no JSON object"),
    "an array that is none": (safetensors({"a": 1}), "cannot read the header of {}: "),
    "no offsets": (safetensors({"a": {}}), "cannot read the header of {}: "),
    "one offset": (
        safetensors({"a": {"data_offsets": [0]}}), "cannot read the header of {}: ",
    ),
    "an offset that is text": (
        safetensors({"a": {"data_offsets": [0, "x"]}}), "cannot read the header of {}: ",
    ),
    "bytes that do not fit the shape": (
        safetensors({"a": entry([3], 0, 2)}, b"12"), "{}: a has 2 bytes, which do not fit",
    ),
    "a shape below nothing": (
        safetensors({"a": entry([-1, -2], 0, 2)}, b"12"), "{}: a has a shape or an offset",
    ),
    "a side beyond 32 bits": (
        safetensors({"a": entry([0, 2**40], 0, 0)}), "{}: a has an impossible shape",
    ),
    "a thousand dimensions": (
        safetensors({"a": entry([1] * 1000, 0, 1)}, b"1"), "{}: a has an impossible shape",
    ),
    "an end before the begin": (
        safetensors({"a": entry([1], 2, 1)}, b"1"), "{}: a has -1 bytes",
    ),
    "a name that would clear the screen": (
        safetensors({"\x1b[2J": entry([1], 0, 2)}, b"12"), r"{}: '\x1b[2J' has 2 bytes",
    ),
    "a type that is a list": (
        safetensors({"a": entry([1], 0, 1, [])}, b"1"), "{}: a has a type that is no text",
    ),
    "a type that is a number": (
        safetensors({"a": entry([1], 0, 1, 5)}, b"1"), "{}: a has a type that is no text",
    ),
    "metadata that is a number": (
        safetensors({"__metadata__": 5}), "cannot read the header of {}: ",
    ),
    "metadata with a number": (
        safetensors({"__metadata__": {"format": 5}}), "{}: a value of __metadata__ in its header",
    ),
    "UTF-16": (safetensors("{}".encode("utf-16")), "cannot read the header of {}: "),
    "too deep": (safetensors(b"[" * 100_000), "cannot read the header of {}: "),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_WEIGHTS)
def test_a_weight_file_that_cannot_be_used_is_named(tmp_path: Path, what: str) -> None:
    content, message = BAD_WEIGHTS[what]
    file = tmp_path / "w"
    with pytest.raises(BadModelError) as caught:
        header_of(file, content)
    expected = message.format(file)
    found = str(caught.value)
    is_whole = "incomplete" in message or message.endswith(("empty", "file"))
    assert found == expected if is_whole else found.startswith(expected)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_called_so(folder: Path, name: str) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / name).write_bytes(pointer)
    assert refused(folder, BadModelError) == (
        f"{folder / name} is a Git LFS pointer, not the file itself;"
        f" fetch the files with `git -C {folder} lfs pull`"
    )


# ---------------------------------------------------------------- the fingerprint
@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("config.json", True), ("chat_template.jinja", True), ("x.tiktoken", True),
        ("tokenizer.model", True), ("merges.txt", True), ("a.jsonl", True),
        ("model.safetensors.index.json", False), ("model.safetensors", False),
        ("README.md", False), ("model.py", False),
    ],
)  # fmt: skip
def test_which_files_decide_how_text_becomes_tokens(name: str, is_one: bool) -> None:
    assert is_tokenizer_file(name) is is_one


def test_a_fingerprint_is_that_of_these_lines(folder: Path) -> None:
    """Other lines would make every kept verdict on a model worthless."""
    (folder / "folder.json").mkdir()
    (folder / "README.md").write_text("not counted")
    (folder / "additional_chat_templates").mkdir()
    named = "additional_chat_templates/tool_use.jinja"
    (folder / named).write_text("{{ tools }}")
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, 1_700_000_000_123_999_999))
    lines = [
        f"content {name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n"
        for name in ("config.json", "tokenizer.json", named)
    ]
    lines.append(f"weights model.safetensors {file.stat().st_size} 1700000000123\n")
    lines += ["fact a 2\n", "fact b 1\n"]
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    assert fingerprint(check(folder), {"b": "1", "a": "2"}) == expected


# ---------------------------------------------------------------- files that would cost too much
@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "chat_template.jinja", "model-2.safetensors", "x.txt",
     "additional_chat_templates/x.jinja"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_special_file_is_refused_unopened(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    assert refused(folder, BadModelError).startswith(f"{folder / name} is not a regular file")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_text_of_a_gigabyte_is_refused_before_it_is_read(folder: Path, name: str) -> None:
    with open(folder / name, "wb") as file:
        file.truncate(2**30)
    assert refused(folder, BadModelError) == (
        f"{folder / name} has 1.00 GiB; a file of its kind has 100.0 MiB at most"
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; the weight files hold 3 l"),
        ({"num_hidden_layers": 1e300}, "num_hidden_layers is 1e+300; the weight files hold 3"),
        ({"n_layer": 10**9}, "n_layer is 1000000000; "),
        ({"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers is 1000000"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000; the longest side of an array in the"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000; the longest side of an array in the w"),
        ({"num_attention_heads": 10**9}, "num_attention_heads is 1000000000; the longest side of"),
        ({"intermediate_size": [64, 10**9]}, "intermediate_size is 1000000000; the longest side"),
        ({"hidden_size": -1}, "hidden_size is -1; it must be a whole number of 0 or more"),
        ({"hidden_size": "64"}, 'hidden_size is "64"; it must be a whole number of 0 or more'),
        (
            {"hidden_size": float("nan")},
            "hidden_size is NaN; it must be a whole number of 0 or more",
        ),
        ({"hidden_size": float("inf")}, "hidden_size is Infinity; "),
        ({"hidden_size": True}, "hidden_size is true; it must be a whole number of 0 or more"),
        (
            {"hidden_size": {"a": 1}},
            'hidden_size is {"a": 1}; it must be a whole number of 0 or more',
        ),
    ],
)
def test_a_size_that_no_weight_file_has_is_refused_by_its_key(
    folder: Path, config: dict[str, Any], said: str
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    assert refused(folder, BadModelError).startswith(f"{folder / 'config.json'}: {said}")


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
    assert check(folder).config["model_type"] == "llama"


def test_as_many_experts_as_the_weight_files_number_are_no_nonsense(folder: Path) -> None:
    names = ["model.layers.0.w", "model.layers.0.mlp.experts.4999.w"]
    (folder / "model.safetensors").write_bytes(arrays(*names))
    (folder / "config.json").write_text('{"model_type": "llama", "num_experts": 5000}')
    assert check(folder).config["num_experts"] == 5000
