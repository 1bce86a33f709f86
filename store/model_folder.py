"""A model folder: the files that it needs, what they say of the model, and why it is none.

What they say is for people who choose a model: a file that cannot be read is a gap, never an error.
Reasons are found by names and the first bytes of files, cheap enough for each model of a
configuration, at every start; only `damage` reads more.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlxsup.protocol.context_length import NESTED_NAMES, find_context_length
from mlxsup.protocol.model_files import is_pointer, is_weight_file, pointer_problem
from mlxsup.protocol.parameters import makers_sampling
from mlxsup.protocol.pictures import declares_vision
from mlxsup.protocol.pooling import find_pooling
from mlxsup.protocol.regular_file import MIB, kind_of, open_regular, read_regular
from mlxsup.protocol.tasks import Task

from .hub_cache import PREFIX, SNAPSHOTS, find_cache, repository_of

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
"""At least one of these must exist, or a file that ends with `.tiktoken`."""

GGUF_SUFFIX = ".gguf"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".npz", ".safetensors")

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_OWNERS = ("chat_template.json", "tokenizer_config.json")
"""The other files that may hold a template."""
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
FENCE = "---"
"""Begins and ends the header of a model's card."""

MAX_INDEX_BYTES = 64 * MIB
MAX_JSON_BYTES = 16 * MIB
MAX_CARD_BYTES = 64 * 1024
MAX_HEADER_BYTES = 64 * MIB
"""Of a weight file; a model of 90,000 arrays has 10 MiB of headers."""
MAX_ARRAY_NUMBERS = 2**50
MAX_NAMED = 3
DAMAGED_HINT = "copy or download this file again"
MAX_LOOKED_AT = 200
"""Folders that are searched for models below one that is none."""


# ---------------------------------------------------------------- files


def regular_files(folder: Path) -> list[str]:
    """Return the names of the regular files in a folder, in order; links are followed.

    Raises:
        OSError: the folder cannot be read.
    """
    # An entry of `os.scandir` would hold the interpreter's lock while its disk does not answer.
    return sorted(name for name in os.listdir(folder) if os.path.isfile(folder / name))


def missing_files(folder: Path) -> tuple[str, ...]:
    """Return the names of files that a model needs and a folder does not have, in order of a load.

    A link that leads nowhere counts as missing. Sizes and contents are not looked at.

    Raises:
        OSError: the folder cannot be read.
    """
    names = regular_files(folder)
    missing = [] if CONFIG in names else [CONFIG]
    if not any(name in TOKENIZERS or name.endswith(".tiktoken") for name in names):
        missing.append(TOKENIZERS[0])
    if INDEX in names:
        missing += (name for name in shards_of(folder / INDEX) if name not in names)
    elif not any(map(is_weight_file, names)):
        missing.append(ONE_FILE)
    return tuple(missing)


def shards_of(index: Path) -> list[str]:
    """Return the weight files that an index names, in order; none if it cannot be read.

    A load refuses such an index, and says what is wrong with it.
    """
    files = _json_object(index, MAX_INDEX_BYTES).get("weight_map")
    return sorted({str(name) for name in files.values()}) if isinstance(files, dict) else []


def _weights_problem(path: Path) -> str:
    """Return why a weight file is none, or not as long as its header says; empty if it is one.

    Raises:
        OSError: it cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES:
            return f"{path} is not a safetensors file"
        header = file.read(length)
    last = 0
    try:
        values = json.loads(header)
        values.pop("__metadata__", None)
        for value in values.values():
            begin, end = (int(place) for place in value["data_offsets"])
            if begin > end or math.prod(map(int, value["shape"])) > MAX_ARRAY_NUMBERS:
                return f"{path}: its header has impossible sizes"
            last = max(last, end)
    except (
        ValueError, ArithmeticError, AttributeError, LookupError, TypeError, RecursionError
    ) as error:  # fmt: skip
        return f"cannot read the header of {path}: {error}"
    end = 8 + len(header) + last
    if size < end:
        return f"{path} is incomplete: {size} of {end} bytes"
    return f"{path} is damaged: it has {size} bytes, and {end} by its header" if size > end else ""


def _json_object(path: Path, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path, most_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------- what they say


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The statements of a folder about its model.

    Attributes:
        architecture: the class that its makers gave it; empty if it does not say.
        model_type: what mlx-lm chooses its code by; empty if it does not say.
        quantization: "4 bit, groups of 64", or the type of its numbers; empty if it does not say.
        context_length: tokens of prompt and answer together; None if it declares none.
        parameter_count: as mlx-lm notes it beside the weights; None if it is not there.
        template: the chat template that comes with it; empty if there is none.
        licence: as its card names it; empty if it does not say.
        size_bytes: of the weight files.
        sampling: how its makers sample, by the names of parameters; empty for the likeliest token.
        task: what it is for.
        task_problem: why it cannot do that here; empty if it can.
        takes_pictures: true if it has a vision tower.
    """

    architecture: str
    model_type: str
    quantization: str
    context_length: int | None
    parameter_count: int | None
    template: str
    licence: str
    size_bytes: int
    sampling: dict[str, Any]
    task: Task = Task.GENERATE
    task_problem: str = ""
    takes_pictures: bool = False


def describe(folder: Path) -> Description:
    """Return what a model folder says; a file that cannot be read says nothing."""
    config = _json_object(folder / CONFIG)
    context = find_context_length(config, 0)
    pooling = find_pooling(folder, config)
    lengths = [] if context.warnings else [context.tokens]
    if pooling is not None and pooling.max_tokens is not None:
        lengths.append(pooling.max_tokens)
    match config.get("architectures"):
        case [str(architecture), *_]:
            pass
        case _:
            architecture = ""
    model_type = config.get("model_type")
    return Description(
        architecture=architecture,
        model_type=model_type if isinstance(model_type, str) else "",
        quantization=_quantization(config),
        context_length=min(lengths, default=None),
        parameter_count=_parameter_count(folder),
        template=_template(folder),
        licence=_licence(folder),
        size_bytes=_size(folder),
        sampling=makers_sampling(_json_object(folder / "generation_config.json")),
        task=Task.GENERATE if pooling is None else pooling.task,
        task_problem="" if pooling is None else pooling.problem,
        takes_pictures=declares_vision(config),
    )


def _quantization(config: Mapping[str, Any]) -> str:
    for name in ("quantization", "quantization_config"):
        if isinstance(config.get(name), dict):
            return _quantized(config[name])
    for part in (config, *(config.get(name) for name in NESTED_NAMES)):
        for name in ("torch_dtype", "dtype"):
            if isinstance(part, dict) and isinstance(part.get(name), str):
                return str(part[name])
    return ""


def _quantized(entry: Mapping[str, Any]) -> str:
    bits, group = entry.get("bits"), entry.get("group_size")
    if not isinstance(bits, int):
        return str(entry.get("quant_method", "quantised"))
    # Layers with another width have their own entries.
    others = (inner.get("bits") for inner in entry.values() if isinstance(inner, dict))
    widths = {bits, *(width for width in others if isinstance(width, int))}
    if len(widths) > 1:
        return " and ".join(map(str, sorted(widths))) + " bit"
    return f"{bits} bit, groups of {group}" if isinstance(group, int) else f"{bits} bit"


def _parameter_count(folder: Path) -> int | None:
    metadata = _json_object(folder / INDEX, MAX_INDEX_BYTES).get("metadata")
    count = metadata.get("total_parameters") if isinstance(metadata, dict) else None
    return count if type(count) is int and count > 0 else None


def _template(folder: Path) -> str:
    """Return the chat template; of several that have names, the default one."""
    if (template := _text(folder / TEMPLATE_FILE)) is not None:
        return template
    for name in TEMPLATE_OWNERS:
        match _json_object(folder / name).get("chat_template"):
            case str(template):
                return template
            case [*templates]:
                named = [one for one in templates if isinstance(one, dict)]
                named.sort(key=lambda one: one.get("name") != "default")
                given = (one.get("template") for one in named)
                return next((text for text in given if isinstance(text, str)), "")
    texts = map(_text, sorted(folder.glob(NAMED_TEMPLATES)))
    return next((text for text in texts if text is not None), "")


def _text(path: Path) -> str | None:
    """Return the text of a file; None if it cannot be read."""
    try:
        return read_regular(path, MAX_JSON_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def _licence(folder: Path) -> str:
    """Return the licence that the header of the model's card names."""
    try:
        with open(open_regular(folder / "README.md"), "rb") as file:
            lines = file.read(MAX_CARD_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    if not lines or lines[0].strip() != FENCE:
        return ""
    named = {}
    for line in takewhile(lambda line: line.strip() != FENCE, lines[1:]):
        key, _, value = line.partition(":")
        named[key] = value.strip().strip("\"'")
    return named.get("license_name") or named.get("license", "")


def _size(folder: Path) -> int:
    total = 0
    try:
        for name in filter(is_weight_file, regular_files(folder)):
            total += os.path.getsize(folder / name)
    except OSError:
        return total
    return total


# ---------------------------------------------------------------- what is wrong with them


@dataclass(frozen=True, slots=True)
class FolderProblem:
    """The reason why a path cannot be served.

    Attributes:
        text: a sentence without a full stop that names the path.
        hint: what to do; may be empty.
    """

    text: str
    hint: str = ""


def folder_problem(path: Path) -> FolderProblem | None:
    """Return why an absolute path is no model folder; None if all files of one are there, whatever
    they contain."""
    try:
        if not path.exists():
            return _absent(path)
        if not path.is_dir():
            return _file(path)
        names = regular_files(path)
        if CONFIG in names:
            return _pointer(path, names) or _incomplete(path, names)
        if (path / CONFIG).exists():
            return _odd_file(path / CONFIG, "copy the file itself there")
        return _no_model(path, names)
    except OSError as error:
        return _unreadable(path, error)


def damage(path: Path) -> FolderProblem | None:
    """Return which file of a model folder was cut off or is no such file; None if none is."""
    if (problem := damaged_weights(path) or damaged_index(path)) is not None:
        return problem
    tokenizer = path / TOKENIZERS[0]
    try:
        if tokenizer.is_file() and not _is_tokenizer(tokenizer):
            return FolderProblem(f"{tokenizer} is not a tokenizer in JSON", DAMAGED_HINT)
    except OSError as error:
        return _unreadable(path, error)
    return None


def damaged_index(path: Path) -> FolderProblem | None:
    """Return the problem of a folder whose index names no weight files; None without an index."""
    index = path / INDEX
    if not os.path.lexists(index) or shards_of(index):
        return None
    return FolderProblem(f"{index} is no list of weight files in JSON", DAMAGED_HINT)


def damaged_weights(path: Path) -> FolderProblem | None:
    """Return which weight file of a folder is not as long as its header says; None if each is."""
    try:
        for name in filter(is_weight_file, regular_files(path)):
            if problem := _weights_problem(path / name):
                return FolderProblem(problem, DAMAGED_HINT)
    except MemoryError:
        return FolderProblem(f"{path}: its headers take too much memory")
    except OSError as error:
        return _unreadable(path, error)
    return None


def repository_problem(repo: str, revision: str) -> FolderProblem:
    """Return what to say of a repository that the cache does not have at this revision."""
    at = "" if revision == "main" else f" at {revision}"
    more = "" if revision == "main" else f" --revision {shlex.quote(revision)}"
    return FolderProblem(
        f"{repo}{at} is not in the Hugging Face cache {find_cache()}",
        f"download it with `mlxsup pull {repo}{more}`",
    )


def folders_below(path: Path) -> Iterator[Path]:
    """Yield the folders with a config.json at most two levels below a folder, in order.

    Looks at a limited number of folders; what cannot be read is passed over.
    """
    level, left = [path], MAX_LOOKED_AT
    for _ in range(2):
        below: list[Path] = []
        for folder in level:
            for inner in _subfolders(folder)[:left]:
                left -= 1
                if (inner / CONFIG).is_file():
                    yield inner
                else:
                    below.append(inner)
        level = below


def _subfolders(folder: Path) -> list[Path]:
    try:
        names = [name for name in sorted(os.listdir(folder)) if not name.startswith(".")]
        return [folder / name for name in names if os.path.isdir(folder / name)]
    except OSError:
        return []


def _unreadable(path: Path, error: OSError) -> FolderProblem:
    what = error.strerror or str(error)
    return FolderProblem(f"{error.filename or path} cannot be read: {what}")


def _is_tokenizer(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes())["model"], dict)
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


def _odd_file(path: Path, hint: str) -> FolderProblem:
    kind = kind_of(path.stat().st_mode)
    return FolderProblem(f"{path} is {kind}, not a regular file", hint)


def _absent(path: Path) -> FolderProblem:
    repo = repository_of(path)
    hint = f"download it with `mlxsup pull {repo}`" if repo else ""
    return FolderProblem(
        f"the model folder {path} does not exist",
        hint or "`mlxsup models` lists the models on this machine",
    )


def _file(path: Path) -> FolderProblem:
    if path.suffix.lower() == GGUF_SUFFIX:
        return FolderProblem(
            f"{path} is a GGUF file, which MLX cannot serve",
            f"convert it with `mlxsup convert {shlex.quote(str(path))}`",
        )
    hint = "give the folder of a model"
    if (path.parent / CONFIG).is_file():
        hint = f"give the folder that contains it: {shlex.quote(str(path.parent))}"
    return FolderProblem(f"{path} is a file, not a folder with a {CONFIG}", hint)


def _no_model(path: Path, names: list[str]) -> FolderProblem:
    """Return what a folder without a config.json is instead."""
    if (path / SNAPSHOTS).is_dir() and path.name.startswith(PREFIX):
        repo = repository_of(path) or path.name
        return FolderProblem(
            f"{path} is the cache folder of {repo}, not one of its snapshots",
            f'write repo = "{repo}" instead of path, or start with `--model {repo}`',
        )
    for name in names:
        if name.lower().endswith(GGUF_SUFFIX):
            return FolderProblem(
                f"{path} has GGUF files, which MLX cannot serve",
                f"convert one with `mlxsup convert {shlex.quote(str(path / name))}`",
            )
    if any(name.endswith(OTHER_WEIGHTS) for name in names):
        return FolderProblem(
            f"{path / CONFIG} does not exist", "copy all files of the model, not only its weights"
        )
    if any(name.startswith(PREFIX) for name in os.listdir(path)):
        return FolderProblem(
            f"{path} is a Hugging Face cache, not a model folder",
            "`mlxsup models` lists the models in it",
        )
    found = list(folders_below(path))
    if not found:
        return FolderProblem(
            f"{path} is not a model folder, because it has no {CONFIG}",
            "`mlxsup models` lists the models on this machine",
        )
    named = ", ".join(str(folder.relative_to(path)) for folder in found[:MAX_NAMED])
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return FolderProblem(
        f"{path} is not a model folder, but contains some: {named}{more}",
        f"choose one of them: {shlex.quote(str(found[0]))}",
    )


def _pointer(path: Path, names: list[str]) -> FolderProblem | None:
    for name in names:
        is_needed = is_weight_file(name) or name in (CONFIG, *TOKENIZERS[:2])
        if is_needed and is_pointer(path / name):
            return FolderProblem(*pointer_problem(path / name))
    return None


def _incomplete(path: Path, names: list[str]) -> FolderProblem | None:
    missing = missing_files(path)
    if not missing:
        return None
    first = path / missing[0]
    if first.is_file():  # `missing_files` looks in the folder alone
        return FolderProblem(
            f"{path / INDEX} names a file of another folder: {missing[0]}", "put it into this one"
        )
    if first.exists():
        return _odd_file(first, "put the file itself there")
    text = f"{first} does not exist"
    if len(missing) > 1:
        text += f", nor {len(missing) - 1} more of the model's files"
    repo = repository_of(path.parent.parent) if path.parent.name == SNAPSHOTS else None
    if repo is not None:
        return FolderProblem(text, f"finish the download: `mlxsup pull {repo}`")
    others = [name for name in names if name.endswith(OTHER_WEIGHTS)]
    if others and any(map(is_weight_file, missing)) and not any(map(is_weight_file, names)):
        text = f"{path} has weights for another program ({others[0]}), but no {missing[0]}"
        return FolderProblem(text, "get the model in the safetensors format")
    return FolderProblem(text, "copy or download the rest of the model")
