"""`mlxsup top` on a terminal: a daemon on the whole screen, drawn by prompt_toolkit.

`Screen` decides what keys and news do, and what is shown; `run` draws it, asks the daemon and
carries out orders.

A selection never moves by itself: if its neighbour were selected when it ends, the key that was
meant for the one would reach the other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from prompt_toolkit.application import Application, run_in_terminal
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout import FormattedTextControl, Layout, Window

from mlxsup.client import AsyncClient, ConnectionLost, RequestError

from .changes import change_line, is_step
from .connection import errors_explained
from .exit_status import CliError
from .terminal.output import Line, Output
from .terminal.requests import request_lines, stage_line
from .terminal.status import amounts, models_table, remarks
from .terminal.text import (
    cell_len,
    clock,
    counted,
    cut,
    format_duration,
    in_a_line,
    wrapped,
)
from .terminal.writer import for_terminal
from .turn_reader import color_depth, drawing_terminal

LOOK_INTERVAL_S = 1.0
"""Between two looks at the daemon, also while none answers."""

READ_S = 0.3
"""A question is answered by no key before that: the key was meant for something else."""

ESCAPE_S = 0.05
"""How long to wait for the rest of a key that begins as escape does."""

MAX_HEARD = 200
"""Lines about what happened that are kept; more than any terminal has."""

MARK, NO_MARK = "> ", "  "
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

COLOURS = {name: f"ansi{name}" for name in ("red", "green", "yellow")}
"""The colours of our lines by their names in prompt_toolkit, which knows `bold`, `dim` and
`reverse`."""

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
)
HINTS = {
    None: "arrows select  ? help  q quit",
    "model": "r restart  l load  u unload  ? help",
    "request": "c cancel  p pause  ? help  q quit",
}


class Look(NamedTuple):
    """A daemon's answers, as `mlxsup status --json` and `mlxsup requests --json` print them."""

    status: Mapping[str, Any]
    requests: Mapping[str, Any]


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


class Screen:
    """The picture of a daemon and the selection in it.

    Attributes:
        look: the latest one; None before the first.
        heard: lines about what happened, the newest last.
        lost: why no daemon answers; None while one does.
        selected: a model, a request, or nothing.
        question: an order that takes something away, and is only given after a `y`.
        said: a sentence about what was typed last.
        is_left: whether the user has left.
    """

    def __init__(self) -> None:
        self.look: Look | None = None
        self.heard: deque[str] = deque(maxlen=MAX_HEARD)
        self.lost: CliError | None = None
        self.selected: Item | None = None
        self.question: Order | None = None
        self.said = ""
        self.is_left = False
        self._asked_at = 0.0
        self._lost_at = 0.0
        self._place = 0
        self._is_helping = False
        # Bounded by what can be selected.
        self._under_way: set[Item] = set()

    # ------------------------------------------------------------ news

    def take(self, news: Look | CliError) -> None:
        """Take news of the daemon: it answered, or did not."""
        now = time.time()
        if isinstance(news, Look):
            self._see(news, now)
        else:
            if self.lost is None:
                self._lost_at = now
                self.heard.append(f"{clock(now)} no daemon answers")
            self.lost = news
        self._keep_selection()

    def _see(self, look: Look, now: float) -> None:
        pid = look.status["pid"]
        if self.look is not None and self.look.status["pid"] != pid:
            self.heard.append(f"{clock(now)} another daemon answers (pid {pid})")
            # A request's number means another one there.
            if self.selected is not None and self.selected.kind == "request":
                self.selected = None
            if self.question is not None and self.question.item.kind == "request":
                self.question = None
        elif self.lost is not None:
            self.heard.append(f"{clock(now)} the daemon answers again (pid {pid})")
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

    def press(self, key: str) -> Order | None:
        """Do what a key stands for; return what the daemon has to do, if anything."""
        if self.question is not None:
            return self._answer(self.question, key)
        self.said = ""
        if key in ("q", "c-d"):
            self.is_left = True
        elif self._is_helping or key == "?":
            self._is_helping = not self._is_helping
        elif key in KEYS:
            return self._command(key)
        elif key == "escape":
            self.selected = None
        elif self.items and key in (*STEPS, "home", "end"):
            self._move(key)
        return None

    def _move(self, key: str) -> None:
        """Select another; the first key after nothing was selected continues where it was."""
        last = len(self.items) - 1
        step = STEPS.get(key, 0) if self.selected is not None else 0
        place = {"home": 0, "end": last}.get(key, self._place + step)
        self._place = min(max(place, 0), last)
        self.selected = self.items[self._place]

    def _command(self, key: str) -> Order | None:
        kind, verb = KEYS[key]
        item = self.selected
        if item is None:
            self.said = "nothing is selected: use the arrow keys"
            return None
        if item.kind != kind:
            self.said = f"select a {kind} first to use `{key}`"
            return None
        if verb == "pause" and item.state in PAUSED_STATES:
            verb = "resume"
        order = Order(verb, item)
        if verb not in ASKED_FIRST:
            return self._begin(order)
        self.question, self._asked_at = order, time.monotonic()
        return None

    def _answer(self, question: Order, key: str) -> Order | None:
        if time.monotonic() - self._asked_at < READ_S:
            return None
        self.question = None
        if key in ("y", "Y"):
            return self._begin(question)
        self.said = f"{question.item.title}: nothing was changed"
        return None

    def _begin(self, order: Order) -> Order | None:
        if order.item in self._under_way:
            self.said = f"{order.item.title}: the previous action is still running"
            return None
        self._under_way.add(order.item)
        self.said = f"{DOING[order.verb]} {order.item.title} …"
        return order

    def finish(self, order: Order, sentence: str) -> None:
        """Say what has become of an order."""
        self._under_way.discard(order.item)
        self.said = sentence

    # ------------------------------------------------------------ the picture

    def lines(self, width: int, height: int) -> list[Line]:
        """Return what a terminal of this size shows; nothing before the first look."""
        if self.look is None:
            return []
        title = in_a_line(self._title(self.look))
        lines: list[Line] = [[(cut(title, width), "bold red" if self.lost else "bold")]]
        lines.append([(cut(f"memory: {amounts(self.look.status)}", width), "")])
        room = max(height - len(lines) - 1, 0)
        body: list[Line] = [[(line, "")] for line in HELP[:room]]
        if not self._is_helping:
            body = self._body(self.look, width, room)
        if self.lost is not None:
            # The daemon no longer confirms it.
            body = [[(text, "dim") for text, _ in line] for line in body]
        lines += [*body, *[list[tuple[str, str]]()] * (room - len(body))]
        last = cut(in_a_line(self._last_line(width)), width)
        return [*lines, [(last, "bold" if self.question else "")]]

    def _title(self, look: Look) -> str:
        if self.lost is not None:
            since = clock(self._lost_at)
            return f"no daemon since {since}, reconnecting: {self.lost.message}"
        status, requests = look
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

    def _body(self, look: Look, width: int, height: int) -> list[Line]:
        """Return the tables, the remarks and the events.

        The tables get all lines but a third, which are for the latest events, or what the tables
        leave to them.
        """
        lines, focus = self._tables(look, width)
        room = max(2, min(len(lines), max(height - len(self.heard) - 1, height - height // 3)))
        if len(lines) > room:
            # The selected row is always shown, and the first ones if nothing is selected.
            first = max(focus - room + 2, 0)
            hidden = len(lines) - room + 1
            lines = [*lines[first : first + room - 1], [(f"  and {hidden} more lines", "")]]
        nothing = ("no events since top began", "dim")
        lines.append([("latest events", "bold") if self.heard else nothing])
        latest = list(self.heard)[max(len(self.heard) - height + len(lines), 0) :]
        lines += [[(cut(in_a_line(line), width), "")] for line in latest]
        return lines[:height]

    def _tables(self, look: Look, width: int) -> tuple[list[Line], int]:
        """Return the lines of models, requests and remarks, and the place of the selected row's
        last one; 0 without a selection."""
        room = width - len(MARK)
        models_header, *models = models_table(look.status["models"], room)
        listed, more = look.requests["requests"], look.requests["more"]
        requests_header, *requests = request_lines(listed, room) if listed else [_NO_REQUESTS]
        lines: list[Line] = []
        focus, items = 0, iter(items_of(look))
        tables = ((models_header[0], models), (requests_header, [[one] for one in requests]))
        for header, groups in tables:
            lines.append([(NO_MARK, ""), *header])
            for group in groups:
                marked: list[Line] = [[(NO_MARK, ""), *line] for line in group]
                if next(items) == self.selected:
                    # Not its colours, which a terminal may show on themselves.
                    text = "".join(text for text, _ in group[0])
                    marked[0] = [(MARK + text + " " * (room - cell_len(text)), "reverse")]
                    focus = len(lines) + len(marked) - 1
                lines += marked
        if more:
            lines.append([(f"{NO_MARK}and {more} more", "")])
        said = [line for remark in remarks(look.status) for line in wrapped(remark, width)]
        return [*lines, *([(line, "dim")] for line in said)], focus


_NO_REQUESTS: Line = [("no open requests", "dim")]


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


# ---------------------------------------------------------------- the terminal


def run(endpoint: str, output: Output) -> None:
    """Show a daemon on the whole terminal until the user leaves.

    A signal that ends other programs ends this one, once the terminal is what it was.

    Args:
        endpoint: of the daemon.
    """
    ended_by = asyncio.run(show(endpoint, output))
    if ended_by is not None and ended_by != signal.SIGINT:
        signal.signal(ended_by, signal.SIG_DFL)
        signal.raise_signal(ended_by)


async def show(endpoint: str, output: Output) -> signal.Signals | None:
    """Draw a daemon and obey the keys; return the signal that has asked for the end, if one did."""
    screen = Screen()
    app: Application[signal.Signals | None] = Application(
        Layout(Window(FormattedTextControl(lambda: _fragments(screen, app)))),
        key_bindings=_bindings(screen, endpoint),
        full_screen=True,
        output=drawing_terminal(),
        color_depth=color_depth(output),
    )
    app.ttimeoutlen = ESCAPE_S
    loop = asyncio.get_running_loop()
    # prompt_toolkit's own would print a mistake with its traceback, and wait for a key.
    loop.set_exception_handler(lambda _, context: _fail(app, context))
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, _end, app, number)

    def begin() -> None:
        app.create_background_task(_follow(endpoint, screen, app))

    try:
        return await app.run_async(begin, set_exception_handler=False, handle_sigint=False)
    except EOFError:
        return signal.SIGHUP  # the terminal has gone


def _end(app: Application[signal.Signals | None], number: signal.Signals) -> None:
    if app.is_running and not app.is_done:
        app.exit(result=number)


def _fail(app: Application[Any], context: Mapping[str, Any]) -> None:
    """End the app by an exception of a task or a callback, which `show` raises then."""
    error = context.get("exception")
    if error is not None and app.is_running and not app.is_done:
        app.exit(exception=error)


def _fragments(screen: Screen, app: Application[Any]) -> FormattedText:
    """Return what is shown, with the styles as prompt_toolkit names them."""
    size = app.output.get_size()
    shown = FormattedText()
    for line in screen.lines(size.columns, size.rows):
        for text, style in line:
            named = " ".join(COLOURS.get(word, word) for word in style.split())
            shown.append((named, for_terminal(text)))
        shown.append(("", "\n"))
    return FormattedText(shown[:-1])


def _bindings(screen: Screen, endpoint: str) -> KeyBindings:
    keys = KeyBindings()
    modes = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None

    @keys.add("c-c")
    def leave(event: KeyPressEvent) -> None:
        event.app.exit()

    @keys.add("c-z")
    def suspend(_: KeyPressEvent) -> None:
        run_in_terminal(lambda: _suspend(modes))

    @keys.add(Keys.BracketedPaste)
    def ignore(_: KeyPressEvent) -> None:
        """Give no order, and answer no question, by what is pasted."""

    @keys.add(Keys.Any)
    def press(event: KeyPressEvent) -> None:
        key = event.key_sequence[0].key
        order = screen.press(key.value if isinstance(key, Keys) else key)
        if screen.is_left:
            event.app.exit()
        elif order is not None:
            event.app.create_background_task(_carry_out(order, endpoint, screen, event.app))

    return keys


def _suspend(modes: list[Any] | None) -> None:
    """Stop the process group; prompt_toolkit alone would not give back every mode before."""
    if modes is not None:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)
    os.kill(0, signal.SIGTSTP)


async def _follow(endpoint: str, screen: Screen, app: Application[Any]) -> None:
    """Look at the daemon again and again, and hear what happens between two looks."""
    while True:
        try:
            with errors_explained():
                async with AsyncClient(endpoint) as client:
                    hearing = app.create_background_task(_hear(client, screen))
                    try:
                        while True:
                            screen.take(Look(await client.status(), await client.requests()))
                            app.invalidate()
                            await asyncio.sleep(LOOK_INTERVAL_S)
                    finally:
                        hearing.cancel()
        except CliError as error:
            screen.take(error)
            app.invalidate()
        await asyncio.sleep(LOOK_INTERVAL_S)


async def _hear(client: AsyncClient, screen: Screen) -> None:
    with suppress(ConnectionLost, RequestError):  # the looks meet the same error
        async for change in client.events():
            if is_step(change):
                screen.heard.append(change_line(change))


async def _carry_out(order: Order, endpoint: str, screen: Screen, app: Application[Any]) -> None:
    try:
        with errors_explained():
            async with AsyncClient(endpoint) as client:
                value = await getattr(client, order.verb)(order.item.name)
    except CliError as error:
        sentence = f"{order.item.title}: {error.message}"
    else:
        if order.verb == "cancel":
            value = {**value, "stage": "cancelled"}
        done = DONE.get(order.verb)
        sentence = f"{order.item.title} is {done}" if done else stage_line(value)
    screen.finish(order, sentence)
    app.invalidate()
