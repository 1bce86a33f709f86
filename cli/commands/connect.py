"""`mlxsup connect`: makes other programs use the daemon.

As little as possible changes in files that people write, and a copy of what was there stays beside
each.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..arguments import complete_writer
from ..connecting import PROGRAMS, Settings, is_key_missing, site_of
from ..connection import Target, daemon_options
from ..connection import connect as connect_to
from ..exit_status import CliError
from ..keys import read_key
from ..new_file import replaced_file
from ..terminal.output import Output

NEW_FILE_MODE = 0o600
MOST_BYTES = 8 * 1024 * 1024
BY_HAND = "correct the file, or copy the settings that `mlxsup connect` prints without --write"


@click.command()
@click.argument("tool", metavar="TOOL", type=click.Choice(list(PROGRAMS)))
@click.option(
    "--model",
    "model",
    metavar="MODEL",
    shell_complete=complete_writer,
    help="The default model of the program; otherwise the first one that is READY.",
)
@click.option(
    "--key",
    metavar="KEY",
    help="An API key of the gateway, if one is needed; - reads it from stdin.",
)
@click.option(
    "--write",
    "is_writing",
    is_flag=True,
    help="Write the settings file of the program.",
)
@daemon_options
def connect(
    tool: str,
    model: str | None,
    key: str | None,
    is_writing: bool,
    target: Target,
    output: Output,
) -> None:
    """Example: mlxsup connect opencode --write

    Prints the settings that another program needs to use the models of the daemon over HTTP.
    --write saves them in its settings file and keeps a copy of the previous file beside it. TOOL is
    claude, codex, opencode, pi, qwen, copilot, aider, vscode or zed.
    """
    given = read_key(key)
    with connect_to(target) as client:
        site = site_of(client.status(), model, given)
    needs_key = is_key_missing(target, given)
    settings = PROGRAMS[tool].settings(site)
    value: dict[str, Any] = {
        "tool": tool,
        "path": None if settings.path is None else str(settings.path),
        "settings": None if settings.path is None else applied(settings, None).rstrip("\n"),
        "variables": settings.variables,
        "usage": list(settings.usage),
        "is_key_missing": needs_key,
    }
    if is_writing:
        _write(tool, settings, value, output)
    else:
        _show(settings, value, output)
    if needs_key:
        output.note(
            f"the gateway needs an API key: `mlxsup key new {tool}` creates one; pass it with --key"
        )


def _show(settings: Settings, value: dict[str, Any], output: Output) -> None:
    text: str | None = value["settings"]
    if text is not None:
        output.note(f"in {settings.path}:")
    exports = [f"export {name}={shlex.quote(one)}" for name, one in settings.variables.items()]
    output.result(value, "\n".join([*([] if text is None else [text]), *exports]))
    _say_usage(settings.usage, output)
    if text is not None and not settings.is_pasted:
        output.note("--write saves these settings there and keeps a copy of the current file")


def _say_usage(usage: Sequence[str], output: Output) -> None:
    for line in usage:
        output.note(f"then: {line}")


def _write(tool: str, settings: Settings, value: dict[str, Any], output: Output) -> None:
    path = settings.path
    if path is None or settings.is_pasted:
        has = "has no file for these settings" if path is None else "reads a file with comments"
        hint = f"`mlxsup connect {tool}` prints what to {'do' if path is None else 'paste into it'}"
        raise CliError(f"{tool} {has}", code="no_file", hint=hint)
    before = read(path)
    try:
        after = applied(settings, before)
    except ValueError as error:
        if not output.is_json:
            output.data(str(value["settings"]))
        raise _trouble(f"{path} was not changed: {error}") from None
    backup = None if before == after else write(path, after)
    shown = f"{path} already has these settings" if before == after else f"wrote {path}"
    output.result({**value, "backup": None if backup is None else str(backup)}, shown)
    _say_usage(settings.usage, output)
    if backup is not None:
        output.note(f"the text of before is in {backup}")


# ---------------------------------------------------------------- files


def applied(settings: Settings, before: str | None) -> str:
    """Return the text of a program's file with the settings in it.

    Raises:
        ValueError: it is not plain JSON, or a part of it is of another type; the message says
            where. Comments would be lost.
    """
    if isinstance(settings.content, str):
        return settings.content
    try:
        old = json.loads(before) if before and before.strip() else None
        new = settings.content(old)
        indent = re.search(r"^([ \t]+)\S", before or "", re.MULTILINE)
        text = json.dumps(new, indent=indent.group(1) if indent else 2, ensure_ascii=False) + "\n"
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it is not plain JSON ({place}); comments are not supported") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if before and new == old:
        return before
    text.encode()  # raises ValueError: JSON can spell half a surrogate pair, UTF-8 cannot
    return text.replace("\n", "\r\n") if before and "\r\n" in before else text


def read(path: Path) -> str | None:
    """Return the text of a file; None if there is none."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _trouble(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        message = f"{path} is larger than {MOST_BYTES // 2**20} MiB, too large for a settings file"
        raise _trouble(message)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _trouble(f"{path} is not UTF-8 text (byte {error.start})") from None


def write(path: Path, after: str) -> Path | None:
    """Write the file, and return where its text of before is kept; None if there was no file."""
    path = path.resolve()
    backup = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}.bak")
    is_new, mode = not path.exists(), NEW_FILE_MODE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not is_new:
            mode = stat.S_IMODE(path.stat().st_mode)
            shutil.copy2(path, backup)
        with replaced_file(path) as file:
            os.fchmod(file.fileno(), mode)
            file.write(after.encode())
    except OSError as error:
        message = f"cannot write {error.filename or path}: {error.strerror}"
        raise _trouble(message) from None
    return None if is_new else backup


def _trouble(message: str) -> CliError:
    return CliError(message, code="file", hint=BY_HAND)
