"""Stop strings: whatever the pieces, the shown text is that of a look at the whole."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.worker.text.stops import StopMatcher, find_first, undecided

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


@settings(max_examples=500)
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


@settings(max_examples=500)
@given(pieces=PIECES, stops=STOPS, early=st.integers(0, 12))
def test_what_is_complete_too_early_is_text(
    pieces: list[str], stops: list[str], early: int
) -> None:
    text = "".join(pieces)
    whole, is_stopped = reference(text, stops, len("".join(pieces[:early])))
    matcher = StopMatcher(stops)
    shown = ""
    for place, piece in enumerate(pieces):
        shown += matcher.add(piece, may_stop=place >= early)
        assert whole.startswith(shown), "a part of a stop string leaked"
    assert matcher.is_stopped == is_stopped
    assert shown + matcher.finish() == whole


@settings(max_examples=300)
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


def test_only_a_text_that_ends_late_enough_is_found() -> None:
    found = [find_first("abab", ["ab"], ends_after=least) for least in range(5)]
    assert found == [(0, "ab"), (0, "ab"), (2, "ab"), (2, "ab"), None]


def test_what_may_still_become_a_text_is_undecided() -> None:
    pairs = [
        ("xab", ["abc"]),
        ("xab", ["ab"]),
        ("aab", ["aabc", "abx"]),
        ("xa", []),
        ("aa", ["ab"]),
    ]
    assert [undecided(pending, texts) for pending, texts in pairs] == [2, 0, 3, 0, 1]


def test_after_a_stop_nothing_is_shown() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.add("one EN") == "one "
    assert matcher.add("D two") == ""
    assert matcher.is_stopped
    assert (matcher.add(" three"), matcher.finish()) == ("", "")


def test_held_text_comes_when_it_turns_out_to_be_no_stop() -> None:
    matcher = StopMatcher(["</s>"])
    assert [matcher.add(piece) for piece in ("a <", "/", "b", "<")] == ["a ", "", "</b", ""]
    assert (matcher.finish(), matcher.finish()) == ("<", ""), "given once"


def test_the_longest_possible_beginning_of_any_stop_string_is_held_back() -> None:
    for stops in (["abc", "bd"], ["bd", "abc"]):
        matcher = StopMatcher(stops)
        assert (matcher.add("xab"), matcher.add("c")) == ("x", "")
        assert matcher.is_stopped
