"""The harmony format: headers decide what each part of an answer is, and are never shown."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxsup.protocol.states import Channel
from mlxsup.worker.text import harmony
from mlxsup.worker.text.channels import BROKEN_HEADER, UNREADABLE_CALL, ChannelParser, Piece
from mlxsup.worker.text.harmony import CHANNELS, harmony_rules, opening_of, read_header
from mlxsup.worker.text.tool_calls import ToolCallReader

OPENING = "<|start|>assistant"
CALL = '{"city": "Köln"}'


def parse(pieces: list[str], opening: str = OPENING, *, has_form: bool = False) -> list[Piece]:
    parser = ChannelParser(
        harmony_rules(), opening, ToolCallReader(None, seed=5), has_form=has_form
    )
    return [piece for text in pieces for piece in parser.add(text)] + parser.finish()


def shown(pieces: list[Piece]) -> list[tuple[str, str]]:
    joined: list[tuple[str, str]] = []
    for channel, text in [(piece.channel.value, piece.text) for piece in pieces if piece.text]:
        if joined and joined[-1][0] == channel:
            joined[-1] = (channel, joined[-1][1] + text)
        else:
            joined.append((channel, text))
    return joined


def test_reasoning_preamble_call_and_answer_are_apart() -> None:
    got = parse(
        [
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>I look. <|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.weather <|constrain|>json<|message|>{CALL}<|call|>"
            "<|start|>assistant<|channel|>final"
            "<|message|>Rain.<|return|>"
        ]
    )
    kinds = [kind for kind, _ in shown(got)]
    assert kinds == ["reasoning", "content", "tool_call", "content"]
    assert shown(got)[0][1] == "hm"
    assert shown(got)[1][1] == "I look. "
    call = json.loads(shown(got)[2][1])["function"]
    assert call == {"name": "weather", "arguments": CALL}
    assert shown(got)[3][1] == "Rain."
    assert not [piece for piece in got if piece.warning]


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary json<|message|>",
        " to=functions.f<|channel|>commentary<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>commentary to=functions.f code<|message|>",
        "<|channel|>analysis to=functions.f <|constrain|>json<|message|>",
        " to=f<|channel|>commentary <|constrain|>json<|message|>",
    ],
)
@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", ""])
def test_a_recipient_makes_a_call_wherever_it_stands(header: str, end: str) -> None:
    got = parse([header + CALL + end])
    assert [piece.channel for piece in got] == [Channel.TOOL_CALL]
    assert json.loads(got[0].text)["function"] == {"name": "f", "arguments": CALL}


def test_a_call_that_is_no_json_stays_text_without_its_header() -> None:
    got = parse(["<|channel|>commentary to=functions.f <|constrain|>json<|message|>{no<|call|>"])
    assert shown(got) == [("content", "{no")]
    assert [piece.warning for piece in got] == [UNREADABLE_CALL]


def test_with_a_form_the_content_is_the_final_part_alone() -> None:
    text = "<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert shown(parse([text])) == [("content", "ab")]
    assert shown(parse([text], has_form=True)) == [("reasoning", "a"), ("content", "b")]


@pytest.mark.parametrize(
    "cut", ["", "<|chan", "<|channel|>", "<|channel|>fin", "<|channel|>final<|mess", " to=func"]
)
def test_a_header_without_its_end_is_not_shown(cut: str) -> None:
    assert parse([cut]) == []


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hello", "Hello"),
        ("Hello there, all of you", "Hello there, all of you"),
        ("Sure<|channel|>final<|message|>yes", "Sureyes"),
        ("<|channel|>final<|message|>a<|end|>stray", "astray"),
        ("<|channel|>thought<|message|>a", "thoughta"),
    ],
)
def test_text_that_is_no_header_is_shown_with_a_warning(text: str, content: str) -> None:
    got = parse([text])
    assert shown(got) == [("content", content)]
    assert [piece.warning for piece in got if piece.warning] == [BROKEN_HEADER]


def test_a_raw_prompt_may_open_a_part_at_its_end() -> None:
    final = "<|start|>assistant<|channel|>final<|message|>"
    assert opening_of("x<|end|>" + final) == final
    assert opening_of("x<|end|><|start|>assistant") == "<|start|>assistant"
    assert opening_of(final + "so far") == ""
    assert opening_of("<|channel|>analysis<|message|>") == ""
    assert opening_of("2+2=") == ""
    assert shown(parse(["4"], "")) == [("content", "4")]
    assert shown(parse(["4"], final)) == [("content", "4")]
    analysis = "<|start|>assistant<|channel|>analysis<|message|>"
    assert shown(parse(["4"], analysis)) == [("reasoning", "4")]


WORDS = st.sampled_from(
    ["<|start|>", "<|end|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>",
     "<|return|>", *CHANNELS, "assistant", " to=functions.f", " ", "json", "user", "x", "<", "<|",
     "|>", '{"a": 1}', "🦊", "t", "a", "Hello "]
)  # fmt: skip


@given(st.lists(WORDS, max_size=16), st.lists(st.integers(1, 7), min_size=1, max_size=60))
@example([" to=functions.f"] * 3, [1])
@example([" to=functions.f", "<|message|>", "<|message|>"], [1])
def test_the_cut_makes_no_difference_and_no_marker_is_shown(
    words: list[str], sizes: list[int]
) -> None:
    text = "".join(words)
    pieces: list[str] = []
    at = 0
    while at < len(text):
        pieces.append(text[at : at + sizes[len(pieces) % len(sizes)]])
        at += len(pieces[-1])
    whole = parse([text])
    cut = parse(pieces)
    assert shown(cut) == shown(whole)
    assert [piece.warning for piece in cut if piece.warning] == [
        piece.warning for piece in whole if piece.warning
    ]
    visible = "".join(piece.text for piece in whole if piece.channel is not Channel.TOOL_CALL)
    assert not any(f"<|{name}|>" in visible for name in ("start", "end", "channel", "message"))


@given(st.lists(WORDS, max_size=10))
def test_what_is_no_header_stays_none(words: list[str]) -> None:
    text = "".join(words)
    verdicts = [read_header(text[:at], False) is None for at in range(len(text) + 1)]
    assert verdicts == sorted(verdicts)


def test_a_header_without_end_is_none() -> None:
    assert text_length(parse([" "] * 1000)) == 1000
    assert text_length(parse([" to=" + "x" * 1000])) == 1004


def text_length(pieces: list[Piece]) -> int:
    return sum(len(piece.text) for piece in pieces)


LETTERS = st.text(alphabet="ab <|{}\n🦊", max_size=30)


@given(LETTERS, LETTERS)
def test_every_other_letter_is_shown_once(reasoning: str, content: str) -> None:
    got = parse(
        list(
            f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant<|channel|>final"
            f"<|message|>{content}<|return|>"
        )
    )
    assert "".join(p.text for p in got if p.channel is Channel.REASONING) == reasoning
    assert "".join(p.text for p in got if p.channel is Channel.CONTENT) == content


@pytest.mark.parametrize("recipient", ["user", "assistant", "all"])
def test_a_part_to_somebody_who_is_no_function_is_no_call(recipient: str) -> None:
    header = f"<|channel|>commentary to={recipient}"
    assert harmony.read_header(header, False) == "normal"
    with pytest.raises(ValueError, match="no recipient"):
        harmony.parse_call(header + "<|message|>{}")


def test_a_call_without_a_body_is_none() -> None:
    """It may have been cut short there; a call without arguments has the body `{}`."""
    head = "<|channel|>commentary to=functions.now<|message|>"
    assert harmony.parse_call(head + "{}") == {"name": "now", "arguments": {}}
    with pytest.raises(ValueError):
        harmony.parse_call(head)


def test_a_raw_prompt_that_ends_in_no_header_opens_nothing() -> None:
    good = "<|start|>assistant<|channel|>analysis"
    assert harmony.opening_of("x" + good) == good
    assert harmony.opening_of("x<|start|>assistant<|channel|>nonsense") == ""
    assert harmony.opening_of("x<|start|>assistant<|channel|>nonsense<|message|>") == ""


@pytest.mark.parametrize(
    ("header", "state", "with_form"),
    [
        ("", "normal", "reasoning"),
        ("<|start|>assistant", "normal", "reasoning"),
        ("<|channel|>analysis", "reasoning", "reasoning"),
        ("<|channel|>analy", "normal", "reasoning"),
        ("<|channel|>commentary", "normal", "reasoning"),
        ("<|channel|>final", "normal", "normal"),
        ("<|start|>assistant to=functions.f", "tool", "tool"),
        ("<|channel|>analysis to=f", "tool", "tool"),
        ("<|channel|>final <|constrain|>json", "normal", "normal"),
        ("<|channel|>final json", "normal", "normal"),
        ("<|channel|>final application/x.y+z-1", "normal", "normal"),
        ("<|channel|>final<|const", "normal", "normal"),
        ("<|channel|>final a b", "normal", "normal"),
        ("<|channel|>final a b c", None, None),
        ("<|channel|>final a,b", None, None),
        ("<|channel|>final " + "x" * 40, "normal", "normal"),
        ("<|channel|>final " + "x" * 41, None, None),
        ("<|channel|>final to=" + "x" * 197, "tool", "tool"),
        ("<|channel|>final to=" + "x" * 198, None, None),
        ("<|channel|>nothing", None, None),
        ("<|start|>assistant x", None, None),
        ("<|start|>assistant to", "normal", "reasoning"),
        ("<|end|> ", "normal", "reasoning"),
        ("<|end|>x", None, None),
        ("<|return|>x", None, None),
        ("<|call|>x", None, None),
        ("x", None, None),
        ("<|start|>functions.f", "normal", "reasoning"),
        ("<|start|>functions." + "x" * 190, "normal", "reasoning"),
        ("<|start|>functions." + "x" * 191, None, None),
        ("<|start|>functi", "normal", "reasoning"),
        ("<|start|>nobody", None, None),
        ("<|channel|>final" + " " * 496, "normal", "normal"),
        ("<|channel|>final" + " " * 497, None, None),
    ],
)
def test_what_a_header_leads_to(header: str, state: str | None, with_form: str | None) -> None:
    assert (read_header(header, False), read_header(header, True)) == (state, with_form)


@pytest.mark.parametrize("role", ["assistant", "user", "system", "developer", "tool", "a", "t"])
def test_a_part_may_be_anybodys(role: str) -> None:
    assert read_header(f"<|start|>{role}<|channel|>final", True) == "normal"


def test_the_recipient_is_named_without_its_namespace() -> None:
    def name(recipient: str) -> str:
        return str(harmony.parse_call(f"<|start|>assistant to={recipient}<|message|>{{}}")["name"])

    assert [name(one) for one in ("functions.f", "f", "browser.open")] == ["f", "f", "browser.open"]
    with pytest.raises(ValueError, match=r"^no recipient$"):
        harmony.parse_call("x to=f<|message|>{}")


def test_the_markers_that_end_an_answer() -> None:
    assert harmony.ENDS == ("<|return|>", "<|call|>")
    rules = harmony_rules()
    assert rules.header is not None
    assert (rules.header.end, rules.header.never_shown) == (
        "<|message|>", ("<|message|>", "<|constrain|>")
    )  # fmt: skip
    begins = {(m, "header") for m in ("<|start|>", "<|end|>", "<|return|>", "<|call|>",
                                      "<|channel|>")}  # fmt: skip
    inside = ("<|message|>", "<|constrain|>")
    assert {state: set(edges) for state, edges in rules.transitions.items()} == {
        "normal": begins | {(marker, "normal") for marker in inside},
        "reasoning": begins | {(marker, "reasoning") for marker in inside},
        "tool": begins,
    }
