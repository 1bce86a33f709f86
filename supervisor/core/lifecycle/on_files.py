"""The rules for files that may have changed since a process loaded them."""

from __future__ import annotations

from ..actions import LookAtFiles
from .effects import Changed
from .files import Files
from .life import Life
from .states import Draining, Ready, Swapping
from .triggers import FilesCompared, FilesDoubted


def doubted(life: Life, phase: Ready, trigger: FilesDoubted, now: float) -> None:
    """The shell looks; until it answers, the model stays."""
    life.files = life.files.being_seen()
    life.do(LookAtFiles(model=life.name, generation=life.generation))


def noted(life: Life, phase: Draining | Swapping, trigger: FilesCompared, now: float) -> None:
    """It is on its way out, from which it may return."""
    life.files = Files(seen_at=now, change=trigger.change)


def compared(life: Life, phase: Ready, trigger: FilesCompared, now: float) -> None:
    """Its watchers are notified if that changes whether it may be swapped out."""
    before = life.files.change
    life.files = Files(seen_at=now, change=trigger.change)
    if trigger.change and not before:
        life.do(Changed(note=f"cannot be swapped out while it has open answers: {trigger.change}"))
    elif before and not trigger.change:
        life.do(
            Changed(note="can be swapped out again, because its files are unchanged since the load")
        )
