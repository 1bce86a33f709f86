"""Model folders whose files change now and then, and are restored; and who must stay for that."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.supervisor.core.actions import LookAtFiles, Spawn
from mlxsup.supervisor.core.events import FilesSeen

from .books import Book, Life
from .violation import check

if TYPE_CHECKING:
    from .record import Record
    from .world import World

UNSTEADY_SHARE = 0.5
"""Of runs with a memory budget, those in which files change."""

EVERY_S = (1.0, 12.0)
LOOK_S = (0.0, 0.0, 0.02, 0.3, 1.0)
RESTORED_SHARE = 0.3
"""Of changes, those that bring back what was there at first."""

BELIEVED_S = 5.05
"""A change may be unknown for so long: what a look has found is believed, and a little more."""

ORIGINAL = 0


@dataclass(slots=True)
class _Loaded:
    version: int
    differs_since: float | None = None
    has_differed: bool = False


class Folders:
    """The files of all models, by version.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(f"files of {seed}")
        self._is_unsteady = self._dice.random() < UNSTEADY_SHARE
        self._versions: dict[ModelName, int] = {}
        self._newest = ORIGINAL
        self._loaded: dict[tuple[ModelName, Generation], _Loaded] = {}

    def begin(self, world: World) -> None:
        """From now on files change, until the faults end."""
        if not self._is_unsteady or world.plan.budget_bytes is None:
            return

        def change() -> None:
            if world.is_healing:
                return
            self._change(self._dice.choice(world.plan.models).name, world.time.now)
            world.time.after(self._dice.uniform(*EVERY_S), change)

        world.time.after(self._dice.uniform(*EVERY_S), change)

    def loads(self, spawn: Spawn) -> None:
        """A process reads what is there now."""
        version = self._versions.get(spawn.model, ORIGINAL)
        self._loaded[spawn.model, spawn.generation] = _Loaded(version)

    def look(self, world: World, look: LookAtFiles) -> None:
        """Somebody compares, which takes a moment."""

        def tell() -> None:
            differs = self.differs_since(look.model, look.generation) is not None
            world.record.count("files changed" if differs else "files unchanged")
            change = "config.json has changed" if differs else ""
            model, generation, now = look.model, look.generation, world.time.now
            world.handle(FilesSeen(now=now, model=model, generation=generation, change=change))

        world.time.after(self._dice.choice(LOOK_S), tell)

    def differs_since(self, model: ModelName, generation: Generation) -> float | None:
        """Since when the files of a model have not been those that a process has loaded."""
        return self._loaded[model, generation].differs_since

    def have_differed(self, model: ModelName, generation: Generation) -> bool:
        """Whether that has ever been so."""
        return self._loaded[model, generation].has_differed

    def check_swap(self, record: Record, book: Book, life: Life) -> None:
        """A model makes room: another process must be able to continue what has begun."""
        has_begun = any(ask.is_open for ask in life.given.values())
        has_begun = has_begun or any(ask.tokens for ask in book.waiting)
        since = self.differs_since(life.model, life.generation)
        is_known = since is not None and record.now > since + BELIEVED_S
        check("swapped with changed files", not (has_begun and is_known), f"{book.name}: {since}")

    def _change(self, model: ModelName, now: float) -> None:
        is_restored = self._dice.random() < RESTORED_SHARE
        self._newest += 1
        version = self._versions[model] = ORIGINAL if is_restored else self._newest
        for (name, _), loaded in self._loaded.items():
            if name != model:
                continue
            if loaded.version == version:
                loaded.differs_since = None
            elif loaded.differs_since is None:
                loaded.differs_since, loaded.has_differed = now, True
