"""Whether the files of a model still are those that its worker has loaded, by name, size and time.

A worker knows its files by their content, too; to read that again would take too long. So a file
that was written anew with the same content counts as changed.
"""

from __future__ import annotations

from pathlib import Path

from mlxsup.protocol.launch import LaunchSettings

from ..file_threads import FileThreads
from .folder import Stamp, stamp

SILENT = "its folder does not answer: look after its disk"

LIMIT_S = 5.0
"""How long a look at a folder may take; a disk may not answer at all."""

UNKNOWN = "its folder could not be read when it was loaded"


def difference(loaded: Stamp, present: Stamp) -> str:
    """Return what has changed, the first file by name; empty if nothing has."""
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
        self._threads = FileThreads()

    async def before_load(self, launch: LaunchSettings) -> Stamp | None:
        """Return the files that a worker is about to load; None if they cannot be read, or if its
        engine loads none.

        Raises:
            TimeoutError: the folder does not answer, and would keep a worker waiting, too.
        """
        if launch.engine == "fake":
            return None
        try:
            return await self._stamp(launch)
        except TimeoutError:
            raise
        except OSError:  # the load itself says what is wrong
            return None

    async def change(self, launch: LaunchSettings, loaded: Stamp | None) -> str:
        """Return what has changed since a worker loaded its files, a phrase; empty if nothing."""
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

    async def _stamp(self, launch: LaunchSettings) -> Stamp:
        folder = Path(launch.path)
        return await self._threads.run(folder, lambda: stamp(folder), limit_s=self._limit_s)
