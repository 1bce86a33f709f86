"""Reasoning and tool calls in a model's text, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.states import Channel
from mlxsup.worker.text.channels import (
    NORMAL,
    REASONING,
    TOOL,
    UNREADABLE_CALL,
    ChannelParser,
    ChannelRules,
    Piece,
)
from mlxsup.worker.text.tool_calls import ToolCallReader

CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'


def rules(**changes: Any) -> ChannelRules:
    values: dict[str, Any] = {
        "transitions": {
            NORMAL: [("<think>", REASONING), ("<tool_call>", TOOL)],
            REASONING: [("</think>", NORMAL), ("<tool_call>", TOOL)],
            TOOL: [("</tool_call>", NORMAL)],
        },
        "parse_tool_call": lambda text, tools: json.loads(text),
    }
    return ChannelRules(**(values | changes))


def parse(
    pieces: list[str],
    opening: str = "",
    model: ChannelRules | None = None,
) -> list[Piece]:
    """All pieces, with neighbours of one channel joined."""
    parser = ChannelParser(model or rules(), opening, ToolCallReader(None, seed=5))
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


def test_reasoning_and_content_are_told_apart() -> None:
    got = parse(["<think>why", " not</think>Because."])
    assert shown(got) == [("reasoning", "why not"), ("content", "Because.")]


def test_a_template_may_have_opened_the_reasoning() -> None:
    got = parse(["so</think>yes"], "assistant\n<think>\n")
    assert shown(got) == [("reasoning", "so"), ("content", "yes")]


def test_a_call_is_shown_whole_in_one_form() -> None:
    got = parse(["Look: <tool_call>", CALL[:9], CALL[9:], "</tool_call> done"])
    assert shown(got)[0] == ("content", "Look: ")
    assert call_of(got[1]) == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert shown(got)[2] == ("content", " done")


def test_two_calls_have_their_own_ids_and_the_same_ones_again() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 2
    ids = [json.loads(line)["id"] for line in parse([text])[0].text.splitlines()]
    assert len(set(ids)) == 2
    assert ids == [json.loads(line)["id"] for line in parse(list(text))[0].text.splitlines()]


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
    model = rules(needs_ends=True)
    assert call_of(parse(["<tool_call>" + CALL + "</tool_call>"], model=model)[0])
    got = parse(["<tool_call>" + CALL], model=model)
    assert shown(got) == [("content", "<tool_call>" + CALL)]
    assert [piece.warning for piece in got] == [UNREADABLE_CALL]


def test_some_formats_have_no_end_marker() -> None:
    model = rules(transitions={NORMAL: [("[CALLS]", TOOL)]})
    assert call_of(parse(["[CALLS]", CALL], model=model)[0])["name"] == "weather"


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


def test_a_model_without_markers_shows_everything() -> None:
    assert shown(parse(["<think>", "x"], model=ChannelRules())) == [("content", "<think>x")]


PARTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "</", "<to", "a", "🦊", "b "]
)


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


def test_what_comes_within_a_call_is_content_until_the_call_is_whole() -> None:
    rules = ChannelRules(transitions={"normal": [("<call>", "tool")]})
    parser = ChannelParser(rules, "", ToolCallReader(None, 1))
    assert parser.add("<call>{") == []
    assert parser.channel is Channel.CONTENT
    assert not parser.is_in_content


def test_a_parser_is_in_content_until_a_marker_leads_elsewhere() -> None:
    parser = ChannelParser(rules(), "", ToolCallReader(None, 1))
    assert parser.is_in_content is True
    parser.add("x<think>")
    assert parser.is_in_content is False
    parser.add("hm</think>")
    assert parser.is_in_content is True


def test_what_was_held_back_is_shown_once() -> None:
    parser = ChannelParser(rules(), "", ToolCallReader(None, 1))
    assert parser.add("a<thi") == [Piece(channel=Channel.CONTENT, text="a")]
    assert parser.finish() == [Piece(channel=Channel.CONTENT, text="<thi")]
    assert parser.finish() == []
