"""Whether the files of a model still are those that its worker has loaded, by name, size and time.

A worker knows its files by their content, too; to read that again would take too long. So a file
that was written anew with the same content counts as changed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.model_files import is_tokenizer_file, is_weight_file

LIMIT_S = 5.0
"""How long a look at a folder may take; a disk may not answer at all."""

UNKNOWN = "its folder could not be read when it was loaded"

Stamp = Mapping[str, tuple[int, int]]
"""Size in bytes and time of modification in nanoseconds of each file, by name."""


def stamp(folder: Path) -> Stamp:
    """The files of a model folder that decide what the model answers.

    Raises:
        OSError: the folder cannot be read.
    """
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if (is_tokenizer_file(entry.name) or is_weight_file(entry.name)) and entry.is_file():
                status = entry.stat()
                found[entry.name] = status.st_size, status.st_mtime_ns
    return found


def difference(loaded: Stamp, present: Stamp) -> str:
    """What has changed, the first file by name; empty if nothing has."""
    for name in sorted(loaded.keys() | present.keys()):
        if name not in present:
            return f"{name} was removed since it was loaded"
        if name not in loaded:
            return f"{name} was added since it was loaded"
        if loaded[name] != present[name]:
            return f"{name} has changed since it was loaded"
    return ""


class FileLooks:
    """Looks at folders outside the loop's thread, because a disk may be slow.

    Args:
        limit_s: how long a look may take.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        # One thread: if a disk does not answer, no more than that one waits for it.
        self._executor = ThreadPoolExecutor(1, "mlxsup-files")

    async def before_load(self, launch: LaunchSettings) -> Stamp | None:
        """The files that a worker is about to load; None if they could not be read in time, or if
        its engine loads none."""
        if launch.engine == "fake":
            return None
        try:
            return await self._stamp(launch)
        except OSError:  # and TimeoutError, which is one: the load itself says what is wrong
            return None

    async def change(self, launch: LaunchSettings, loaded: Stamp | None) -> str:
        """What has changed since a worker loaded its files, a phrase; empty if nothing has."""
        if launch.engine == "fake":
            return ""
        if loaded is None:
            return UNKNOWN
        try:
            return difference(loaded, await self._stamp(launch))
        except TimeoutError:
            return f"its folder could not be read within {self._limit_s:g} s"
        except OSError as error:
            return f"its folder cannot be read ({error.strerror or error})"

    def close(self) -> None:
        """Lets the thread end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _stamp(self, launch: LaunchSettings) -> Stamp:
        run = asyncio.get_running_loop().run_in_executor
        async with asyncio.timeout(self._limit_s):
            return await run(self._executor, stamp, Path(launch.path))
