"""The keys of a daemon's gateway."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlxsup.protocol.folders import DEFAULT_RUNTIME_DIR
from mlxsup.protocol.key_file import KeyFileError, KeyPlace
from mlxsup.protocol.places import endpoint_in, socket_at

from .connection import Target
from .exit_status import CliError, ExitStatus
from .lock_holder import lock_holder


def find_keys(target: Target) -> KeyPlace:
    """Return where the keys of a daemon are: as the one that runs has written down, else beside the
    configuration, else as the latest one has.

    Raises:
        CliError: what counts does not name an endpoint, or names one at which no daemon ever was:
            a key beside another configuration would have no effect.
    """
    place = target.find()
    runtime_dir = socket_at(place.endpoint).parent
    recorded = KeyPlace.recorded(runtime_dir)
    if recorded is not None and (place.config is None or lock_holder(place.endpoint) is not None):
        return recorded
    if place.config is None and place.endpoint != endpoint_in(DEFAULT_RUNTIME_DIR):
        raise CliError(
            f"no daemon has run at {place.endpoint} yet, so its keys cannot be found",
            code="unknown_endpoint",
            hint="give its configuration with --config FILE, or start it first",
            status=ExitStatus.USAGE,
        )
    return KeyPlace.beside(place.config, runtime_dir)


@contextmanager
def usable_keys(target: Target) -> Iterator[KeyPlace]:
    """Give the place of a daemon's keys, whether it runs or not.

    Raises:
        CliError: they cannot be used, or there is no such daemon.
    """
    try:
        yield find_keys(target)
    except KeyFileError as error:
        raise CliError(str(error), code="keys", status=ExitStatus.RUNTIME_FOLDER) from None


def read_key(given: str | None) -> str | None:
    """Return the key that was given with `--key`; `-` means that it is on stdin.

    Raises:
        CliError: usage; that cannot be a key.
    """
    key = sys.stdin.readline().strip() if given == "-" else given
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise CliError(
            "a key takes letters, digits and signs",
            hint="`mlxsup key new NAME` creates one",
            status=ExitStatus.USAGE,
        )
    return key
