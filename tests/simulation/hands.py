"""People who pause, resume and prioritize requests by hand, their own and those of others."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import Cancel, Prioritize
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.request_messages import PauseRequest, ResumeRequest
from mlxsup.protocol.states import Priority

from .asks import Ask, Place

if TYPE_CHECKING:
    from .people import People
    from .world import World

BY_NUMBER_SHARE = 0.2
"""Of pauses and resumes by hand, if the supervisor's number is known."""

LOOKS_S = 2.0
"""How often somebody looks for what was left paused, once all is to come to its end."""


class Hands:
    """Pauses, resumes, and gives other classes.

    Args:
        world: in which it happens.
        people: whose requests they are.
    """

    def __init__(self, world: World, people: People) -> None:
        self._world, self._people = world, people
        self._dice = world.plan.random
        self._own_dice = random.Random(f"hands {world.plan.seed}")

    def begin(self) -> None:
        """From now on nothing stays paused for ever."""
        self._world.time.after(LOOKS_S, self._look)

    def pause(self) -> None:
        """Somebody pauses any open request; some are paused already, or must not be."""
        opened = [ask for ask in self._people.asked if ask.is_open]
        if opened:
            self._tell(PauseRequest, self._dice.choice(opened))

    def resume(self) -> None:
        """Somebody resumes a paused request, or one that is not."""
        opened = [ask for ask in self._people.asked if ask.is_open]
        paused = [ask for ask in opened if ask.is_pausing or ask.place is Place.PAUSED]
        if paused and self._dice.random() < 0.9:
            self._tell(ResumeRequest, self._dice.choice(paused))
        elif opened:
            self._tell(ResumeRequest, self._dice.choice(opened))

    def prioritize_later(self, ask: Ask, dice: random.Random) -> None:
        """Somebody gives a request another class: others may have the same id, or it has ended."""

        def prioritize() -> None:
            if not self._world.is_healing:
                priority = dice.choice(tuple(Priority))
                self._people.command(
                    lambda id: Prioritize(id=id, request=RequestId(ask.id), priority=priority)
                )

        self._world.time.after(dice.uniform(0.0, 1.0), prioritize)

    def _tell(self, kind: type[PauseRequest | ResumeRequest], ask: Ask) -> None:
        own = [client for client in self._people.clients if client.name == ask.connection]
        by_others = self._dice.random() < 0.2 or not own
        client = self._dice.choice(self._people.clients) if by_others else own[0]
        id = RequestId(self._people.new_id(client))
        client.commands[id] = False
        name = ask.id if self._own_dice.random() >= BY_NUMBER_SHARE else _number(ask)
        self._people.say(client, kind(id=id, request=RequestId(name)))

    def _look(self) -> None:
        world = self._world
        if world.has_finished:
            return
        if world.is_healing:
            for ask in list(world.record.open):
                if ask.is_pausing or ask.place is Place.PAUSED:
                    self._lets_end(ask)
        world.time.after(LOOKS_S, self._look)

    def _lets_end(self, ask: Ask) -> None:
        """Resumes a request by a name that only it has; if none is known, its client gives up."""
        alike = [one for one in self._world.record.open if one.id == ask.id]
        name = ask.id if len(alike) == 1 else _number(ask)
        if name != ask.id or len(alike) == 1:
            self._people.command(lambda id: ResumeRequest(id=id, request=RequestId(name)))
            return
        for client in self._people.clients:
            if client.name == ask.connection:
                self._people.say(client, Cancel(id=RequestId(ask.id)))


def _number(ask: Ask) -> str:
    """The supervisor's name for a request, as people write it; its id, if it was never started."""
    return ask.id if ask.key is None else f"#{ask.key}"
