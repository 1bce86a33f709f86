"""A configuration without a file: model folders named on the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from .check import MODEL_NAME
from .load import DaemonConfig, parse_config

WHERE = Path("--model")
"""What errors name instead of a file."""


def split_model(given: str) -> tuple[str, Path]:
    """The name and the absolute folder that `FOLDER` or `NAME=FOLDER` means."""
    name, equals, folder = given.partition("=")
    if not equals or not MODEL_NAME.fullmatch(name):
        name, folder = "", given
    path = Path(os.path.expanduser(folder)).absolute()
    return name or path.resolve().name, path


def config_of_folders(folders: Mapping[str, Path]) -> tuple[DaemonConfig, str]:
    """The configuration that a daemon runs with, and the file that would say the same.

    Args:
        folders: model folders by model name.

    Raises:
        ConfigError: a name is invalid.
    """
    text = "\n".join(
        f"[models.{_key(name)}]\npath = {_quoted(str(path))}\n" for name, path in folders.items()
    )
    return parse_config(text, path=WHERE, config_path=None, folder=Path.cwd()), text


def _key(name: str) -> str:
    return name if MODEL_NAME.fullmatch(name) and "." not in name else _quoted(name)


def _quoted(text: str) -> str:
    """A basic string of TOML, which has the escapes of JSON; only ASCII is left unescaped."""
    return json.dumps(text)
