"""Reasoning, content and calls in a model's text, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxsup.protocol.states import Channel
from mlxsup.worker.text import harmony
from mlxsup.worker.text.bare_calls import MAX_BEGINNING, BareCallWatch
from mlxsup.worker.text.channels import (
    BROKEN_HEADER,
    NORMAL,
    REASONING,
    TOOL,
    UNREADABLE_CALL,
    ChannelParser,
    ChannelRules,
    Piece,
)
from mlxsup.worker.text.harmony import CHANNELS, harmony_rules, opening_of, read_header
from mlxsup.worker.text.tool_calls import ToolCallReader
from mlxsup.worker.text.tool_formats import parse_json_calls

CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
OFFERED = [{"type": "function", "function": {"name": name}} for name in ("weather", "f")]


def rules(**changes: Any) -> ChannelRules:
    values: dict[str, Any] = {
        "transitions": {
            NORMAL: [("<think>", REASONING), ("<tool_call>", TOOL)],
            REASONING: [("</think>", NORMAL), ("<tool_call>", TOOL)],
            TOOL: [("</tool_call>", NORMAL)],
        },
        "parse_tool_call": parse_json_calls,
    }
    return ChannelRules(**(values | changes))


def parse(
    pieces: list[str],
    opening: str = "",
    model: ChannelRules | None = None,
) -> list[Piece]:
    """All pieces, with neighbours of one channel joined."""
    parser = ChannelParser(model or rules(), opening, ToolCallReader(OFFERED, seed=5))
    found = [piece for text in pieces for piece in parser.add(text)] + parser.finish()
    joined: list[Piece] = []
    for piece in found:
        before = joined[-1] if joined else None
        if before and before.channel is piece.channel and not (piece.warning or before.warning):
            joined[-1] = Piece(channel=piece.channel, text=before.text + piece.text)
        else:
            joined.append(piece)
    return joined


def shown(pieces: list[Piece]) -> list[tuple[str, str]]:
    return [(piece.channel.value, piece.text) for piece in pieces]


def call_of(piece: Piece) -> dict[str, Any]:
    assert piece.channel is Channel.TOOL_CALL
    assert piece.text.endswith("\n")
    value = json.loads(piece.text)
    assert value["type"] == "function"
    assert value["id"].startswith("call_")
    return dict(value["function"])


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "{}",
        '{"name": 5}',
        '{"name": "f", "arguments": [1]}',
        "[]",
        "null",
        '"x"',
        "",
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "\\ud800"}',
        "[" * 5000,
    ],
)
def test_a_malformed_call_comes_as_text_with_a_warning(text: str) -> None:
    got = parse([f"a<tool_call>{text}</tool_call>b"])
    assert "".join(t for _, t in shown(got)) == f"a<tool_call>{text}</tool_call>b"
    assert {piece.channel for piece in got} == {Channel.CONTENT}
    assert [piece.warning for piece in got if piece.warning]


def test_a_call_without_its_end_is_read_at_the_end_of_the_answer() -> None:
    assert call_of(parse(["<tool_call>" + CALL])[0])["name"] == "weather"
    half = parse(["<tool_call>" + CALL[:20]])
    assert shown(half) == [("content", "<tool_call>" + CALL[:20])]


def test_a_call_without_its_end_stays_text_if_its_parser_reads_half_a_call_too() -> None:
    model = rules(shows_its_end=False)
    assert call_of(parse(["<tool_call>" + CALL + "</tool_call>"], model=model)[0])
    got = parse(["<tool_call>" + CALL], model=model)
    assert shown(got) == [("content", "<tool_call>" + CALL)]
    assert [piece.warning for piece in got] == [UNREADABLE_CALL]


def test_headers_are_not_shown() -> None:
    model = rules(
        initial="header",
        transitions={
            "header": [("to=self|", REASONING), ("to=user|", NORMAL)],
            REASONING: [("<eom>", "header")],
            NORMAL: [("<eom>", "header")],
        },
    )
    got = parse(["role to=self|hm<eom>role to=", "user|hi"], model=model)
    assert shown(got) == [("reasoning", "hm"), ("content", "hi")]


PARTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "</", "<to", "a", "🦊", "b "]
)


@settings(max_examples=40)
@given(st.lists(PARTS, max_size=14), st.lists(st.integers(1, 5), min_size=1, max_size=80))
def test_the_cut_makes_no_difference(parts: list[str], sizes: list[int]) -> None:
    text = "".join(parts)
    pieces: list[str] = []
    at = 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    assert parse(pieces) == parse([text])


def test_text_that_might_have_become_a_call_is_shown_before_the_next_part() -> None:
    rules = ChannelRules(
        transitions={"normal": [("<think>", "reasoning")], "reasoning": [("</think>", "normal")]},
        has_bare_calls=True,
    )
    tools = [{"type": "function", "function": {"name": "weather"}}]
    parser = ChannelParser(rules, "", ToolCallReader(tools, 1))
    pieces = [*parser.add('{"name"<think>hm'), *parser.finish()]
    assert [(piece.channel, piece.text) for piece in pieces] == [
        (Channel.CONTENT, '{"name"'),
        (Channel.REASONING, "hm"),
    ]


def test_an_unfinished_call_is_content() -> None:
    rules = ChannelRules(transitions={"normal": [("<call>", "tool")]})
    parser = ChannelParser(rules, "", ToolCallReader(OFFERED, 1))
    assert parser.add("<call>{") == []
    assert parser.channel is Channel.CONTENT
    assert not parser.is_in_content


OPENING = "<|start|>assistant"

HARMONY_CALL = '{"city": "Köln"}'


def parse_harmony(
    pieces: list[str], opening: str = OPENING, *, has_form: bool = False
) -> list[Piece]:
    parser = ChannelParser(
        harmony_rules(), opening, ToolCallReader(OFFERED, seed=5), has_form=has_form
    )
    return [piece for text in pieces for piece in parser.add(text)] + parser.finish()


def shown_parts(pieces: list[Piece]) -> list[tuple[str, str]]:
    joined: list[tuple[str, str]] = []
    for channel, text in [(piece.channel.value, piece.text) for piece in pieces if piece.text]:
        if joined and joined[-1][0] == channel:
            joined[-1] = (channel, joined[-1][1] + text)
        else:
            joined.append((channel, text))
    return joined


def test_reasoning_preamble_call_and_answer_are_apart() -> None:
    got = parse_harmony(
        [
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>I look. <|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.weather <|constrain|>json<|message|>{HARMONY_CALL}<|call|>"
            "<|start|>assistant<|channel|>final"
            "<|message|>Rain.<|return|>"
        ]
    )
    kinds = [kind for kind, _ in shown_parts(got)]
    assert kinds == ["reasoning", "content", "tool_call", "content"]
    assert shown_parts(got)[0][1] == "hm"
    assert shown_parts(got)[1][1] == "I look. "
    call = json.loads(shown_parts(got)[2][1])["function"]
    assert call == {"name": "weather", "arguments": HARMONY_CALL}
    assert shown_parts(got)[3][1] == "Rain."
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
    got = parse_harmony([header + HARMONY_CALL + end])
    assert [piece.channel for piece in got] == [Channel.TOOL_CALL]
    assert json.loads(got[0].text)["function"] == {"name": "f", "arguments": HARMONY_CALL}


def test_a_call_that_is_no_json_stays_text_without_its_header() -> None:
    got = parse_harmony(
        ["<|channel|>commentary to=functions.f <|constrain|>json<|message|>{no<|call|>"]
    )
    assert shown_parts(got) == [("content", "{no")]
    assert [piece.warning for piece in got] == [UNREADABLE_CALL]


def test_with_a_form_the_content_is_the_final_part_alone() -> None:
    text = "<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert shown_parts(parse_harmony([text])) == [("content", "ab")]
    assert shown_parts(parse_harmony([text], has_form=True)) == [
        ("reasoning", "a"),
        ("content", "b"),
    ]


@pytest.mark.parametrize(
    "cut", ["", "<|chan", "<|channel|>", "<|channel|>fin", "<|channel|>final<|mess", " to=func"]
)
def test_a_header_without_its_end_is_not_shown(cut: str) -> None:
    assert parse_harmony([cut]) == []


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
    got = parse_harmony([text])
    assert shown_parts(got) == [("content", content)]
    assert [piece.warning for piece in got if piece.warning] == [BROKEN_HEADER]


def test_a_raw_prompt_may_open_a_part_at_its_end() -> None:
    final = "<|start|>assistant<|channel|>final<|message|>"
    assert opening_of("x<|end|>" + final) == final
    assert opening_of("x<|end|><|start|>assistant") == "<|start|>assistant"
    assert opening_of(final + "so far") == ""
    assert opening_of("<|channel|>analysis<|message|>") == ""
    assert opening_of("2+2=") == ""
    assert shown_parts(parse_harmony(["4"], "")) == [("content", "4")]
    assert shown_parts(parse_harmony(["4"], final)) == [("content", "4")]
    analysis = "<|start|>assistant<|channel|>analysis<|message|>"
    assert shown_parts(parse_harmony(["4"], analysis)) == [("reasoning", "4")]


WORDS = st.sampled_from(
    ["<|start|>", "<|end|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>",
     "<|return|>", *CHANNELS, "assistant", " to=functions.f", " ", "json", "user", "x", "<", "<|",
     "|>", '{"a": 1}', "🦊", "t", "a", "Hello "]
)  # fmt: skip


@settings(max_examples=40)
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
    whole = parse_harmony([text])
    cut = parse_harmony(pieces)
    assert shown_parts(cut) == shown_parts(whole)
    assert [piece.warning for piece in cut if piece.warning] == [
        piece.warning for piece in whole if piece.warning
    ]
    visible = "".join(piece.text for piece in whole if piece.channel is not Channel.TOOL_CALL)
    assert not any(f"<|{name}|>" in visible for name in ("start", "end", "channel", "message"))


def test_a_call_without_a_body_is_none() -> None:
    """It may have been cut short there; a call without arguments has the body `{}`."""
    head = "<|channel|>commentary to=functions.now<|message|>"
    assert harmony.parse_call(head + "{}", {}, False) == [{"name": "now", "arguments": {}}]
    with pytest.raises(ValueError):
        harmony.parse_call(head, {}, False)


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
def test_read_header_gives_the_state(header: str, state: str | None, with_form: str | None) -> None:
    assert (read_header(header, False), read_header(header, True)) == (state, with_form)


NAMES = ("weather", "time")


def shown_text(text: str, size: int = 1, names: tuple[str, ...] = NAMES) -> tuple[str, int, str]:
    """What is let out, behind how many characters the first of it was, and what is held."""
    watch, out, first = BareCallWatch(names), "", -1
    for at in range(0, len(text), size):
        piece = watch.add(text[at : at + size])
        if piece and first < 0:
            first = at + size
        out += piece
    assert watch.is_undecided is (first < 0)
    return out, first, watch.text


BARE_CALL = '{"name": "weather", "parameters": {"city": "Rome"}}'


@pytest.mark.parametrize(
    "text",
    [
        BARE_CALL,
        " \n" + BARE_CALL + " \n",
        BARE_CALL + ";" + BARE_CALL,
        BARE_CALL + " ; \n" + BARE_CALL,
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
    assert shown_text(text, size) == ("", -1, text)


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
def test_text_that_is_no_call_is_shown_at_once(text: str, behind: int) -> None:
    assert shown_text(text) == (text, behind, "")
    assert shown_text(text, 1000) == (text, 1000, "")


def test_a_beginning_is_waited_for_up_to_512_characters() -> None:
    assert MAX_BEGINNING == 512
    watch = BareCallWatch(NAMES)
    assert watch.add(" " * 512) == ""
    assert watch.is_undecided
    assert watch.add(" ") == " " * 513
    assert not watch.is_undecided
    whole = BareCallWatch(NAMES)
    assert whole.add(" " * 600 + BARE_CALL) == "", "complete, however long the beginning is"
