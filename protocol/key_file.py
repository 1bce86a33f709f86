"""The file of the gateway's API keys: their names, and hashes from which no key can be made.

The file is beside the configuration. A mark in the runtime folder says whether keys were in force,
so that a file that has vanished opens nothing: only `mlxsup key off` does.

Keys are 256 random bits, so a fast hash protects them as well as a slow one. The file is not in
the runtime folder, because people empty that to tidy up.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folders import DEFAULT_CONFIG
from .regular_file import replace_file, room_hint, write_draft

KEYS_SUFFIX = ".keys.json"
"""Replaces `.toml` in the name of the configuration: no two of a folder share their keys."""

MARK_NAME = "keys_in_force"
KEY_RECORD_NAME = "key_file"
"""Both are in the runtime folder, which only its owner can enter. The record has the path of the
key file that the latest daemon used, for commands that are given an endpoint only."""

ON, OFF = b"on\n", b"off\n"

SCHEMA_VERSION = 1
PREFIX = "sk-mlxsup-"
SECRET_BYTES = 32
MAX_FILE_BYTES = 1024 * 1024

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/+-]{0,63}")
NAME_EXPECTED = "1 to 64 of the characters A-Z a-z 0-9 . _ @ : / + -, the first a letter or digit"
"""Of keys and of accounts: what `[clients]` takes."""


class KeyFileError(Exception):
    """The file cannot be used; the message names it, and says why.

    Attributes:
        hint: what to do, unless the message says it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UnreadKeyFileError(KeyFileError):
    """The system does not open or read the file now: nothing is known of what is in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The record of a key.

    Attributes:
        name: for people.
        digest: SHA-256 of the key, in hexadecimal. A key has 256 random bits, found by no guess, so
            a slower hash would protect nothing.
        account: the name under `[clients]` that its requests have.
        is_operator: whether it may load, unload and restart models.
        created: in UTC, as `text.timestamp` formats it.
    """

    name: str
    digest: str
    account: str
    is_operator: bool
    created: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """The content of the file."""

    schema_version: int
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """The place of the keys of a daemon.

    Attributes:
        file: has the keys.
        mark: says whether keys were in force.
    """

    file: Path
    mark: Path

    @classmethod
    def beside(cls, config: Path | None, runtime_dir: Path) -> KeyPlace:
        """Return the place for a configuration file, whichever link names it.

        Args:
            config: the file; None without one, as for the file that `mlxsup init` writes.
            runtime_dir: of the daemon.
        """
        path = Path(config or DEFAULT_CONFIG).expanduser().resolve()
        name = path.name.removesuffix(".toml") + KEYS_SUFFIX
        return cls(path.with_name(name), runtime_dir / MARK_NAME)

    @classmethod
    def recorded(cls, runtime_dir: Path) -> KeyPlace | None:
        """Return the place that the latest daemon in this runtime folder used; None if none did."""
        try:
            data = read_key_file(runtime_dir / KEY_RECORD_NAME)
        except KeyFileError:
            return None
        return cls(Path(os.fsdecode(data)), runtime_dir / MARK_NAME) if data else None

    def record(self) -> None:
        """Write down where the key file is.

        Raises:
            OSError: that cannot be written.
        """
        replace_file(self.mark.with_name(KEY_RECORD_NAME), os.fsencode(self.file), is_durable=True)


def digest_of(key: str) -> str:
    """Return what the file has in a key's place."""
    import hashlib  # the help of commands would wait for OpenSSL

    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


# ---------------------------------------------------------------- reading


def read_keys(path: Path) -> tuple[Key, ...] | None:
    """Return the keys of a file; None if there is no file.

    Raises:
        KeyFileError: it cannot be read, others can read or write it, or it is not such a file.
    """
    data = read_key_file(path)
    return None if data is None else parse_keys(path, data)


def read_key_file(path: Path) -> bytes | None:
    """Return what is in a file of at most 1 MiB, or the first byte beyond that, too; None if there
    is no file.

    Raises:
        UnreadKeyFileError: it cannot be read.
        KeyFileError: it is no file of this user alone.
    """
    try:
        # A pipe in its place must not make the reader wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise KeyFileError(f"{path} is a link to a missing file") from None
        return None
    except OSError as error:
        raise UnreadKeyFileError(f"{path} cannot be read: {error.strerror}") from None
    try:
        _check_owner(path, os.fstat(descriptor))
        return os.read(descriptor, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UnreadKeyFileError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def parse_keys(path: Path, data: bytes) -> tuple[Key, ...]:
    """Return the keys in what `read_key_file` has read.

    Raises:
        KeyFileError: it is something else.
    """
    from .codec import DecodeError, read_part  # a command's help would wait for it

    try:
        content: Any = json.loads(data) if len(data) <= MAX_FILE_BYTES else None
        found = read_part(_Content, content, "it")
    except (ValueError, RecursionError, DecodeError):
        found = None
    if found is None or found.schema_version != SCHEMA_VERSION:
        raise KeyFileError(
            f"{path} is not a whole file of keys: put a copy of it back, or move it away and make"
            " new keys with `mlxsup key new NAME`"
        )
    return found.keys


def read_mark(path: Path) -> bool | None:
    """Return whether keys were in force: True unless `mlxsup key off` was the last to say so; None
    if there were never any. A mark that is damaged counts as True.

    Raises:
        UnreadKeyFileError: it cannot be read. That may pass, so it must not become a mark: a
            process that is out of files for a moment would lock a gateway that never had keys.
    """
    try:
        data = read_key_file(path)
    except UnreadKeyFileError:
        raise
    except KeyFileError:
        return True
    return None if data is None else data != OFF


def have_been_made(place: KeyPlace) -> bool:
    """Return whether there is a key, or was one, since `mlxsup key off` at the latest; True if that
    cannot be read."""
    try:
        return os.path.lexists(place.file) or bool(read_mark(place.mark))
    except UnreadKeyFileError:
        return True


def find_trouble(place: KeyPlace) -> str:
    """Return why a gateway with these keys refuses every request; empty if it does not, or if keys
    were never in force."""
    try:
        keys = read_keys(place.file)
        if keys is None:
            return f"{place.file} is gone, and keys were in force" if read_mark(place.mark) else ""
    except KeyFileError as error:
        return str(error)
    return "" if keys else f"{place.file} has no key: the last one was revoked"


# ---------------------------------------------------------------- writing


def add_key(
    place: KeyPlace, *, name: str, account: str, is_operator: bool, created: str
) -> str | None:
    """Make a key, and return it; it can never be read again. None if there is one of this name.

    Raises:
        KeyFileError: the file cannot be used; then keys are in force only if they were before.
    """
    import secrets

    key = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    with _only_writer(place.file):
        keys = read_keys(place.file) or ()
        if any(one.name == name for one in keys):
            return None
        new = Key(
            name=name,
            digest=digest_of(key),
            account=account,
            is_operator=is_operator,
            created=created,
        )
        _write(place, [*keys, new])
    return key


def revoke_key(place: KeyPlace, name: str) -> tuple[Key, ...] | None:
    """Take a key out of the file, and return those that are left; None if none has that name.

    Raises:
        KeyFileError: the file cannot be used.
    """
    with _only_writer(place.file):
        keys = read_keys(place.file) or ()
        left = tuple(one for one in keys if one.name != name)
        if len(left) == len(keys):
            return None
        # Also an empty list is one: revoking the last key does not let all in.
        _write(place, left)
    return left


def turn_off(place: KeyPlace) -> None:
    """Remove all keys, and say that none is needed any longer.

    Raises:
        KeyFileError: that cannot be done; then keys are in force as they were before.
    """
    with _only_writer(place.file):
        # The mark first: as long as the file is there, its keys count even if the mark says OFF;
        # once it is gone, the mark explains that.
        _set_mark(place.mark, OFF)
        try:
            place.file.unlink(missing_ok=True)
        except OSError as error:
            _set_mark(place.mark, ON)
            problem = f"cannot be removed: {error.strerror}"
            if place.file.is_dir():
                problem = "is a folder; move it away, then run `mlxsup key off`"
            raise KeyFileError(f"{place.file} {problem}") from None


def remember(place: KeyPlace) -> None:
    """Write the mark of keys that are in force, if it was lost with its folder; makes no folder.

    Raises:
        KeyFileError: it cannot be written, or a command is writing.
    """
    with _only_writer(place.file, is_command=False):
        mark = read_mark(place.mark)
        if mark is None or (mark is False and os.path.lexists(place.file)):
            _set_mark(place.mark, ON, makes_folder=False)


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Refuse what is no file of this user alone."""
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{path} is not a file: move it away, then `mlxsup key new NAME`")
    if status.st_uid != os.geteuid():
        raise KeyFileError(f"{path} belongs to another user (uid {status.st_uid})")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        reach = "so others may read or change it"
        raise KeyFileError(f"{path} has mode {mode:04o}, {reach}; run: chmod 600 {path}")


@contextmanager
def _only_writer(path: Path, *, is_command: bool = True) -> Iterator[None]:
    """Keep other writers out; a command waits for them, and makes the folder if it is missing."""
    try:
        if is_command:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise KeyFileError(f"{path.parent} cannot be used: {error.strerror}") from None
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | (0 if is_command else fcntl.LOCK_NB))
        except OSError as error:
            raise KeyFileError(f"{path.parent} cannot be locked: {error.strerror}") from None
        yield
    finally:
        os.close(folder)


def _write(place: KeyPlace, keys: Sequence[Key]) -> None:
    """Replace the file as a whole, so that no reader gets half of it."""
    from .codec import to_map

    value = to_map(_Content(schema_version=SCHEMA_VERSION, keys=tuple(keys)))
    try:
        new = write_draft(place.file, json.dumps(value, indent=1).encode() + b"\n", is_durable=True)
        try:
            # Before the first key counts, and after all that may fail of a disk that is full.
            _set_mark(place.mark, ON)
            new.replace(place.file)
        finally:
            new.unlink(missing_ok=True)  # if the mark's disk is the full one
    except OSError as error:
        raise _unwritten(place.file, error) from None


def _set_mark(path: Path, value: bytes, *, makes_folder: bool = True) -> None:
    with suppress(KeyFileError):
        if read_key_file(path) == value:
            return  # a key can be revoked although the disk of the mark is full
    try:
        if makes_folder:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, value, is_durable=True)
    except OSError as error:
        raise _unwritten(path, error) from None


def _unwritten(path: Path, error: OSError) -> KeyFileError:
    hint = room_hint(error, f"make {path.parent} writable")
    return KeyFileError(f"{path} cannot be written: {error.strerror}", hint)
