"""A model folder as the daemon reads it: config.json and the headers of its weights, without MLX.

The worker checks a folder in full before it loads it; here only what memory depends on is read.
Nothing here calls a method of `os.DirEntry`: those hold the interpreter's lock while a disk does
not answer, so that one thread would stop all others of its process.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.protocol.context_length import NESTED_NAMES
from mlxsup.protocol.model_files import is_tokenizer_file, is_weight_file
from mlxsup.protocol.regular_file import MIB, kind_of, open_regular, read_regular
from mlxsup.store.description import CONFIG, INDEX, MAX_INDEX_BYTES

MAX_CONFIG_BYTES = 16 * MIB
MAX_HEADERS_BYTES = 64 * MIB
"""Of all weight files together; a model of 90,000 arrays has 10 MiB of headers."""

Stamp = Mapping[str, tuple[int, int]]
"""Size in bytes and time of modification in nanoseconds of each file, by name."""


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
    """

    config: Mapping[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The same with that of a nested text model on top, but the model type of the whole."""
        for name in NESTED_NAMES:
            inner = self.config.get(name)
            if isinstance(inner, dict):
                return {**self.config, **inner, "model_type": self.config.get("model_type")}
        return self.config


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderBytes:
    """What is read of a folder, before any of it is parsed.

    Attributes:
        path: the folder.
        stamp: of its files.
        names: of its files, in order.
        config: config.json.
        index: the index of the shards; None if there is none.
        headers: of each weight file its name, its size in bytes, and its header.
    """

    path: Path
    stamp: Stamp
    names: list[str]
    config: bytes
    index: bytes | None
    headers: list[tuple[str, int, bytes]]


def stamp(folder: Path) -> Stamp:
    """Return the files of a model folder that decide what the model answers.

    Raises:
        OSError: the folder cannot be read.
    """
    return {
        name: (status.st_size, status.st_mtime_ns)
        for name, status in _files(folder).items()
        if is_tokenizer_file(name) or is_weight_file(name)
    }


def fingerprint(of: Stamp) -> str:
    """Return what changes when config.json or a weight file does, by its name, size or time."""
    known = {name: of[name] for name in sorted(of) if name == CONFIG or is_weight_file(name)}
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def read_folder(path: Path) -> ModelFiles:
    """Read a model folder.

    Raises:
        FolderError: it or one of its files is missing or damaged.
    """
    return parse_folder(read_bytes(path))


def read_bytes(path: Path) -> FolderBytes:
    """Read what `parse_folder` needs; this may wait for a disk, and takes little time otherwise.

    Raises:
        FolderError: the folder or one of its files is missing, or no regular file of its size.
    """
    try:
        return _read_bytes(path)
    except FileNotFoundError as error:
        if error.filename is not None and Path(error.filename) == path:
            raise FolderError(f"the model folder {path} does not exist") from error
        raise FolderError(f"{error.filename or path}: {error.strerror}") from error
    except OSError as error:
        raise FolderError(f"{error.filename or path}: {error.strerror or error}") from error


def _read_bytes(path: Path) -> FolderBytes:
    files = _files(path)
    names = sorted(files)
    config = read_regular(path / CONFIG, MAX_CONFIG_BYTES)
    index = read_regular(path / INDEX, MAX_INDEX_BYTES) if INDEX in names else None
    shards = [name for name in names if is_weight_file(name)]
    if not shards:
        raise FolderError(f"{path / 'model.safetensors'} {_absence(path)}, nor any shard")
    headers, left_bytes = [], MAX_HEADERS_BYTES
    for name in shards:
        size, header = _read_header(path / name, left_bytes)
        left_bytes -= len(header)
        headers.append((name, size, header))
    return FolderBytes(
        path=path,
        stamp={n: (files[n].st_size, files[n].st_mtime_ns) for n in (CONFIG, *shards)},
        names=names,
        config=config,
        index=index,
        headers=headers,
    )


def _files(folder: Path) -> dict[str, os.stat_result]:
    """The regular files of a folder, by name; a link that leads nowhere is none."""
    try:
        names = os.listdir(folder)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(folder)) from None
    found = {}
    for name in names:
        with suppress(OSError):
            status = os.stat(folder / name)
            if stat.S_ISREG(status.st_mode):
                found[name] = status
    return found


def _absence(path: Path) -> str:
    """Why there is no regular file `model.safetensors`."""
    with suppress(OSError):
        return f"is {kind_of(os.stat(path / 'model.safetensors').st_mode)}"
    return "does not exist"


def parse_folder(read: FolderBytes) -> ModelFiles:
    """Return what the files of a folder say; this takes time, and waits for nothing.

    Raises:
        FolderError: a file is damaged, or one is missing that the index names.
    """
    config = _json_object(read.path / CONFIG, read.config)
    if read.index is not None:
        _check_index(read.path / INDEX, read.index, read.names)
    tensors = [
        tensor
        for name, size, header in read.headers
        for tensor in parse_header(read.path / name, size, header)
    ]
    return ModelFiles(config=config, tensors=tuple(tensors))


def _check_index(index: Path, content: bytes, names: list[str]) -> None:
    """Raise if a shard is missing that the index names."""
    shards = _json_object(index, content).get("weight_map")
    if not isinstance(shards, dict):
        raise FolderError(f"{index} has no weight_map")
    missing = {str(value) for value in shards.values()}.difference(names)
    if missing:
        raise FolderError(f"{index.parent / min(missing)} does not exist; {index.name} names it")


def _json_object(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FolderError(f"{path} does not hold a JSON object")
    return value


def _read_header(path: Path, max_bytes: int) -> tuple[int, bytes]:
    """The size of a weight file and its header.

    Raises:
        FolderError: it is no safetensors file, or has more of a header than that.
        OSError: it cannot be read.
    """
    descriptor = open_regular(path)
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADERS_BYTES + 1
        if length > MAX_HEADERS_BYTES:
            raise FolderError(f"{path} is not a safetensors file")
        if length > max_bytes:
            raise FolderError(
                f"{path.parent}: the headers of its weight files have more than the"
                f" {MAX_HEADERS_BYTES // MIB} MiB that are read of a model"
            )
        return size, file.read(length)


def parse_header(path: Path, size: int, header: bytes) -> list[Tensor]:
    """Return the arrays of a weight file, from its header alone.

    Args:
        path: the file, as errors call it.
        size: of the file, in bytes.
        header: as it was read.

    Raises:
        FolderError: the file is cut short, or has no header of a safetensors file.
    """
    try:
        values = json.loads(header)
        values.pop("__metadata__", None)
        tensors = [_tensor(name, value) for name, value in values.items()]
        last = max((value["data_offsets"][1] for value in values.values()), default=0)
        end = 8 + len(header) + last
    except (
        ValueError, ArithmeticError, AttributeError, LookupError, TypeError, RecursionError
    ) as error:  # fmt: skip
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
