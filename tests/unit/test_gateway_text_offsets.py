"""Where in a completion's text each token begins."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlxsup.gateway.openai.text_offsets import TextOffsets

TEXT = st.text(st.sampled_from("ab é€𝄞\ufffd"), max_size=12)


def parts(content: bytes, cuts: list[int]) -> list[bytes]:
    """What lies between the cuts; nothing of it is lost."""
    places = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
    return [content[a:b] for a, b in pairwise(places)]


def shown_of(content: bytes) -> str:
    """The text of what is there of the characters that are whole."""
    return content.decode(errors="ignore")


@given(TEXT.map(lambda text: text.replace("\ufffd", "")), st.lists(st.integers(0, 100)))
def test_tokens_of_half_characters_begin_where_their_character_does(
    text: str, cuts: list[int]
) -> None:
    offsets, read, shown = TextOffsets(), b"", ""
    for part in parts(text.encode(), cuts):
        before, read = shown_of(read), read + part
        now = shown_of(read)
        found = offsets.take(now.removeprefix(shown), [part.decode(errors="replace")])
        assert found == [len(before)]
        shown = now


@given(TEXT, st.lists(st.integers(0, 100)), st.lists(st.integers(0, 5), min_size=13))
def test_text_that_is_held_back_counts(text: str, cuts: list[int], backs: list[int]) -> None:
    """Tokens of whole characters, several in a piece, of which the text comes later."""
    text = text.replace("\ufffd", "")
    offsets, shown, at = TextOffsets(), 0, 0
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    tokens = [text[a:b] for a, b in pairwise(places)]
    for number, back in enumerate(backs):
        own, tokens = tokens[: number % 3], tokens[number % 3 :]
        begins = [at + len("".join(own[:nth])) for nth in range(len(own))]
        at += len("".join(own))
        new = text[shown : max(at - back, shown)] if own else ""
        if own or new:
            assert offsets.take(new, own) == begins
        shown += len(new)


def test_a_character_in_the_middle_of_what_is_held_back_counts_once() -> None:
    offsets = TextOffsets()
    tokens = ["<", "\ufffd", "\ufffd", "", "b"]
    assert [offsets.take("", [token]) for token in tokens] == [[0], [1], [1], [1], [2]]
    assert [offsets.take("<éb>", [">"]), offsets.take("c", ["c"])] == [[3], [4]]


def test_text_without_known_tokens_counts() -> None:
    offsets = TextOffsets()
    assert offsets.take("four") == []
    assert offsets.take("", ["a"]) == [4]
    assert offsets.take("ab") == [], "nothing is held back behind it"
    assert offsets.take("c", ["c"]) == [6]


def test_a_text_that_differs_from_its_tokens_counts_as_it_is() -> None:
    """Some tokenizers drop the space before the first word."""
    offsets = TextOffsets()
    assert [offsets.take("so", [" so"]), offsets.take(" be", [" be"])] == [[0], [2]]
