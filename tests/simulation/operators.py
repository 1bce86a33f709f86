"""People who operate the daemon: commands, an edited file, signals."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import (
    Load,
    Ping,
    Reload,
    Restart,
    StatusQuery,
    Stop,
    Subscribe,
    Unload,
)
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.supervisor.core.events import Caller, Reloaded, ReloadRefused, ShutdownAsked

from .asks import Place
from .plan import other_launch

if TYPE_CHECKING:
    from .people import People
    from .world import World


class Operators:
    """What is asked of the daemon beside answers.

    Args:
        world: in which it happens.
        people: whose commands they are.

    Attributes:
        entries: what the file says now, read or not.
    """

    def __init__(self, world: World, people: People) -> None:
        self._world, self._people = world, people
        self._dice = world.plan.random
        self._own_dice = random.Random(f"operators {world.plan.seed}")
        self.entries = list(world.plan.models)

    def read_configuration(self, caller: Caller | None) -> None:
        """The file is read, in a moment; what it says then counts."""
        dice, world = self._dice, self._world

        def read() -> None:
            if caller is not None and dice.random() < 0.25:
                problems = ("line 3: no such key",)
                world.handle(ReloadRefused(now=world.time.now, problems=problems, caller=caller))
                return
            world.hub.lose_one()
            entries = tuple(map(world.hub.as_read, self.entries or world.plan.models[:1]))
            world.handle(
                Reloaded(
                    now=world.time.now,
                    settings=world.plan.settings,
                    models=entries,
                    caller=caller,
                    later=("log_dir",) if dice.random() < 0.3 else (),
                    needs=world.hub.needs(),
                )
            )

        world.time.after(dice.choice((0.0, 0.05)), read)

    def ping(self) -> None:
        """Somebody asks whether anybody is there."""
        self._people.command(lambda id: Ping(id=id))

    def status(self) -> None:
        """Somebody asks for the status, sometimes for all of it."""
        is_debug = self._dice.random() < 0.2
        self._people.command(lambda id: StatusQuery(id=id, debug=is_debug))

    def load(self) -> None:
        """Somebody loads a model."""
        model = self._people.model()
        self._people.command(lambda id: Load(id=id, model=model))

    def dry_load(self) -> None:
        """Somebody asks what a load would do."""
        model = self._people.model()
        self._people.command(lambda id: Load(id=id, model=model, dry_run=True))

    def unload(self) -> None:
        """Somebody unloads a model, often one with paused requests, which then end with it."""
        paused = [ask.model for ask in self._people.asked if ask.place is Place.PAUSED]
        is_any = not paused or self._own_dice.random() < 0.4
        self.unload_model(self._people.model() if is_any else self._own_dice.choice(paused))

    def unload_model(self, model: ModelName) -> None:
        """Somebody unloads this model."""
        self._people.command(lambda id: Unload(id=id, model=model))

    def restart(self) -> None:
        """Somebody restarts a model, sometimes at once."""
        self.restart_model(self._people.model())

    def restart_model(self, model: ModelName) -> None:
        """Somebody restarts this model, sometimes at once."""
        is_now = self._dice.random() < 0.5
        self._people.command(lambda id: Restart(id=id, model=model, now=is_now))

    def subscribe(self) -> None:
        """Somebody follows the events."""
        client = self._people.client()
        id = RequestId(self._people.new_id(client))
        client.subscriptions.append(id)
        self._people.say(client, Subscribe(id=id))

    def edit(self) -> None:
        """Somebody edits the file: nothing happens before it is read."""
        dice, entries = self._dice, []
        for entry in self._world.plan.models:
            what = dice.random()
            if what < 0.2:
                continue
            if what < 0.5:
                entry = other_launch(dice, entry)
            elif what < 0.7:
                entry = replace(entry, idle_unload_s=dice.choice((0.0, 2.5, 4.0)))
            entries.append(entry)
        self.entries = entries

    def reload(self) -> None:
        """Somebody has the file read."""
        if self._dice.random() < 0.3:
            self.read_configuration(None)  # SIGHUP
        else:
            self._people.command(lambda id: Reload(id=id))

    def stop(self) -> None:
        """Somebody stops the daemon."""
        dice = self._dice
        is_now, timeout_s = dice.random() < 0.3, dice.choice((None, 0.2, 5.0))
        self._people.command(lambda id: Stop(id=id, now=is_now, timeout_s=timeout_s))

    def signal(self) -> None:
        """SIGTERM; sometimes a second one."""
        world = self._world
        world.handle(ShutdownAsked(now=world.time.now, is_immediate=False))
        if self._dice.random() < 0.3:
            world.time.after(
                self._dice.uniform(0.0, 1.0),
                lambda: world.handle(ShutdownAsked(now=world.time.now, is_immediate=True)),
            )
