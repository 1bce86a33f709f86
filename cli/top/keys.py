"""What the keys of `mlxsup top` mean: a selection, a question, and the orders that follow.

A selection never moves by itself: if its neighbour were selected when it ends, the key that was
meant for the one would reach the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

Kind = Literal["model", "request"]


class Verb(Enum):
    """What can be done to a model or a request."""

    RESTART = "restart"
    LOAD = "load"
    UNLOAD = "unload"
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A model or a request; equal to itself in other states.

    Attributes:
        kind: which of them.
        name: what the daemon calls it: a model's name, or the id or number of a request.
        title: what people call it: a model's name, or the id of a request.
        state: as its row shows it.
    """

    kind: Kind
    name: str
    title: str = field(compare=False)
    state: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a person wants to be done."""

    verb: Verb
    item: Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """What the keys have led to.

    Attributes:
        items: what can be selected, in the order of the screen.
        selected: one of them, or none.
        place: where the selection was last, as an index of `items`.
        question: an order that takes something away, and is only carried out after a `y`.
        is_helping: whether the keys are explained.
        has_quit: whether somebody wants to leave.
        said: a sentence about what was typed last.
    """

    items: tuple[Item, ...] = ()
    selected: Item | None = None
    place: int = 0
    question: Order | None = None
    is_helping: bool = False
    has_quit: bool = False
    said: str = ""

    def saying(self, sentence: str) -> Controls:
        """The same, with another sentence; a question stays."""
        return replace(self, said=sentence)


KEYS: dict[str, tuple[Kind, Verb]] = {
    "r": ("model", Verb.RESTART),
    "l": ("model", Verb.LOAD),
    "u": ("model", Verb.UNLOAD),
    "c": ("request", Verb.CANCEL),
    "p": ("request", Verb.PAUSE),
}
"""A `p` on a request that is paused resumes it."""

ASKED_FIRST = {
    Verb.RESTART: "running answers finish first",
    Verb.UNLOAD: "running answers finish first",
    Verb.CANCEL: "its answer ends",
}
"""What is only done after a question, and what the question says about it."""

STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10}
QUIT = frozenset({"q", "ctrl-d"})
PAUSED_STATES = frozenset({"paused", "pausing"})
NOTHING_SELECTED = "nothing is selected: use the arrow keys"


def press(controls: Controls, key: str) -> tuple[Controls, Order | None]:
    """What a key leads to, and the order that it gives.

    Args:
        controls: before it.
        key: a character, or the name of a key: `up`, `page down`, `escape`.
    """
    if controls.has_quit:
        return controls, None
    controls = replace(controls, said="")
    if controls.question is not None:
        return _answer(controls, controls.question, key)
    if key in QUIT:
        return replace(controls, has_quit=True), None
    if controls.is_helping or key == "?":
        return replace(controls, is_helping=not controls.is_helping), None
    if key in KEYS:
        return _command(controls, key)
    return _move(controls, key), None


def press_all(controls: Controls, keys: Iterable[str]) -> tuple[Controls, list[Order]]:
    """What keys lead to that came together, and their orders.

    Nothing that came together with a question answers it: a person has not read it by then.
    """
    orders = []
    for key in keys:
        had_question = controls.question is not None
        controls, order = press(controls, key)
        if order is not None:
            orders.append(order)
        if controls.question is not None and not had_question:
            break
    return controls, orders


def see(controls: Controls, items: tuple[Item, ...], *, is_same_daemon: bool = True) -> Controls:
    """What is left of the selection and the question once other things can be selected.

    What has gone is not replaced by its neighbour, or a key that was meant for the one would
    reach the other.

    Args:
        controls: before it.
        items: what can be selected now.
        is_same_daemon: whether a request's number still means the same.
    """
    kept = {item: item for item in items if is_same_daemon or item.kind == "model"}
    selected = controls.selected and kept.get(controls.selected)
    place = items.index(selected) if selected else controls.place
    question, said = controls.question, controls.said
    if question is not None and question.item not in kept:
        said = f"{question.item.title} is not there any longer"
        question = None
    return replace(
        controls, items=items, selected=selected, place=place, question=question, said=said
    )


def question_text(order: Order) -> str:
    """`restart smollm2? running answers finish first (y/n)`."""
    return f"{order.verb.value} {order.item.title}? {ASKED_FIRST[order.verb]} (y/n)"


def _answer(controls: Controls, question: Order, key: str) -> tuple[Controls, Order | None]:
    controls = replace(controls, question=None)
    if key in ("y", "Y"):
        return controls, question
    undone = f"{question.item.title} is left as it is"
    return replace(controls, said=undone), None


def _command(controls: Controls, key: str) -> tuple[Controls, Order | None]:
    kind, verb = KEYS[key]
    item = controls.selected
    if item is None:
        return replace(controls, said=NOTHING_SELECTED), None
    if item.kind != kind:
        return replace(controls, said=f"`{key}` is for a {kind}: select one"), None
    if verb is Verb.PAUSE and item.state in PAUSED_STATES:
        verb = Verb.RESUME
    order = Order(verb=verb, item=item)
    if verb in ASKED_FIRST:
        return replace(controls, question=order), None
    return controls, order


def _move(controls: Controls, key: str) -> Controls:
    """The selection after an arrow key; the first one selects what is where the last one was."""
    last = len(controls.items) - 1
    if last < 0 or key not in (*STEPS, "home", "end", "escape"):
        return controls
    if key == "escape":
        return replace(controls, selected=None)
    step = STEPS.get(key, 0) if controls.selected is not None else 0
    place = {"home": 0, "end": last}.get(key, controls.place + step)
    place = min(max(place, 0), last)
    return replace(controls, selected=controls.items[place], place=place)
