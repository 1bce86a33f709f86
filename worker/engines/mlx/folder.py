"""A model folder as files: what must be there, whether it can be read, and its fingerprint.

No MLX here: everything that can be checked without it is checked before it is imported, and
errors name the file (B6). mlx-lm would take a missing folder for the id of a model to download.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxsup.protocol.model_files import (
    is_pointer,
    is_tokenizer_file,
    is_weight_file,
    pointer_problem,
    weights_among,
)
from mlxsup.protocol.text import size_text

from ...engine import BadModelError, ModelMissingError
from .config_sizes import check_sizes
from .gguf_header import shown
from .known_faults import Remedy, find_fault

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
"""At least one of these must exist; the tokenizer takes care of merges and the rest."""

GENERATION_CONFIG = "generation_config.json"

READ_AS_JSON = (
    "config.json",
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "hf_quant_config.json",
    "model.safetensors.index.json",
)
"""The files that loaders parse; other files of a folder may contain anything."""

TEMPLATE_FOLDER = "additional_chat_templates"

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The largest header of a safetensors file, by its specification."""

MAX_TEXT_BYTES = 100 * 1024 * 1024
"""The largest configuration or tokenizer file; the largest of any known model has 35 MB."""

MAX_DIMENSIONS = 8
MAX_SIDE = 2**31 - 1
"""MLX keeps each side of a shape in 32 bits."""

NUMBER_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2,
    "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one number by its type; MLX refuses the types that it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A folder that has passed the checks.

    Attributes:
        path: the folder.
        config: the content of config.json.
        shards: the weight files, in order of name.
        shard_of: for each array, the file that holds it.
        weight_bytes: size of all weight files.
        generation_config: the content of generation_config.json; empty if there is none.
        strays: names of weight files that are not the model's.
    """

    path: Path
    config: dict[str, Any]
    shards: list[Path]
    shard_of: dict[str, Path]
    weight_bytes: int
    generation_config: dict[str, Any] = field(default_factory=dict)
    strays: frozenset[str] = frozenset()

    def number(self, *names: str) -> int | None:
        """A positive integer of config.json, under the first of the names that exists; also looks
        into a text model that is nested in another one."""
        for settings in (self.config, self.config.get("text_config")):
            for name in names:
                value = settings.get(name) if isinstance(settings, dict) else None
                if type(value) is int and value > 0:
                    return value
        return None


def check_folder(path: Path, report: Callable[[float], None]) -> ModelFolder:
    """Reads everything in a folder except the weights themselves.

    Args:
        path: the folder.
        report: called with the share of the weight files that has been checked.

    Raises:
        ModelMissingError: the folder or a file is not there.
        BadModelError: a file cannot be used.
    """
    try:
        return _check_folder(path, report)
    except PermissionError as error:
        raise BadModelError(f"{error.filename or path}: no permission to read it") from error
    except OSError as error:
        name = error.filename or path
        raise BadModelError(f"{name}: {error.strerror or error}") from error


def _check_folder(path: Path, report: Callable[[float], None]) -> ModelFolder:
    if not path.exists():
        raise ModelMissingError(f"the model folder {path} does not exist")
    if not path.is_dir():
        raise BadModelError(f"{path} is not a folder; a model is a folder with a config.json")
    names = sorted(name for name in os.listdir(path) if _is_file(path / name))
    if "config.json" not in names:
        raise ModelMissingError(f"{path / 'config.json'} does not exist")
    read = {name: _read_json(path / name) for name in READ_AS_JSON if name in names}
    config = read["config.json"]
    if not isinstance(config.get("model_type"), str):
        raise BadModelError(f"{path / 'config.json'} has no model_type")
    fault = find_fault(config)
    if fault is not None and fault.remedy is Remedy.REFUSE:
        raise BadModelError(f"{path / 'config.json'}: {fault.model_type} is refused: {fault}")
    if not any(name in TOKENIZER_FILES or name.endswith(".tiktoken") for name in names):
        raise ModelMissingError(
            f"{path / 'tokenizer.json'} does not exist, and there is no other tokenizer"
        )
    for name in (*filter(is_tokenizer_file, names), *_named_templates(path)):
        with open(path / name, "rb") as file:
            file.read(1)
    shards = _find_shards(path, names)
    total = sum(shard.stat().st_size for shard in shards)
    shard_of: dict[str, Path] = {}
    shapes: dict[str, list[int]] = {}
    done = 0
    for shard in shards:
        found = read_safetensors_header(shard)
        shard_of |= dict.fromkeys(found, shard)
        shapes |= found
        done += shard.stat().st_size
        report(done / total)
    check_sizes(path / "config.json", config, shapes)
    return ModelFolder(
        path=path,
        config=config,
        shards=shards,
        shard_of=shard_of,
        weight_bytes=total,
        generation_config=read.get(GENERATION_CONFIG, {}),
        strays=frozenset(filter(is_weight_file, names)) - {shard.name for shard in shards},
    )


def _is_file(path: Path) -> bool:
    """True if a loader may open this file; False for a folder, or a link that leads nowhere.

    Raises:
        BadModelError: it is neither: reading a pipe or a device may never end. Or it is larger than
            any file of its kind.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(status.st_mode):
        return False
    if not stat.S_ISREG(status.st_mode):
        raise BadModelError(f"{path} is not a regular file; copy the file itself to its place")
    is_text = is_tokenizer_file(path.name) or path.name in READ_AS_JSON
    if is_text and status.st_size > MAX_TEXT_BYTES:
        raise BadModelError(
            f"{path} has {size_text(status.st_size)}; a file of its kind has"
            f" {size_text(MAX_TEXT_BYTES)} at most"
        )
    return True


def _named_templates(path: Path) -> list[str]:
    """Return the files of a folder's named chat templates, by their paths in it."""
    folder = path / TEMPLATE_FOLDER
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    files = [f"{TEMPLATE_FOLDER}/{name}" for name in names if name.endswith(".jinja")]
    return [name for name in files if _is_file(path / name)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _is_not("JSON", path, f": {error}") from error
    if not isinstance(value, dict):
        raise BadModelError(f"{path} does not hold a JSON object")
    return value


def _is_not(kind: str, path: Path, detail: str = "") -> BadModelError:
    """The error for a file of another kind than its name says."""
    if is_pointer(path):
        return BadModelError("; ".join(pointer_problem(path)))
    return BadModelError(f"{path} is not {kind}{detail}")


def _find_shards(path: Path, names: list[str]) -> list[Path]:
    """Return the weight files; all that the index names have to be there."""
    indexed: set[str] = set()
    if "model.safetensors.index.json" in names:
        index = _read_json(path / "model.safetensors.index.json").get("weight_map")
        if not isinstance(index, dict):
            raise BadModelError(f"{path / 'model.safetensors.index.json'} has no weight_map")
        indexed = {str(value) for value in index.values()}
        for name in sorted(indexed):
            if name not in names:
                raise ModelMissingError(
                    f"{path / name} does not exist; model.safetensors.index.json names it"
                )
    shards = weights_among(names, indexed)
    if not shards:
        raise ModelMissingError(
            f"{path / 'model.safetensors'} does not exist, and there are no shards"
        )
    return [path / name for name in shards]


def read_safetensors_header(path: Path) -> dict[str, list[int]]:
    """Return the shapes of a weight file's arrays; check that all of their bytes are there.

    MLX believes the header: where shape and bytes do not fit, it reads other arrays' bytes.

    Raises:
        BadModelError: the file is empty, cut short, or not safetensors at all.
    """
    size = path.stat().st_size
    if size == 0:
        raise BadModelError(f"{path} is empty")
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES:
            raise _is_not("a safetensors file", path)
        if 8 + length > size:
            raise BadModelError(
                f"{path} is incomplete: it has {size} bytes, less than its header needs"
            )
        try:
            header = json.loads(file.read(length).decode())
            header.pop("__metadata__", None)
            end = 8 + length + max((v["data_offsets"][1] for v in header.values()), default=0)
            if size < end:
                raise BadModelError(f"{path} is incomplete: {size} of {end} bytes")
            return {name: _shape(path, name, entry) for name, entry in header.items()}
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
            raise BadModelError(f"cannot read the header of {path}: {error}") from error


def _shape(path: Path, name: str, entry: Mapping[str, Any]) -> list[int]:
    """Return the shape of an array in a header.

    Raises:
        BadModelError: its type, its shape and its place in the file do not fit together.
        LookupError, TypeError, ValueError: something is missing, or of another kind.
    """
    shape: list[int] = entry["shape"]
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in [begin, end, *shape]):
        raise BadModelError(f"{path}: {shown(name)} has a shape or an offset that is not a number")
    if len(shape) > MAX_DIMENSIONS or max(shape, default=0) > MAX_SIDE:
        raise BadModelError(f"{path}: {shown(name)} has an impossible shape")
    number_bytes = NUMBER_BYTES.get(entry["dtype"])
    if begin > end or (number_bytes is not None and math.prod(shape) * number_bytes != end - begin):
        raise BadModelError(
            f"{path}: {shown(name)} has {end - begin} bytes, which do not fit its shape {shape}"
        )
    return shape


def fingerprint(folder: ModelFolder, facts: Mapping[str, str]) -> str:
    """Changes when the same request might give another answer.

    Covers config and tokenizer files by content, weight files by name, size and time (their
    content would take longer to read than to load), and whatever `facts` names.
    """
    digest = hashlib.sha256()
    names = filter(is_tokenizer_file, sorted(os.listdir(folder.path)))
    for name in (*names, *_named_templates(folder.path)):
        path = folder.path / name
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"content {name} {content}\n".encode())
    for shard in folder.shards:
        status = shard.stat()
        milliseconds = status.st_mtime_ns // 1_000_000
        digest.update(f"weights {shard.name} {status.st_size} {milliseconds}\n".encode())
    for name, value in sorted(facts.items()):
        digest.update(f"fact {name} {value}\n".encode())
    return digest.hexdigest()
