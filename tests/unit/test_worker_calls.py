"""Tool calls by hand: what each parser makes of a text, the ids, and calls behind headers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from mlxsup.protocol.states import Channel
from mlxsup.worker.text import tool_formats
from mlxsup.worker.text.channels import (
    BROKEN_HEADER,
    NORMAL,
    REASONING,
    TOOL,
    UNREADABLE_CALL,
    ChannelParser,
    ChannelRules,
    Header,
    Piece,
)
from mlxsup.worker.text.tool_calls import CallIds, ToolCallParser, ToolCallReader
from mlxsup.worker.text.tool_formats import (
    json_values,
    own_format,
    parse_deepseek_calls,
    parse_fenced_calls,
    parse_json_calls,
    parse_mistral_calls,
    parse_python_calls,
)

# ---------------------------------------------------------------- parsers

Parser = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", []),
        (" ;, \n", []),
        ("1 2", [1, 2]),
        ('[1, 2];{"a": 3},"x"', [1, 2, {"a": 3}, "x"]),
        ("[[1]]", [[1]]),
    ],
)
def test_values_of_json_stand_one_behind_the_other(text: str, values: list[Any]) -> None:
    assert json_values(text) == values


@pytest.mark.parametrize(
    ("parse", "text", "calls"),
    [
        (parse_json_calls, '{"name": "f", "arguments": {"a": 1}}',
         [{"name": "f", "arguments": {"a": 1}}]),
        (parse_json_calls, '{"tool_name": "f", "parameters": {"a": 1}, "id": "x"}',
         [{"name": "f", "arguments": {"a": 1}, "id": "x"}]),
        (parse_json_calls, '{"function": "f", "more": 1}', [{"name": "f", "arguments": {}}]),
        (parse_json_calls,
         '{"function": "h", "tool_name": "g", "name": "f", "parameters": 2, "arguments": 1}',
         [{"name": "f", "arguments": 1}]),
        (parse_json_calls, '{"function": "h", "tool_name": "g"}', [{"name": "g", "arguments": {}}]),
        (parse_python_calls, "f()", [{"name": "f", "arguments": {}}]),
        (parse_python_calls, " [f(a=1), g.h(b=[true, null, false, None])] ",
         [{"name": "f", "arguments": {"a": 1}},
          {"name": "g.h", "arguments": {"b": [True, None, False, None]}}]),
        (parse_python_calls, "f(a=-1)\ng(b={'c': 'd'})",
         [{"name": "f", "arguments": {"a": -1}}, {"name": "g", "arguments": {"b": {"c": "d"}}}]),
        (parse_python_calls, "[ ]", []),
        (parse_mistral_calls, ' [{"name": "f"}]', [{"name": "f", "arguments": {}}]),
        (parse_mistral_calls, '{"name": "f"}', [{"name": "f", "arguments": {}}]),
        (parse_mistral_calls, ' f.g-1 [CALL_ID] abc [ARGS] {"a": 1} [TOOL_CALLS] g{}  ',
         [{"name": "f.g-1", "arguments": {"a": 1}, "id": "abc"},
          {"name": "g", "arguments": {}, "id": None}]),
        (parse_mistral_calls, " ", []),
        (parse_deepseek_calls,
         " <｜tool▁call▁begin｜> f <｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>\n",
         [{"name": "f", "arguments": {"a": 1}}]),
        (parse_deepseek_calls,
         "<｜tool▁call▁begin｜>function<｜tool▁sep｜> f \n```json\n{}\n``` <｜tool▁call▁end｜>",
         [{"name": "f", "arguments": {}}]),
        (parse_fenced_calls,
         '[{"tool_name": "directly_answer"}, {"name": "f"}, {"name": "directly-answer"}]',
         [{"name": "f", "arguments": {}}]),
    ],
)  # fmt: skip
def test_what_a_parser_reads(parse: Parser, text: str, calls: list[dict[str, Any]]) -> None:
    assert parse(text) == calls
    assert parse(text, []) == calls, "the tools say nothing more"


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_json_calls, '{"name": "f"} x', "Expecting value"),
        (parse_python_calls, "x = 1", "no call$"),
        (parse_python_calls, "x", "no call with named arguments"),
        (parse_python_calls, "f(1)", "no call with named arguments"),
        (parse_python_calls, "f(**x)", "an argument without a name"),
        (parse_python_calls, "f(a=b)", "malformed"),
        (parse_mistral_calls, "f x", "no call"),
        (parse_mistral_calls, "f{} ]", "no call"),
        (parse_deepseek_calls, "", "no calls alone"),
        (parse_deepseek_calls, "x<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "no calls alone"),
    ],
)
def test_what_a_parser_does_not_read(parse: Parser, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


def returns(calls: object) -> ToolCallParser:
    """A parser that makes the same of every text."""
    return lambda text, tools: calls


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"name": "unknown", "arguments": {}}, "no call"),
        ({"name": "f", "arguments": {"raw": 1}}, "no call"),
        *(({"name": f"f{mark}", "arguments": {}}, "no name") for mark in " <>{}\"'\n"),
    ],
)
def test_calls_that_a_loose_parser_made_of_text_are_none(call: dict[str, Any], words: str) -> None:
    right = {"name": "f", "arguments": {"raw": 1, "b": 2}}
    for made in (call, [right, call]):
        made_of_text = tool_formats.only_whole_calls(returns(made))
        with pytest.raises(ValueError, match=words):
            made_of_text("x", None)
    strict = tool_formats.only_whole_calls(lambda text, tools: [right, {"text": text} | right])
    assert strict("x", None) == [right, {"text": "x"} | right]
    with pytest.raises(ValueError, match="an argument that cannot be read"):
        strict("f<arg_key>", None)


FORMATS = [value for value in vars(tool_formats).values() if hasattr(value, "begins")]


def test_the_markers_of_each_format() -> None:
    kinds = [one for one in FORMATS if isinstance(one, tool_formats.ToolFormat)]
    assert {one.name: (one.begins, one.ends) for one in kinds} == {
        "llama": (("<|python_tag|>",), ()),
        "deepseek": (("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)),
        "phi": (("<|tool_call|>",), ("<|/tool_call|>",)),
        "granite": (("<|tool_call|>",), ()),
        "olmo": (("<function_calls>",), ("</function_calls>",)),
        "command-a": (("<|START_ACTION|>",), ("<|END_ACTION|>",)),
        "command-r": (("Action: ```json", "Action:```json", "Action:\n```json"), ("```",)),
        "mistral": (("[TOOL_CALLS]",), ()),
    }
    assert {one.name for one in kinds if one.has_bare_calls} == {"llama"}
    assert {one.name for one in kinds if one.needs_tools} == {"command-r"}
    assert not [one for one in kinds if one.needs_ends]
    assert {one.name for one in kinds if one.call_ids is not CallIds.OURS} == {"mistral"}
    assert tool_formats.MISTRAL.call_ids is CallIds.NINE


@pytest.mark.parametrize(
    ("vocabulary", "template", "name"),
    [
        (["<|python_tag|>"], "", None),
        ([], "tool_calls", None),
        ([], "Action:", None),
        ([], "```json", None),
        (["<|/tool_call|>"], "", "phi"),
        (["<function_calls>"], "", None),
        (["<|START_ACTION|>", "<|tool_call|>"], "Action: ```json", "command-a"),
        (["<｜tool▁calls▁begin｜>", "<|START_ACTION|>"], "<function_calls>", "deepseek"),
        (["<|tool_call|>"], "<function_calls>", "granite"),
        (["<|python_tag|>"], "<function_calls> tool_calls", "olmo"),
        (["<|python_tag|>"], "tool_calls Action: ```json", "llama"),
    ],
)
def test_of_several_signs_the_surest_decides(
    vocabulary: list[str], template: str, name: str | None
) -> None:
    found = own_format(vocabulary, template)
    assert (found.name if found else None) == name


# ---------------------------------------------------------------- ids and lines


def test_ids_are_the_same_for_the_same_key_and_number() -> None:
    assert CallIds.OURS.make("f", 0, "k") == "call_c775e643826e1ed0602dbe77"
    assert CallIds.OURS.make("g", 0, "k") == CallIds.OURS.make("f", 0, "k")
    assert CallIds.OURS.make("f", 1, "k") != CallIds.OURS.make("f", 0, "k")
    assert CallIds.NINE.make("f", 0, "k") == "9fGq0ja93"
    assert CallIds.NUMBERED.make("f", 3, "k") == "functions.f:3"


@pytest.mark.parametrize(
    ("ids", "right", "wrong"),
    [
        (CallIds.OURS, ("!", "~" * 128), ("", " ", "x" * 129, "é", 5, None)),
        (CallIds.NINE, ("aZ0aZ0aZ0",), ("aZ0aZ0aZ", "aZ0aZ0aZ00", "aZ0aZ0aZ_", None)),
        (CallIds.NUMBERED, ("functions.f:0", f"functions.{'f' * 100}:123456789"),
         ("functions.f", "functions.:0", "functions.f g:0", "functions.f:0123456789",
          f"functions.{'f' * 101}:0", "xfunctions.f:0")),
    ],
)  # fmt: skip
def test_ids_fit_a_family(ids: CallIds, right: tuple[Any, ...], wrong: tuple[Any, ...]) -> None:
    assert all(map(ids.fits, right))
    assert not any(map(ids.fits, wrong))


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def read(reader: ToolCallReader, calls: Any, **more: Any) -> list[dict[str, Any]] | None:
    lines = reader.read("text", lambda text, tools: calls, **more)
    if lines is None:
        return None
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    return [json.loads(line) for line in lines]


def test_calls_are_lines_of_json_in_order() -> None:
    reader = ToolCallReader(named("f"), 7)
    assert reader.names == {"f"}
    calls: list[dict[str, Any]] = [
             {"name": "f", "arguments": {"a": "é"}, "id": "mine"}, {"name": "g"},
             {"name": "h", "arguments": '{"as": "text"}', "id": 5}]  # fmt: skip
    seen = []

    def parse(text: str, tools: list[Any] | None) -> list[dict[str, Any]]:
        seen.append((text, tools))
        return calls

    lines = reader.read("text", parse)
    assert lines is not None
    assert seen == [("text", named("f"))]
    assert lines[0] == (
        '{"id": "mine", "type": "function", "function": '
        '{"name": "f", "arguments": "{\\"a\\": \\"é\\"}"}}\n'
    )
    made = [json.loads(line) for line in lines]
    assert [one["function"] for one in made[1:]] == [
        {"name": "g", "arguments": "{}"},
        {"name": "h", "arguments": '{"as": "text"}'},
    ]
    assert [one["id"] for one in made[1:]] == [
        CallIds.OURS.make("g", 1, "7"),
        CallIds.OURS.make("h", 2, "7"),
    ]
    assert reader.count == 3


def test_an_id_that_is_taken_is_not_given_again() -> None:
    reader = ToolCallReader(None, 7)
    assert reader.names == frozenset()
    mine = CallIds.OURS.make("f", 2, "7")
    found = read(reader, [{"name": "f", "id": mine}, {"name": "f", "id": mine}, {"name": "f"}])
    assert found is not None
    assert [one["id"] for one in found] == [
        mine,
        CallIds.OURS.make("f", 1, "7"),
        CallIds.OURS.make("f", 3, "7"),  # the second number is the model's own already
    ]
    again = read(reader, {"name": "f", "id": mine})
    assert again is not None
    assert again[0]["id"] not in [one["id"] for one in found]


@pytest.mark.parametrize(
    "calls",
    [[], None, 5, {}, {"name": ""}, {"name": 5}, {"name": "f", "arguments": []},
     {"name": "f", "arguments": {"a": float("nan")}}, {"name": "\ud800"},
     [{"name": "f"}, {"name": ""}]],
)  # fmt: skip
def test_what_is_no_call_counts_nothing(calls: Any) -> None:
    reader = ToolCallReader(named("f"), 7)
    assert read(reader, calls) is None
    assert reader.count == 0
    assert reader.read("text", None) is None


def test_only_known_tools_are_called_if_that_is_asked_for() -> None:
    reader = ToolCallReader(named("f", "g"), 7)
    assert read(reader, [{"name": "f"}, {"name": "x"}], are_known=True) is None
    assert reader.count == 0
    assert read(reader, [{"name": "f"}, {"name": "g"}], are_known=True) is not None
    assert reader.count == 2
    assert read(reader, {"name": "x"}) is not None


# ---------------------------------------------------------------- parts behind headers


def read_header(header: str, has_form: bool) -> str | None:
    """`|c` is content, `|r` reasoning, `|t…` a call; `|x` is none; a form makes `|c` reasoning."""
    found = re.match(r"<h>(\w?)", header)
    assert found is not None
    return {"": NORMAL, "c": REASONING if has_form else NORMAL, "r": REASONING, "t": TOOL}.get(
        found[1]
    )


HEADED = ChannelRules(
    transitions={state: [("<h>", "header")] for state in (NORMAL, REASONING, TOOL)},
    header=Header(end="<m>", read=read_header, never_shown=("<n>",)),
    parse_tool_call=lambda text, tools: {
        "name": text.partition("<m>")[0], "arguments": json.loads(text.partition("<m>")[2])
    },
)  # fmt: skip


def pieces_of(
    text: str, opening: str = "", *, size: int = 1, has_form: bool = False
) -> list[tuple[str, str, str | None]]:
    """Channel, text and warning, with neighbours of one channel joined."""
    parser = ChannelParser(HEADED, opening, ToolCallReader(None, 1), has_form=has_form)
    pieces: list[Piece] = []
    for at in range(0, len(text), size):
        pieces += parser.add(text[at : at + size])
    joined: list[tuple[str, str, str | None]] = []
    for piece in pieces + parser.finish():
        if not (piece.text or piece.warning):
            continue
        before = joined[-1] if joined else None
        if before and before[0] == piece.channel.value and before[2] is piece.warning is None:
            joined[-1] = (before[0], before[1] + piece.text, None)
        else:
            joined.append((piece.channel.value, piece.text, piece.warning))
    return joined


CONTENT, CALLED = Channel.CONTENT.value, Channel.TOOL_CALL.value


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_headers_decide_and_are_not_shown(size: int) -> None:
    text = "a<h>r<m>why<h>c<m>b"
    assert pieces_of(text, size=size) == [
        (CONTENT, "a", None), ("reasoning", "why", None), (CONTENT, "b", None)
    ]  # fmt: skip
    assert pieces_of("<h>c<m>b", size=size, has_form=True) == [("reasoning", "b", None)]
    assert pieces_of("<m>b", "<h>r", size=size) == [("reasoning", "b", None)]


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_call_behind_a_header_is_given_with_it(size: int) -> None:
    [(channel, line, warning), *rest] = pieces_of('<h>t<m>{"a": 1}<h>c<m>b', size=size)
    assert (channel, warning, rest) == (CALLED, None, [(CONTENT, "b", None)])
    assert json.loads(line)["function"] == {"name": "<h>t", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_call_behind_a_header_that_cannot_be_read_shows_no_marker(size: int) -> None:
    assert pieces_of("<h>t<m>{<n>x<h>c<m>b", size=size) == [
        (CONTENT, "{x", UNREADABLE_CALL), (CONTENT, "b", None)
    ]  # fmt: skip
    assert pieces_of("<h>t<m>", size=size) == [(CONTENT, "", UNREADABLE_CALL)]


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_header_that_is_none_is_content_and_said_once(size: int) -> None:
    assert pieces_of("a<h>x<m>b<h>x<m>c", size=size) == [
        (CONTENT, "a", None), (CONTENT, "", BROKEN_HEADER), (CONTENT, "x<m>bx<m>c", None)
    ]  # fmt: skip
    assert pieces_of("xy", "<h>", size=size)[0] == (CONTENT, "", BROKEN_HEADER)


def test_what_an_unfinished_header_holds_is_never_shown() -> None:
    assert pieces_of("a<h>r") == [(CONTENT, "a", None)]
    assert pieces_of("a<h") == [(CONTENT, "a<h", None)]
