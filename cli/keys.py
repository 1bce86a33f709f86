"""The keys of a daemon's gateway."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxsup.protocol.key_file import KEYS_NAME, KeyFileError

from .connection import Target
from .exit_status import CliError, ExitStatus


@contextmanager
def key_file(target: Target) -> Iterator[Path]:
    """The file of a daemon's keys, whether it runs or not.

    Raises:
        CliError: it cannot be used, or there is no such daemon.
    """
    path = Path(target.find_endpoint().removeprefix("ipc://")).parent / KEYS_NAME
    try:
        yield path
    except KeyFileError as error:
        raise CliError(str(error), code="keys", status=ExitStatus.RUNTIME_FOLDER) from None


def read_key(given: str | None) -> str | None:
    """The key that was given with `--key`; `-` means that it is on stdin.

    Raises:
        CliError: usage; that cannot be a key.
    """
    key = sys.stdin.readline().strip() if given == "-" else given
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise CliError(
            "a key takes letters, digits and signs",
            code="usage",
            hint="`mlxsup key new NAME` makes one",
            status=ExitStatus.USAGE,
        )
    return key
