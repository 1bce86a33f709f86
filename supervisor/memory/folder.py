"""A model folder as the daemon knows it: config.json and the sizes of its files, without MLX.

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

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.context_length import declared_context_length
from mlxsup.protocol.estimate import MAX_BYTES, ModelMemory, estimates_folder, find_kept
from mlxsup.protocol.model_files import (
    ADAPTER_CONFIG,
    MLX_ADAPTER,
    PEFT_ADAPTER,
    is_tokenizer_file,
    is_weight_file,
    weights_among,
)
from mlxsup.protocol.pictures import declares_vision
from mlxsup.protocol.pooling import find_pooling
from mlxsup.protocol.regular_file import MIB, read_regular
from mlxsup.protocol.tasks import Task
from mlxsup.store.model_folder import (
    CONFIG,
    INDEX,
    FolderProblem,
    damaged_index,
    folder_problem,
    shards_of,
)

from .machine import installed

MAX_CONFIG_BYTES = 16 * MIB
QUANTIZATION = "hf_quant_config.json"
"""Says in some folders how the weights are packed, instead of config.json."""

_ENGINE_VERSION = re.compile(r"(?:mlx|mlx_lm)-[^-]+\.dist-info")

ADAPTER_FILES = (MLX_ADAPTER, PEFT_ADAPTER, ADAPTER_CONFIG)

UNASKED = "the caches of its rows are measured at its first load"
"""The remark of a model that mlx-lm has not been asked about."""

Stamp = Mapping[str, tuple[int, int]]
"""Size in bytes and time of modification in nanoseconds of each file, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The memory of a model that has not been loaded.

    Attributes:
        fingerprint: of the files, by name, size and time; see `fingerprint`.
        key: of what config.json and the sizes of the weights say to the installed mlx-lm.
        weight_bytes: the arrays, once they are loaded.
        layers: what the layers keep for each row; empty if that is not known.
        remark: why the layers are not known; empty if mlx-lm has said it.
        context_length: tokens that the folder declares; None if it does not.
        task: what the model is for.
        takes_pictures: true if it has a vision tower.
        adapter_bytes: its adapters: as much for each of them, and once more for none, as the file
            of the largest has.
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


def read_folder(path: Path, adapters: Sequence[str] = ()) -> Estimate | FolderProblem:
    """Return what the files of a folder say, and what mlx-lm has said of such files before.

    Unless it has, the weights are as large as their files; mlx-lm leaves out or widens some.

    Args:
        path: the folder of the model; this may wait for its disk.
        adapters: folders of its adapters; those that are missing are left out.

    Returns:
        Instead of an estimate the reason why the folder cannot be loaded.
    """
    if (problem := folder_problem(path) or damaged_index(path)) is not None:
        return problem
    try:
        found = stamp(path, adapters)
        content = read_regular(path / CONFIG, MAX_CONFIG_BYTES)
        is_packed = QUANTIZATION in found
        packing = read_regular(path / QUANTIZATION, MAX_CONFIG_BYTES) if is_packed else b""
        config = json.loads(content)
    except OSError as error:
        return FolderProblem(f"{error.filename or path}: {error.strerror or error}")
    except (ValueError, RecursionError) as error:
        return FolderProblem(f"{path / CONFIG} is not JSON: {error}")
    if not isinstance(config, dict):
        return FolderProblem(f"{path / CONFIG} does not hold a JSON object")
    sizes = {name: found[name][0] for name in sorted(found) if is_weight_file(name)}
    weights = weights_among(sizes, shards_of(path / INDEX))
    stacks = [found[name][0] for name in found if name.endswith((MLX_ADAPTER, PEFT_ADAPTER))]
    pooling = find_pooling(path, config)
    lengths = [declared_context_length(config), pooling.max_tokens if pooling else None]
    # Whatever mlx-lm's answer follows from.
    asked = (2, sys.platform, _engine_versions(), content, packing, pooling, sizes)
    estimated = Estimate(
        fingerprint=fingerprint(found),
        key=hashlib.sha256(repr(asked).encode()).hexdigest(),
        weight_bytes=min(sum(sizes[name] for name in weights), MAX_BYTES),
        layers=(),
        remark=UNASKED,
        context_length=min((one for one in lengths if one is not None), default=None),
        task=pooling.task if pooling else Task.GENERATE,
        takes_pictures=declares_vision(config),
        adapter_bytes=min((len(stacks) + 1) * max(stacks, default=0), MAX_BYTES),
    )
    kept = find_kept(estimated.key, estimates_folder())
    return estimated if kept is None else estimated.as_said(kept)


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


def _engine_versions() -> list[str]:
    """Return the installed versions of MLX and mlx-lm."""
    return sorted(path.name for path in installed() if _ENGINE_VERSION.fullmatch(path.name))
