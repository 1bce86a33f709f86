"""A model folder as the daemon reads it: config.json and the headers of its weights, without MLX.

The worker checks a folder in full before it loads it; here only what memory depends on is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.protocol.context_length import NESTED_NAMES
from mlxsup.protocol.model_files import is_weight_file

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The largest header of a safetensors file, by its specification."""


class FolderError(Exception):
    """What a model needs cannot be found out: its folder is missing or damaged.

    The message names the file.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An array of a weight file.

    Attributes:
        name: with dots between the parts.
        shape: of the array.
        dtype: as safetensors names it: `BF16`, `U32`.
        size_bytes: in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What a folder says about its model.

    Attributes:
        config: the content of config.json.
        tensors: the arrays of all weight files.
        fingerprint: see `fingerprint`.
    """

    config: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    fingerprint: str

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The same with that of a nested text model on top, but the model type of the whole."""
        for name in NESTED_NAMES:
            inner = self.config.get(name)
            if isinstance(inner, dict):
                return {**self.config, **inner, "model_type": self.config.get("model_type")}
        return self.config


def read_folder(path: Path) -> ModelFiles:
    """Reads a model folder.

    Raises:
        FolderError: it or one of its files is missing or damaged.
    """
    try:
        return _read_folder(path)
    except OSError as error:
        raise FolderError(f"{error.filename or path}: {error.strerror or error}") from error


def _read_folder(path: Path) -> ModelFiles:
    if not path.exists():
        raise FolderError(f"the model folder {path} does not exist")
    config = _json_object(path / "config.json")
    shards = _find_shards(path)
    tensors = [tensor for shard in shards for tensor in read_header(shard)]
    return ModelFiles(config=config, tensors=tuple(tensors), fingerprint=fingerprint(path))


def fingerprint(path: Path) -> str:
    """Changes when config.json changes, or the name, size or time of a weight file.

    Raises:
        FolderError: there are no weight files.
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for shard in _find_shards(path):
        status = shard.stat()
        digest.update(f"{shard.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _find_shards(path: Path) -> list[Path]:
    """The weight files, as mlx-lm finds them; all that the index names must be there."""
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_file())
    shards = [name for name in names if is_weight_file(name)]
    _check_index(path, names)
    if not shards:
        raise FolderError(f"{path / 'model.safetensors'} does not exist, nor any shard")
    return [path / name for name in shards]


def _check_index(path: Path, names: list[str]) -> None:
    """Whether all the shards that the index names are there."""
    index = path / "model.safetensors.index.json"
    if index.name not in names:
        return
    shards = _json_object(index).get("weight_map")
    if not isinstance(shards, dict):
        raise FolderError(f"{index} has no weight_map")
    for shard in sorted({str(value) for value in shards.values()}):
        if shard not in names:
            raise FolderError(f"{path / shard} does not exist; {index.name} names it")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FolderError(f"{path} does not hold a JSON object")
    return value


def read_header(path: Path) -> list[Tensor]:
    """The arrays of a weight file, from its header alone.

    Raises:
        FolderError: the file is cut short, or is no safetensors file.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES:
            raise FolderError(f"{path} is not a safetensors file")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = [_tensor(name, value) for name, value in header.items()]
        end = 8 + length + max((value["data_offsets"][1] for value in header.values()), default=0)
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise FolderError(f"{path} has a header that cannot be read: {error}") from error
    if size < end:
        raise FolderError(f"{path} is cut short: {size} bytes of {end}")
    return tensors


def _tensor(name: str, value: Mapping[str, Any]) -> Tensor:
    begin, end = value["data_offsets"]
    return Tensor(
        name=name,
        shape=tuple(int(length) for length in value["shape"]),
        dtype=str(value["dtype"]),
        size_bytes=int(end) - int(begin),
    )
