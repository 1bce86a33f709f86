"""What keys mean in `mlxsup top`: nothing is taken away without a question that was read."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxsup.cli.top.keys import (
    NOTHING_SELECTED,
    Controls,
    Item,
    Kind,
    Order,
    Verb,
    press,
    press_all,
    question_text,
    see,
)

TAKES_AWAY = {Verb.RESTART, Verb.UNLOAD, Verb.CANCEL}
OF_MODELS = {Verb.RESTART, Verb.LOAD, Verb.UNLOAD}
KEYS = [*"rlucpyYnqjk? x", "up", "down", "page up", "page down", "home", "end", "escape", "ctrl-d"]


def item(kind: Kind, name: str, state: str = "READY") -> Item:
    return Item(kind=kind, name=name, title=name, state=state)


ALPHA, BETA = item("model", "alpha"), item("model", "beta")
FIRST, PAUSED = item("request", "5f-1", "answering"), item("request", "5f-2", "paused")
ITEMS = (ALPHA, BETA, FIRST, PAUSED)


def after(*keys: str, items: tuple[Item, ...] = ITEMS) -> tuple[Controls, list[Order]]:
    """What keys lead to that a person types one after the other."""
    controls, orders = see(Controls(), items), []
    for key in keys:
        controls, order = press(controls, key)
        orders += [order] if order else []
    return controls, orders


@pytest.mark.parametrize(
    ("keys", "selected"),
    [
        ([], None),
        (["down"], ALPHA),
        (["j", "j"], BETA),
        (["up"], ALPHA),
        (["down", "up", "up"], ALPHA),
        (["end"], PAUSED),
        (["end", "down"], PAUSED),
        (["end", "k"], FIRST),
        (["down", "page down"], PAUSED),
        (["end", "home"], ALPHA),
        (["end", "escape"], None),
        (["end", "escape", "up"], PAUSED),
    ],
)
def test_arrows_move_the_selection_and_stop_at_both_ends(
    keys: list[str], selected: Item | None
) -> None:
    assert after(*keys)[0].selected == selected


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        (["down", "l"], Order(verb=Verb.LOAD, item=ALPHA)),
        (["down", "r", "y"], Order(verb=Verb.RESTART, item=ALPHA)),
        (["down", "u", "Y"], Order(verb=Verb.UNLOAD, item=ALPHA)),
        (["end", "up", "c", "y"], Order(verb=Verb.CANCEL, item=FIRST)),
        (["end", "up", "p"], Order(verb=Verb.PAUSE, item=FIRST)),
        (["end", "p"], Order(verb=Verb.RESUME, item=PAUSED)),
    ],
)
def test_each_key_gives_its_order(keys: list[str], order: Order) -> None:
    assert after(*keys)[1] == [order]


@pytest.mark.parametrize("key", ["n", "escape", "q", "r", "x", "down"])
def test_any_other_key_than_y_leaves_things_as_they_are(key: str) -> None:
    controls, orders = after("down", "u", key)
    assert (orders, controls.question, controls.has_quit) == ([], None, False)
    assert controls.selected == ALPHA
    assert controls.said == "alpha is left as it is"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["r"], NOTHING_SELECTED),
        (["c"], NOTHING_SELECTED),
        (["down", "c"], "`c` is for a request: select one"),
        (["end", "u"], "`u` is for a model: select one"),
    ],
)
def test_a_key_that_does_not_fit_says_what_is_missing(keys: list[str], said: str) -> None:
    controls, orders = after(*keys)
    assert (controls.said, orders) == (said, [])


def test_a_question_names_what_would_be_done_to_whom() -> None:
    assert question_text(Order(verb=Verb.CANCEL, item=FIRST)) == (
        "cancel 5f-1? its answer ends (y/n)"
    )


def test_what_is_pasted_answers_no_question() -> None:
    controls, _ = after("down")
    controls, orders = press_all(controls, "uyyy")
    assert orders == []
    assert controls.question == Order(verb=Verb.UNLOAD, item=ALPHA)
    assert press_all(controls, "y")[1] == [Order(verb=Verb.UNLOAD, item=ALPHA)]


def test_help_is_left_with_any_key_and_does_nothing_else() -> None:
    controls, orders = after("down", "?", "l")
    assert (controls.is_helping, orders) == (False, [])
    assert after("?")[0].is_helping


def test_what_has_gone_takes_its_selection_and_its_question_with_it() -> None:
    controls, _ = after("end", "up", "c")
    gone = see(controls, (ALPHA, BETA, PAUSED))
    assert (gone.selected, gone.question) == (None, None)
    assert gone.said == "5f-1 is not there any longer"
    # The next arrow continues where the selection was.
    assert press(gone, "down")[0].selected == PAUSED


def test_another_daemon_has_other_requests_even_if_they_are_called_the_same() -> None:
    controls, _ = after("end", "up", "c")
    other = see(controls, ITEMS, is_same_daemon=False)
    assert (other.selected, other.question) == (None, None)
    controls, _ = after("down", "u")
    assert see(controls, ITEMS, is_same_daemon=False).selected == ALPHA


class KeysMachine(RuleBasedStateMachine):
    """Any keys in any blocks, while anything comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.controls = Controls()

    @rule(
        models=st.lists(st.sampled_from("abc"), unique=True),
        requests=st.dictionaries(st.sampled_from("1234"), st.sampled_from(["waiting", "paused"])),
        is_same=st.booleans(),
    )
    def look(self, models: list[str], requests: dict[str, str], is_same: bool) -> None:
        items = tuple(item("model", name) for name in models)
        items += tuple(item("request", name, state) for name, state in requests.items())
        before = self.controls.selected
        self.controls = see(self.controls, items, is_same_daemon=is_same)
        assert self.controls.selected in (before, None)
        if before in items and (is_same or before.kind == "model"):
            assert self.controls.selected == before

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=5))
    def press(self, keys: list[str]) -> None:
        before = self.controls
        self.controls, orders = press_all(before, keys)
        for number, order in enumerate(orders):
            assert order.item in before.items
            assert (order.item.kind == "model") == (order.verb in OF_MODELS)
            if order.verb in TAKES_AWAY:
                # It was read on the screen, and this is the answer.
                assert number == 0
                assert keys[0] in "yY"
                assert before.question == order
        if before.has_quit:
            assert (self.controls, orders) == (before, [])

    @invariant()
    def everything_is_there(self) -> None:
        controls = self.controls
        assert controls.selected is None or controls.selected in controls.items
        assert controls.question is None or controls.question.item in controls.items
        assert controls.question is None or controls.question.verb in TAKES_AWAY


TestKeysMachine = KeysMachine.TestCase
