"""A configuration without a file: models named on the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mlxsup.store.hub_cache import find_snapshot, is_owned_repository

from .lines import MODEL_NAME, source_line, table_key
from .load import DaemonConfig, looked_up, parse_config

WHERE = Path("--model")
"""What errors name instead of a file."""


def split_model(given: str) -> tuple[str, Path | str]:
    """Return the name of a model, and where it is.

    Args:
        given: a folder, or a repository as OWNER/NAME; NAME= may stand before it.

    Returns:
        The name, and the absolute folder or the repository.
    """
    name, equals, source = given.partition("=")
    if not equals or not MODEL_NAME.fullmatch(name):
        name, source = "", given
    if _is_repository(source):
        return name or source.rpartition("/")[2], source
    path = Path(os.path.expanduser(source)).absolute()
    return name or path.resolve().name, path


def _is_repository(text: str) -> bool:
    """True if it reads as one and is no folder; below a folder that exists, only one in the cache
    is."""
    if not is_owned_repository(text) or Path(text).exists():
        return False
    if not Path(text).parent.is_dir():
        return True
    with suppress(OSError):
        return find_snapshot(text) is not None
    return False


def config_of_folders(sources: Mapping[str, Path | str]) -> tuple[DaemonConfig, str]:
    """Return the configuration that a daemon runs with, and the file that would say the same.

    Raises:
        ConfigError: a name is invalid.
    """
    text = "\n".join(
        f"[models.{table_key(name)}]\n{source_line(source)}\n" for name, source in sources.items()
    )
    config = parse_config(text, path=WHERE, config_path=None, folder=Path.cwd())
    return looked_up(config), text
