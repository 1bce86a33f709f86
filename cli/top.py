"""`mlxsup top` on a terminal: a daemon on the whole screen, as an app of textual.

A selection never moves by itself: if its neighbour were selected when it ends, the key that was
meant for the one would reach the other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from .changes import MAX_CHANGES, Changes, change_line, is_step
from .connection import errors_explained
from .exit_status import CliError
from .terminal.output import Line, Output
from .terminal.requests import request_lines, stage_line
from .terminal.status import amounts, models_table, remarks, whole_bytes
from .terminal.text import (
    cell_len,
    clock,
    counted,
    cut,
    format_bytes,
    format_duration,
    in_a_line,
    wrapped,
)
from .terminal.writer import for_terminal

if TYPE_CHECKING:
    from mlxsup.client import Client

LOOK_INTERVAL_S = 1.0
RETRY_S = 1.0
"""How long after a failure the daemon is looked for again."""

READ_S = 0.3
"""A question is answered by no key before that: it was pasted, or meant for something else."""

LEAST_ROWS_WITH_BAR = 6
MIN_BAR_WIDTH = 8
MARK, NO_MARK = "> ", "  "
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Verb = Literal["restart", "load", "unload", "cancel", "pause", "resume"]

KEYS: dict[str, tuple[Literal["model", "request"], Verb]] = {
    "r": ("model", "restart"),
    "l": ("model", "load"),
    "u": ("model", "unload"),
    "c": ("request", "cancel"),
    "p": ("request", "pause"),
}
"""A `p` on a request that is paused resumes it."""

ASKED_FIRST: dict[Verb, str] = {
    "restart": "running answers finish first",
    "unload": "running answers finish first",
    "cancel": "this ends its answer",
}
"""What is only done after a question, and what the question says about it."""

DOING: dict[Verb, str] = {
    "restart": "restarting",
    "load": "loading",
    "unload": "unloading",
    "cancel": "cancelling",
    "pause": "pausing",
    "resume": "resuming",
}
DONE: dict[Verb, str] = {"restart": "restarted", "load": "loaded", "unload": "unloaded"}
STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -10, "pagedown": 10}
PAUSED_STATES = frozenset({"paused", "pausing"})

HELP = (
    "arrows, j, k   select",
    "home, end      go to the first, the last",
    "escape         select nothing",
    "r  l  u        restart, load, unload",
    "c              cancel a request",
    "p              pause it, or resume it",
    "q, Ctrl-C      quit",
    "Ctrl-Z         suspend",
    "memory  # =    used, may grow to",
)
HINTS = {
    None: "arrows select  ? help  q quit",
    "model": "r restart  l load  u unload  ? help",
    "request": "c cancel  p pause  ? help  q quit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A daemon's answers to the questions for its status and its requests.

    Attributes:
        at: seconds since the epoch.
        status: as `mlxsup status --json` prints it.
        requests: as `mlxsup requests --json` prints it.
        changes: of models' states since the look before, as `mlxsup events --json` prints them.
    """

    at: float
    status: Mapping[str, Any]
    requests: Mapping[str, Any]
    changes: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A model or a request that can be selected; equal to itself in other states.

    Attributes:
        kind: which of them.
        name: for the daemon: a model's name, or the id or number of a request.
        title: for people: a model's name, or the id of a request.
        state: as its row shows it.
    """

    kind: Literal["model", "request"]
    name: str
    title: str = field(compare=False)
    state: str = field(compare=False)


class Order(NamedTuple):
    """What a person wants to be done."""

    verb: Verb
    item: Item


def run(endpoint: str, output: Output) -> None:
    """Show a daemon on the whole terminal until the user leaves.

    A signal that ends other programs ends this one, once the terminal is what it was.

    Args:
        endpoint: of the daemon.
    """
    if not output.has_colour(sys.stdout):
        os.environ["NO_COLOR"] = "1"  # textual asks nothing else
    app = Top(endpoint)
    ended_by = app.run(mouse=False)  # so that text can be selected and copied
    if app.failure is not None:
        raise app.failure
    if ended_by is not None and ended_by != signal.SIGINT:
        signal.signal(ended_by, signal.SIG_DFL)
        signal.raise_signal(ended_by)


class Top(App[int]):
    """A daemon on the whole terminal; it returns the signal that asked for its end, if one did.

    Args:
        endpoint: of the daemon.

    Attributes:
        look: the latest one; None before the first.
        heard: lines about what happened, the newest last.
        lost: why no daemon answers; None while one does.
        selected: a model, a request, or nothing.
        question: an order that takes something away, and is only carried out after a `y`.
        is_asked: whether the question has been there for long enough to be answered.
        said: a sentence about what was typed last.
        failure: what ended it, if that was a mistake in here.
    """

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", priority=True, show=False),
        Binding("ctrl+z", "suspend_process", priority=True, show=False),
    ]
    CSS = """
    Screen { background: ansi_default; color: ansi_default; overflow: hidden; }
    Static { height: 1; background: ansi_default; color: ansi_default; }
    #body { height: 1fr; }
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(ansi_color=True)
        self.look: Look | None = None
        self.heard: deque[str] = deque(maxlen=MAX_CHANGES)
        self.lost: CliError | None = None
        self.selected: Item | None = None
        self.question: Order | None = None
        self.is_asked = False
        self.said = ""
        self.failure: Exception | None = None
        self._endpoint = endpoint
        self._lost_at = 0.0
        self._place = 0
        self._is_helping = False
        # Bounded by what can be selected.
        self._under_way: set[Item] = set()
        self._has_ended = threading.Event()
        self._is_taken = threading.Event()

    def compose(self) -> ComposeResult:
        """See `App.compose`."""
        for name in ("title", "memory", "body", "last"):
            yield Static(id=name, markup=False)

    def on_mount(self) -> None:
        """Begin to follow the daemon, and to hear signals."""
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in ENDING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    loop.add_signal_handler(number, self.exit, number)
        threading.Thread(target=self._follow, name="mlxsup-follower", daemon=True).start()

    def on_unmount(self) -> None:
        """Let the thread that follows the daemon end; the process does not wait for it."""
        self._has_ended.set()
        self._is_taken.set()

    # ------------------------------------------------------------ news

    def _follow(self) -> None:
        """Look at the daemon again and again; each look waits until the one before is shown."""
        from mlxsup.client import Client

        while not self._has_ended.is_set():
            try:
                with errors_explained(), Client(self._endpoint) as client:
                    changes = Changes(client)
                    while not self._has_ended.is_set():
                        status, requests = client.status(), client.requests()
                        heard = [change for change in changes.wait(0.0) if is_step(change)]
                        look = Look(at=time.time(), status=status, requests=requests, changes=heard)
                        self._bring(look)
                        self._has_ended.wait(LOOK_INTERVAL_S)
            except CliError as error:
                self._bring(error)
            self._has_ended.wait(RETRY_S)

    def _bring(self, news: Look | CliError) -> None:
        """Post news and wait until they are taken: a terminal may be held up for hours."""
        self._is_taken.clear()
        if not self._has_ended.is_set() and self.call_later(self.take, news):
            self._is_taken.wait()

    def take(self, news: Look | CliError) -> None:
        """Take news of the daemon: it answered, or did not."""
        self._is_taken.set()
        with self._failing():
            if isinstance(news, Look):
                self._see(news)
            else:
                if self.lost is None:
                    self._lost_at = time.time()
                    self.heard.append(f"{clock(self._lost_at)} no daemon answers")
                self.lost = news
            self._keep_selection()
            self._draw()

    def _see(self, look: Look) -> None:
        self.heard.extend(change_line(change) for change in look.changes)
        pid = look.status["pid"]
        if self.look is not None and self.look.status["pid"] != pid:
            self.heard.append(f"{clock(look.at)} another daemon answers (pid {pid})")
            # A request's number means another one there.
            if self.selected is not None and self.selected.kind == "request":
                self.selected = None
            if self.question is not None and self.question.item.kind == "request":
                self.question = None
        elif self.lost is not None:
            self.heard.append(f"{clock(look.at)} the daemon answers again (pid {pid})")
        self.look, self.lost = look, None

    @property
    def items(self) -> tuple[Item, ...]:
        """Return what can be selected, in the order of the screen; nothing without a daemon."""
        return items_of(self.look) if self.look is not None and self.lost is None else ()

    def _keep_selection(self) -> None:
        """Forget what has gone; its neighbour does not replace it."""
        items = {item: item for item in self.items}
        if self.selected is not None:
            self.selected = items.get(self.selected)
        if self.selected is not None:
            self._place = self.items.index(self.selected)
        if self.question is not None and self.question.item not in items:
            self.said = f"{self.question.item.title} is gone"
            self.question = None

    # ------------------------------------------------------------ keys

    def on_key(self, event: events.Key) -> None:
        """Do what a key stands for."""
        with self._failing():
            self._press(event.character if event.is_printable and event.character else event.key)
            self._draw()

    def _press(self, key: str) -> None:
        if self.question is not None:
            if self.is_asked:
                self._answer(self.question, key)
            return
        self.said = ""
        if key in ("q", "ctrl+d"):
            self.exit()
        elif self._is_helping or key == "?":
            self._is_helping = not self._is_helping
        elif key in KEYS:
            self._command(key)
        elif key == "escape":
            self.selected = None
        elif self.items and key in (*STEPS, "home", "end"):
            self._move(key)

    def _move(self, key: str) -> None:
        """Select another; the first key after nothing was selected continues where it was."""
        last = len(self.items) - 1
        step = STEPS.get(key, 0) if self.selected is not None else 0
        place = {"home": 0, "end": last}.get(key, self._place + step)
        self._place = min(max(place, 0), last)
        self.selected = self.items[self._place]

    def _command(self, key: str) -> None:
        kind, verb = KEYS[key]
        item = self.selected
        if item is None:
            self.said = "nothing is selected: use the arrow keys"
            return
        if item.kind != kind:
            self.said = f"select a {kind} first to use `{key}`"
            return
        if verb == "pause" and item.state in PAUSED_STATES:
            verb = "resume"
        order = Order(verb=verb, item=item)
        if verb not in ASKED_FIRST:
            self._start(order)
            return
        self.question, self.is_asked = order, False
        self.set_timer(READ_S, self._ask)

    def _ask(self) -> None:
        self.is_asked = True

    def _answer(self, question: Order, key: str) -> None:
        self.question = None
        if key in ("y", "Y"):
            self._start(question)
        else:
            self.said = f"{question.item.title}: nothing was changed"

    # ------------------------------------------------------------ orders

    def _start(self, order: Order) -> None:
        """Carry out an order on a thread, because some take as long as a load."""
        if order.item in self._under_way:
            self.said = f"{order.item.title}: the previous action is still running"
            return
        self._under_way.add(order.item)
        self.said = f"{DOING[order.verb]} {order.item.title} …"
        name = f"mlxsup-{order.verb}"
        threading.Thread(target=self._carry_out, args=(order,), name=name, daemon=True).start()

    def _carry_out(self, order: Order) -> None:
        from mlxsup.client import Client

        try:
            with errors_explained(), Client(self._endpoint) as client:
                sentence = _done(client, order)
        except CliError as error:
            sentence = f"{order.item.title}: {error.message}"
        self.call_later(self._say, sentence, order.item)

    def _say(self, sentence: str, item: Item) -> None:
        """Say what has become of an order."""
        with self._failing():
            self._under_way.discard(item)
            self.said = sentence
            self._draw()

    # ------------------------------------------------------------ the picture

    def on_resize(self) -> None:
        """Draw for another size."""
        with self._failing():
            self._draw()

    def _draw(self) -> None:
        width, height = self.size
        if self.look is None or not width:
            return
        has_bar = height >= LEAST_ROWS_WITH_BAR
        memory = self.query_one("#memory", Static)
        memory.display = has_bar
        memory.update(Text(memory_bar(self.look.status, width)))
        self._show("title", self._title(self.look), "bold red" if self.lost else "bold", width)
        room = max(height - 2 - has_bar, 0)
        if self._is_helping:
            lines = [Text(line) for line in HELP[:room]]
        else:
            lines = body(self.look, self.heard, self.selected, width, room)
        if self.lost is not None:
            # The daemon no longer confirms it.
            lines = [Text(line.plain, style="dim") for line in lines]
        self.query_one("#body", Static).update(Text("\n").join(lines))
        self._show("last", self._last_line(width), "bold" if self.question else "", width)

    def _show(self, name: str, text: str, style: str, width: int) -> None:
        line = Text(for_terminal(in_a_line(text)), style=style)
        line.truncate(width, overflow="ellipsis")
        self.query_one(f"#{name}", Static).update(line)

    def _title(self, look: Look) -> str:
        if self.lost is not None:
            since = clock(self._lost_at)
            return f"no daemon since {since}, reconnecting: {self.lost.message}"
        status, requests = look.status, look.requests
        models = counted(len(status["models"]), "model")
        listed = counted(len(requests["requests"]) + requests["more"], "request")
        return (
            f"mlxsup {status['version']}, {models}, {listed}, up "
            f"{format_duration(status['uptime_s'])}, pid {status['pid']}, {status['endpoint']}"
        )

    def _last_line(self, width: int) -> str:
        if self.question is not None:
            verb, name = self.question.verb, in_a_line(self.question.item.title)
            text = f"{verb} {name}? {ASKED_FIRST[verb]} (y/n)"
            # The keys that answer it are never cut off.
            short = f"{verb} {cut(name, width - len(f'{verb} ? (y/n)'))}? (y/n)"
            return text if cell_len(text) <= width else short
        if self._is_helping:
            return "press any key to close this help"
        return self.said or HINTS[self.selected.kind if self.selected is not None else None]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """End the app by an exception, which textual would print with its traceback."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self.failure = error
            self.exit()


def _done(client: Client, order: Order) -> str:
    """Carry out an order, and return what has become of it."""
    value = getattr(client, order.verb)(order.item.name)
    if order.verb in DONE:
        return f"{order.item.title} is {DONE[order.verb]}"
    return stage_line({**value, "stage": "cancelled"} if order.verb == "cancel" else value)


def items_of(look: Look) -> tuple[Item, ...]:
    """Return what can be selected, in the order of the screen."""
    models, listed = look.status["models"], look.requests["requests"]
    ids = Counter(one["id"] for one in listed)
    items = [
        Item(kind="model", name=str(one["name"]), title=str(one["name"]), state=str(one["state"]))
        for one in models
    ]
    for one in listed:
        # A number means another request once another daemon answers, an id never does; but two
        # connections may use the same one.
        name = str(one["id"] if ids[one["id"]] == 1 else one["number"])
        items.append(Item(kind="request", name=name, title=str(one["id"]), state=str(one["state"])))
    return tuple(items)


def memory_bar(status: Mapping[str, Any], width: int) -> str:
    """Return `memory [###==.....] 3.10 GiB used, may grow to 5.00 GiB of 10.00 GiB`.

    The bar is as long as the budget, or as what models may grow to if that is more. A `#` is used,
    an `=` is what that may grow to, and a dot is neither. A narrow terminal gets no bar.
    """
    memory = status.get("memory") or {}
    used, grown = memory.get("used_bytes") or 0, memory.get("may_grow_to_bytes") or 0
    whole, text = whole_bytes(status), amounts(status)
    room = width - len(f"memory [] {text}")
    if room < MIN_BAR_WIDTH:
        text = f"{format_bytes(used)} used of {format_bytes(whole)}"
        room = width - len(f"memory [] {text}")
    if room < MIN_BAR_WIDTH:
        return f"memory {text}"[:width]
    longest = max(whole, grown, 1)
    signs = "#" * round(used / longest * room)
    return f"memory [{signs.ljust(round(grown / longest * room), '=').ljust(room, '.')}] {text}"


def body(
    look: Look, heard: Sequence[str], selected: Item | None, width: int, height: int
) -> list[Text]:
    """Return the tables, the remarks and the events, cut to a terminal of this size.

    The tables get all lines but a third, which are for the latest events, or what the tables leave
    to them.

    Args:
        look: the latest one.
        heard: lines about what happened, the newest last.
        selected: what is marked, if anything is.
        width: columns of the terminal.
        height: how many lines there are.
    """
    lines, focus = _tables(look, selected, width)
    room = max(2, min(len(lines), max(height - len(heard) - 1, height - height // 3)))
    if len(lines) > room:
        # The selected row is always shown, and the first ones if nothing is selected.
        first = max(focus - room + 2, 0)
        hidden = len(lines) - room + 1
        lines = [*lines[first : first + room - 1], Text(f"  and {hidden} more lines")]
    lines.append(
        Text("latest events", style="bold")
        if heard
        else Text("no events since top began", style="dim")
    )
    latest = list(heard)[max(len(heard) - height + len(lines), 0) :]
    lines += [Text(for_terminal(in_a_line(line))) for line in latest]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _tables(look: Look, selected: Item | None, width: int) -> tuple[list[Text], int]:
    """Return the lines of models, requests and remarks, and the place of the selected row's last
    one; 0 without a selection."""
    (models_header,), *models = models_table(look.status, look.status["models"], width - len(MARK))
    nothing: list[Line] = [[("no open requests", "dim")]]
    listed, more = look.requests["requests"], look.requests["more"]
    requests_header, *requests = request_lines(listed, width - len(MARK)) if listed else nothing
    lines: list[Text] = []
    focus, items = 0, iter(items_of(look))
    for header, groups in ((models_header, models), (requests_header, [[one] for one in requests])):
        lines.append(Text.assemble(NO_MARK, *header))
        for group in groups:
            marked = [Text.assemble(NO_MARK, *line) for line in group]
            if next(items) == selected:
                # Not its colours, which a terminal may show on themselves.
                marked[0] = Text(f"{MARK}{marked[0].plain.removeprefix(NO_MARK)}", style="reverse")
                marked[0].pad_right(max(width - marked[0].cell_len, 0))
                focus = len(lines) + len(marked) - 1
            lines += marked
    if more:
        lines.append(Text(f"{NO_MARK}and {more} more"))
    said = [line for remark in remarks(look.status) for line in wrapped(remark, width)]
    return lines + [Text(for_terminal(line), style="dim") for line in said], focus
