"""Clients as the world plays them: people ask, pause, operate, listen, and come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mlxsup.protocol import client_messages as say
from mlxsup.protocol.client_messages import (
    Attach,
    Cancel,
    CancelRequest,
    ClientMessage,
    Deltas,
    Done,
    Failed,
    Generate,
    PauseRequest,
    ResumeRequest,
)
from mlxsup.protocol.ids import Caller, ConnectionId, ModelName, RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import Priority
from mlxsup.supervisor.core import events
from mlxsup.supervisor.core.errors import bad_configuration

from .books import Ask, Listener, Place, Stream
from .ground import Link, check
from .plan import Kind, Prompt, habits

if TYPE_CHECKING:
    from .world import World

ACCOUNTS = ("ann", "bob", "eve")
PROCESSES = ("", "process 7@1", "process 8@1")
AN_HOUR_S = 3700.0


@dataclass(slots=True, kw_only=True)
class Client:
    """One connection."""

    name: bytes
    process: str  # behind it; empty if the shell could not find it
    up: Link
    down: Link
    said: int = 0
    streams: dict[str, Stream] = field(default_factory=dict)  # readers of other streams, too
    commands: dict[str, bool] = field(default_factory=dict)  # whether each was answered
    subscriptions: list[str] = field(default_factory=list)
    is_slow: bool = False  # it does not read: what waits for it is thrown away, ends excepted
    has_left: bool = False
    is_gone: bool = False  # the supervisor knows
    twins: int = 0  # second uses of an id that were sent and not answered
    unheard: set[str] = field(default_factory=set)  # what was said after the daemon had ended

    def new_id(self) -> RequestId:
        """Return an id: each client counts for itself, so that several use the same one."""
        self.said += 1
        return RequestId(f"r{self.said}")

    def open_streams(self) -> list[Stream]:
        """Return its own requests whose end has not arrived."""
        own = (one for one in self.streams.values() if not isinstance(one, Listener))
        return [stream for stream in own if stream.end is None]

    def listening(self) -> list[str]:
        streams = self.streams.items()
        return [id for id, one in streams if isinstance(one, Listener) and one.end is None]

    @property
    def waits(self) -> bool:
        is_answered = all(stream.end for stream in self.streams.values())
        return not (is_answered and all(self.commands.values()))

    def send_down(self, message: Message) -> None:
        """Send it as the shell does: nothing but ends goes to those who do not read."""
        if not (self.is_slow and isinstance(message, Deltas | say.Event)):
            self.down.send(lambda: self._receive(message))

    def check_ends(self) -> None:
        """Raise unless everything was answered."""
        for id, stream in self.streams.items():
            check("unanswered", stream.end or id in self.unheard, stream)
        for id, is_answered in self.commands.items():
            check("command unanswered", is_answered or id in self.unheard, id)
        check("command unanswered", self.twins == 0, "a second use of an id")

    def _receive(self, message: Message) -> None:
        if self.has_left:
            return
        match message:
            case Deltas(deltas=deltas):
                for delta in deltas:
                    self.streams[delta.id].take(delta)
            case Failed(error=error) if error.code == "duplicate_id":
                self.twins -= 1
            case Done(id=id) | Failed(id=id) if id in self.streams:
                self.streams[id].ends(message, is_slow=self.is_slow)
            case Failed(id=id) if id in self.subscriptions:
                self.subscriptions.remove(id)
            case Failed(id=id) | say.Reply(id=id):
                check("answer to nobody", id in self.commands, id)
                check("answered twice", not self.commands[id], id)
                self.commands[id] = True
            case say.Notice(id=id, kind=kind):
                stream = self.streams[id]
                check("notice after the end", stream.end is None, kind)
                check("notice to nobody", stream.ask and stream.ask.wants_notices, kind)
            case say.Event(id=id):
                check("event without subscription", id in self.subscriptions, id)
            case _:
                raise AssertionError(message)


class People:
    """Every client, and what they say."""

    def __init__(self, world: World) -> None:
        self._world, self._dice = world, world.plan.random
        self._kind = world.plan.kind
        self._own, self._hands, self._operators = map(
            world.plan.dice, ("people", "hands", "operators")
        )
        self._connected = 0
        self.clients = [self._connect() for _ in range(3)]
        self.asked: list[Ask] = []
        self.entries = list(world.plan.models)  # what the file says, read or not
        weights = habits(self._kind, has_budget=world.plan.budget_bytes is not None)
        self._acts: list[Callable[[], None]] = [getattr(self, f"_{name}") for name in weights]
        self._weights = list(weights.values())

    def begin(self) -> None:
        """Ask for a little at once, then do whatever the dice say."""
        for _ in range(self._dice.randint(1, 6)):
            self._ask()
        self.resume_in_time()
        self._act()

    def awaited(self) -> bool:
        """True if anyone who is there waits for something."""
        return any(client.waits for client in self.clients)

    def deliver(self, connection: bytes, message: Message) -> None:
        """Take what the supervisor sends a client; dropped if it is gone."""
        for client in self.clients:
            if client.name == connection:
                client.send_down(message)

    def check_ends(self) -> None:
        for client in self.clients:
            client.check_ends()

    def say(
        self, client: Client, message: ClientMessage, *, only_if: Callable[[], bool] | None = None
    ) -> None:
        """Send something, unless there is no reason any more when it arrives."""
        world = self._world

        def deliver() -> None:
            if world.has_finished:
                client.unheard.add(message.id)
            elif not client.is_gone and (only_if is None or only_if()):
                world.handle(
                    events.ClientSaid(
                        now=world.time.now,
                        connection=ConnectionId(client.name),
                        message=message,
                        process=client.process,
                    )
                )

        client.up.send(deliver)

    def command(
        self, kind: Callable[..., ClientMessage], *, by: Client | None = None, **fields: Any
    ) -> None:
        """Send a command in the name of any client, or of one."""
        client = by or self._client()
        id = client.new_id()
        client.commands[id] = False
        self.say(client, kind(id=id, **fields))

    def send(self, client: Client, ask: Ask) -> None:
        """Send a request."""
        self.asked.append(ask)
        self._world.prompts[ask.prompt.number] = ask.prompt
        self._world.bodies[ask.prompt.body] = ask.prompt
        self._world.record.asks[ask.connection, ask.id] = ask
        client.streams[ask.id] = Stream(ask=ask)
        self.say(client, ask.message())

    def say_goodbye(self) -> None:
        """Ask the supervisor to end, sometimes after an hour at rest."""
        world = self._world
        rests = {Kind.POISON: 0.3, Kind.LOADS: 0.5}
        if self._dice.random() >= rests.get(self._kind, 0.0):
            self._signal()
            return
        for entry in self.entries:
            self.command(say.Unload, model=entry.name)
        world.time.after(60.0 + AN_HOUR_S, self._status)
        if self._kind is Kind.POISON:
            world.time.after(70.0 + AN_HOUR_S, self._again)
            world.time.after(75.0 + AN_HOUR_S, self._again)
        else:  # more than the rows that a lack of memory leaves
            world.time.after(70.0 + AN_HOUR_S, self._burst)
        world.time.after(100.0 + AN_HOUR_S, self._signal)
        world.rest_s = 200.0 + AN_HOUR_S

    # ------------------------------------------------------------ inside

    def _connect(self) -> Client:
        self._connected += 1
        return Client(
            name=b"client%d" % self._connected,
            process=PROCESSES[self._connected % len(PROCESSES)],
            up=self._world.link("client_up"),
            down=self._world.link("client_down"),
        )

    def _act(self) -> None:
        if self._world.is_healing:
            return
        act = self._dice.choices(self._acts, weights=self._weights)[0]
        act()
        wait_s = self._dice.expovariate(1 / 0.15)
        if act == self._quiet:
            wait_s += self._dice.uniform(0.5, 1.0) * 5.0
        self._world.time.after(wait_s, self._act)

    def _quiet(self) -> None:
        pass

    def _client(self) -> Client:
        return self._dice.choice(self.clients)

    def _client_of(self, ask: Ask) -> Client | None:
        return next((one for one in self.clients if one.name == ask.connection), None)

    def _model(self) -> ModelName:
        return self._dice.choice(self._world.plan.models).name

    def _open(self) -> list[Ask]:
        return [ask for ask in self.asked if ask.is_open]

    # ------------------------------------------------------------ requests

    def _ask(self) -> None:
        client, model = self._client(), self._model()
        self._generate(client, model, self._world.plan.new_prompt())

    def _burst(self) -> None:
        for _ in range(8):
            self._ask()

    def _generate(
        self, client: Client, model: ModelName, prompt: Prompt, *, may_resume: bool | None = None
    ) -> None:
        dice, own, plan = self._dice, self._own, self._world.plan
        if may_resume is None:
            may_resume = dice.random() < 0.9
        ask = Ask(
            connection=client.name,
            id=client.new_id(),
            model=model,
            prompt=prompt,
            may_resume=may_resume,
            wants_notices=dice.random() < 0.15,
        )
        if plan.is_limited:
            ask.queue_s = dice.choice((None, None, 0.0, 1.5))
            ask.first_token_s = dice.choice((None, None, 1.0, 3.0))
            ask.total_s = dice.choice((None, None, None, 1.0, 6.0))
        ask.client = own.choice((None, None, *ACCOUNTS))
        ask.priority = own.choice((None, None, None, *Priority))
        if plan.has_contrast:
            is_highest = ask.prompt.number % 4 == 0
            ask.priority = Priority.INTERACTIVE if is_highest else Priority.BATCH
        if own.random() < 0.1:
            self._world.time.after(own.uniform(0.0, 1.0), lambda: self._prioritize(ask))
        self.send(client, ask)
        # Cancels of what the worker rejects often cross the rejection.
        if dice.random() < (0.4 if ask.prompt.is_refused else 0.08):
            cancel, wait_s = Cancel(id=RequestId(ask.id)), dice.choice((0.0, 0.1, 0.5))
            self._world.time.after(dice.uniform(0.0, wait_s), lambda: self.say(client, cancel))

    def _prioritize(self, ask: Ask) -> None:
        """Give a request another class: others may have the same id, or it has ended."""
        if not self._world.is_healing:
            priority = self._own.choice(tuple(Priority))
            self.command(say.Prioritize, request=RequestId(ask.id), priority=priority)

    def _again(self) -> None:
        """Send a request once more that has ended: it may be under suspicion, or worse."""
        ended = [ask for ask in self.asked if ask.end is not None]
        if ended:
            ask = self._dice.choice(ended)
            self.asked = [one for one in self.asked if one.prompt is not ask.prompt]
            self._generate(self._client(), ask.model, ask.prompt, may_resume=ask.may_resume)

    def _copy(self) -> None:
        """Send a request once more while it is open: both are under the same suspicion."""
        if opened := self._open():
            ask = self._dice.choice(opened)
            self._generate(self._client(), ask.model, ask.prompt, may_resume=ask.may_resume)

    def _forgive(self) -> None:
        """Restart a model that refuses a request for its crashes, and ask it again."""
        refused = [ask for ask in self.asked if ask.code == "quarantined"]
        if refused:
            ask = self._dice.choice(refused)
            self._restart(ask.model)
            client = self._client()
            self._world.time.after(
                self._dice.uniform(0.0, 2.0),
                lambda: self._generate(client, ask.model, ask.prompt),
            )

    def _twin(self) -> None:
        """Use an id a second time."""
        client = self._client()
        if opened := client.open_streams():
            ask = self._dice.choice(opened).ask
            assert ask is not None

            def is_open() -> bool:
                is_open = ask.is_open and self._world.record.is_served(ask.model)
                client.twins += is_open
                return is_open

            self.say(client, ask.message(), only_if=is_open)

    def _unknown(self) -> None:
        client = self._client()
        self._generate(client, ModelName("nobody"), self._world.plan.new_prompt())

    def _nonsense(self) -> None:
        client = self._client()
        id = client.new_id()
        client.commands[id] = False
        self.say(client, Generate(id=id, model=self._model(), timeout_s=-1.0))

    def _cancel(self) -> None:
        client = self._client()
        if opened := client.open_streams():
            ask = self._dice.choice(opened).ask
            assert ask is not None
            self.say(client, Cancel(id=RequestId(ask.id)))

    def _cancel_any(self) -> None:
        if ask := self._any_ask():
            self.cancel_by_name(ask)

    def cancel_by_name(self, ask: Ask) -> None:
        """Cancel a request in the name of any client."""
        name = self._name_of(ask)
        self.command(CancelRequest, request=name)

    def _any_ask(self) -> Ask | None:
        """Return any open request, or now and then one that has ended."""
        opened = self._open()
        some = opened if self._dice.random() < 0.95 else self.asked
        return self._dice.choice(some) if some else None

    def _name_of(self, ask: Ask) -> RequestId:
        """Return a name of a request: its number if that is known, because ids are not unique."""
        return RequestId(ask.number_name if self._dice.random() < 0.8 else ask.id)

    # ------------------------------------------------------------ pauses

    def _pause(self) -> None:
        """Pause any open request; some are paused already, or must not be."""
        if opened := self._open():
            self.tell(PauseRequest, self._dice.choice(opened))

    def _resume(self) -> None:
        """Resume a paused request, or one that is not."""
        opened = self._open()
        paused = [ask for ask in opened if ask.is_put_aside]
        if paused and self._dice.random() < 0.9:
            self.tell(ResumeRequest, self._dice.choice(paused))
        elif opened:
            self.tell(ResumeRequest, self._dice.choice(opened))

    def tell(self, kind: type[PauseRequest | ResumeRequest], ask: Ask) -> None:
        """Pause or resume a request, in its client's name or another's."""
        own = self._client_of(ask)
        by_others = self._dice.random() < 0.2 or own is None
        client = self._client() if by_others else own
        name = ask.id if self._hands.random() >= 0.2 else ask.number_name
        self.command(kind, by=client, request=RequestId(name))

    def resume_in_time(self) -> None:
        """Have nothing stay paused for ever, once all is to come to its end."""
        world = self._world
        if world.has_finished:
            return
        if world.is_healing:
            for ask in [one for one in world.record.open if one.is_put_aside]:
                self._let_end(ask)
        world.time.after(2.0, self.resume_in_time)

    def _let_end(self, ask: Ask) -> None:
        """Resume a request by a name that only it has; if none is known, its client gives up."""
        is_unique = sum(one.id == ask.id for one in self._world.record.open) == 1
        if is_unique or ask.number_name != ask.id:
            name = ask.id if is_unique else ask.number_name
            self.command(ResumeRequest, request=RequestId(name))
        elif client := self._client_of(ask):
            self.say(client, Cancel(id=RequestId(ask.id)))

    # ------------------------------------------------------------ readers

    def _attach(self) -> None:
        if ask := self._any_ask():
            self.join(ask)

    def _crowd(self) -> None:
        """Join a request with more readers than there may be."""
        if ask := self._any_ask():
            for _ in range(10):
                self.join(ask)

    def join(self, ask: Ask) -> None:
        """Have a client join the stream of a request."""
        client = self._client()
        id = client.new_id()
        listener = Listener(name=f"{client.name.decode()}/{id}")
        client.streams[id] = self._world.record.joining.sent[client.name, id] = listener
        self.say(client, Attach(id=id, request=self._name_of(ask)))

    def _stop_listening(self) -> None:
        client = self._client()
        if listening := client.listening():
            self.say(client, Cancel(id=RequestId(self._dice.choice(listening))))

    # ------------------------------------------------------------ coming and going

    def _leave(self) -> None:
        self.leave(self._dice.randrange(len(self.clients)))

    def leave(self, place: int) -> None:
        """Have a client leave, and another one come."""
        client = self.clients[place]
        client.has_left = True
        client.up.send(lambda: self._gone(client))
        self.clients[place] = self._connect()

    def _gone(self, client: Client) -> None:
        client.is_gone = True
        connection = ConnectionId(client.name)
        self._world.handle(events.ClientGone(now=self._world.time.now, connection=connection))

    def _slow(self) -> None:
        self.be_slow(self._client())

    def be_slow(self, client: Client) -> None:
        """Have a client not read: it is given up, and leaves after that."""
        if not client.is_slow:
            self._world.too_slow(client)

            def leave() -> None:
                if client in self.clients:
                    self.leave(self.clients.index(client))

            self._world.time.after(self._dice.uniform(0.0, 2.0), leave)

    def _subscribe(self) -> None:
        client = self._client()
        client.subscriptions.append(client.new_id())
        self.say(client, say.Subscribe(id=RequestId(client.subscriptions[-1])))

    # ------------------------------------------------------------ operators

    def _ping(self) -> None:
        self.command(say.Ping)

    def _status(self) -> None:
        is_debug = self._dice.random() < 0.2
        self.command(say.StatusQuery, debug=is_debug)

    def _load(self) -> None:
        model = self._model()
        self.command(say.Load, model=model)

    def _dry_load(self) -> None:
        model = self._model()
        self.command(say.Load, model=model, dry_run=True)

    def _unload(self) -> None:
        """Unload a model, often one with paused requests, which then end with it."""
        paused = [ask.model for ask in self.asked if ask.place is Place.PAUSED]
        is_any = not paused or self._operators.random() < 0.4
        model = self._model() if is_any else self._operators.choice(paused)
        self.command(say.Unload, model=model)

    def _restart(self, model: ModelName | None = None) -> None:
        model = model or self._model()
        is_now = self._dice.random() < 0.5
        self.command(say.Restart, model=model, now=is_now)

    def _edit(self) -> None:
        """Edit the file: nothing happens before it is read."""
        dice, entries = self._dice, []
        for entry in self._world.plan.models:
            what = dice.random()
            if what < 0.2:
                continue
            if what < 0.5:
                rows = dice.choice([n for n in range(1, 6) if n != entry.launch.max_concurrency])
                entry = replace(entry, launch=replace(entry.launch, max_concurrency=rows))
            elif what < 0.7:
                entry = replace(entry, idle_unload_s=dice.choice((0.0, 2.5, 4.0)))
            entries.append(entry)
        self.entries = entries

    def _reload(self) -> None:
        if self._dice.random() < 0.3:
            self.read_configuration(None)  # SIGHUP
        else:
            self.command(say.Reload, dry_run=self._operators.random() < 0.4)

    def read_configuration(self, caller: Caller | None, *, is_dry: bool = False) -> None:
        """Have the file read in a moment; what it says then counts, unless it is a dry run."""
        dice, world = self._dice, self._world

        def read() -> None:
            if caller is not None and dice.random() < 0.25:
                error = bad_configuration(["line 3: no such key"])
                world.handle(events.ReloadRefused(now=world.time.now, error=error, caller=caller))
                return
            world.hub.lose_one()
            entries = tuple(map(world.hub.as_read, self.entries or world.plan.models[:1]))
            world.handle(
                events.Reloaded(
                    now=world.time.now,
                    settings=world.plan.settings,
                    models=entries,
                    caller=caller,
                    later=("log_dir",) if dice.random() < 0.3 else (),
                    needs=world.hub.needs(),
                    is_dry=is_dry,
                )
            )

        world.time.after(dice.choice((0.0, 0.05)), read)

    def _stop(self) -> None:
        dice = self._dice
        is_now, timeout_s = dice.random() < 0.3, dice.choice((None, 0.2, 5.0))
        self.command(say.Stop, now=is_now, timeout_s=timeout_s)

    def _signal(self) -> None:
        """Send SIGTERM; sometimes a second one."""
        world = self._world
        world.handle(events.ShutdownAsked(now=world.time.now, is_immediate=False))
        if self._dice.random() < 0.3:
            world.time.after(
                self._dice.uniform(0.0, 1.0),
                lambda: world.handle(events.ShutdownAsked(now=world.time.now, is_immediate=True)),
            )
