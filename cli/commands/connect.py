"""`mlxsup connect`: makes other programs use the daemon.

As little as possible changes in files that people write. An undo happens only if the file is as it
was written, and brings back what was there before the first write.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mlxsup.protocol.folders import CONNECTED_DIR

from ..arguments import complete_writer
from ..connecting import PROGRAMS, Settings, is_key_missing, site_of
from ..connection import Target, daemon_options
from ..connection import connect as connect_to
from ..exit_status import CliError, misuse
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
    help="Write the settings file of the program and show what changes.",
)
@click.option(
    "--undo", "is_undoing", is_flag=True, help="Restore the file as it was before --write."
)
@daemon_options
def connect(
    tool: str,
    model: str | None,
    key: str | None,
    is_writing: bool,
    is_undoing: bool,
    target: Target,
    output: Output,
) -> None:
    """Example: mlxsup connect opencode --write

    Prints the settings that another program needs to use the models of the daemon over HTTP.
    --write saves them in its settings file and keeps a copy of the previous file, which --undo
    restores. TOOL is claude, codex, opencode, pi, qwen, copilot, aider, continue, vscode, zed or
    open-webui.
    """
    if is_undoing:
        if is_writing or model is not None or key is not None:
            raise misuse(
                "--undo cannot be combined with --write, --model or --key", "mlxsup connect"
            )
        path, before, after = undo(tool)
        shown = _diff(path, before, after)
        output.result({"tool": tool, "path": str(path), "diff": shown}, shown or f"restored {path}")
        return
    given = read_key(key)
    with connect_to(target) as client:
        site = site_of(client.status(), model, given)
    needs_key = is_key_missing(target, given)
    settings = PROGRAMS[tool].settings(site)
    unknown = [one for one in settings.sized if one.context is None]
    value: dict[str, Any] = {
        "tool": tool,
        "path": None if settings.path is None else str(settings.path),
        "settings": None if settings.path is None else applied(settings, None).rstrip("\n"),
        "variables": settings.variables,
        "usage": list(settings.usage),
        "is_key_missing": needs_key,
        "unknown_contexts": [one.name for one in unknown],
    }
    if is_writing:
        _write(tool, settings, value, output)
    else:
        _show(settings, value, output)
    if needs_key:
        output.note(
            f"the gateway needs an API key: `mlxsup key new {tool}` creates one; pass it with --key"
        )
    for one in unknown:
        output.note(
            f"the files of {one.name} cannot be read, so a context of {one.tokens} tokens is "
            "assumed"
        )


def _show(settings: Settings, value: dict[str, Any], output: Output) -> None:
    text: str | None = value["settings"]
    if text is not None:
        output.note(f"in {settings.path}:")
    exports = [f"export {name}={shlex.quote(one)}" for name, one in settings.variables.items()]
    output.result(value, "\n".join([*([] if text is None else [text]), *exports]))
    _say_usage(settings.usage, output)
    if text is not None:
        output.note("--write saves these settings there and keeps a copy of the current file")


def _say_usage(usage: Sequence[str], output: Output) -> None:
    for line in usage:
        output.note(f"then: {line}")


def _write(tool: str, settings: Settings, value: dict[str, Any], output: Output) -> None:
    path = settings.path
    if path is None:
        raise CliError(
            f"{tool} has no file for these settings",
            code="no_file",
            hint=f"`mlxsup connect {tool}` prints what to do",
        )
    before = read(path)
    try:
        after = applied(settings, before)
    except ValueError as error:
        if not output.is_json:
            output.data(str(value["settings"]))
        raise _trouble(f"{path} was not changed: {error}", BY_HAND) from None
    shown, backup = "", None
    if before != after:
        shown, backup = _diff(path, before, after), write(tool, path, before, after)
    kept = None if backup is None else str(backup)
    output.result(
        {**value, "diff": shown, "backup": kept}, shown or f"{path} already has these settings"
    )
    for name, text in settings.variables.items():
        output.note(f"also set in the environment: export {name}={shlex.quote(text)}")
    _say_usage(settings.usage, output)
    if shown:
        output.note(f"`mlxsup connect {tool} --undo` takes it back")


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
        raise _trouble(f"cannot read {path}: {error.strerror}", BY_HAND) from None
    if len(data) > MOST_BYTES:
        message = f"{path} is larger than {MOST_BYTES // 2**20} MiB, too large for a settings file"
        raise _trouble(message, BY_HAND)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _trouble(f"{path} is not UTF-8 text (byte {error.start})", BY_HAND) from None


def write(tool: str, path: Path, before: str | None, after: str) -> Path | None:
    """Write the file, and return where its text of before is kept; None if there was no file.

    What was written for the same program before, and has not been changed since, is not kept: what
    was there before that is what an undo has to bring back.
    """
    path, record, last = path.resolve(), _record(tool), _last(tool)
    if last is not None and last[0] == path and last[2] == _digest(before):
        before = last[1]
    about = {"path": str(path), "before": before, "digest": _digest(after)}
    try:
        for folder in (path.parent, record.parent):
            folder.mkdir(parents=True, exist_ok=True)
        _replace(record, json.dumps(about) + "\n")
        _replace(path, after)
    except OSError as error:
        message = f"cannot write {error.filename or path}: {error.strerror}"
        raise _trouble(message, BY_HAND) from None
    return None if before is None else record


def undo(tool: str) -> tuple[Path, str | None, str | None]:
    """Bring back what was there before `write`.

    Returns:
        The file, what it was until now, and what it is; None for no file.
    """
    last, record = _last(tool), _record(tool)
    if last is None:
        hint = f"`mlxsup connect {tool}` prints what it needs"
        raise CliError(
            f"mlxsup has not written any settings for {tool}", code="nothing_to_undo", hint=hint
        )
    path, before, digest = last
    now = read(path)
    if _digest(now) != digest:
        kept = f"; {record} has its text of before" if before is not None else ""
        raise _trouble(
            f"{path} was changed since then: remove the settings of mlxsup by hand{kept}"
        )
    try:
        if before is None:
            path.unlink()
        else:
            _replace(path, before)
        record.unlink()
    except OSError as error:
        raise _trouble(f"cannot write {error.filename}: {error.strerror}") from None
    return path, now, before


def _diff(path: Path, before: str | None, after: str | None) -> str:
    """Return what changes, as `diff -u` shows it; None stands for no file."""
    lines = difflib.unified_diff(
        (before or "").splitlines(),
        (after or "").splitlines(),
        "/dev/null" if before is None else str(path),
        "/dev/null" if after is None else str(path),
        lineterm="",
    )
    return "\n".join(lines)


def _replace(path: Path, text: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else NEW_FILE_MODE
    with replaced_file(path) as file:
        os.fchmod(file.fileno(), mode)
        file.write(text.encode())


def _record(tool: str) -> Path:
    return Path(CONNECTED_DIR).expanduser() / f"{tool}.json"


def _last(tool: str) -> tuple[Path, str | None, str] | None:
    """Return the file that was written last, its text of before, and the digest of what was
    written; None if nothing was, or the record cannot be read."""
    try:
        value = json.loads(_record(tool).read_text(encoding="utf-8"))
        before = None if value["before"] is None else str(value["before"])
        return Path(value["path"]), before, str(value["digest"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _digest(text: str | None) -> str:
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def _trouble(message: str, hint: str = "") -> CliError:
    return CliError(message, code="file", hint=hint)
