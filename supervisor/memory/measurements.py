"""What workers measured of their models, remembered from one daemon to the next.

The file may be lost or damaged at any time: it only holds what a load finds out again, and how
much more is reserved for models that ran out of memory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.codec import DecodeError, Size, read_part, to_map

FILE_NAME = "measured.json"
FORMAT = 2
"""Changes when the file means something else; a file of another format is begun afresh."""

MAX_ENTRIES = 1000
"""What was measured longest ago is forgotten beyond this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The sizes that a worker measured when its model was READY.

    Attributes:
        path: the model folder.
        backend: `cpu`, `cuda`, `metal` or `fake`.
        fingerprint: of the folder's files; see `folder.fingerprint`.
        weight_bytes: the arrays of the model.
        own_bytes: what its process held besides; None: not known.
        layers: what its layers keep for each row; empty: not known.
    """

    path: str
    backend: str
    fingerprint: str
    weight_bytes: Size
    own_bytes: Size | None
    layers: tuple[CacheLayers, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """Memory that is reserved for a model beyond what it needs, because it has run out of it.

    It is kept apart from what a worker measured, so that a READY does not lower it.

    Attributes:
        path: the model folder.
        backend: as in `Measured`.
        fingerprint: as in `Measured`.
        raised_bytes: how much more.
    """

    path: str
    backend: str
    fingerprint: str
    raised_bytes: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The content of the file, the oldest entries first; `format` is `FORMAT`."""

    format: int
    models: list[Measured]
    raised: list[Raised]


Entry = TypeVar("Entry", Measured, Raised)


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
        self._raised: dict[tuple[str, str], Raised] = {}  # in the same way
        try:
            file = _read(self._path)
        except FileNotFoundError:
            return
        except (OSError, ValueError, DecodeError, RecursionError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is damaged"
            self.problem = f"{self._path} is ignored ({cause}); models are measured again"
            return
        self._entries = {(entry.path, entry.backend): entry for entry in file.models}
        self._raised = {(one.path, one.backend): one for one in file.raised}

    def find(self, path: str, backend: str, fingerprint: str) -> Measured | None:
        """Return what is known of a model, if its files are still those that were measured."""
        found = self._entries.get((path, backend))
        return found if found is not None and found.fingerprint == fingerprint else None

    def raised_bytes(self, path: str, backend: str, fingerprint: str) -> int:
        """Return how much more is reserved for a model, if its files are still those with which its
        processes ran out of memory; otherwise 0."""
        found = self._raised.get((path, backend))
        return found.raised_bytes if found is not None and found.fingerprint == fingerprint else 0

    def largest_own_bytes(self, backend: str) -> int | None:
        """Return the most that a process held besides its arrays; None: nothing was measured."""
        known = (entry.own_bytes for entry in self._entries.values() if entry.backend == backend)
        return max((size for size in known if size is not None), default=None)

    def learn(self, measured: Measured) -> None:
        """Remember a measurement instead of an earlier one of the same folder and backend.

        Raises:
            OSError: the file cannot be written; it is remembered for as long as this object lives.
        """
        if _remember(self._entries, measured):
            self._write()

    def learn_raised(self, raised: Raised) -> None:
        """Remember how much more is reserved for a model, instead of what was said before.

        Raises:
            OSError: as `learn`.
        """
        if _remember(self._raised, raised):
            self._write()

    def _write(self) -> None:
        models, raised = list(self._entries.values()), list(self._raised.values())
        value = to_map(_File(format=FORMAT, models=models, raised=raised))
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps(value, indent=1), encoding="utf-8")
        os.replace(draft, self._path)


def _remember(entries: dict[tuple[str, str], Entry], entry: Entry) -> bool:
    """Enter one as the newest; return whether that changes anything."""
    key = entry.path, entry.backend
    if entries.get(key) == entry:
        return False
    entries.pop(key, None)
    entries[key] = entry
    while len(entries) > MAX_ENTRIES:
        del entries[next(iter(entries))]
    return True


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
