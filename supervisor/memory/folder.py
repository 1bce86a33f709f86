"""A model folder as the daemon knows it: config.json and the headers of its weights, without MLX.

The worker checks a folder in full before it loads it; here only what memory depends on is read.
Nothing here calls a method of `os.DirEntry`: those hold the interpreter's lock while a disk does
not answer, so that one thread would stop all others of its process.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.context_length import declared_context_length
from mlxsup.protocol.estimate import MAX_BYTES, ModelMemory
from mlxsup.protocol.model_files import (
    ADAPTER_CONFIG,
    MLX_ADAPTER,
    PEFT_ADAPTER,
    is_tokenizer_file,
    is_weight_file,
    weights_among,
)
from mlxsup.protocol.pictures import declares_vision
from mlxsup.protocol.pooling import Pooling, find_pooling
from mlxsup.protocol.regular_file import MIB, kind_of, read_regular
from mlxsup.protocol.tasks import Task
from mlxsup.store.model_folder import (
    CONFIG,
    INDEX,
    MAX_HEADERS_BYTES,
    MAX_INDEX_BYTES,
    FolderError,
    array_bytes,
    read_header,
)

from .machine import installed

MAX_CONFIG_BYTES = 16 * MIB
QUANTIZATION = "hf_quant_config.json"
"""Says in some folders how the weights are packed, instead of config.json."""

_ENGINE_VERSION = re.compile(r"(?:mlx|mlx_lm)-[^-]+\.dist-info")

ADAPTER_FILES = (MLX_ADAPTER, PEFT_ADAPTER, ADAPTER_CONFIG)
MAX_ADAPTER_HEADER_BYTES = 4 * MIB

UNASKED = "the caches of its rows are measured at its first load"
"""The remark of a model that mlx-lm has not been asked about."""

Stamp = Mapping[str, tuple[int, int]]
"""Size in bytes and time of modification in nanoseconds of each file, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The memory of a model that has not been loaded.

    Attributes:
        fingerprint: of the files, by name, size and time; see `fingerprint`.
        key: of what config.json and the headers say to the installed mlx-lm.
        weight_bytes: the arrays, once they are loaded.
        layers: what the layers keep for each row; empty if that is not known.
        remark: why the layers are not known; empty if mlx-lm has said it.
        context_length: tokens that the folder declares; None if it does not.
        task: what the model is for.
        takes_pictures: true if it has a vision tower.
        adapter_bytes: its adapters, as large as their numbers are in the files, at most.
    """

    fingerprint: str
    key: str
    weight_bytes: int
    layers: tuple[CacheLayers, ...]
    remark: str
    context_length: int | None
    task: Task = Task.GENERATE
    takes_pictures: bool = False
    adapter_bytes: int = 0

    def as_said(self, said: ModelMemory | str) -> Estimate:
        """Return the same with what mlx-lm says, or why it says nothing; it was not asked about
        adapters."""
        if isinstance(said, str):
            return replace(self, remark=f"{UNASKED}: {said}")
        return replace(self, weight_bytes=said.weight_bytes, layers=said.layers, remark="")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderBytes:
    """The content of a folder's files, before any of it is parsed.

    Attributes:
        path: the folder.
        stamp: of config.json and the weight files.
        names: of its files, in order.
        config: config.json.
        index: the index of the shards; None if there is none.
        pooling: how the model pools; None if it writes text.
        quantization: the file of that name; empty if there is none.
        headers: of each weight file its name, its size in bytes, and its header.
        adapters: the headers of its adapters.
    """

    path: Path
    stamp: Stamp
    names: list[str]
    config: bytes
    index: bytes | None
    pooling: Pooling | None
    quantization: bytes
    headers: list[tuple[str, int, bytes]]
    adapters: Sequence[bytes] = ()


def stamp(folder: Path, adapters: Iterable[str] = ()) -> Stamp:
    """Return the files of a model folder, and of its adapters' folders, that decide what the model
    answers.

    Raises:
        OSError: the folder cannot be read.
    """
    return _stamp_of_adapters(adapters) | {
        name: (status.st_size, status.st_mtime_ns)
        for name, status in _files(folder).items()
        if is_tokenizer_file(name) or is_weight_file(name)
    }


def _stamp_of_adapters(adapters: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the files of adapters, by their paths; those that are missing are left out."""
    found = {}
    for path in (f"{folder}/{name}" for folder in adapters for name in ADAPTER_FILES):
        with suppress(OSError):
            status = os.stat(path)
            found[path] = (status.st_size, status.st_mtime_ns)
    return found


def fingerprint(of: Stamp) -> str:
    """Return a text that changes when config.json, a weight file or an adapter does, by name, size
    or time."""
    known = {
        name: of[name]
        for name in sorted(of)
        if name == CONFIG or is_weight_file(name) or os.path.isabs(name)
    }
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def difference(loaded: Stamp, present: Stamp) -> str:
    """Return what has changed since a load, the first file by name; empty if nothing has.

    A worker knows its files by their content, too; to read that again would take too long. So a
    file that was written anew with the same content counts as changed.
    """
    for name in sorted(loaded.keys() | present.keys()):
        if name not in present:
            return f"{name} was removed since it was loaded"
        if name not in loaded:
            return f"{name} was added since it was loaded"
        if loaded[name] != present[name]:
            return f"{name} has changed since it was loaded"
    return ""


def read_bytes(path: Path, adapters: Sequence[str] = ()) -> FolderBytes:
    """Read what `estimate` needs; this may wait for a disk, and takes little time otherwise.

    Args:
        path: the folder of the model.
        adapters: folders of its adapters; what cannot be read of them is left out.

    Raises:
        FolderError: the folder or one of its files is missing, or no regular file of its size.
    """
    try:
        read = _read_bytes(path)
        headers = []
        for file in (Path(one) / name for one in adapters for name in ADAPTER_FILES[:2]):
            with suppress(OSError, FolderError):
                headers.append(read_header(file, MAX_ADAPTER_HEADER_BYTES)[1])
        stamp_ = {**read.stamp, **_stamp_of_adapters(adapters)}
        return replace(read, stamp=stamp_, adapters=headers)
    except FileNotFoundError as error:
        if error.filename is not None and Path(error.filename) == path:
            raise FolderError(f"the model folder {path} does not exist") from error
        raise FolderError(f"{error.filename or path}: {error.strerror}") from error
    except OSError as error:
        raise FolderError(f"{error.filename or path}: {error.strerror or error}") from error


def estimate(read: FolderBytes) -> Estimate:
    """Return what the files of a folder say; this takes time, and waits for nothing.

    The weights are as large as in the files; mlx-lm, which leaves out or widens some, has not been
    asked yet.

    Raises:
        FolderError: a file is damaged, or one is missing that the index names.
    """
    config = _json_object(read.path / CONFIG, read.config)
    indexed: set[str] = set()
    if read.index is not None:
        indexed = _indexed(read.path / INDEX, read.index, read.names)
    loaded = weights_among([name for name, _, _ in read.headers], indexed)
    weight_bytes = sum(
        array_bytes(read.path / name, size, header)
        for name, size, header in read.headers
        if name in loaded
    )
    if weight_bytes > MAX_BYTES:
        raise FolderError(f"{read.path}: a header has impossible sizes")
    declared = declared_context_length(config)
    most = read.pooling.max_tokens if read.pooling else None
    return Estimate(
        fingerprint=fingerprint(read.stamp),
        key=_key(read),
        weight_bytes=weight_bytes,
        layers=(),
        remark=UNASKED,
        context_length=min(
            (length for length in (declared, most) if length is not None), default=None
        ),
        task=read.pooling.task if read.pooling else Task.GENERATE,
        takes_pictures=declares_vision(config),
        adapter_bytes=_adapter_bytes(read.adapters),
    )


def _adapter_bytes(headers: Sequence[bytes]) -> int:
    """Return the bytes of the stacks of all adapters: as much for each of them, and once more for
    none, as the largest of them needs.

    A damaged header counts nothing: the load says what is wrong with it.
    """
    largest = 0
    for header in headers:
        with suppress(ValueError, AttributeError, LookupError, TypeError, RecursionError):
            ends = (value.get("data_offsets", (0, 0))[1] for value in json.loads(header).values())
            largest = max(largest, *map(int, ends))
    return min((len(headers) + 1) * largest, MAX_BYTES)


def _read_bytes(path: Path) -> FolderBytes:
    files = _files(path)
    names = sorted(files)
    config = read_regular(path / CONFIG, MAX_CONFIG_BYTES)
    index = read_regular(path / INDEX, MAX_INDEX_BYTES) if INDEX in names else None
    is_packed = QUANTIZATION in names
    shards = [name for name in names if is_weight_file(name)]
    if not shards:
        raise FolderError(f"{path / 'model.safetensors'} {_absence(path)}, and there are no shards")
    headers, left_bytes = [], MAX_HEADERS_BYTES
    for name in shards:
        size, header = read_header(path / name, left_bytes)
        left_bytes -= len(header)
        headers.append((name, size, header))
    return FolderBytes(
        path=path,
        stamp={n: (files[n].st_size, files[n].st_mtime_ns) for n in (CONFIG, *shards)},
        names=names,
        config=config,
        index=index,
        pooling=_pooling(path, config),
        quantization=read_regular(path / QUANTIZATION, MAX_CONFIG_BYTES) if is_packed else b"",
        headers=headers,
    )


def _pooling(path: Path, config: bytes) -> Pooling | None:
    try:
        value = json.loads(config)
    except (ValueError, RecursionError):  # `estimate` says so
        return None
    return find_pooling(path, value) if isinstance(value, dict) else None


def _files(folder: Path) -> dict[str, os.stat_result]:
    """Return the regular files of a folder by name; a link that leads nowhere is none."""
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
    """Return why there is no regular file `model.safetensors`."""
    with suppress(OSError):
        return f"is {kind_of(os.stat(path / 'model.safetensors').st_mode)}"
    return "does not exist"


def _indexed(index: Path, content: bytes, names: list[str]) -> set[str]:
    """Return the shards that the index names; raise if one is missing."""
    shards = _json_object(index, content).get("weight_map")
    if not isinstance(shards, dict):
        raise FolderError(f"{index} has no weight_map")
    indexed = {str(value) for value in shards.values()}
    if missing := indexed.difference(names):
        raise FolderError(f"{index.parent / min(missing)} does not exist; {index.name} names it")
    return indexed


def _json_object(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FolderError(f"{path} does not hold a JSON object")
    return value


def _key(read: FolderBytes) -> str:
    """Return a text that changes whenever mlx-lm might say something else of a folder."""
    digest = hashlib.sha256(f"1 {sys.platform} {_engine_versions()}".encode())
    if "modules.json" in read.names:
        digest.update(b"pooled")
    for content in (read.config, read.quantization, *(header for _, _, header in read.headers)):
        digest.update(b"%d " % len(content) + content)
    return digest.hexdigest()


def _engine_versions() -> list[str]:
    """Return the installed versions of MLX and mlx-lm."""
    return sorted(path.name for path in installed() if _ENGINE_VERSION.fullmatch(path.name))
