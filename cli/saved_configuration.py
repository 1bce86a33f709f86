"""`mlxsup start --save`: keeps the configuration that options amount to."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from .exit_status import CliError, ExitStatus
from .terminal.output import Output


def save_configuration(path: Path, models: str, http: str | None, output: Output) -> None:
    """Writes a new configuration file, and says so.

    Args:
        path: the file, which must not exist.
        models: its tables of models, as text.
        http: where the gateway listens; None for no gateway.
        output: how to write output.

    Raises:
        CliError: there is a file already, or it cannot be written.
    """
    gateway = "" if http is None else f"\n[gateway]\nlisten = {json.dumps(http)}\n"
    try:
        with path.expanduser().open("x", encoding="utf-8") as file:
            file.write(models + gateway)
    except FileExistsError:
        raise CliError(
            f"there is a file at {path} already",
            code="file_exists",
            hint=f"use it with `mlxsup start --config {shlex.quote(str(path))}`,"
            " or name another one",
            status=ExitStatus.USAGE,
        ) from None
    except OSError as error:
        raise CliError(
            f"cannot write {path}: {error.strerror}",
            code="file",
            hint="name a file in a folder that you can write to",
            status=ExitStatus.FAILED,
        ) from None
    output.note(f"the configuration is saved in {path}")
