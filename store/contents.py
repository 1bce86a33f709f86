"""Whether a folder holds all the files that a model needs, by their names alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mlxsup.protocol.model_files import is_weight_file
from mlxsup.protocol.regular_file import MIB, read_regular

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
"""At least one of these must exist, or a file that ends with `.tiktoken`."""

MAX_INDEX_BYTES = 64 * MIB


def regular_files(folder: Path) -> list[str]:
    """Return the names of the regular files in a folder, in order; links are followed.

    Raises:
        OSError: the folder cannot be read.
    """
    # An entry of `os.scandir` would hold the interpreter's lock while its disk does not answer.
    return sorted(name for name in os.listdir(folder) if os.path.isfile(folder / name))


def missing_files(folder: Path) -> tuple[str, ...]:
    """The names of files that a model needs and this folder does not have, in the order of a load.

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
    """The weight files that an index names, in order; none if it cannot be read.

    A load refuses such an index, and says what is wrong with it.
    """
    try:
        content = json.loads(read_regular(index, MAX_INDEX_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    files = content.get("weight_map") if isinstance(content, dict) else None
    return sorted({str(name) for name in files.values()}) if isinstance(files, dict) else []
