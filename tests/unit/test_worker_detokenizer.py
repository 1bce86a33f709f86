"""Tokens to text, a piece at a time, without a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.worker.text.detokenizer import (
    MAX_WAITING_TOKENS,
    REPLACEMENT,
    ByteDetokenizer,
    WindowDetokenizer,
)

BYTES = [bytes([n]) for n in range(256)]


def decode(tokens: list[int]) -> str:
    """As a tokenizer whose tokens are bytes, which marks what is no text."""
    return bytes(tokens).decode(errors="replace")


def both() -> list[ByteDetokenizer | WindowDetokenizer]:
    return [ByteDetokenizer(BYTES), WindowDetokenizer(decode)]


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


def test_a_token_without_bytes_is_no_text() -> None:
    detokenizer = ByteDetokenizer(BYTES)
    assert [detokenizer.add(token) for token in (-1, 256, 255 + 1000, 65)] == ["", "", "", "A"]


@pytest.mark.parametrize(("strips", "text"), [(True, "a b"), (False, " a b")])
def test_one_space_at_the_very_start_is_dropped_where_the_tokenizer_does(
    strips: bool, text: str
) -> None:
    detokenizer = ByteDetokenizer(BYTES, strips_first_space=strips)
    assert "".join(detokenizer.add(token) for token in b" a b") == text
    second = ByteDetokenizer(BYTES, strips_first_space=True)
    assert [second.add(token) for token in b"x y"] == ["x", " ", "y"]


def test_what_never_becomes_text_is_not_waited_for_for_ever() -> None:
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
