"""From tokens to the text that is shown: pieces, half characters, stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.worker.text.detokenizer import (
    MAX_WAITING_TOKENS,
    REPLACEMENT,
    ByteDetokenizer,
    WindowDetokenizer,
)
from mlxsup.worker.text.stops import StopMatcher, find_first, undecided

BYTES = [bytes([n]) for n in range(256)]


def decode(tokens: list[int]) -> str:
    """As a tokenizer whose tokens are bytes, which marks what is no text."""
    return bytes(tokens).decode(errors="replace")


def both() -> list[ByteDetokenizer | WindowDetokenizer]:
    return [ByteDetokenizer(BYTES), WindowDetokenizer(decode)]


@settings(max_examples=50)
@given(st.text())
def test_pieces_are_the_whole_text(text: str) -> None:
    for detokenizer in both():
        pieces = [detokenizer.add(token) for token in text.encode()]
        assert "".join(pieces) + detokenizer.finish() == text


@pytest.mark.parametrize("kind", [0, 1])
def test_half_a_character_waits_for_its_other_half(kind: int) -> None:
    detokenizer = both()[kind]
    assert [detokenizer.add(token) for token in "aé🦊".encode()] == ["a", "", "é", "", "", "", "🦊"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", [0, 1])
def test_half_a_character_at_the_end_is_shown_as_one(kind: int) -> None:
    detokenizer = both()[kind]
    assert [detokenizer.add(token) for token in "x🦊".encode()[:3]] == ["x", "", ""]
    assert detokenizer.finish() == REPLACEMENT


@pytest.mark.parametrize(("strips", "text"), [(True, "a b"), (False, " a b")])
def test_one_space_at_the_very_start_is_dropped_where_the_tokenizer_does(
    strips: bool, text: str
) -> None:
    detokenizer = ByteDetokenizer(BYTES, strips_first_space=strips)
    assert "".join(detokenizer.add(token) for token in b" a b") == text
    second = ByteDetokenizer(BYTES, strips_first_space=True)
    assert [second.add(token) for token in b"x y"] == ["x", " ", "y"]


def test_endless_half_characters_are_shown() -> None:
    detokenizer = WindowDetokenizer(lambda tokens: REPLACEMENT * len(tokens))
    pieces = [detokenizer.add(7) for _ in range(MAX_WAITING_TOKENS + 1)]
    assert pieces[:-1] == [""] * MAX_WAITING_TOKENS
    assert pieces[-1] == REPLACEMENT * (MAX_WAITING_TOKENS + 1)


def test_the_window_stays_small_and_keeps_the_token_before() -> None:
    """How a token is spaced may depend on the one before it."""
    seen: list[int] = []

    def spaced(tokens: list[int]) -> str:
        seen.append(len(tokens))
        return " ".join(map(str, tokens))

    detokenizer = WindowDetokenizer(spaced)
    assert "".join(detokenizer.add(token) for token in range(50)) == " ".join(map(str, range(50)))
    assert max(seen) == 2


ALPHABET = "ab🦊"

STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)

PIECES = st.lists(st.text(ALPHABET, max_size=5), max_size=12)


def reference(text: str, stops: list[str], exempt: int = 0) -> tuple[str, bool]:
    """Character by character: the first stop string that is complete cuts, the longest at a tie.
    None ends within the first `exempt` characters."""
    for end in range(exempt + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@settings(max_examples=150)
@given(pieces=PIECES, stops=STOPS)
def test_pieces_show_what_the_whole_text_shows(pieces: list[str], stops: list[str]) -> None:
    whole, is_stopped = reference("".join(pieces), stops)
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.add(piece)
        assert whole.startswith(shown), "a part of a stop string leaked"
    assert matcher.is_stopped == is_stopped
    assert shown + matcher.finish() == whole


@settings(max_examples=80)
@given(pieces=PIECES, stops=STOPS, early=st.integers(0, 12))
def test_nothing_is_held_back_without_need(pieces: list[str], stops: list[str], early: int) -> None:
    matcher = StopMatcher(stops)
    shown, came = "", ""
    for place, piece in enumerate(pieces):
        shown += matcher.add(piece, may_stop=place >= early)
        came += piece
        if matcher.is_stopped:
            return
        held = came[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_first_stop_string_is_the_one_that_is_complete_first() -> None:
    """Not the one that begins first, and of those that end together the longest."""
    for stops in (["abcd", "c"], ["c", "abcd"]):
        assert find_first("xabcde", stops) == (3, "c")
    for stops in (["bc", "c", "abc"], ["abc", "bc", "c"]):
        assert find_first("xabcde", stops) == (1, "abc")
    assert find_first("xabcde", ["f"]) is None
    assert find_first("xabcde", []) is None


def test_a_possible_beginning_is_undecided() -> None:
    pairs = [
        ("xab", ["abc"]),
        ("xab", ["ab"]),
        ("aab", ["aabc", "abx"]),
        ("xa", []),
        ("aa", ["ab"]),
    ]
    assert [undecided(pending, texts) for pending, texts in pairs] == [2, 0, 3, 0, 1]
