"""Model folders as a driven core gets to know them."""

from __future__ import annotations

from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.core.actions import Action, LookAtFiles
from mlxsup.supervisor.core.core import Core
from mlxsup.supervisor.core.events import Event, FilesSeen


class Folders:
    """Answers at once whenever a core asks for a look at files.

    Attributes:
        changes: what has changed, by model; nothing has in the others.
        looks: the models that were looked at, in order.
        is_slow: whether no look comes to an end by itself.
    """

    def __init__(self) -> None:
        self.changes: dict[str, str] = {}
        self.looks: list[str] = []
        self.is_slow = False

    def handle(self, core: Core, event: Event) -> list[Action]:
        """Hands over an event, and what the core has to know of files before it acts on it."""
        actions = core.handle(event)
        asked = [action for action in actions if isinstance(action, LookAtFiles)]
        for look in asked:
            self.looks.append(look.model)
            if not self.is_slow:
                actions += self.handle(core, self._seen(look, event.now))
        return actions

    def answer(self, core: Core, model: str, now: float) -> list[Action]:
        """A slow look at the files of a live process comes to its end."""
        name = ModelName(model)
        generation = core.fleet.by_name[name].life.generation
        return self.handle(core, self._seen(LookAtFiles(model=name, generation=generation), now))

    def _seen(self, look: LookAtFiles, now: float) -> FilesSeen:
        change = self.changes.get(look.model, "")
        return FilesSeen(now=now, model=look.model, generation=look.generation, change=change)
