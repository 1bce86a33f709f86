"""What a model folder says of its model, for people who choose one: never an error, only gaps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.protocol.context_length import NESTED_NAMES, find_context_length
from mlxsup.protocol.model_files import is_weight_file

from .contents import CONFIG, regular_files

MAX_JSON_BYTES = 16 * 1024 * 1024
MAX_CARD_BYTES = 64 * 1024
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
CARD = "README.md"
FENCE = "---"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a folder says.

    Attributes:
        architecture: the class that its makers gave it; empty if it does not say.
        model_type: what mlx-lm chooses its code by; empty if it does not say.
        quantization: "4 bit, groups of 64", or the type of its numbers; empty if it does not say.
        context_length: tokens of prompt and answer together; None if it declares none.
        has_template: whether a chat template comes with it.
        licence: as its card names it; empty if it does not say.
        size_bytes: of the weight files.
    """

    architecture: str
    model_type: str
    quantization: str
    context_length: int | None
    has_template: bool
    licence: str
    size_bytes: int


def describe(folder: Path) -> Description:
    """What a model folder says; a file that cannot be read says nothing."""
    config = _json_object(folder / CONFIG)
    context = find_context_length(config, 0)
    return Description(
        architecture=_architecture(config),
        model_type=model_type_of(config),
        quantization=_quantization(config),
        context_length=None if context.warnings else context.tokens,
        has_template=_has_template(folder),
        licence=_licence(folder),
        size_bytes=_size(folder),
    )


def model_type_of(config: Mapping[str, Any]) -> str:
    """The model type of a config.json; empty if it has none."""
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


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in TEMPLATE_FILES):
        return True
    return bool(_json_object(folder / TOKENIZER_CONFIG).get("chat_template"))


def _licence(folder: Path) -> str:
    """The licence that the header of the model's card names."""
    named: dict[str, str] = {}
    for line in _card_header(folder / CARD):
        key, colon, value = line.partition(":")
        if colon and key in ("license", "license_name"):
            named[key] = value.strip().strip("\"'")
    licence = named.get("license", "")
    return named.get("license_name") or licence if licence == "other" else licence


def _card_header(card: Path) -> Iterator[str]:
    """The lines between the first two fences of a card; none if it begins with no fence."""
    try:
        with open(card, "rb") as file:
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


def _json_object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            return {}
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
