"""What people do: clients that ask, cancel and leave."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import (
    Cancel,
    ClientMessage,
    Generate,
)
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.message import Message
from mlxsup.supervisor.core.events import (
    ClientGone,
    ClientSaid,
    ConnectionId,
)

from . import contrast, shares
from .asks import Ask
from .clients import Client, Stream
from .habits import habits
from .hands import Hands
from .load_options import Saying
from .operators import Operators
from .plan import Kind, Prompt

if TYPE_CHECKING:
    from .world import World

CONNECTIONS = 3
ACTS_S = 0.15
"""The mean time from one act to the next."""

QUIET_S = 5.0
HASTY_SHARE = 0.08
"""Of requests that are cancelled soon after they were sent, wherever they have come."""

HASTY_SHARE_OF_REFUSED = 0.4
"""Of those that the worker will reject, so that cancels and rejections cross."""

AN_HOUR_S = 3700.0

FORGIVEN_S = 2.0
"""Somebody who has restarted a model asks it again within so long."""

BURST = 8
"""Requests at once, after an hour at rest: more than the rows that a lack of memory leaves."""


class People:
    """Every client, and what they say.

    Args:
        world: that they live in.
    """

    def __init__(self, world: World) -> None:
        self._world, self._dice = world, world.plan.random
        self._kind = world.plan.kind
        self._connected = 0
        self.clients = [self._connect() for _ in range(CONNECTIONS)]
        self.past: list[Client] = []
        self.asked: list[Ask] = []
        self._own_dice = random.Random(f"people {world.plan.seed}")
        self._saying = Saying(world.plan.seed)
        self._hands = Hands(world, self)
        self.operators = Operators(world, self)
        weights = habits(self._kind, is_limited=world.plan.budget_bytes is not None)
        self._acts = [self._act_of(name) for name in weights]
        self._weights = list(weights.values())

    def begin(self) -> None:
        """A few requests at once, then whatever the dice say."""
        for _ in range(self._dice.randint(1, 6)):
            self._ask()
        self._hands.begin()
        self._act()

    def awaited(self) -> bool:
        """Whether anybody who is there waits for something."""
        return any(
            client.open_streams() or not all(client.commands.values()) for client in self.clients
        )

    def _connect(self) -> Client:
        self._connected += 1
        name = b"client%d" % self._connected
        return Client(
            name=name,
            process=shares.PROCESSES[self._connected % len(shares.PROCESSES)],
            up=self._world.link("client_up"),
            down=self._world.link("client_down"),
        )

    # ------------------------------------------------------------ what arrives

    def deliver(self, connection: bytes, message: Message) -> None:
        """The supervisor sends a client something; dropped if it is gone."""
        for client in self.clients:
            if client.name == connection:
                client.send_down(message)

    def check_ends(self) -> None:
        """Everybody who stayed was answered."""
        for client in self.clients:
            client.check_ends()

    # ------------------------------------------------------------ what they do

    def _act(self) -> None:
        if self._world.is_healing:
            return
        act = self._dice.choices(self._acts, weights=self._weights)[0]
        act()
        wait_s = self._dice.expovariate(1 / ACTS_S)
        if act == self._quiet:
            wait_s += self._dice.uniform(0.5, 1.0) * QUIET_S
        self._world.time.after(wait_s, self._act)

    def _act_of(self, name: str) -> Callable[[], None]:
        for owner in (self._hands, self.operators):
            if hasattr(owner, name):
                act: Callable[[], None] = getattr(owner, name)
                return act
        own: Callable[[], None] = getattr(self, f"_{name}")
        return own

    def say_goodbye(self) -> None:
        """All is well: the supervisor is asked to end, sometimes after an hour at rest."""
        world = self._world
        rests = {Kind.POISON: 0.3, Kind.LOADS: 0.5}
        if self._dice.random() >= rests.get(self._kind, 0.0):
            self.operators.signal()
            return
        for entry in self.operators.entries:
            self.operators.unload_model(entry.name)
        world.time.after(60.0 + AN_HOUR_S, self.operators.status)
        if self._kind is Kind.POISON:
            world.time.after(70.0 + AN_HOUR_S, self._again)
            world.time.after(75.0 + AN_HOUR_S, self._again)
        else:
            world.time.after(70.0 + AN_HOUR_S, self._burst)
        world.time.after(100.0 + AN_HOUR_S, self.operators.signal)
        world.rest(200.0 + AN_HOUR_S)

    def client(self) -> Client:
        """Any of those who are there."""
        return self._dice.choice(self.clients)

    def model(self) -> ModelName:
        """Any of those that the plan has."""
        return self._dice.choice(self._world.plan.models).name

    def say(
        self, client: Client, message: ClientMessage, *, only_if: Callable[[], bool] | None = None
    ) -> None:
        """A client sends something, unless there is no reason any more when it arrives."""
        world = self._world

        def deliver() -> None:
            if world.has_finished:
                client.unheard.add(message.id)
            elif not client.is_gone and (only_if is None or only_if()):
                world.handle(
                    ClientSaid(
                        now=world.time.now,
                        connection=ConnectionId(client.name),
                        message=message,
                        process=client.process,
                    )
                )

        client.up.send(deliver)

    @staticmethod
    def new_id(client: Client) -> str:
        """Each client counts for itself, so that several use the same id at the same time."""
        client.said += 1
        return f"r{client.said}"

    def _ask(self) -> None:
        self._generate(self.client(), self.model(), self._world.plan.new_prompt())

    def _burst(self) -> None:
        for _ in range(BURST):
            self._ask()

    def _again(self) -> None:
        """The same request once more, once it has ended: it may be under suspicion, or worse."""
        ended = [ask for ask in self.asked if ask.end is not None]
        if ended:
            ask = self._dice.choice(ended)
            self.asked = [one for one in self.asked if one.prompt is not ask.prompt]
            self._generate(self.client(), ask.model, ask.prompt, may_resume=ask.may_resume)

    def _forgive(self) -> None:
        """Somebody restarts a model that refuses a request for its crashes, and asks it again."""
        refused = [ask for ask in self.asked if ask.code == "quarantined"]
        if refused:
            ask = self._dice.choice(refused)
            self.operators.restart_model(ask.model)
            client = self.client()
            self._world.time.after(
                self._dice.uniform(0.0, FORGIVEN_S),
                lambda: self._generate(client, ask.model, ask.prompt),
            )

    def _copy(self) -> None:
        """The same request once more while it is open: both are under the same suspicion."""
        opened = [ask for ask in self.asked if ask.is_open]
        if opened:
            ask = self._dice.choice(opened)
            self._generate(self.client(), ask.model, ask.prompt, may_resume=ask.may_resume)

    def _generate(
        self, client: Client, model: ModelName, prompt: Prompt, *, may_resume: bool | None = None
    ) -> None:
        dice, is_limited = self._dice, self._world.plan.is_limited
        if may_resume is None:
            may_resume = dice.random() < 0.9
        ask = Ask(
            connection=client.name,
            id=self.new_id(client),
            model=model,
            prompt=prompt,
            may_resume=may_resume,
            wants_notices=dice.random() < 0.15,
        )
        if is_limited:
            ask.queue_s = dice.choice((None, None, 0.0, 1.5))
            ask.first_token_s = dice.choice((None, None, 1.0, 3.0))
            ask.total_s = dice.choice((None, None, None, 1.0, 6.0))
        shares.ask_for(self._own_dice, ask)
        contrast.ask_for(self._world.plan, ask)
        self._saying.ask_for(ask)
        if self._own_dice.random() < 0.1:
            self._hands.prioritize_later(ask, self._own_dice)
        self.asked.append(ask)
        self._world.prompts.add(prompt)
        self._world.record.is_sent(ask)
        client.streams[ask.id] = Stream(ask=ask)
        self.say(client, ask.message())
        if dice.random() < (HASTY_SHARE_OF_REFUSED if ask.prompt.is_refused else HASTY_SHARE):
            cancel = Cancel(id=RequestId(ask.id))
            wait_s = dice.choice((0.0, 0.1, 0.5))
            self._world.time.after(dice.uniform(0.0, wait_s), lambda: self.say(client, cancel))

    def _twin(self) -> None:
        client = self.client()
        if opened := client.open_streams():
            ask = self._dice.choice(opened).ask

            def is_open() -> bool:
                record = self._world.record
                is_open = ask.is_open and record.is_served(ask.model)
                client.twins += is_open
                return is_open

            self.say(client, ask.message(), only_if=is_open)

    def _unknown(self) -> None:
        self._generate(self.client(), ModelName("nobody"), self._world.plan.new_prompt())

    def _nonsense(self) -> None:
        client = self.client()
        message = Generate(id=RequestId(self.new_id(client)), model=self.model(), timeout_s=-1.0)
        client.commands[message.id] = False
        self.say(client, message)

    def _cancel(self) -> None:
        client = self.client()
        if opened := client.open_streams():
            stream = self._dice.choice(opened)
            self.say(client, Cancel(id=RequestId(stream.ask.id)))

    def _leave(self) -> None:
        place = self._dice.randrange(len(self.clients))
        client = self.clients[place]
        client.has_left = True
        client.up.send(lambda: self._gone(client))
        self.clients[place] = self._connect()
        self.past.append(client)

    def _slow(self) -> None:
        """A client does not read: it is given up, and leaves after that."""
        client = self.client()
        if not client.is_slow:
            self._world.too_slow(client)

            def leave() -> None:
                if client in self.clients:
                    self.clients[self.clients.index(client)] = self._connect()
                    client.has_left = True
                    client.up.send(lambda: self._gone(client))

            self._world.time.after(self._dice.uniform(0.0, 2.0), leave)

    def _gone(self, client: Client) -> None:
        client.is_gone = True
        world = self._world
        world.handle(ClientGone(now=world.time.now, connection=ConnectionId(client.name)))

    def command(self, message_of: Callable[[RequestId], ClientMessage]) -> None:
        """Somebody sends a command, which gets an id of its own."""
        client = self.client()
        id = RequestId(self.new_id(client))
        client.commands[id] = False
        self.say(client, message_of(id))

    def _quiet(self) -> None:
        """Nothing happens for a while."""
