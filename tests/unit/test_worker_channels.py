"""Reasoning, content and calls in a model's text, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxsup.protocol.states import AnswerForm, Channel
from mlxsup.protocol.tool_choice import UNREADABLE_CALL
from mlxsup.worker.text import harmony
from mlxsup.worker.text.bare_calls import MAX_BEGINNING, BareCallWatch
from mlxsup.worker.text.channels import (
    BROKEN_HEADER,
    NORMAL,
    REASONING,
    TOOL,
    ChannelParser,
    ChannelRules,
)
from mlxsup.worker.text.harmony import CHANNELS, harmony_rules, opening_of, read_header
from mlxsup.worker.text.tool_calls import ToolCallReader
from mlxsup.worker.text.tool_formats import ToolFormat, parse_json_calls

from support.worker.tool_values import cut_up

OFFERED = [{"type": "function", "function": {"name": name}} for name in ("weather", "f")]
HARMONY = harmony_rules()
Shown = list[tuple[str, str]]


def rules(of_calls: dict[str, Any] | None = None, **changes: Any) -> ChannelRules:
    values: dict[str, Any] = {
        "transitions": {
            NORMAL: [("<think>", REASONING), ("<tool_call>", TOOL)],
            REASONING: [("</think>", NORMAL), ("<tool_call>", TOOL)],
            TOOL: [("</tool_call>", NORMAL)],
        },
    }
    tool_format = ToolFormat(name="json", parse=parse_json_calls, **(of_calls or {}))
    return ChannelRules(tool_format=tool_format, **(values | changes))


def parse(
    *parts: str,
    model: ChannelRules | None = None,
    opening: str = "",
    form: AnswerForm = AnswerForm.TEXT,
) -> tuple[Shown, list[str]]:
    """Return the texts with their channels, neighbours of one channel joined, and the warnings."""
    calls = ToolCallReader(OFFERED, seed=5)
    parser = ChannelParser(model or rules(), opening, calls, form=form)
    pieces = [piece for text in parts for piece in parser.add(text)] + parser.finish()
    shown: Shown = []
    for channel, text in [(piece.channel.value, piece.text) for piece in pieces if piece.text]:
        if shown and shown[-1][0] == channel:
            shown[-1] = (channel, shown[-1][1] + text)
        else:
            shown.append((channel, text))
    return shown, [piece.warning for piece in pieces if piece.warning]


def call_of(shown: tuple[str, str]) -> dict[str, Any]:
    channel, text = shown
    assert (channel, text[-1:]) == (Channel.TOOL_CALL.value, "\n")
    value = json.loads(text)
    assert value["type"] == "function"
    assert value["id"].startswith("call_")
    return dict(value["function"])


# ---------------------------------------------------------------- markers
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'


@pytest.mark.parametrize(
    "text",
    ["not json", "{}", '{"name": 5}', '{"name": "f", "arguments": [1]}', "[]", "null", '"x"', "",
     '{"name": "f", "arguments": {"x": NaN}}', '{"name": "\\ud800"}', "[" * 5000],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_malformed_call_comes_as_text_with_a_warning(text: str) -> None:
    whole = f"a<tool_call>{text}</tool_call>b"
    assert parse(whole) == ([("content", whole)], [UNREADABLE_CALL])


def test_a_call_without_its_end_is_read_at_the_end_if_its_format_shows_whether_it_is_whole() -> (
    None
):
    [call], warnings = parse("<tool_call>" + CALL)
    assert (call_of(call)["name"], warnings) == ("weather", [])
    half = "<tool_call>" + CALL[:20]
    assert parse(half) == ([("content", half)], [UNREADABLE_CALL])
    model = rules({"shows_its_end": False})
    [call], _ = parse("<tool_call>" + CALL + "</tool_call>", model=model)
    assert call_of(call)["name"] == "weather"
    text = "<tool_call>" + CALL
    assert parse(text, model=model) == ([("content", text)], [UNREADABLE_CALL])


def test_headers_are_not_shown() -> None:
    model = rules(
        initial="header",
        transitions={
            "header": [("to=self|", REASONING), ("to=user|", NORMAL)],
            REASONING: [("<eom>", "header")],
            NORMAL: [("<eom>", "header")],
        },
    )
    got = parse("role to=self|hm<eom>role to=", "user|hi", model=model)
    assert got == ([("reasoning", "hm"), ("content", "hi")], [])


PARTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "</", "<to", "a", "🦊", "b "]
)


@given(st.lists(PARTS, max_size=14), st.lists(st.integers(1, 5), min_size=1, max_size=80))
def test_the_cut_makes_no_difference(parts: list[str], sizes: list[int]) -> None:
    text = "".join(parts)
    assert parse(*cut_up(text, sizes)) == parse(text)


def test_text_that_might_have_become_a_call_is_shown_before_the_next_part() -> None:
    got = parse('{"name"<think>hm', model=rules({"has_bare_calls": True}))
    assert got == ([("content", '{"name"'), ("reasoning", "hm")], [])


def test_an_unfinished_call_is_content() -> None:
    parser = ChannelParser(rules(), "", ToolCallReader(OFFERED, 1))
    assert parser.add("<tool_call>{") == []
    assert parser.channel is Channel.CONTENT
    assert not parser.is_in_content


# ---------------------------------------------------------------- harmony
OPENING = "<|start|>assistant"
ARGUMENTS = '{"city": "Köln"}'
FINAL = f"{OPENING}<|channel|>final<|message|>"


def harmonised(*parts: str, opening: str = OPENING, **more: Any) -> tuple[Shown, list[str]]:
    return parse(*parts, model=HARMONY, opening=opening, **more)


def test_reasoning_preamble_call_and_answer_are_apart() -> None:
    (hm, look, call, rain), warnings = harmonised(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look. <|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
        f"{FINAL}Rain.<|return|>"
    )
    assert [hm, look, rain] == [("reasoning", "hm"), ("content", "I look. "), ("content", "Rain.")]
    assert call_of(call) == {"name": "weather", "arguments": ARGUMENTS}
    assert warnings == []


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
    [call], warnings = harmonised(header + ARGUMENTS + end)
    assert (call_of(call), warnings) == ({"name": "f", "arguments": ARGUMENTS}, [])


COMMENT_THEN_FINAL = f"<|channel|>commentary<|message|>a<|end|>{FINAL}b"
HALF_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{no<|call|>"


@pytest.mark.parametrize(
    ("text", "how", "shown", "warnings"),
    [
        (COMMENT_THEN_FINAL, {}, [("content", "ab")], []),
        (COMMENT_THEN_FINAL, {"form": AnswerForm.REGEX},
         [("reasoning", "a"), ("content", "b")], []),
        (HALF_CALL, {}, [("content", "{no")], [UNREADABLE_CALL]),
        ("4", {"opening": ""}, [("content", "4")], []),
        ("4", {"opening": FINAL}, [("content", "4")], []),
        ("4", {"opening": f"{OPENING}<|channel|>analysis<|message|>"}, [("reasoning", "4")], []),
        *((cut, {}, [], []) for cut in ("", "<|chan", "<|channel|>", "<|channel|>fin",
                                        "<|channel|>final<|mess", " to=func")),
        *((text, {}, [("content", content)], [BROKEN_HEADER]) for text, content in [
            ("Hello", "Hello"),
            ("Hello there, all of you", "Hello there, all of you"),
            ("Sure<|channel|>final<|message|>yes", "Sureyes"),
            ("<|channel|>final<|message|>a<|end|>stray", "astray"),
            ("<|channel|>thought<|message|>a", "thoughta"),
            ("<|channel|>final<|message|>a<|end|>one<|end|>two", "aonetwo"),
        ]),
    ],
)  # fmt: skip
def test_what_is_no_header_is_shown_and_a_header_is_not(
    text: str, how: dict[str, Any], shown: Shown, warnings: list[str]
) -> None:
    assert harmonised(text, **how) == (shown, warnings)


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [("x<|end|>" + FINAL, FINAL), ("x<|end|><|start|>assistant", OPENING), (FINAL + "so far", ""),
     ("<|channel|>analysis<|message|>", ""), ("2+2=", "")],
)  # fmt: skip
def test_a_raw_prompt_may_open_a_part_at_its_end(prompt: str, opening: str) -> None:
    assert opening_of(prompt) == opening


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
    whole = harmonised(text)
    assert harmonised(*cut_up(text, sizes)) == whole
    visible = "".join(text for channel, text in whole[0] if channel != Channel.TOOL_CALL.value)
    assert not any(f"<|{name}|>" in visible for name in ("start", "end", "channel", "message"))


def test_a_call_without_a_body_is_none() -> None:
    """It may have been cut short there; a call without arguments has the body `{}`."""
    head = "<|channel|>commentary to=functions.now<|message|>"
    assert harmony.parse_call(head + "{}", {}, False) == [{"name": "now", "arguments": {}}]
    for body in ("", "{}{}"):
        with pytest.raises(ValueError):
            harmony.parse_call(head + body, {}, False)


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


# ---------------------------------------------------------------- calls without markers
NAMES = ("weather", "time")


def shown_text(text: str, size: int = 1, names: tuple[str, ...] = NAMES) -> tuple[str, int, str]:
    """Return the text let out, behind how many characters the first came, and the text held."""
    watch, out, first = BareCallWatch(names), "", -1
    for at in range(0, len(text), size):
        piece = watch.add(text[at : at + size])
        if piece and first < 0:
            first = at + size
        out += piece
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
        '{"type": "function"}',
        '{"parameters": {}, "name": "time"}',
        '{"arguments": {}}',
        '{"name": "time", "parameters": X}',
        '{"name": "time", "parameters": {"a": [1, {"b": []}]}}',
        '{"name": "time", "parameters": {"a": "} ] {"}}',
        '{"name": "time", "parameters": {"a": "say \\"}\\" {"}}',
        '{"name": "time", "parameters": {"a": "\\\\"}}',
        '{"name": "time"}, {"name": "weather"}',
        '{"function": {"name": "time"}}',
        'time(a="x", b=[1, (2)])',
        "[weather(a='it(s'), time()]",
        "time(a=') x')",
        "time()\ntime()\n",
    ],
)
def test_calls_of_known_tools_are_held_to_their_end(text: str) -> None:
    for size in (1, 3, 1000):
        assert shown_text(text, size) == ("", -1, text)


@pytest.mark.parametrize(
    ("text", "behind"),
    [("x", 1), ("[x", 2), (" {x", 3), ("weather x", 8), ("time(a)x", 8), ("[time(a)] x", 11),
     ('{"k', 3), ('{"names', 7), ('{"type": "b', 11), ('{"type": {', 10), ('{"key"', 3),
     ('{"name"x', 8),
     ('{"name":x', 9), ('{"name": 5', 10), ('{"name": "x', 11), ('{"function": "x', 15),
     ('{"name": "weathers', 18), ('{"name": "wea"', 14), ('{"na"', 5), ('{"name": "time"} x', 18),
     ('{"name": "time"}, {x', 20), ('{"name": "time"} [x', 19), ('{"name": "time"}}', 17),
     ('{"name": "time"}]', 17), ('{"name": "time", "a": "\\\\"} x', 29),
     ('{"name": "time", "a": "\\"} x"} y', 32)],
)  # fmt: skip
def test_text_that_is_no_call_is_shown_at_once(text: str, behind: int) -> None:
    assert shown_text(text) == (text, behind, "")
    assert shown_text(text, 1000) == (text, 1000, "")


def test_the_latest_of_several_calls_is_known_and_counted() -> None:
    watch = BareCallWatch(NAMES)
    for count, begun in enumerate((BARE_CALL, '; {"name": "time"'), 1):
        assert watch.add(begun) == ""
        assert (watch.begun, watch.latest) == (count, begun.removeprefix("; "))


def test_a_beginning_is_waited_for_up_to_a_limit() -> None:
    watch = BareCallWatch(NAMES)
    assert watch.add(" " * MAX_BEGINNING) == ""
    assert watch.add(" ") == " " * (MAX_BEGINNING + 1)
    assert watch.add(" " + BARE_CALL) == " "
    assert watch.text == BARE_CALL


WEATHER = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("opening", "said", "expected"),
    [
        ("", WEATHER, ["tool_call"]),
        ("]", WEATHER + "\n" + WEATHER, ["tool_call", "content", "tool_call"]),
        ("<think>", "hm</think>" + WEATHER, ["reasoning", "tool_call"]),
        ("", json.dumps({"a": WEATHER}), ["content"]),
        ("", "x" + WEATHER, ["content"]),
        ("", "<tool_call>none</tool_call>" + WEATHER, ["content", "tool_call"]),
        ("<think>", f"{WEATHER}</think>{{}}", ["reasoning", "content"]),
    ],
)
def test_content_that_must_be_json_begins_with_a_call_or_has_none(
    opening: str, said: str, expected: list[str]
) -> None:
    whole, _ = parse(said, opening=opening, form=AnswerForm.JSON)
    assert [channel for channel, _ in whole] == expected
    for cut in range(1, 12):
        pieces = [said[at : at + cut] for at in range(0, len(said), cut)]
        assert parse(*pieces, opening=opening, form=AnswerForm.JSON)[0] == whole
        parser = ChannelParser(rules(), opening, ToolCallReader(OFFERED, 5), form=AnswerForm.JSON)
        added = [one for text in pieces if parser.plain_channel(text) is None
                 for one in parser.add(text)]  # fmt: skip
        calls = [one.text for one in [*added, *parser.finish()] if one.channel == "tool_call"]
        assert calls == [text for channel, text in whole if channel == "tool_call"]
