"""What workers measured of their models, remembered from one daemon to the next.

The file may be lost or damaged at any time: it only holds what a load finds out again, and how
much more is reserved for models that ran out of memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.codec import DecodeError, Size, read_part, to_map
from mlxsup.protocol.regular_file import replace_file

FILE_NAME = "measured.json"
FORMAT = 3
"""Changes when the file means something else; a file of another format is begun afresh."""

MAX_ENTRIES = 1000
"""What was measured longest ago is forgotten beyond this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What workers found out about a model.

    Attributes:
        path: the model folder.
        backend: `cpu`, `cuda`, `metal` or `fake`.
        fingerprint: of the folder's files; see `folder.fingerprint`.
        weight_bytes: the arrays of the model; None: it was never READY.
        own_bytes: what its process held besides; None: not known.
        layers: what its layers keep for each row; empty: not known.
        raised_bytes: how much is reserved beyond that, because processes of it ran out of memory.
    """

    path: str
    backend: str
    fingerprint: str
    weight_bytes: Size | None = None
    own_bytes: Size | None = None
    layers: tuple[CacheLayers, ...] = ()
    raised_bytes: Size = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The content of the file, the oldest entries first; `format` is `FORMAT`."""

    format: int
    models: list[Measured]


class Measurements:
    """The file, which has one writer and is replaced atomically.

    A file that cannot be used is begun afresh, because everything in it can be measured again.

    Attributes:
        problem: why the file was not used, a sentence; empty if it was, or if there is none.

    Args:
        folder: where the file is.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self.problem = ""
        # At most MAX_ENTRIES, by folder and backend; the newest last.
        self._entries: dict[tuple[str, str], Measured] = {}
        try:
            file = _read(self._path)
        except FileNotFoundError:
            return
        except (OSError, ValueError, DecodeError, RecursionError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is damaged"
            self.problem = f"{self._path} is ignored ({cause}); models are measured again"
            return
        self._entries = {(entry.path, entry.backend): entry for entry in file.models}

    def find(self, path: str, backend: str, fingerprint: str) -> Measured | None:
        """Return what is known of a model, if its files are still those that were measured."""
        found = self._entries.get((path, backend))
        return found if found is not None and found.fingerprint == fingerprint else None

    def largest_own_bytes(self, backend: str) -> int | None:
        """Return the most that a process held besides its arrays; None: nothing was measured."""
        known = (entry.own_bytes for entry in self._entries.values() if entry.backend == backend)
        return max((size for size in known if size is not None), default=None)

    def learn(self, measured: Measured) -> None:
        """Remember a measurement instead of an earlier one of the same folder and backend; what was
        raised for the same files stays.

        Raises:
            OSError: the file cannot be written; it is remembered for as long as this object lives.
        """
        known = self.find(measured.path, measured.backend, measured.fingerprint)
        self._remember(replace(measured, raised_bytes=known.raised_bytes if known else 0))

    def learn_raised(self, path: str, backend: str, fingerprint: str, raised_bytes: int) -> None:
        """Remember how much more is reserved for a model, instead of what was said before.

        Raises:
            OSError: as `learn`.
        """
        known = self.find(path, backend, fingerprint)
        entry = known or Measured(path=path, backend=backend, fingerprint=fingerprint)
        self._remember(replace(entry, raised_bytes=raised_bytes))

    def _remember(self, entry: Measured) -> None:
        """Enter one as the newest, unless nothing changes."""
        key = entry.path, entry.backend
        if self._entries.get(key) == entry:
            return
        self._entries.pop(key, None)
        self._entries[key] = entry
        while len(self._entries) > MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]
        value = to_map(_File(format=FORMAT, models=list(self._entries.values())))
        replace_file(self._path, json.dumps(value, indent=1).encode())


def _read(path: Path) -> _File:
    """Return the content of a file.

    Raises:
        OSError: it cannot be read.
        ValueError, DecodeError, RecursionError: it is damaged, or of another format.
    """
    file = read_part(_File, json.loads(path.read_bytes()), "it")
    if file.format != FORMAT:
        raise ValueError("another format")
    return file
