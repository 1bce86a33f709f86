"""A model folder as files: what must be there, whether it can be read, and its fingerprint.

No MLX here: everything that can be checked without it is checked before it is imported, and
errors name the file (B6). mlx-lm would take a missing folder for the id of a model to download.

mlx-lm builds what config.json describes, layer by layer, and looks at the weight files afterwards:
10^9 layers fill the memory of the machine. So sizes that are absurd beside the shapes of the weight
files are refused here; mlx-lm itself refuses what differs a little.

The import of MLX takes a second or more in which the disk has nothing to do. Meanwhile the weights
are read into the system's page cache: at most half of the available memory, because more would push
out what was read first. That has no effect but on time: the load reads the same files, and says
what is wrong with them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from mlxsup.protocol.model_files import (
    is_pointer,
    is_tokenizer_file,
    is_weight_file,
    pointer_problem,
    weights_among,
)
from mlxsup.protocol.text import size_text

from ...engine import BadModelError, ModelMissingError
from .gguf_header import shown
from .quirks import Remedy, find_fault

LAYER_KEYS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers",
    "num_kv_reuse_layers", "num_loops",
)  # fmt: skip
WIDTH_KEYS = (
    "hidden_size", "d_model", "n_embd", "dim", "intermediate_size", "moe_intermediate_size",
    "n_inner", "vocab_size", "num_attention_heads", "n_head", "n_heads", "num_key_value_heads",
    "num_kv_heads", "head_dim", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_num_experts",
)  # fmt: skip
NESTED = ("text_config", "llm_config", "language_config")
"""Where a model for more than text keeps the sizes of its language model."""

PACKED = 32
"""Numbers of one bit that one stored number may hold: a stored side is so much shorter at most."""

LEAST_SIDE = 4096
"""What is no larger costs nothing to build, whatever the weight files hold."""

SPARE_LAYERS = 100
"""Some layers have no weights of their own, because they share those of others."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d{1,7})\.")
_NUMBERED = re.compile(r"\.(\d{1,7})\.")


def check_sizes(file: Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise if a size in config.json is none, or cannot fit to the weight files.

    Args:
        file: config.json, for messages.
        config: its content.
        shapes: of the arrays, by name.

    Raises:
        BadModelError: names the key, its value and what the weight files say.
    """
    layers = _count(_LAYER, shapes) or max(len(shapes), _longest(shapes))
    side = max(LEAST_SIDE, PACKED * max(_longest(shapes), _count(_NUMBERED, shapes)))
    for place, sizes in _places(config):
        for key in LAYER_KEYS:
            for value in _values(file, place + key, sizes.get(key)):
                if value > 2 * layers + SPARE_LAYERS:
                    raise BadModelError(
                        f"{file}: {place}{key} is {value}; the weight files hold {layers} layers"
                    )
        for key in WIDTH_KEYS:
            for value in _values(file, place + key, sizes.get(key)):
                if value > side:
                    raise BadModelError(
                        f"{file}: {place}{key} is {value}; the longest side of an array in the"
                        f" weight files is {_longest(shapes)}"
                    )


def _places(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    nested = [(f"{name}.", config[name]) for name in NESTED if isinstance(config.get(name), dict)]
    return [("", config), *nested]


def _values(file: Path, key: str, value: Any) -> list[int]:
    """Return the sizes under a key: one, or one for each layer; null stands for the usual one."""
    values = value if isinstance(value, list) else [value]
    given = [one for one in values if one is not None]
    for one in given:
        if type(one) not in (int, float) or not (one >= 0 and one == one // 1):
            shown = json.dumps(one)[:40]
            raise BadModelError(f"{file}: {key} is {shown}; it must be a whole number of 0 or more")
    return given


def _count(pattern: re.Pattern[str], names: Mapping[str, Any]) -> int:
    """Return how many are numbered in the names of arrays; 0 if none is."""
    found = (int(number) for name in names for number in pattern.findall(name))
    return max((number + 1 for number in found), default=0)


def _longest(shapes: Mapping[str, Sequence[int]]) -> int:
    return max((side for shape in shapes.values() for side in shape), default=0)


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
        """Return a positive integer of config.json, under the first of the names that exists, or
        else of a text model that is nested in it; None if there is none."""
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
    read = {name: read_json(path / name) for name in READ_AS_JSON if name in names}
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


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        BadModelError: it holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _is_not("JSON", path, f": {error}") from error
    if not isinstance(value, dict):
        raise BadModelError(f"{path} does not hold a JSON object")
    return value


def _is_not(kind: str, path: Path, detail: str = "") -> BadModelError:
    """Make the error for a file of another kind than its name says."""
    if is_pointer(path):
        return BadModelError("; ".join(pointer_problem(path)))
    return BadModelError(f"{path} is not {kind}{detail}")


def _find_shards(path: Path, names: list[str]) -> list[Path]:
    """Return the weight files; all that the index names have to be there."""
    indexed: set[str] = set()
    if "model.safetensors.index.json" in names:
        index = read_json(path / "model.safetensors.index.json").get("weight_map")
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
            if not isinstance(header, dict):
                raise BadModelError(f"cannot read the header of {path}: it is no JSON object")
            # MLX takes texts there, and ends with an error of its own that names no file.
            metadata = header.pop("__metadata__", None)
            if not all(type(value) is str for value in (metadata or {}).values()):
                raise BadModelError(f"{path}: a value of __metadata__ in its header is no text")
            end = 8 + length + max((v["data_offsets"][1] for v in header.values()), default=0)
            if size < end:
                raise BadModelError(f"{path} is incomplete: {size} of {end} bytes")
            if size > end:
                raise BadModelError(
                    f"{path} is damaged: it has {size} bytes, and {end} by its header"
                )
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
    if type(entry["dtype"]) is not str:
        raise BadModelError(f"{path}: {shown(name)} has a type that is no text")
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


CHUNK_BYTES = 1024 * 1024
"""How much is looked at, and read if it is not in memory, at a time."""

AVAILABLE_SHARE = 2
"""Divides the available memory: no more than one part is read, because more could push out what
was read first."""


@contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[None]:
    """Reads files, in this order, on its own thread until the block is left; what is in memory
    already costs a look. Does nothing but on Linux, which can say what is in memory."""
    if sys.platform != "linux":
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(
        target=read_files, args=(files, is_over), name="read-ahead", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # a chunk at most


def read_files(files: Sequence[Path], is_over: threading.Event) -> None:
    """Reads what is not in memory yet, until that is over or has taken its share of the memory."""
    left_bytes = psutil.virtual_memory().available // AVAILABLE_SHARE
    buffer = bytearray(CHUNK_BYTES)
    for path in files:
        try:
            with open(path, "rb", buffering=0) as file:
                left_bytes = _read_file(file.fileno(), buffer, left_bytes, is_over)
        except OSError:
            return  # the load will say so, unless the file system just cannot say what it holds
        if left_bytes <= 0:
            return


def _read_file(
    descriptor: int, buffer: bytearray, left_bytes: int, is_over: threading.Event
) -> int:
    """Reads one file; returns how many bytes may still be read, 0 or less to read no more."""
    size = os.fstat(descriptor).st_size
    for offset in range(0, size, CHUNK_BYTES):
        if is_over.is_set() or left_bytes <= 0:
            return 0
        # The kernel reads a little beyond what is asked for, so the first byte says nothing.
        if not _is_in_memory(descriptor, min(offset + CHUNK_BYTES, size) - 1):
            left_bytes -= os.preadv(descriptor, [buffer], offset)
    return left_bytes


def _is_in_memory(descriptor: int, offset: int) -> bool:
    """True if a byte can be read without waiting for the disk."""
    if sys.platform != "linux":
        raise NotImplementedError
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
