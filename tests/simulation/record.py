"""What was said on the links, event by event, and what must follow from it.

Nothing here reads the core: each event is entered before the core sees it, with the ends that it
must bring about, and each action is held against that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxsup.protocol.client_messages import Cancel, ClientMessage, Generate, Prioritize, Stop
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.log_level import ChangeLogLevel
from mlxsup.protocol.packed_rows import Row
from mlxsup.protocol.request_messages import Attach, CancelRequest, PauseRequest, ResumeRequest
from mlxsup.supervisor.core.actions import Action, Spawn
from mlxsup.supervisor.core.events import (
    Appraised,
    ClientGone,
    ClientSaid,
    ClientTooSlow,
    DownloadSaid,
    Event,
    Exited,
    LaunchAppraised,
    Reloaded,
    Sampled,
    ShutdownAsked,
    SpareEnded,
    SpareReady,
    Spawned,
    SpawnFailed,
    Started,
    Tick,
    WorkerBroke,
    WorkerSaid,
    WorkerUnlinked,
)

from . import (
    admission,
    costs,
    deaths,
    doings,
    due_swaps,
    estimates,
    giving_way,
    heard,
    higher,
    leases,
    making_room,
    memory,
    pauses,
    pressure,
    shares,
    stories,
    swaps,
    timely,
    wishes,
)
from .asks import Ask, Place
from .books import Book, Cause, Life, Wanted
from .downloads import Downloads
from .flight import Flight
from .folders import Folders
from .joining import Joining
from .load_options import LoadOptions
from .log_levels import LogLevels
from .log_lines import LogLines
from .plan import Plan
from .spares import Spares
from .violation import check
from .worker import PlayedWorker

Ends = dict[Ask, set[str]]
"""How requests must end in the event at hand: any of these codes, or `done:` and a reason."""


class Record:
    """The oracle's own account of one run.

    Args:
        plan: of the run.
        status: what the supervisor says of itself, to be compared, never believed.
    """

    def __init__(self, plan: Plan, status: Callable[[float], dict[str, Any]]) -> None:
        self.plan = plan
        self.status = status
        self.now = 0.0
        self.event: Event = Started(now=0.0)
        self.books: dict[ModelName, Book] = {e.name: Book(entry=e) for e in plan.models}
        self.asks: dict[tuple[bytes, str], Ask] = {}
        self.open: dict[Ask, None] = {}
        self.limited: dict[Ask, None] = {}
        self.must: Ends = {}
        self.deltas: list[tuple[Ask, Row]] = []
        self.is_twin = self.is_shutting_down = False
        self.machine_bytes = 0
        self.shortage = pressure.Shortage()
        self.commands: dict[tuple[bytes, str], tuple[ClientMessage, float]] = {}
        self.is_unique: dict[tuple[bytes, str], bool] = {}
        self.changes: dict[str, list[str]] = {}
        self.gone: set[bytes] = set()
        self.may: dict[tuple[bytes, str], bool] = {}
        self.to_leave: set[Ask] = set()
        self.left_short: list[Ask] = []
        self.dropped: dict[ModelName, list[Ask]] = {}
        self.makes_room: dict[ModelName, making_room.Making] = {}
        self.tried_again: Ask | None = None
        self.counts: dict[str, int] = {}
        self.raised: dict[ModelName, int] = {}
        self.owed: dict[ModelName, estimates.Owed] = {}
        self.devices = costs.Devices()
        self.spares = Spares()
        self.folders = Folders(plan.seed)
        self.downloads = Downloads()
        self.joining = Joining()
        self.options = LoadOptions()
        self.log_levels = LogLevels()
        self.log_lines = LogLines()
        self.appraised: set[ModelName] = set()
        self.flight = Flight()
        self.questions = 0
        self._admitted = 0

    # ------------------------------------------------------------ what others ask

    def is_sent(self, ask: Ask) -> None:
        """A client has sent a request."""
        self.asks[ask.connection, ask.id] = ask

    def memory_need(self, model: ModelName) -> int:
        """What the process of a model was started with."""
        life = self.books[model].life if model in self.books else None
        return life.granted if life is not None else 0

    def memory_limit(self, model: ModelName) -> int:
        """What the process of a model may hold."""
        life = self.books[model].life if model in self.books else None
        limit = life.launch.memory_limit_bytes if life else None
        return limit or 9000

    def is_served(self, model: ModelName) -> bool:
        """Whether requests for a model are looked at."""
        book = self.books.get(model)
        is_named = book is not None and book.wanted is not Wanted.GONE
        return is_named and not self.is_shutting_down

    def is_answered(self, connection: bytes, id: str) -> None:
        """A command no longer waits for a load."""
        for book in self.books.values():
            book.callers.discard((connection, id))

    def count(self, what: str) -> None:
        """Something that the summary tells."""
        self.counts[what] = self.counts.get(what, 0) + 1

    # ------------------------------------------------------------ events

    def before(self, event: Event) -> None:
        """Enters an event that the core is about to see."""
        self.now, self.event = event.now, event
        self.must, self.deltas, self.is_twin = {}, [], False
        self.flight.begin()
        self.to_leave.clear()
        self.tried_again = None
        for book in self.books.values():
            book.freed = 0
        match event:
            case WorkerSaid():
                life = self.life_of(event.model, event.generation)
                if life is not None:
                    heard.said(self, self.books[event.model], life, event.message)
            case Tick():
                timely.tick(self)
            case ClientSaid():
                self._client_said(event)
            case ClientGone(connection=connection):
                self._client_gone(bytes(connection))
            case ClientTooSlow(connection=connection):
                for ask in self.open:
                    if ask.connection == connection:
                        self.must[ask] = {"slow_consumer"}
                self.joining.is_slow(bytes(connection))
            case SpareReady() | SpareEnded():
                self.spares.seen(self, event)
            case Exited() | SpawnFailed():
                stories.ended(self, event)
                deaths.seen(self, event)
            case DownloadSaid():
                self.downloads.said(self, event)
            case Appraised(needs=needs):
                self.appraised = set(needs)
            case LaunchAppraised():
                self.options.appraised(self, event)
            case Spawned() | WorkerBroke() | WorkerUnlinked():
                heard.process(self, event)
            case Sampled():
                heard.sampled(self, event)
            case Reloaded(needs=needs):
                self.appraised = set(needs)
                self.changes = wishes.changes(self, event)
                wishes.reloaded(self, event)
            case ShutdownAsked(is_immediate=is_immediate):
                wishes.shut_down(self, self.plan.settings.drain_timeout_s, is_now=is_immediate)
            case Started():
                for book in self.books.values():
                    if book.entry.preload:
                        wishes.preload(self, book)
        for book in self.books.values():
            wishes.drained(self, book)
        self._note_who_works()
        memory.refuse(self)
        memory.forget(self)

    def act(self, action: Action) -> None:
        """Holds an action against what is known."""
        doings.judge(self, action)

    def after(self) -> None:
        """The core has said all that it has to say of the event."""
        for ask, codes in self.must.items():
            is_ended = not ask.is_open or timely.is_almost_due(self, ask, codes)
            check("must end", is_ended, f"{ask}: {sorted(codes)} after {self.event}")
        check("delta lost", not self.deltas, self.deltas[:1])
        check("duplicate answered", not self.is_twin, self.event)
        check("not asked to leave", not self.to_leave, [str(ask) for ask in self.to_leave])
        memory.forget(self)
        self._look_at_what_is_said()
        pressure.check_others(self)
        pauses.look(self)
        higher.look(self)
        giving_way.look(self)
        swaps.look(self)
        due_swaps.look(self)
        timely.look(self)
        self.flight.look()
        leases.look(self)
        pressure.look(self)
        estimates.look(self)
        self.spares.look(self)
        self._note_who_works()

    def _look_at_what_is_said(self) -> None:
        self.downloads.look(self)
        self.joining.look(self)
        self.options.look(self)
        self.log_levels.look()
        self.log_lines.look(self)

    def _note_who_works(self) -> None:
        lives = [book.life for book in self.books.values() if book.life]
        working = [life.model for life in lives if life.works_since is not None]
        self.devices.note(self.now, frozenset(working))

    def begins(self, spawn: Spawn, worker: PlayedWorker) -> None:
        """The process that the core asked for is being started."""
        book = self.books[spawn.model]
        book.life = Life(
            model=spawn.model,
            generation=spawn.generation,
            launch=spawn.launch,
            worker=worker,
            spawned_at=self.now,
            is_after_crash=book.is_after_crash,
            is_of_restart=book.is_restarting,
            progress_at=self.now,
        )
        book.retry, book.retry_at, book.drain_until = None, None, None
        book.held = book.life.granted = estimates.need_of(self, book)

    def check_ends(self) -> None:
        """Everything is over."""
        check("unanswered", not self.open, [str(ask) for ask in self.open])
        rows = self.status(self.now)["models"]
        for row in rows:
            life = self.books[row["name"]].life
            is_over = row["state"] == "STOPPED" or (life is not None and life.is_abandoned)
            check("everything is down", is_over, row)
            check("reserved", row["footprint_bytes"] == 0 or life is not None, row)
            costs.compare(self.books[row["name"]], row)
        queue = self.status(self.now)["queue"]
        check("nobody waits", queue["waiting"] == 0 and not queue["per_client"], queue)

    # ------------------------------------------------------------ clients

    def _client_said(self, event: ClientSaid) -> None:
        message, connection = event.message, bytes(event.connection)
        match message:
            case Generate():
                self._asked(connection, message, event.process)
            case Cancel(id=id):
                self.joining.cancelled(connection, id)
                ask = self.asks.get((connection, id))
                if ask is not None and ask.is_open:
                    self.must[ask] = {"done:cancelled"}
                    self.count("cancelled")
            case _:
                self.commands[connection, message.id] = (message, event.now)
                if isinstance(message, Prioritize):
                    is_unique = shares.prioritized(self, message)
                    self.is_unique[connection, message.id] = is_unique
                elif isinstance(message, Stop):
                    limit_s = message.timeout_s
                    if limit_s is None:
                        limit_s = self.plan.settings.drain_timeout_s
                    wishes.shut_down(self, limit_s, is_now=message.now)
                elif isinstance(message, Attach):
                    self.joining.asked(self, connection, message)
                elif isinstance(message, ChangeLogLevel):
                    self.log_levels.asked(self, connection, message)
                elif isinstance(message, CancelRequest):
                    self._cancelled_by_name(connection, message)
                elif isinstance(message, PauseRequest | ResumeRequest):
                    pauses.commanded(self, connection, message)
                else:
                    wishes.command(self, message, connection)

    def _cancelled_by_name(self, connection: bytes, message: CancelRequest) -> None:
        ask = shares.named(self, message.request)
        self.is_unique[connection, message.id] = ask is not None
        if ask is not None:
            self.must[ask] = {"done:cancelled"}
            self.count("cancelled by another")

    def _asked(self, connection: bytes, message: Generate, process: str) -> None:
        ask = self.asks.get((connection, message.id))
        if ask is None:
            return  # nonsense, which its client expects to be refused
        if ask.is_open:
            self.is_twin = True
            return
        ask.arrived_at = self.now
        shares.identify(self, ask, process, message)
        self.open[ask] = None
        codes = admission.refusals(self, ask, message)
        if codes:
            self.must[ask] = codes
            ask.place = Place.LINE  # for as long as its refusal takes
            return
        self._admitted += 1
        ask.number = self._admitted
        ask.place, ask.placed_at = Place.LINE, self.now
        admission.set_limits(self, ask)
        book = self.books[ask.model]
        book.keep_alive_s = message.keep_alive
        shares.joins(self, book, ask)
        shares.waits(self, ask)
        book.queue.append(ask)
        if book.wanted is not Wanted.UP:
            wishes.up(self, book, by_user=False)

    def _client_gone(self, connection: bytes) -> None:
        self.gone.add(connection)
        self.joining.gone(connection)
        for book in self.books.values():
            book.callers = {caller for caller in book.callers if caller[0] != connection}
        for ask in list(self.open):
            if ask.connection == connection:
                self.close(ask)

    def close(self, ask: Ask) -> None:
        """A request is over; its row may still be in the batch."""
        self.log_lines.closes(ask)
        book = self.books.get(ask.model)
        if book is not None and ask in book.waiting:
            (book.queue if ask in book.queue else book.paused).remove(ask)
            book.busy_at = self.now
        if book is not None and book.life is not None and ask.key in book.life.given:
            book.life.tokens_at_end[ask.key] = ask.tokens
        ask.place, ask.ended_at = Place.ENDED, self.now
        self.flight.closes(ask)
        self.open.pop(ask, None)
        self.limited.pop(ask, None)

    # ------------------------------------------------------------ processes

    def life_of(self, model: ModelName, generation: Generation) -> Life | None:
        """The process, if it is the model's latest and was not given up."""
        book = self.books.get(model)
        life = book.life if book else None
        is_it = life is not None and life.generation == generation and not life.is_abandoned
        return life if is_it else None

    def stops(self, life: Life, cause: Cause) -> None:
        """From now on a process is being ended, if it was not already."""
        if life.cause is None:
            life.cause, life.stopped_serving_at = cause, self.now
