"""When an answer without markers is a call, character by character."""

from __future__ import annotations

import pytest

from mlxsup.worker.text.bare_calls import MAX_BEGINNING, BareCallWatch

NAMES = ("weather", "time")


def shown(text: str, size: int = 1, names: tuple[str, ...] = NAMES) -> tuple[str, int, str]:
    """What is let out, behind how many characters the first of it was, and what is held."""
    watch, out, first = BareCallWatch(names), "", -1
    for at in range(0, len(text), size):
        piece = watch.add(text[at : at + size])
        if piece and first < 0:
            first = at + size
        out += piece
    assert watch.is_undecided is (first < 0)
    return out, first, watch.text


CALL = '{"name": "weather", "parameters": {"city": "Rome"}}'


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        " \n" + CALL + " \n",
        CALL + ";" + CALL,
        CALL + " ; \n" + CALL,
        '{"name":"time"}',
        '{ "name" : "time" }',
        '{"function": "time"}',
        '{"type": "anything"}',
        '{"parameters": {}, "name": "time"}',
        '{"arguments": {}}',
        '{"name": "time", "parameters": X}',
        '{"name": "time", "parameters": {"a": [1, {"b": []}]}}',
        '{"name": "time", "parameters": {"a": "} ] {"}}',
        '{"name": "time", "parameters": {"a": "say \\"}\\" {"}}',
        '{"name": "time", "parameters": {"a": "\\\\"}}',
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_of_known_tools_are_held_to_their_end(text: str, size: int) -> None:
    assert shown(text, size) == ("", -1, text)


@pytest.mark.parametrize(
    ("text", "behind"),
    [
        ("x", 1),
        ("[", 1),
        (" {x", 3),
        ('{"k', 3),
        ('{"names', 7),
        ('{"key"', 3),
        ('{"name"x', 8),
        ('{"name":x', 9),
        ('{"name": 5', 10),
        ('{"name": "x', 11),
        ('{"function": "x', 15),
        ('{"name": "weathers', 18),
        ('{"name": "wea"', 14),
        ('{"na"', 5),
        ('{"name": "time"} x', 18),
        ('{"name": "time"}, {', 17),
        ('{"name": "time"} [', 18),
        ('{"name": "time"}}', 17),
        ('{"name": "time"}]', 17),
        ('{"name": "time", "a": "\\\\"} x', 29),
        ('{"name": "time", "a": "\\"} x"} y', 32),
    ],
)
def test_what_can_be_no_call_is_let_out_at_once(text: str, behind: int) -> None:
    assert shown(text) == (text, behind, "")
    assert shown(text, 1000) == (text, 1000, "")


def test_behind_what_was_let_out_everything_is_text() -> None:
    watch = BareCallWatch(NAMES)
    assert watch.add("So: ") == "So: "
    assert (watch.is_undecided, watch.is_call_like, watch.text) == (False, False, "")
    assert watch.add(CALL) == CALL
    assert watch.text == ""


def test_a_beginning_is_waited_for_up_to_512_characters() -> None:
    assert MAX_BEGINNING == 512
    watch = BareCallWatch(NAMES)
    assert watch.add(" " * 512) == ""
    assert watch.is_undecided
    assert watch.add(" ") == " " * 513
    assert not watch.is_undecided
    whole = BareCallWatch(NAMES)
    assert whole.add(" " * 600 + CALL) == "", "complete, however long the beginning is"


def test_it_is_like_a_call_from_the_name_on() -> None:
    watch = BareCallWatch(NAMES)
    for piece, is_call_like in (('{"name": "time', False), ('"', True), ("}", True), ("x", False)):
        watch.add(piece)
        assert watch.is_call_like is is_call_like
    assert not watch.is_undecided
