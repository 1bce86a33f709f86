"""People who look on and steer: they join streams, list requests, cancel those of others, change
what is logged, and load models otherwise than configured.

They are there in some runs only, with their own connections and dice, so that other runs stay as
they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import Cancel, ClientMessage, Load
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.log_level import ChangeLogLevel
from mlxsup.protocol.message import Message
from mlxsup.protocol.request_messages import Attach, CancelRequest, RequestsQuery
from mlxsup.supervisor.core.events import ClientGone, ClientSaid, ConnectionId

from . import load_options, log_levels
from .asks import Ask
from .clients import Client
from .links import Link
from .listeners import Listener
from .plan import Kind

if TYPE_CHECKING:
    from .world import World

THERE_SHARE = 0.5
"""Of runs."""

CONNECTIONS = 2
ACTS_S = 0.5
DELAYS_S = (0.0, 0.02, 0.3)
BY_NUMBER_SHARE = 0.8
"""Of names, if the supervisor's number is known: ids are seldom unique."""

CROWD = 10
"""Readers of one request that come together: more than there may be."""

WATCH = {"attach": 12, "crowd": 1, "stop_listening": 3, "list": 3, "log": 1.5, "cancel": 0.5,
         "leave": 1}  # fmt: skip
STEER = {"load": 2, "load_dry": 0.5}
STEERED = (Kind.PEOPLE, Kind.LOADS, Kind.STORM)


class Onlookers:
    """Their clients, and what they say.

    Args:
        world: that they live in.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._dice = random.Random(f"onlookers of {world.plan.seed}")
        is_there = self._dice.random() < THERE_SHARE
        self._delay_s = self._dice.choice(DELAYS_S)
        self._connected = 0
        self._clients = [self._connect() for _ in range(CONNECTIONS)] if is_there else []
        acts = WATCH | (STEER if world.plan.kind in STEERED else {})
        self._acts: list[Callable[[], None]] = [getattr(self, f"_{name}") for name in acts]
        self._weights = list(acts.values())

    def begin(self) -> None:
        """From now on, until the faults end."""
        if self._clients:
            self._act()

    def awaited(self) -> bool:
        """Whether any of them waits for something."""
        return any(_waits(client) for client in self._clients)

    def deliver(self, connection: bytes, message: Message) -> None:
        """The supervisor sends one of them something; dropped if it is gone."""
        for client in self._clients:
            if client.name == connection:
                client.send_down(message)

    def check_ends(self) -> None:
        """Everybody who stayed was answered."""
        for client in self._clients:
            client.check_ends()

    # ------------------------------------------------------------ what they do

    def _act(self) -> None:
        if self._world.is_healing:
            return
        [act] = self._dice.choices(self._acts, weights=self._weights)
        act()
        self._world.time.after(self._dice.expovariate(1 / ACTS_S), self._act)

    def _attach(self) -> None:
        ask = self._any_ask()
        if ask is not None:
            self._join(ask)

    def _crowd(self) -> None:
        ask = self._any_ask()
        for _ in range(CROWD if ask is not None else 0):
            assert ask is not None
            self._join(ask)

    def _stop_listening(self) -> None:
        client = self._client()
        listening = [id for id, reader in client.readers.items() if reader.end is None]
        if listening:
            self._say(client, Cancel(id=RequestId(self._dice.choice(listening))))

    def _list(self) -> None:
        account = self._dice.choice((None, None, "ann", "7", "process 8@1"))
        self._command(lambda id: RequestsQuery(id=id, client=account))

    def _log(self) -> None:
        level = self._dice.choice((*log_levels.LEVELS, log_levels.NO_LEVEL))
        self._command(lambda id: ChangeLogLevel(id=id, level=level))

    def _cancel(self) -> None:
        ask = self._any_ask()
        if ask is not None:
            name = self._name_of(ask)
            self._command(lambda id: CancelRequest(id=id, request=name))

    def _load(self) -> None:
        length = self._dice.choice(load_options.LENGTHS)
        keep_s = self._dice.choice(load_options.SENSIBLE_S)
        slip = self._dice.random()
        if slip < 0.1:
            length = self._dice.choice(load_options.SENSELESS_LENGTHS)
        elif slip < 0.2:
            keep_s = self._dice.choice(load_options.SENSELESS_S)
        model = self._dice.choice(self._world.plan.models).name
        self._command(lambda id: Load(id=id, model=model, context_length=length, keep_alive=keep_s))

    def _load_dry(self) -> None:
        model = self._dice.choice(self._world.plan.models).name
        self._command(lambda id: Load(id=id, model=model, dry_run=True, keep_alive=3.0))

    def _leave(self) -> None:
        place = self._dice.randrange(len(self._clients))
        client = self._clients[place]
        client.has_left = True
        client.up.send(lambda: self._gone(client))
        self._clients[place] = self._connect()

    # ------------------------------------------------------------ inside

    def _connect(self) -> Client:
        self._connected += 1
        up, down = (Link(self._world.time, self._dice, self._delay_s, 1.0) for _ in range(2))
        return Client(name=b"onlooker%d" % self._connected, process="", up=up, down=down)

    def _client(self) -> Client:
        return self._dice.choice(self._clients)

    def _any_ask(self) -> Ask | None:
        """Any open request, or now and then one that has ended."""
        asked = self._world.people.asked
        opened = [ask for ask in asked if ask.is_open]
        some = opened if self._dice.random() < 0.95 else asked
        return self._dice.choice(some) if some else None

    def _name_of(self, ask: Ask) -> RequestId:
        is_by_number = ask.key is not None and self._dice.random() < BY_NUMBER_SHARE
        return RequestId(f"#{ask.key}" if is_by_number else ask.id)

    def _join(self, ask: Ask) -> None:
        client = self._client()
        id = self._new_id(client)
        listener = Listener(connection=client.name, id=id)
        client.readers[id] = self._world.record.joining.sent[client.name, id] = listener
        self._say(client, Attach(id=id, request=self._name_of(ask)))

    def _command(self, message_of: Callable[[RequestId], ClientMessage]) -> None:
        client = self._client()
        id = self._new_id(client)
        client.commands[id] = False
        self._say(client, message_of(id))

    @staticmethod
    def _new_id(client: Client) -> RequestId:
        client.said += 1
        return RequestId(f"o{client.said}")

    def _say(self, client: Client, message: ClientMessage) -> None:
        world, connection = self._world, ConnectionId(client.name)

        def deliver() -> None:
            if world.has_finished:
                client.unheard.add(message.id)
            elif not client.is_gone:
                now = world.time.now
                world.handle(ClientSaid(now=now, connection=connection, message=message))

        client.up.send(deliver)

    def _gone(self, client: Client) -> None:
        client.is_gone = True
        now, connection = self._world.time.now, ConnectionId(client.name)
        self._world.handle(ClientGone(now=now, connection=connection))


def _waits(client: Client) -> bool:
    is_listening = any(reader.end is None for reader in client.readers.values())
    return is_listening or not all(client.commands.values())
