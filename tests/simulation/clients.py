"""Clients as the world plays them: each checks its streams as they arrive; people ask, pause,
operate and look on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import (
    Cancel,
    ClientDelta,
    ClientMessage,
    Deltas,
    Done,
    Event,
    Failed,
    Generate,
    Load,
    Notice,
    Ping,
    Prioritize,
    Reload,
    Reply,
    Restart,
    StatusQuery,
    Stop,
    Subscribe,
    Unload,
)
from mlxsup.protocol.delta_body import read_body
from mlxsup.protocol.ids import ModelName, RequestId, unpack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.request_messages import Attach, CancelRequest, PauseRequest, ResumeRequest
from mlxsup.protocol.states import Channel, FinishReason, NoticeKind, Priority
from mlxsup.supervisor.core.events import (
    Caller,
    ClientGone,
    ClientSaid,
    ConnectionId,
    Reloaded,
    ReloadRefused,
    ShutdownAsked,
)

from .books import Ask, Place
from .ground import Link, check
from .plan import (
    Kind,
    Prompt,
    answer_channel,
    answer_finish,
    answer_length,
    answer_shown,
    answer_token,
    ask_for_in_contrast,
    habits,
    other_launch,
)
from .requests import PROCESSES, Listener, ask_for

if TYPE_CHECKING:
    from .world import World


# ---------------------------------------------------------------- clients


@dataclass(slots=True, kw_only=True)
class Stream:
    """What one client has received for one request."""

    ask: Ask
    tokens: int = 0
    pieces: int = 0
    text: dict[Channel, str] = field(default_factory=dict)
    end: Done | Failed | None = None


@dataclass(slots=True, kw_only=True)
class Client:
    """One connection.

    Attributes:
        process: the process behind it; empty if the shell could not find it.
        up, down: its link, in both directions.
        said: how many ids it has used.
        streams: by request id, ended ones too.
        readers: those that were sent to join a stream, by id.
        commands: whether each command has been answered, by id.
        is_slow: it does not read: what waits for it is thrown away, ends excepted.
        has_left, is_gone: it has left; the supervisor knows.
        twins: second uses of an id that were sent and not answered.
        unheard: what was said after the supervisor had ended.
        subscriptions: ids of those that were sent, the latest last.
    """

    name: bytes
    process: str
    up: Link
    down: Link
    said: int = 0
    streams: dict[str, Stream] = field(default_factory=dict)
    readers: dict[str, Listener] = field(default_factory=dict)
    commands: dict[str, bool] = field(default_factory=dict)
    subscriptions: list[str] = field(default_factory=list)
    is_slow: bool = False
    has_left: bool = False
    is_gone: bool = False
    twins: int = 0
    unheard: set[str] = field(default_factory=set)

    def open_streams(self) -> list[Stream]:
        """Those whose end has not arrived."""
        return [stream for stream in self.streams.values() if stream.end is None]

    def send_down(self, message: Message) -> None:
        """The shell sends it, or drops it: nothing but ends goes to those who do not read."""
        if not (self.is_slow and isinstance(message, Deltas | Event)):
            self.down.send(lambda: self._receive(message))

    def check_ends(self) -> None:
        """Everything was answered."""
        for stream in self.streams.values():
            check("unanswered", stream.end or stream.ask.id in self.unheard, stream.ask)
        for id, reader in self.readers.items():
            check("reader unanswered", reader.end or id in self.unheard, reader)
        for id, is_answered in self.commands.items():
            check("command unanswered", is_answered or id in self.unheard, id)
        check("command unanswered", self.twins == 0, "a second use of an id")

    def _receive(self, message: Message) -> None:
        if self.has_left:
            return
        match message:
            case Deltas(deltas=deltas):
                for delta in deltas:
                    if delta.id in self.readers:
                        self.readers[delta.id].takes(delta)
                    else:
                        self._take(self.streams[delta.id], delta)
            case Done(id=id) | Failed(id=id) if id in self.readers:
                self.readers[id].ends(message, is_slow=self.is_slow)
            case Done():
                self._done(self.streams[message.id], message)
            case Failed(id=id):
                if message.error["code"] == "duplicate_id":
                    self.twins -= 1
                elif id in self.streams:
                    self._failed(self.streams[id], message)
                elif id in self.subscriptions:
                    self.subscriptions.remove(id)
                else:
                    self._answered(id)
            case Reply(id=id):
                self._answered(id)
            case Notice(id=id, kind=kind):
                self._noticed(self.streams[id], kind)
            case Event(id=id):
                check("event without subscription", id in self.subscriptions, id)
            case _:
                raise AssertionError(message)

    def _answered(self, id: str) -> None:
        check("answer to nobody", id in self.commands, id)
        check("answered twice", not self.commands[id], id)
        self.commands[id] = True

    def _noticed(self, stream: Stream, kind: NoticeKind) -> None:
        check("notice after the end", stream.end is None, kind)
        check("notice to nobody", stream.ask.wants_notices, kind)

    def _take(self, stream: Stream, delta: ClientDelta) -> None:
        ask, accepted = stream.ask, stream.ask.acceptance
        check("after the end", stream.end is None, ask)
        check("token before acceptance", accepted is not None, ask)
        assert accepted is not None
        check("sequence", delta.seq == stream.pieces or self.is_slow, f"{ask}: {delta.seq}")
        stream.pieces = delta.seq + 1
        if self.is_slow:
            return
        body = read_body(delta.body)
        for token in unpack_tokens(delta.tokens):
            expected = answer_token(accepted, stream.tokens)
            check("tokens", token == expected, f"{ask}: token {stream.tokens} is {token}")
            check("channel", body.channel == answer_channel(accepted, stream.tokens), ask)
            stream.tokens += 1
        stream.text[body.channel] = stream.text.get(body.channel, "") + body.text
        is_end = stream.tokens == answer_length(accepted)
        shown = answer_shown(accepted, stream.tokens, is_end=is_end)
        received = "".join(stream.text.values())
        check("text", received == shown, f"{ask}: {received!r} and not {shown!r}")

    def _done(self, stream: Stream, done: Done) -> None:
        ask, accepted = stream.ask, stream.ask.acceptance
        check("two ends", stream.end is None, ask)
        stream.end = done
        if self.is_slow:
            return
        check("pieces counted", done.seq == stream.pieces, f"{ask}: {done.seq}")
        check("resumed counted", done.resumed == ask.resumed, f"{ask}: {done.resumed}")
        check("pauses counted", done.paused == ask.paused, f"{ask}: {done.paused}")
        check("warnings", done.warnings == ask.warnings, f"{ask}: {done.warnings}")
        usage = done.usage
        check("usage of the answer", usage.completion_tokens == stream.tokens, f"{ask} {usage}")
        if accepted is None:
            check("usage of the prompt", usage.prompt_tokens == 0, f"{ask} {usage}")
            check("seed", done.seed is None, f"{ask}: {done.seed}")
        else:
            prompt = len(accepted.prompt_tokens) // 4
            check("usage of the prompt", usage.prompt_tokens == prompt, f"{ask} {usage}")
            check("seed", done.seed == accepted.seed, f"{ask}: {done.seed}")
            queued_s = (ask.started_at if ask.has_begun else ask.ended_at) - ask.arrived_at
            check("timings", abs(done.timings.queued_s - queued_s) < 1e-6, f"{ask}: {queued_s}")
        check("usage of the cache", usage.cached_tokens == ask.cached, f"{ask} {usage}")
        times = done.timings
        first_s = 0.0 if ask.first_token_at is None else ask.first_token_at - ask.arrived_at
        check("timings", abs(times.first_token_s - first_s) < 1e-6, f"{ask}: {times}")
        check("timings", abs(times.total_s - (ask.ended_at - ask.arrived_at)) < 1e-6, ask)
        since = ask.ended_at if ask.paused_at is None else ask.paused_at
        paused_s = ask.paused_s + ask.ended_at - since
        check("time paused", abs(times.paused_s - paused_s) < 1e-6, f"{ask}: {times}")
        if done.finish_reason is not FinishReason.CANCELLED:
            check("finished unaccepted", accepted is not None, ask)
            assert accepted is not None
            check("whole answer", stream.tokens == answer_length(accepted), ask)
            check("finish reason", done.finish_reason == answer_finish(accepted), ask)

    def _failed(self, stream: Stream, failed: Failed) -> None:
        check("two ends", stream.end is None, stream.ask)
        stream.end = failed
        sent = failed.error["detail"].get("tokens_sent")
        if not self.is_slow:
            check("tokens_sent", sent in (None, stream.tokens), f"{stream.ask}: {sent}")


# ---------------------------------------------------------------- hands

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
        self._own_dice = world.plan.dice("hands")

    def begin(self) -> None:
        """From now on nothing stays paused for ever."""
        self._world.time.after(LOOKS_S, self._look)

    def pause(self) -> None:
        """Somebody pauses any open request; some are paused already, or must not be."""
        opened = [ask for ask in self._people.asked if ask.is_open]
        if opened:
            self.tell(PauseRequest, self._dice.choice(opened))

    def resume(self) -> None:
        """Somebody resumes a paused request, or one that is not."""
        opened = [ask for ask in self._people.asked if ask.is_open]
        paused = [ask for ask in opened if ask.is_pausing or ask.place is Place.PAUSED]
        if paused and self._dice.random() < 0.9:
            self.tell(ResumeRequest, self._dice.choice(paused))
        elif opened:
            self.tell(ResumeRequest, self._dice.choice(opened))

    def prioritize_later(self, ask: Ask, dice: random.Random) -> None:
        """Somebody gives a request another class: others may have the same id, or it has ended."""

        def prioritize() -> None:
            if not self._world.is_healing:
                priority = dice.choice(tuple(Priority))
                self._people.command(
                    lambda id: Prioritize(id=id, request=RequestId(ask.id), priority=priority)
                )

        self._world.time.after(dice.uniform(0.0, 1.0), prioritize)

    def tell(self, kind: type[PauseRequest | ResumeRequest], ask: Ask) -> None:
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


# ---------------------------------------------------------------- operators


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
        self._own_dice = world.plan.dice("operators")
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


# ---------------------------------------------------------------- people

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
CROWD = 10
"""Readers of one request that come together: more than there may be."""
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
        self.asked: list[Ask] = []
        self._own_dice = world.plan.dice("people")
        self.hands = Hands(world, self)
        self.operators = Operators(world, self)
        weights = habits(self._kind, is_limited=world.plan.budget_bytes is not None)
        self._acts = [self._act_of(name) for name in weights]
        self._weights = list(weights.values())

    def begin(self) -> None:
        """A few requests at once, then whatever the dice say."""
        for _ in range(self._dice.randint(1, 6)):
            self._ask()
        self.hands.begin()
        self._act()

    def awaited(self) -> bool:
        """Whether anybody who is there waits for something."""
        return any(map(_waits, self.clients))

    def _connect(self) -> Client:
        self._connected += 1
        name = b"client%d" % self._connected
        return Client(
            name=name,
            process=PROCESSES[self._connected % len(PROCESSES)],
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
        for owner in (self.hands, self.operators):
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
        ask_for(self._own_dice, ask)
        ask_for_in_contrast(self._world.plan, ask)
        if self._own_dice.random() < 0.1:
            self.hands.prioritize_later(ask, self._own_dice)
        self.send(client, ask)
        if dice.random() < (HASTY_SHARE_OF_REFUSED if ask.prompt.is_refused else HASTY_SHARE):
            cancel = Cancel(id=RequestId(ask.id))
            wait_s = dice.choice((0.0, 0.1, 0.5))
            self._world.time.after(dice.uniform(0.0, wait_s), lambda: self.say(client, cancel))

    def send(self, client: Client, ask: Ask) -> None:
        """Send a request."""
        self.asked.append(ask)
        self._world.prompts.add(ask.prompt)
        self._world.record.is_sent(ask)
        client.streams[ask.id] = Stream(ask=ask)
        self.say(client, ask.message())

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
        self.leave(self._dice.randrange(len(self.clients)))

    def leave(self, place: int) -> None:
        """A client leaves, and another one comes."""
        client = self.clients[place]
        client.has_left = True
        client.up.send(lambda: self.gone(client))
        self.clients[place] = self._connect()

    def _slow(self) -> None:
        self.be_slow(self.client())

    def be_slow(self, client: Client) -> None:
        """A client does not read: it is given up, and leaves after that."""
        if not client.is_slow:
            self._world.too_slow(client)

            def leave() -> None:
                if client in self.clients:
                    self.clients[self.clients.index(client)] = self._connect()
                    client.has_left = True
                    client.up.send(lambda: self.gone(client))

            self._world.time.after(self._dice.uniform(0.0, 2.0), leave)

    def gone(self, client: Client) -> None:
        client.is_gone = True
        world = self._world
        world.handle(ClientGone(now=world.time.now, connection=ConnectionId(client.name)))

    def command(self, message_of: Callable[[RequestId], ClientMessage]) -> None:
        """Somebody sends a command, which gets an id of its own."""
        client = self.client()
        id = RequestId(self.new_id(client))
        client.commands[id] = False
        self.say(client, message_of(id))

    def _attach(self) -> None:
        if ask := self._any_ask():
            self.join(ask)

    def _crowd(self) -> None:
        if ask := self._any_ask():
            for _ in range(CROWD):
                self.join(ask)

    def join(self, ask: Ask) -> Listener:
        """Have a client join the stream of a request."""
        client = self.client()
        id = RequestId(self.new_id(client))
        listener = Listener(connection=client.name, id=id)
        client.readers[id] = self._world.record.joining.sent[client.name, id] = listener
        self.say(client, Attach(id=id, request=self._name_of(ask)))
        return listener

    def _stop_listening(self) -> None:
        client = self.client()
        listening = [id for id, reader in client.readers.items() if reader.end is None]
        if listening:
            self.say(client, Cancel(id=RequestId(self._dice.choice(listening))))

    def _cancel_any(self) -> None:
        if ask := self._any_ask():
            self.cancel_by_name(ask)

    def cancel_by_name(self, ask: Ask) -> None:
        """Cancel a request in the name of any client."""
        name = self._name_of(ask)
        self.command(lambda id: CancelRequest(id=id, request=name))

    def _any_ask(self) -> Ask | None:
        """Return any open request, or now and then one that has ended."""
        opened = [ask for ask in self.asked if ask.is_open]
        some = opened if self._dice.random() < 0.95 else self.asked
        return self._dice.choice(some) if some else None

    def _name_of(self, ask: Ask) -> RequestId:
        """Return a name of a request: its number if that is known, because ids are not unique."""
        return RequestId(_number(ask) if self._dice.random() < 0.8 else ask.id)

    def _quiet(self) -> None:
        """Nothing happens for a while."""


def _waits(client: Client) -> bool:
    is_listening = any(reader.end is None for reader in client.readers.values())
    return bool(client.open_streams()) or is_listening or not all(client.commands.values())
