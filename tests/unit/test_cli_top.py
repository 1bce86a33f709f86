"""The keys and the picture of `top`."""

from __future__ import annotations

import pytest

from mlxsup.cli.exit_status import CliError
from mlxsup.cli.top.facts import Facts, Lost
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
from mlxsup.cli.top.screen import screen

from support.top_facts import AT, facts, looked, model, request


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


KILLED = {"reason": "crash", "signal": "SIGKILL", "detail": "out of memory", "at": AT}
MODELS = [
    model("alpha", running=["5f0c12ab-1"], queued=1),
    model("a-model-with-quite-a-long-name", "BACKOFF", retry_in_s=4.0, last_exit=KILLED, pid=None),
    model("cold", "STOPPED", pid=None, tokens_per_s=None, footprint_bytes=0, loaded_for_s=None),
]
REQUESTS = [
    request("5f0c12ab-1"),
    request("5f0c12ab-2", "reading"),
    request("5f0c12ab-3", "waiting"),
    request("5f0c12ab-4", "paused"),
]


def plain(text: str, what: str) -> str:
    return text


def shown(
    known: Facts, controls: Controls | None = None, *, columns: int = 80, rows: int = 24
) -> list[str]:
    controls = controls or see(Controls(), known.items())
    return screen(known, controls, columns=columns, rows=rows, style=plain)


def test_a_state_is_a_word_and_the_selection_a_sign_without_any_colour() -> None:
    known = facts(MODELS, REQUESTS)
    controls = press(see(Controls(), known.items()), "down")[0]
    lines = shown(known, controls)
    assert [line.split()[1:3] for line in lines if line.startswith("> ")] == [["alpha", "READY"]]


def test_a_question_and_what_was_said_stand_in_the_last_line() -> None:
    known = facts(MODELS)
    order = Order(verb=Verb.UNLOAD, item=known.items()[0])
    assert shown(known, Controls(question=order))[-1] == (
        "unload alpha? running answers finish first (y/n)"
    )
    assert shown(known, Controls(said="alpha is loaded"))[-1] == "alpha is loaded"


def test_a_daemon_that_is_gone_is_said_in_words_and_nothing_can_be_selected() -> None:
    known = facts(MODELS, REQUESTS).after(Lost(at=AT, error=CliError("no daemon answers at X")))
    again = known.after(Lost(at=AT + 60, error=CliError("no daemon answers at X")))
    assert again.lost_at == AT
    assert len(again.events) == 1
    lines = shown(again)
    assert lines[0] == "no daemon since 12:13:20Z, still trying: no daemon answers at X"
    assert any("alpha" in line for line in lines), "what was known last"
    assert again.items() == ()
    back = again.after(looked(MODELS, at=AT + 61))
    assert (back.lost_at, len(back.items())) == (None, 3)
    assert back.events[-1] == "12:14:21Z the daemon answers again (pid 100)"
    other = again.after(looked(MODELS, pid=101, at=AT + 61))
    assert other.events[-1] == "12:14:21Z another daemon answers (pid 101)"
    assert not other.is_same_daemon(again)


def test_two_requests_with_one_id_are_told_apart_by_their_numbers() -> None:
    known = facts([], [request("a", number="#1"), request("a", number="#2"), request("b")])
    assert [one.name for one in known.items()] == ["#1", "#2", "b"]
