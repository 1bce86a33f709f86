"""What workers measured of their models, remembered from one daemon to the next.

The file may be lost or damaged at any time: it only holds what a load finds out again, and how
much more is reserved for models that ran out of memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlxsup.protocol.cache_layers import CacheLayers, size_of_json

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
    weight_bytes: int
    own_bytes: int | None
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
    raised_bytes: int


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
            entries, raised = _read(self._path)
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is damaged"
            self.problem = f"{self._path} is ignored ({cause}); models are measured again"
            return
        self._entries = {(entry.path, entry.backend): entry for entry in entries}
        self._raised = {(one.path, one.backend): one for one in raised}

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
        value = {
            "format": FORMAT,
            "models": [asdict(one) for one in self._entries.values()],
            "raised": [asdict(one) for one in self._raised.values()],
        }
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


def _read(path: Path) -> tuple[list[Measured], list[Raised]]:
    """Return the entries of a file.

    Raises:
        OSError: it cannot be read.
        ValueError, LookupError, TypeError, RecursionError: it is damaged, or of another format.
    """
    value = json.loads(path.read_bytes())
    if value["format"] != FORMAT:
        raise ValueError("another format")
    entries = [_entry(entry) for entry in value["models"]]
    return entries, [_raised(one) for one in value["raised"]]


def _entry(value: Mapping[str, Any]) -> Measured:
    own = value["own_bytes"]
    return Measured(
        path=_text(value["path"]),
        backend=_text(value["backend"]),
        fingerprint=_text(value["fingerprint"]),
        weight_bytes=size_of_json(value["weight_bytes"]),
        own_bytes=None if own is None else size_of_json(own),
        layers=tuple(CacheLayers.of_json(one) for one in value["layers"]),
    )


def _raised(value: Mapping[str, Any]) -> Raised:
    return Raised(
        path=_text(value["path"]),
        backend=_text(value["backend"]),
        fingerprint=_text(value["fingerprint"]),
        raised_bytes=size_of_json(value["raised_bytes"]),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value
