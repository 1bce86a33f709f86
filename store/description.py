"""The files of a model folder: which are missing, and what they say of the model.

What they say is for people who choose a model: a file that cannot be read is a gap, never an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.protocol.context_length import NESTED_NAMES, find_context_length
from mlxsup.protocol.model_files import is_weight_file
from mlxsup.protocol.parameters import makers_sampling
from mlxsup.protocol.pictures import declares_vision
from mlxsup.protocol.pooling import find_pooling
from mlxsup.protocol.regular_file import MIB, open_regular, read_regular
from mlxsup.protocol.tasks import Task

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
"""At least one of these must exist, or a file that ends with `.tiktoken`."""

MAX_INDEX_BYTES = 64 * MIB
MAX_JSON_BYTES = 16 * MIB
MAX_CARD_BYTES = 64 * 1024
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_OWNERS = ("chat_template.json", "tokenizer_config.json")
"""The other files that may hold a template."""
NAMED_TEMPLATES = "additional_chat_templates"
CARD = "README.md"
FENCE = "---"


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
    return (*missing, *_missing_weights(folder, names))


def _missing_weights(folder: Path, names: list[str]) -> list[str]:
    if INDEX in names:
        return [name for name in shards_of(folder / INDEX) if name not in names]
    return [] if any(map(is_weight_file, names)) else [ONE_FILE]


def shards_of(index: Path) -> list[str]:
    """Return the weight files that an index names, in order; none if it cannot be read.

    A load refuses such an index, and says what is wrong with it.
    """
    files = _json_object(index, MAX_INDEX_BYTES).get("weight_map")
    return sorted({str(name) for name in files.values()}) if isinstance(files, dict) else []


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
    return Description(
        architecture=_architecture(config),
        model_type=model_type_of(config),
        quantization=_quantization(config),
        context_length=min(lengths, default=None),
        parameter_count=_parameter_count(folder),
        template=_template(folder),
        licence=_licence(folder),
        size_bytes=_size(folder),
        sampling=makers_sampling(_json_object(folder / GENERATION_CONFIG)),
        task=Task.GENERATE if pooling is None else pooling.task,
        task_problem="" if pooling is None else pooling.problem,
        takes_pictures=declares_vision(config),
    )


def model_type_of(config: Mapping[str, Any]) -> str:
    """Return the model type of a config.json; empty if it has none."""
    given = config.get("model_type")
    return given if isinstance(given, str) else ""


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return ""


def _quantization(config: Mapping[str, Any]) -> str:
    for name in ("quantization", "quantization_config"):
        entry = config.get(name)
        if isinstance(entry, dict):
            return _quantized(entry)
    for part in (config, *(config.get(name) for name in NESTED_NAMES)):
        if isinstance(part, dict):
            for name in ("torch_dtype", "dtype"):
                if isinstance(part.get(name), str):
                    return str(part[name])
    return ""


def _quantized(entry: Mapping[str, Any]) -> str:
    bits = entry.get("bits")
    if not isinstance(bits, int):
        return str(entry.get("quant_method", "quantised"))
    # Layers with another width have their own entries.
    widths = {
        inner["bits"] for inner in entry.values() if isinstance(inner, dict) and "bits" in inner
    }
    widths = {width for width in widths if isinstance(width, int)} | {bits}
    if len(widths) > 1:
        return " and ".join(map(str, sorted(widths))) + " bit"
    group = entry.get("group_size")
    return f"{bits} bit, groups of {group}" if isinstance(group, int) else f"{bits} bit"


def _parameter_count(folder: Path) -> int | None:
    metadata = _json_object(folder / INDEX, MAX_INDEX_BYTES).get("metadata")
    count = metadata.get("total_parameters") if isinstance(metadata, dict) else None
    return count if type(count) is int and count > 0 else None


def _template(folder: Path) -> str:
    """Return the chat template; of several that have names, the default one."""
    try:
        return read_regular(folder / TEMPLATE_FILE, MAX_JSON_BYTES).decode("utf-8", "replace")
    except OSError:
        pass
    for name in TEMPLATE_OWNERS:
        match _json_object(folder / name).get("chat_template"):
            case str(template):
                return template
            case [*templates]:
                named = [one for one in templates if isinstance(one, dict)]
                named.sort(key=lambda one: one.get("name") != "default")
                texts = [one.get("template") for one in named]
                return next((text for text in texts if isinstance(text, str)), "")
    for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja")):
        with suppress(OSError):
            return read_regular(path, MAX_JSON_BYTES).decode("utf-8", "replace")
    return ""


def _licence(folder: Path) -> str:
    """Return the licence that the header of the model's card names."""
    named: dict[str, str] = {}
    for line in _card_header(folder / CARD):
        key, colon, value = line.partition(":")
        if colon and key in ("license", "license_name"):
            named[key] = value.strip().strip("\"'")
    return named.get("license_name") or named.get("license", "")


def _card_header(card: Path) -> Iterator[str]:
    """Yield the lines between the first two fences of a card; none if it begins with no fence."""
    try:
        with open(open_regular(card), "rb") as file:
            lines = file.read(MAX_CARD_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return
    if not lines or lines[0].strip() != FENCE:
        return
    for line in lines[1:]:
        if line.strip() == FENCE:
            return
        yield line


def _size(folder: Path) -> int:
    total = 0
    try:
        for name in regular_files(folder):
            if is_weight_file(name):
                total += os.path.getsize(folder / name)
    except OSError:
        return total
    return total


def _json_object(path: Path, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path, most_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
