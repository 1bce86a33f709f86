"""The folders of a daemon: whose they are, who may enter, and how much room there is."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from mlxsup.protocol.folders import check_runtime_dir
from mlxsup.protocol.key_file import find_trouble
from mlxsup.store.hub_cache import find_cache

from ..facts import Folder, OpenFiles, Places
from .setting import Setting


def gather_places(setting: Setting) -> Places:
    """The runtime folder, the log folder, the cache of models, and the file of API keys."""
    trouble, _, _ = find_trouble(setting.keys).partition("; run: ")  # the finding's command
    too_long = ""
    try:
        check_runtime_dir(setting.runtime_dir)
    except ValueError as error:
        too_long = str(error)
    return Places(
        user=os.geteuid(),
        runtime=look_at(setting.runtime_dir),
        logs=look_at(setting.log_dir),
        cache=look_at(find_cache()),
        too_long=too_long,
        key_trouble=trouble,
        key_path=setting.keys.file,
        is_key_file_open=_is_open(setting.keys.file),
    )


def gather_open_files(setting: Setting) -> OpenFiles:
    """The hard limit of this process, which a daemon that it starts inherits."""
    from mlxsup.supervisor.runtime_folder import files_needed

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OpenFiles(
        system="Linux" if sys.platform == "linux" else "Darwin",
        hard=None if hard == resource.RLIM_INFINITY else hard,
        needed=files_needed(setting.configuration.models),
    )


def look_at(path: Path) -> Folder:
    """A folder, or where it would be made."""
    owner, mode, is_folder = None, None, False
    with suppress(OSError):
        status = path.stat()
        owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
        is_folder = stat.S_ISDIR(status.st_mode)
    near = _nearest(path)
    free = None
    with suppress(OSError):
        free = shutil.disk_usage(near).free
    return Folder(
        path=path,
        is_there=mode is not None,
        is_folder=is_folder,
        owner=owner,
        mode=mode,
        is_private_use=is_folder and _is_private_use(path),
        file_system=_file_system(near),
        free_bytes=free,
        refusal=_refusal(near),
    )


def _nearest(path: Path) -> Path:
    """The path itself, or the closest one above it that is there."""
    return next((one for one in (path, *path.parents) if one.exists()), Path("/"))


def _refusal(near: Path) -> str:
    """Why no file can be made in a folder; empty if one can. Leaves nothing there."""
    if not near.is_dir():
        return f"{near} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=near):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _is_private_use(path: Path) -> bool:
    """Whether mlxsup alone uses it, so that nobody is locked out of it."""
    from mlxsup.supervisor.runtime_folder import is_own_name

    with suppress(OSError):
        return all(is_own_name(entry.name) for entry in os.scandir(path))
    return False


def _file_system(path: Path) -> str:
    """The kind of the disk that a path is on; empty if the system does not say."""
    real = path.resolve()
    mounted = [
        part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)
    ]
    closest = max(mounted, key=lambda part: len(part.mountpoint), default=None)
    return closest.fstype if closest is not None else ""


def _is_open(path: Path) -> bool:
    """Whether a file of ours is one that others may read or change."""
    with suppress(OSError):
        status = path.stat()
        is_own_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return is_own_file and bool(stat.S_IMODE(status.st_mode) & 0o077)
    return False
