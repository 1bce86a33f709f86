"""The runtime folder, private to the user, and that of the logs: one daemon locks each for life."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxsup.protocol.folders import (
    BEAT_SUFFIX,
    CLIENT_SOCKET_NAME,
    LEARNED_NAME,
    LOCK_NAME,
    LOG_DIR_NAME,
    LOGS_NAME,
    check_runtime_dir,
    worker_socket_name,
)
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.key_file import KEY_RECORD_NAME, MARK_NAME
from mlxsup.protocol.regular_file import replace_file, room_hint

from .memory.measurements import FILE_NAME as MEASUREMENTS_NAME
from .process_identity import process_identity
from .sockets.limits import MAX_CONNECTIONS, MIN_CONNECTIONS
from .workers.orphans import RECORD_NAME

UNUSABLE_EXIT_CODE = 73
ALREADY_RUNNING_EXIT_CODE = 75

RESERVED_FILES = 256
"""Open files for the daemon itself, for its logs, for connections that are being refused, and those
that the listener keeps free."""

FILES_PER_MODEL = 16
"""Open files for each model: a worker's pipes and sockets, and its log."""

MAX_OPEN_FILES = 65_536
MAX_OPEN_FILES_MACOS = 10_240
"""The kernel refuses more than this if the hard limit says "unlimited"."""


OWN_NAMES = {
    LOCK_NAME,
    LEARNED_NAME,
    LOG_DIR_NAME,
    LOGS_NAME,
    MARK_NAME,
    KEY_RECORD_NAME,
    RECORD_NAME,
    MEASUREMENTS_NAME,
}
"""What mlxsup keeps in a runtime folder, besides sockets."""


class RuntimeFolderError(Exception):
    """The runtime or the log folder cannot be used, or too few files may be open (exit 73).

    Attributes:
        hint: what to do about it.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint

    exit_code = UNUSABLE_EXIT_CODE


class AlreadyRunningError(Exception):
    """Another supervisor holds the folder (exit 75).

    Attributes:
        pid: that supervisor's pid; None if the lock does not say.
    """

    exit_code = ALREADY_RUNNING_EXIT_CODE

    def __init__(self, pid: int | None, folder: Path) -> None:
        who = f"with pid {pid}" if pid is not None else "with an unknown pid"
        super().__init__(f"a daemon {who} is already running in {folder}")
        self.pid = pid


class RuntimeFolder:
    """A runtime folder that this process holds; `claim` makes one, `close` gives it back.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @property
    def is_held(self) -> bool:
        """True if the folder is there, and no other daemon can take it."""
        try:
            found = (self.path / LOCK_NAME).stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._lock))

    def beat(self) -> None:
        """Touch the lock, which tells commands that the daemon lives although it cannot answer.

        Raises:
            OSError: it cannot be touched.
        """
        os.utime(self._lock)

    def hold_again(self) -> None:
        """Make the folder and its lock again, which were removed.

        A daemon that was started in the meantime keeps what it has taken (P19).

        Raises:
            RuntimeFolderError: it cannot be used now.
            AlreadyRunningError: another daemon has taken it.
        """
        _prepare(self.path)
        lock = _take_lock(self.path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(self._lock)
        self._lock = lock

    @classmethod
    def claim(cls, path: Path) -> RuntimeFolder:
        """Create the folder if it is missing, check it, lock it, remove stale sockets (E6).

        The lock comes before any bind: a second bind on a Unix socket's path would succeed and
        take over the clients (P19).

        Raises:
            RuntimeFolderError: it cannot be used.
            AlreadyRunningError: another supervisor holds it.
        """
        _check_socket_paths(path)
        _prepare(path)
        folder = cls(path, _take_lock(path))
        for pattern in ("*.sock", "*.sock" + BEAT_SUFFIX):
            for stale in path.glob(pattern):
                try:
                    stale.unlink(missing_ok=True)
                except OSError as error:
                    folder.close()
                    raise RuntimeFolderError(
                        f"cannot remove {stale}, which is in the way: {error.strerror}",
                        hint="remove it, or set another runtime_dir",
                    ) from None
        return folder

    @property
    def client_socket(self) -> Path:
        """Return where clients connect."""
        return self.path / CLIENT_SOCKET_NAME

    def worker_socket(self, spawn: int) -> Path:
        """Return where the worker of this spawn, counted over all models, connects.

        Raises:
            OSError: the folder is not held, so that the socket could take the place of another one.
        """
        if not self.is_held:
            raise OSError(errno.ENOENT, "the runtime folder is gone or belongs to another daemon")
        return self.path / worker_socket_name(spawn)

    def learned_dir(self, model: ModelName) -> Path:
        """Return where the workers of a model keep what they learn of it."""
        return self.path / LEARNED_NAME / model

    def close(self) -> None:
        """Give the folder to the next supervisor. The lock file stays: unlinking it could take
        away the one that another process has just locked."""
        os.close(self._lock)


def connections_within(open_files: int, models: int) -> int:
    """Return how many connections a daemon may let in; fewer than MIN_CONNECTIONS are too few.

    Args:
        open_files: how many files the process may have open.
        models: how many models may have a worker.
    """
    return min(MAX_CONNECTIONS, open_files - RESERVED_FILES - FILES_PER_MODEL * models)


def room_for(models: int, open_files: int, connected: int) -> int:
    """Return how many connections a daemon may let in with the models of a new configuration.

    Raises:
        ConfigError: they are too few, or fewer than are in use.
    """
    allowed = connections_within(open_files, models)
    if allowed < max(MIN_CONNECTIONS, connected):
        from .config.load import ConfigError  # `mlxsup doctor` would wait for pydantic

        raise ConfigError(
            [
                f"models: {models} are too many for {open_files} open files and {connected} "
                "client connections"
            ]
        )
    return allowed


def raise_open_file_limit(models: int) -> int:
    """Raise the soft limit of open files as far as is sensible, and return it.

    Raises:
        RuntimeFolderError: they are too few for that many models and for storms of connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard != resource.RLIM_INFINITY else MAX_OPEN_FILES_MACOS
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft >= wanted:
        return _enough(soft, models)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return _enough(soft, models)
    return _enough(wanted, models)


def _enough(open_files: int, models: int) -> int:
    missing = MIN_CONNECTIONS - connections_within(open_files, models)
    if missing > 0:
        raise RuntimeFolderError(
            f"only {open_files} files may be open at once, but the daemon needs "
            f"{open_files + missing} for its models ({models})",
            hint="raise the hard limit of open files (`ulimit -Hn`, or LimitNOFILE of systemd)",
        )
    return open_files


def _check_socket_paths(path: Path) -> None:
    try:
        check_runtime_dir(path)
    except ValueError as error:
        raise RuntimeFolderError(
            f"the runtime folder cannot hold a socket: {error}", hint="set another runtime_dir"
        ) from None


def check_folder(path: Path) -> None:
    """Refuse a folder that no daemon can use as it is; one that is not there can be made.

    Raises:
        RuntimeFolderError: its path is too long, or it is open to others, or no folder.
    """
    _check_socket_paths(path)
    try:
        status = path.stat()
    except OSError:
        return
    if not stat.S_ISDIR(status.st_mode):
        raise RuntimeFolderError(
            f"the runtime folder {path} is not a folder",
            hint="remove it or set another runtime_dir",
        )
    _check_private(path, status)


def _prepare(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except FileExistsError:
        raise RuntimeFolderError(
            f"the runtime folder {path} is not a folder",
            hint="remove it or set another runtime_dir",
        ) from None
    except OSError as error:
        raise RuntimeFolderError(
            f"the runtime folder {path} cannot be created: {error.strerror}",
            hint=room_hint(error, "set runtime_dir to a writable folder"),
        ) from None
    _check_private(path, status)


def _check_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise RuntimeFolderError(
            f"the runtime folder {path} belongs to another user (uid {status.st_uid})",
            hint="set runtime_dir to a folder that you own",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode != 0o700:
        raise RuntimeFolderError(
            (
                f"the runtime folder {path} has mode {mode:04o}, so other users may access its "
                "sockets"
            ),
            hint=_mode_hint(path),
        )


def _mode_hint(path: Path) -> str:
    """Return a hint, with no command that could lock others out of a folder that they share."""
    own = "set runtime_dir to a new folder; mlxsup creates it with mode 0700"
    try:
        with os.scandir(path) as entries:
            is_ours = all(is_own_name(entry.name) for entry in entries)
    except OSError:
        return own
    return f"run: chmod 0700 {shlex.quote(str(path))}" if is_ours else own


def is_own_name(name: str) -> bool:
    """Return whether mlxsup gives this name to what it keeps in a runtime folder."""
    return name in OWN_NAMES or name.removesuffix(BEAT_SUFFIX).endswith(".sock")


def _take_lock(path: Path, gate_lock: int = fcntl.LOCK_EX) -> int:
    """Lock the folder for life and record who holds it; return the lock's descriptor.

    A lock on the folder itself, held only for these few calls, keeps others from reading the pid
    before it is written: if many start at once, each loser can name the winner (P19).
    """
    try:
        gate = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(gate, gate_lock)
            return _take_lock_file(path)
        finally:
            os.close(gate)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise RuntimeFolderError(
            f"the runtime folder {path} cannot be used: {error.strerror}{where}",
            hint=room_hint(error, "set runtime_dir to a writable folder"),
        ) from None


def _take_lock_file(path: Path) -> int:
    lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {process_identity(os.getpid())}\n".encode(), 0)
    except BlockingIOError:
        written = os.pread(lock, 256, 0).split()
        os.close(lock)
        raise AlreadyRunningError(int(written[0]) if written else None, path) from None
    except OSError:
        os.close(lock)
        raise
    return lock


# ---------------------------------------------------------------- the folder for logs


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
            hint=room_hint(error, "set log_dir to a writable folder"),
        ) from None
    try:
        _lock_log_folder(folder, path)
        yield
    finally:
        os.close(folder)


def _lock_log_folder(folder: int, path: Path) -> None:
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
    replace_file(runtime_dir / LOG_DIR_NAME, os.fsencode(log_dir))
