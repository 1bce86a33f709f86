"""The folder for logs: held by one daemon, and found again when none runs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxsup.protocol.folders import LOG_DIR_NAME

from .runtime_folder import RuntimeFolderError


@contextmanager
def held_log_folder(path: Path) -> Iterator[None]:
    """Create the folder if it is missing, and keep every other daemon out of it: each would
    rotate the other's files away, and write into the logs of models with the same names.

    Raises:
        RuntimeFolderError: it cannot be created or read, or another daemon writes its logs there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)  # private: see the umask
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RuntimeFolderError(
            f"the log folder {path} cannot be created: {error.strerror}",
            hint="set log_dir to a writable folder",
        ) from None
    try:
        _lock(folder, path)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, path: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeFolderError(
            f"another daemon writes its logs to {path}",
            hint="set log_dir to another folder; without log_dir, each daemon has its own",
        ) from None
    except OSError:
        # Some network disks lock no folders; a daemon there is no worse off than without a lock.
        return


def record_log_folder(runtime_dir: Path, log_dir: Path) -> None:
    """Note in the runtime folder where the logs are, for `mlxsup logs` when no daemon answers.

    Raises:
        OSError: it cannot be written.
    """
    path = runtime_dir / LOG_DIR_NAME
    written = path.with_name(f"{LOG_DIR_NAME}.new")
    written.write_bytes(os.fsencode(log_dir))
    written.replace(path)
