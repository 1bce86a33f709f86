"""`mlxsup start --save`: keeps the configuration that options amount to."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from .connection import RUNNING_HINT, target_to_reach
from .exit_status import CliError, ExitStatus
from .lock_holder import lock_holder
from .schema_file import SCHEMA_LINE, write_schema_next_to
from .terminal.output import Output


def save_configuration(
    path: Path, models: str, http: str | None, endpoint: str, output: Output
) -> None:
    """Writes a new configuration file, with its schema next to it, and says so.

    Args:
        path: the file, which must not exist.
        models: its tables of models, as text.
        http: where the gateway listens; None for no gateway.
        endpoint: where the daemon will listen.
        output: how to write output.

    Raises:
        CliError: there is a file already, it cannot be written, or a daemon runs already, which
            would not use it; nothing is left then.
    """
    gateway = "" if http is None else f"\n[gateway]\nlisten = {json.dumps(http)}\n"
    file = path.expanduser()
    if os.path.lexists(file):
        raise _exists(path)
    _refuse_if_running(endpoint)
    try:
        opened = file.open("x", encoding="utf-8")
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise _unwritten(path, error) from None
    try:
        with opened:
            opened.write(f"{SCHEMA_LINE}\n\n{models}{gateway}")
        write_schema_next_to(file)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise _unwritten(path, error) from None
    output.note(f"the configuration is saved in {path}")


def _refuse_if_running(endpoint: str) -> None:
    holder = lock_holder(endpoint)
    if holder is None:
        return
    folder = Path(endpoint.removeprefix("ipc://")).parent
    raise CliError(
        f"a daemon with pid {holder.pid} is already running in {folder}; nothing is saved",
        code="already_running",
        hint=target_to_reach(endpoint, None).repeat_in(RUNNING_HINT),
        status=ExitStatus.ALREADY_RUNNING,
    )


def _exists(path: Path) -> CliError:
    return CliError(
        f"there is a file at {path} already",
        code="file_exists",
        hint=f"use it with `mlxsup start --config {shlex.quote(str(path))}`, or name another one",
        status=ExitStatus.USAGE,
    )


def _unwritten(path: Path, error: OSError) -> CliError:
    return CliError(
        f"cannot write {path}: {error.strerror}",
        code="file",
        hint="name a file in a folder that you can write to",
    )
