"""The keys of a daemon's gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from mlxsup.protocol.discovery import endpoint_in, socket_at
from mlxsup.protocol.folders import DEFAULT_RUNTIME_DIR
from mlxsup.protocol.key_file import (
    KEYS_SUFFIX,
    KeyFileError,
    KeyPlace,
    add_key,
    digest_of,
    find_trouble,
    have_been_made,
    read_key_file,
    read_keys,
    revoke_key,
)
from mlxsup.protocol.regular_file import replace_file
from mlxsup.protocol.text import timestamp

from .connection import Target
from .exit_status import CliError, ExitStatus
from .lock_holder import lock_holder

WAYS = "`mlxsup key new NAME` creates one, or `mlxsup key off` opens it to this machine"

LAUNCH_KEY = "mlxsup-launch"
"""The name of the key that `mlxsup launch` makes for agents, and of its account."""

LAUNCH_SUFFIX = ".launch-key"
"""Of the file beside the keys that has it."""


def find_keys(target: Target) -> KeyPlace:
    """Return where the keys of a daemon are: as the one that runs has written down, else beside the
    configuration, else as the latest one has.
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
    """Give the place of a daemon's keys, whether it runs or not."""
    try:
        yield find_keys(target)
    except KeyFileError as error:
        status = ExitStatus.RUNTIME_FOLDER
        raise CliError(str(error), code="keys", hint=error.hint, status=status) from None


def launch_key(target: Target, *, is_made: bool) -> tuple[str | None, bool]:
    """Return the key that programs use, and whether the gateway needs one that was missing; None
    while it needs none.

    One key serves all of them. The keys themselves are not kept, so this one has a file of its own.

    Args:
        target: the daemon.
        is_made: a new one is made if the file or the key is gone; otherwise None is returned.

    Raises:
        CliError: the keys cannot be used, or HTTP is locked because the last one was revoked.
    """
    with usable_keys(target) as place:
        if not have_been_made(place):
            return None, False
        if trouble := find_trouble(place):
            # To make one would let programs in that the user has locked out.
            raise CliError(f"HTTP is locked: {trouble}", hint=WAYS, code="keys")
        file = place.file.with_name(place.file.name.removesuffix(KEYS_SUFFIX) + LAUNCH_SUFFIX)
        kept = (read_key_file(file) or b"").decode("utf-8", "replace").strip()
        if digest_of(kept) in {one.digest for one in read_keys(place.file) or ()}:
            return kept, False
        if not is_made:
            return None, True
        revoke_key(place, LAUNCH_KEY)
        now = timestamp(time.time())
        made = add_key(place, name=LAUNCH_KEY, account=LAUNCH_KEY, is_operator=False, created=now)
        if made is None:
            raise CliError("another `mlxsup launch` is making a key", hint="try again", code="keys")
        try:
            replace_file(file, f"{made}\n".encode())
        except OSError as error:
            raise KeyFileError(f"{file} cannot be written: {error.strerror}") from None
        return made, True
