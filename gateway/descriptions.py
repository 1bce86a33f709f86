"""Descriptions of models from their folders, for programs that list models.

Folders are read in one thread at a time, and again once a file of them has changed: a disk may be
slow, or not answer at all. What is not known in time is a gap in a list.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.protocol.context_length import UNKNOWN_CONTEXT_LENGTH
from mlxsup.protocol.states import State
from mlxsup.protocol.tasks import Task
from mlxsup.store.model_folder import Description, describe

from . import limits
from .daemon import Daemon
from .names import names_of, row_of
from .openai.models import no_model
from .pictures import takes_pictures

THINKS = ("enable_thinking", "<think>", "thinking", "reasoning_effort")
"""Words in the chat template of a model that reasons."""

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A model of the status, and what its folder says.

    Attributes:
        row: of the status.
        name: as requests call it: the model's own, or that of a preset or an adapter.
        said: by its folder; None if that is not there, or does not answer.
        modified_at: of the newest file, in seconds since the epoch; None as above.
    """

    row: Mapping[str, Any]
    name: str
    said: Description | None = None
    modified_at: float | None = None

    @property
    def is_loaded(self) -> bool:
        """True if its process has its weights."""
        return self.row["state"] in (State.READY, State.DRAINING)

    @property
    def publisher(self) -> str:
        """Return the publisher of its repository; empty for a folder."""
        return str(self.row["repo"] or "").partition("/")[0]

    @property
    def family(self) -> str:
        """Return its type, as mlx-lm has it; empty if that is not known."""
        return self.said.model_type if self.said else ""

    @property
    def digest(self) -> str:
        """Return 64 hexadecimal digits that change with its files."""
        text = f"{self.row['name']} {self.row.get('revision')} {self.modified_at}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its weights; 0 if that is not known."""
        return self.said.size_bytes if self.said else 0

    @property
    def bits(self) -> int | None:
        """Return the bits of most weights; None if they are not packed."""
        found = _NUMBER.match(self.said.quantization) if self.said else None
        return int(found.group()) if found else None

    @property
    def quantization(self) -> str:
        """`4bit`, or the type of its numbers; empty if that is not known."""
        return f"{self.bits}bit" if self.bits else (self.said.quantization if self.said else "")

    @property
    def parameter_size(self) -> str:
        """`7.6B`; empty if that is not known."""
        count = (self.said.parameter_count if self.said else None) or 0
        if count >= 1e9:
            return f"{count / 1e9:.1f}B"
        return f"{count / 1e6:.0f}M" if count else ""

    @property
    def context_length(self) -> int:
        """Return the most tokens of prompt and answer.

        Before a load, those of its folder, or what a model gets that declares none.
        """
        declared = self.said.context_length if self.said else None
        return self.row["context_length"] or declared or UNKNOWN_CONTEXT_LENGTH

    @property
    def task(self) -> Task:
        """Return what it is for; before a load, as its folder says."""
        known = self.row.get("task")
        return Task(known) if known else self.said.task if self.said else Task.GENERATE

    @property
    def sees_images(self) -> bool:
        """True if it takes images."""
        return bool(takes_pictures(self.row))

    @property
    def takes_tools(self) -> bool:
        """True if its chat template shows tools to it."""
        return self._template is not None and "tools" in self._template

    @property
    def thinks(self) -> bool:
        """True if its chat template knows of reasoning."""
        return self._template is not None and any(word in self._template for word in THINKS)

    @property
    def _template(self) -> str | None:
        """Return the chat template of a model that writes; None if it is not known."""
        is_writer = self.task is Task.GENERATE
        return self.said.template if self.said is not None and is_writer else None


Known = tuple[float, Description]
"""The time of the newest change in a folder, and its description."""


class Descriptions:
    """The models of a daemon, with what their folders said when they were read last."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._known: Mapping[str, Known] = {}
        self._reading: asyncio.Task[dict[str, Known]] | None = None

    async def all(self) -> list[Described]:
        """Return each model, and each of its presets and adapters.

        Raises:
            Failure: the daemon does not answer.
        """
        return await self._of(await self._daemon.status())

    async def one(self, name: str) -> Described:
        """Return the model, or the preset or adapter of it, that a name means; it may be an alias.

        Raises:
            Failure: there is none, or the daemon does not answer.
        """
        status, meant = await self._daemon.status(), await self._daemon.meant(name)
        row = row_of(status, meant.model)
        found = [one for one in await self._of(status) if one.row is row]
        variant = name.rpartition(":")[2]
        of_variant = [one for one in found if one.name == f"{one.row['name']}:{variant}"]
        for one in (*of_variant, *found):
            return one
        raise no_model(status, name)

    async def _of(self, status: Mapping[str, Any]) -> list[Described]:
        folders = {row["folder"] for row in status["models"] if row["folder"]}
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(asyncio.to_thread(_read, folders, self._known))
        try:
            async with asyncio.timeout(limits.STATUS_LIMIT_S):
                self._known = await asyncio.shield(self._reading)
        except TimeoutError:
            pass  # a disk does not answer
        return [self._described(row, name) for row in status["models"] for name in names_of(row)]

    def _described(self, row: Mapping[str, Any], name: str) -> Described:
        modified_at, said = self._known.get(row["folder"], (None, None))
        return Described(row=row, name=name, said=said, modified_at=modified_at)


def _read(folders: set[str], known: Mapping[str, Known]) -> dict[str, Known]:
    """Return what folders say; those that have not changed are not read again."""
    read = {}
    for name in folders:
        modified_at = _modified_at(Path(name))
        if modified_at is None:
            continue
        before = known.get(name)
        if before is None or before[0] != modified_at:
            before = modified_at, describe(Path(name))
        read[name] = before
    return read


def _modified_at(folder: Path) -> float | None:
    """Return when a folder or a file in it was changed last; None if it cannot be read."""
    try:
        return max(os.lstat(path).st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return None
