"""The file of the gateway's API keys: their names, and hashes from which no key can be made."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

KEYS_NAME = "keys.json"
"""In the runtime folder, which only its owner can enter."""

SCHEMA_VERSION = 1
PREFIX = "sk-mlxsup-"
SECRET_BYTES = 32
MAX_FILE_BYTES = 1024 * 1024

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/+-]{0,63}")
NAME_EXPECTED = "1 to 64 of the characters A-Z a-z 0-9 . _ @ : / + -, the first a letter or digit"
"""Of keys and of accounts: what `[clients]` takes."""


class KeyFileError(Exception):
    """The file cannot be used; the message names it, and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What is known of a key.

    Attributes:
        name: for people.
        digest: SHA-256 of the key, in hexadecimal. A key has 256 random bits: nobody guesses it, so
            a slower hash would protect nothing.
        account: the name under `[clients]` that its requests have.
        is_operator: whether it may load, unload and restart models.
        created: in UTC, as `text.timestamp` formats it.
    """

    name: str
    digest: str
    account: str
    is_operator: bool = False
    created: str = ""


def digest_of(key: str) -> str:
    """What the file has in a key's place."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(path: Path) -> tuple[Key, ...] | None:
    """The keys of a file; None if there is no file.

    Raises:
        KeyFileError: it cannot be read, others can read or write it, or it is not such a file.
    """
    try:
        # A pipe in its place must not make anybody wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    try:
        _check_owner(path, os.fstat(descriptor))
        data = os.read(descriptor, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    try:
        return _parse(data)
    except (ValueError, RecursionError):
        raise KeyFileError(
            f"{path} is not a file of keys: remove it, and make new keys with `mlxsup key new NAME`"
        ) from None


def add_key(path: Path, *, name: str, account: str, is_operator: bool, created: str) -> str | None:
    """Makes a key, and returns it; it can never be read again. None if there is one of this name.

    Raises:
        KeyFileError: the file cannot be used.
    """
    key = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    with _only_writer(path):
        keys = read_keys(path) or ()
        if any(one.name == name for one in keys):
            return None
        new = Key(
            name=name,
            digest=digest_of(key),
            account=account,
            is_operator=is_operator,
            created=created,
        )
        _write(path, [*keys, new])
    return key


def revoke_key(path: Path, name: str) -> tuple[Key, ...] | None:
    """Takes a key out of the file, and returns those that are left; None if none has that name.

    Raises:
        KeyFileError: the file cannot be used.
    """
    with _only_writer(path):
        keys = read_keys(path) or ()
        left = tuple(one for one in keys if one.name != name)
        if len(left) == len(keys):
            return None
        # Also an empty file is one: revoking the last key does not let everybody in.
        _write(path, left)
    return left


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Refuses what is no file of this user alone."""
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{path} is not a file")
    if status.st_uid != os.geteuid():
        raise KeyFileError(f"{path} belongs to another user (uid {status.st_uid})")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        reach = "so others may read or change it"
        raise KeyFileError(f"{path} has mode {mode:04o}, {reach}; run: chmod 600 {path}")


def _parse(data: bytes) -> tuple[Key, ...]:
    """Reads the text of a file.

    Raises:
        ValueError, RecursionError: it is something else.
    """
    if len(data) > MAX_FILE_BYTES:
        raise ValueError("too long")
    value = json.loads(data)
    if not isinstance(value, dict) or value.get("schema_version") != SCHEMA_VERSION:
        raise ValueError("another format")
    entries = value.get("keys")
    if not isinstance(entries, list):
        raise ValueError("no list")
    return tuple(map(_parse_key, entries))


def _parse_key(entry: Any) -> Key:
    kinds: dict[str, type] = {f.name: bool if f.name == "is_operator" else str for f in fields(Key)}
    is_key = isinstance(entry, dict) and entry.keys() == kinds.keys()
    if not is_key or any(type(entry[name]) is not kind for name, kind in kinds.items()):
        raise ValueError("not a key")
    return Key(**entry)


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Makes the folder if it is missing, and keeps other writers out."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise KeyFileError(f"{path.parent} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, keys: Sequence[Key]) -> None:
    """Replaces the file as a whole, so that nobody reads half of it."""
    value = {"schema_version": SCHEMA_VERSION, "keys": [asdict(key) for key in keys]}
    new = path.with_suffix(".new")
    try:
        new.unlink(missing_ok=True)  # of a writer that was killed
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(descriptor)
        new.replace(path)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from None
