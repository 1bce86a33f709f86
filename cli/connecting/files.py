"""Writes a file of another program, so that it can be undone."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mlxsup.protocol.folders import CONNECTED_DIR

from ..exit_status import CliError

BACKUP_SUFFIX = ".mlxsup-backup"
NEW_FILE_MODE = 0o600
MOST_BYTES = 8 * 1024 * 1024
BY_HAND = "correct that, or put in by hand what is printed without --write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written for a program, and where what was there before is.

    Attributes:
        path: of the file.
        backup: a copy of what it had been; None if there was no file.
        digest: of what was written.
    """

    path: Path
    backup: Path | None
    digest: str


def read(path: Path) -> str | None:
    """The text of a file; None if there is none.

    Raises:
        CliError: it cannot be read, or is no text.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _trouble(f"cannot read {path}: {error.strerror}", BY_HAND) from None
    if len(data) > MOST_BYTES:
        message = f"{path} has more than {MOST_BYTES // 2**20} MiB: that is no such file"
        raise _trouble(message, BY_HAND)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _trouble(f"{path} is not UTF-8 text (byte {error.start})", BY_HAND) from None


def diff(path: Path, before: str | None, after: str | None) -> str:
    """What changes, as `diff -u` shows it; None stands for no file."""
    lines = difflib.unified_diff(
        (before or "").splitlines(),
        (after or "").splitlines(),
        "/dev/null" if before is None else str(path),
        "/dev/null" if after is None else str(path),
        lineterm="",
    )
    return "\n".join(lines)


def write(tool: str, path: Path, before: str | None, after: str) -> Written:
    """Writes the file, after a copy of what it was.

    What was written for the same program before, and nobody has changed since, is not copied: what
    was there before that is what an undo has to bring back.

    Raises:
        CliError: a file cannot be written; then nothing has changed.
    """
    path = path.resolve()
    last = _last(tool)
    is_ours = last is not None and last.path == path and last.digest == _digest(before)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        backup = last.backup if last is not None and is_ours else _back_up(path, before)
        written = Written(path=path, backup=backup, digest=_digest(after))
        _remember(tool, written)
        _replace(path, after)
    except OSError as error:
        message = f"cannot write {error.filename or path}: {error.strerror}"
        raise _trouble(message, BY_HAND) from None
    return written


def undo(tool: str) -> tuple[Path, str | None, str | None]:
    """Brings back what was there before `write`.

    Returns:
        The file, what it was until now, and what it is; None for no file.

    Raises:
        CliError: nothing was written, somebody has changed the file since, or it cannot be written.
    """
    last = _last(tool)
    if last is None:
        hint = f"`mlxsup connect {tool}` prints what it needs"
        raise CliError(f"nothing was written for {tool}", code="nothing_to_undo", hint=hint)
    now = read(last.path)
    if _digest(now) != last.digest:
        kept = f"; what it was is in {last.backup}" if last.backup else ""
        raise _trouble(f"{last.path} was changed since: take our settings out by hand{kept}")
    before = None if last.backup is None else read(last.backup)
    if last.backup is not None and before is None:
        raise _trouble(f"the copy {last.backup} is gone: take our settings out by hand")
    try:
        if last.backup is None:
            last.path.unlink()
        else:
            last.backup.replace(last.path)
        _record(tool).unlink()
    except OSError as error:
        raise _trouble(f"cannot write {error.filename}: {error.strerror}") from None
    return last.path, now, before


def _back_up(path: Path, before: str | None) -> Path | None:
    """A copy under a name that is free; None if there is nothing to copy."""
    if before is None:
        return None
    mode = stat.S_IMODE(path.stat().st_mode)
    number = 1
    while True:
        extra = "" if number == 1 else f".{number}"
        backup = path.with_name(f"{path.name}{BACKUP_SUFFIX}{extra}")
        try:
            descriptor = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            number += 1
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            os.fchmod(descriptor, mode)
            file.write(before)
        return backup


def _replace(path: Path, text: str) -> None:
    """Whoever reads the file gets the old text or the new one."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else NEW_FILE_MODE
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            os.fchmod(descriptor, mode)
            file.write(text)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _record(tool: str) -> Path:
    return Path(CONNECTED_DIR).expanduser() / f"{tool}.json"


def _remember(tool: str, written: Written) -> None:
    record = _record(tool)
    record.parent.mkdir(parents=True, exist_ok=True)
    backup = None if written.backup is None else str(written.backup)
    value = {"path": str(written.path), "backup": backup, "digest": written.digest}
    _replace(record, json.dumps(value) + "\n")


def _last(tool: str) -> Written | None:
    """What was written last; None if there is nothing, or nobody can read it any longer."""
    text = read(_record(tool))
    if text is None:
        return None
    try:
        value = json.loads(text)
        backup = None if value["backup"] is None else Path(value["backup"])
        return Written(path=Path(value["path"]), backup=backup, digest=str(value["digest"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _digest(text: str | None) -> str:
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def _trouble(message: str, hint: str = "") -> CliError:
    return CliError(message, code="file", hint=hint)
