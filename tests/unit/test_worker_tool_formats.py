"""Formats of tool calls, their ids, and messages that bring calls back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.states import Channel
from mlxsup.worker.text import tool_formats
from mlxsup.worker.text.channels import (
    NORMAL,
    TOOL,
    UNREADABLE_CALL,
    ChannelParser,
    ChannelRules,
    Piece,
)
from mlxsup.worker.text.chat_messages import plain_messages, with_text_arguments
from mlxsup.worker.text.tool_calls import CallIds, ToolCallReader
from mlxsup.worker.text.tool_formats import ToolFormat, own_format

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]
WEATHER = {"city": "Köln", "days": 2, "note": 'a "b" {c}; <d>'}
SPELLED = json.dumps(WEATHER, ensure_ascii=False)


def rules_of(kind: ToolFormat) -> ChannelRules:
    transitions = {NORMAL: [(marker, TOOL) for marker in kind.begins]}
    transitions[TOOL] = [(marker, NORMAL) for marker in kind.ends]
    return ChannelRules(
        transitions=transitions,
        parse_tool_call=kind.parse,
        call_ids=kind.call_ids,
        has_bare_calls=kind.has_bare_calls,
        needs_tools=kind.needs_tools,
    )


def parse(kind: ToolFormat, pieces: list[str], tools: Any = TOOLS, **more: Any) -> list[Piece]:
    parser = ChannelParser(rules_of(kind), "", ToolCallReader(tools, seed=5), **more)
    return [piece for text in pieces for piece in parser.add(text)] + parser.finish()


def calls_of(pieces: list[Piece]) -> list[tuple[str, Any]]:
    lines = "".join(p.text for p in pieces if p.channel is Channel.TOOL_CALL).splitlines()
    functions = [json.loads(line)["function"] for line in lines]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def text_of(pieces: list[Piece]) -> str:
    return "".join(p.text for p in pieces if p.channel is Channel.CONTENT)


DEEP = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
WRITTEN = [
    (tool_formats.LLAMA, f'{{"name": "weather", "parameters": {SPELLED}}}', 1),
    (
        tool_formats.LLAMA,
        f'\n{{"type": "function", "name": "weather", "parameters": {SPELLED}}}',
        1,
    ),
    (tool_formats.LLAMA, f'<|python_tag|>{{"name": "weather", "parameters": {SPELLED}}}', 1),
    (
        tool_formats.LLAMA,
        f'{{"name": "weather", "parameters": {SPELLED}}}; {{"name": "time", "parameters": {{}}}}',
        2,
    ),
    (
        tool_formats.DEEPSEEK,
        "<｜tool▁calls▁begin｜>"
        + DEEP.format("function", f"weather\n```json\n{SPELLED}\n```")
        + "\n"
        + DEEP.format("function", "time\n```json\n{}\n```")
        + "<｜tool▁calls▁end｜>",
        2,
    ),
    (
        tool_formats.DEEPSEEK,
        "<｜tool▁calls▁begin｜>" + DEEP.format("weather", SPELLED) + "<｜tool▁calls▁end｜>",
        1,
    ),
    (tool_formats.GRANITE, f'<|tool_call|>[{{"name": "weather", "arguments": {SPELLED}}}]', 1),
    (
        tool_formats.PHI,
        f'<|tool_call|>[{{"name": "weather", "arguments": {SPELLED}}}]<|/tool_call|>',
        1,
    ),
    (
        tool_formats.OLMO,
        f"<function_calls>\nweather(city='Köln', days=2, note={WEATHER['note']!r})\ntime()\n"
        "</function_calls>",
        2,
    ),
    (
        tool_formats.COMMAND_R,
        f'Action: ```json\n[{{"tool_name": "weather", "parameters": {SPELLED}}}]\n```',
        1,
    ),
    (
        tool_formats.COMMAND_A,
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": '
        f"{SPELLED}}}]<|END_ACTION|>",
        1,
    ),
    (tool_formats.MISTRAL, f'[TOOL_CALLS][{{"name": "weather", "arguments": {SPELLED}}}]', 1),
    (tool_formats.MISTRAL, f"[TOOL_CALLS]weather[ARGS]{SPELLED}[TOOL_CALLS]time[ARGS]{{}}", 2),
    (tool_formats.MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]Ab3dE6gH9[ARGS]{SPELLED}", 1),
]


@pytest.mark.parametrize(("kind", "text", "count"), WRITTEN)
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_each_format_is_read_however_it_is_cut(
    kind: ToolFormat, text: str, count: int, size: int
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    got = parse(kind, pieces)
    assert calls_of(got) == [("weather", WEATHER), ("time", {})][:count]
    assert text_of(got).strip() == ""
    assert not [piece.warning for piece in got if piece.warning]


@pytest.mark.parametrize("kind", [kind for kind, _, _ in WRITTEN])
@pytest.mark.parametrize("broken", ["{", "no call", '{"a": ', "[" * 3000, "x(", '[{"name": 5}]'])
def test_what_is_no_call_stays_text_with_a_warning(kind: ToolFormat, broken: str) -> None:
    whole = kind.begins[0] + broken + (kind.ends[0] if kind.ends else "")
    got = parse(kind, [whole])
    assert text_of(got) == whole
    assert [piece.warning for piece in got if piece.warning] == [UNREADABLE_CALL]


@pytest.mark.parametrize("kind", [kind for kind, _, _ in WRITTEN])
@pytest.mark.parametrize("part", ["{", "[", "(", "1+", "-", "a.", "{'a':", '[{"name":', "f(x="])
def test_a_hundred_thousand_letters_of_nonsense_stay_text(kind: ToolFormat, part: str) -> None:
    nonsense = part * (100_000 // len(part))
    whole = kind.begins[0] + nonsense + (kind.ends[0] if kind.ends else "")
    got = parse(kind, [whole[at : at + 4] for at in range(0, len(whole), 4)])
    assert text_of(got) == whole
    assert not calls_of(got)


@pytest.mark.parametrize("place", ["before", "between", "behind"])
def test_words_among_the_calls_of_deepseek_make_all_of_it_text(place: str) -> None:
    call = DEEP.format("weather", SPELLED)
    inside = {"before": f"so: {call}", "between": f"{call} and {call}", "behind": f"{call} done"}
    whole = "<｜tool▁calls▁begin｜>" + inside[place] + "<｜tool▁calls▁end｜>"
    got = parse(tool_formats.DEEPSEEK, [whole])
    assert (text_of(got), calls_of(got)) == (whole, [])


@pytest.mark.parametrize("end", ["", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"])
def test_many_beginnings_are_read_in_one_go(end: str) -> None:
    whole = "<｜tool▁calls▁begin｜>" + ("<｜tool▁call▁begin｜>" + end) * 20_000
    assert text_of(parse(tool_formats.DEEPSEEK, [whole])) == whole


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Rome"}',
        '{"name": "unknown", "parameters": {}}',
        '{"name": "weather"} is how to call it',
        "{" * 100_000,
        '{"name" 5}',
        "{}",
        "[1]",
        " " * 1000,
        "Look: " + '{"name": "weather", "parameters": {}}',
        '{"name": "weather", "parameters": {}}]',
    ],
)
def test_json_that_is_no_call_is_content_without_delay(text: str) -> None:
    parser = ChannelParser(rules_of(tool_formats.LLAMA), "", ToolCallReader(TOOLS, seed=5))
    early = parser.add(text)
    late = parser.finish()
    assert text_of(early) + text_of(late) == text
    assert not calls_of(early + late)
    assert not late or not text.strip() or text == "{}"


@pytest.mark.parametrize("more", [{"tools": None}, {"has_form": True}])
def test_bare_json_is_a_call_only_if_calls_are_asked_for(more: dict[str, Any]) -> None:
    text = '{"name": "weather", "parameters": {}}'
    got = parse(tool_formats.LLAMA, list(text), **more)
    assert (text_of(got), calls_of(got)) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "weather", "parameters": {}}; {"name": "unknown", "parameters": {}}',
        '{"type": "function", "name": "unknown", "parameters": {}}',
    ],
)
def test_bare_calls_of_unknown_tools_are_text(text: str) -> None:
    got = parse(tool_formats.LLAMA, list(text))
    assert (text_of(got), calls_of(got)) == (text, [])
    assert [piece.warning for piece in got if piece.warning] == [UNREADABLE_CALL]


def test_half_a_bare_call_is_text_with_a_warning() -> None:
    got = parse(tool_formats.LLAMA, ['{"name": "weather", "param'])
    assert [(piece.text, piece.warning) for piece in got] == [
        ('{"name": "weather", "param', UNREADABLE_CALL)
    ]


def test_a_fence_is_a_call_only_in_a_request_with_tools() -> None:
    text = 'Action: ```json\n[{"tool_name": "weather", "parameters": {}}]\n```'
    assert text_of(parse(tool_formats.COMMAND_R, [text], tools=None)) == text


BITS = st.sampled_from(
    ['{"name": "', "weather", "time", '"', ', "parameters": ', "{", "}", "[", "]", ";", " ", "\\",
     "<|python_tag|>", "x", '{"name": "weather", "parameters": {}}', "🦊"]
)  # fmt: skip


@given(st.lists(BITS, max_size=12), st.lists(st.integers(1, 6), min_size=1, max_size=40))
def test_the_cut_of_bare_calls_makes_no_difference(bits: list[str], sizes: list[int]) -> None:
    text = "".join(bits)
    pieces: list[str] = []
    at = 0
    while at < len(text):
        pieces.append(text[at : at + sizes[len(pieces) % len(sizes)]])
        at += len(pieces[-1])
    cut, whole = parse(tool_formats.LLAMA, pieces), parse(tool_formats.LLAMA, [text])
    assert (text_of(cut), calls_of(cut)) == (text_of(whole), calls_of(whole))
    if not calls_of(whole):
        assert text_of(whole) == text


def test_ids_fit_the_family_and_are_the_same_again() -> None:
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {}}, {"name": "time", "arguments": {}}]'
    found = [json.loads(line)["id"] for _ in range(2) for line in lines_of(text)]
    assert found[:2] == found[2:]
    assert len(set(found)) == 2
    assert all(CallIds.NINE.fits(one) for one in found)


def lines_of(text: str) -> list[str]:
    got = parse(tool_formats.MISTRAL, [text])
    return "".join(p.text for p in got if p.channel is Channel.TOOL_CALL).splitlines()


def test_the_models_own_id_is_kept_once() -> None:
    calls = [
        "a[CALL_ID]Ab3dE6gH9[ARGS]{}",
        "b[CALL_ID]Ab3dE6gH9[ARGS]{}",
        "c[CALL_ID]short[ARGS]{}",
    ]
    found = [json.loads(line)["id"] for line in lines_of("[TOOL_CALLS]" + "".join(calls))]
    assert found[0] == "Ab3dE6gH9"
    assert len(set(found)) == 3
    assert all(CallIds.NINE.fits(one) for one in found)


def test_a_parser_that_makes_a_call_of_anything_is_not_believed() -> None:
    loose = tool_formats.only_whole_calls(lambda text, tools: {"name": text, "arguments": {}})
    assert loose("weather", None)["name"] == "weather"
    for text in ("unknown", "two words", "{a"):
        with pytest.raises(ValueError):
            loose(text, None)


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ("f", True),
        ("f\n<arg_key>a</arg_key>\n<arg_value>Rome</arg_value>\n", True),
        ("f<arg_key>a</arg_key><arg_value>1 < 2</arg_value>", True),
        ("f<arg_key>a</arg_key><arg_value></arg_value><arg_key>b</arg_key><arg_value>", False),
        ("f<arg_key>a</arg_value>", False),
        ("f<arg_key>a</arg_key>", False),
        ("f<arg_key>a</arg_key><arg_value>Ro", False),
        ("f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>n", False),
        ("f<arg_key>a</arg_key><arg_value>1</arg_value>stray", False),
    ],
)  # fmt: skip
def test_a_call_that_loses_an_argument_is_none(text: str, is_call: bool) -> None:
    loose = tool_formats.only_whole_calls(lambda text, tools: {"name": "f", "arguments": {}})
    if is_call:
        assert loose(text, None)["name"] == "f"
    else:
        with pytest.raises(ValueError):
            loose(text, None)


@pytest.mark.parametrize(
    ("vocabulary", "template", "name"),
    [
        (["<｜tool▁calls▁begin｜>"], "", "deepseek"),
        (["<|tool_call|>", "<|/tool_call|>"], "", "phi"),
        (["<|tool_call|>"], "", "granite"),
        (["<|python_tag|>"], "message.tool_calls", "llama"),
        ([], "<function_calls>", "olmo"),
        (["<|START_ACTION|>"], "", "command-a"),
        ([], "Write 'Action:' followed by ```json", "command-r"),
        ([], "", None),
    ],
)
def test_the_format_follows_from_the_model(
    vocabulary: list[str], template: str, name: str | None
) -> None:
    found = own_format(vocabulary, template)
    assert (found.name if found else None) == name


def call(call_id: str | None, name: str = "weather") -> dict[str, Any]:
    function = {"name": name, "arguments": '{"city": "Rome"}'}
    return ({} if call_id is None else {"id": call_id}) | {"function": function}


@pytest.mark.parametrize("ids", list(CallIds))
@pytest.mark.parametrize(
    "given_id", ["call_0123456789abcdef01234567", "functions.f:3", "Ab3dE6gH9"]
)
def test_results_find_their_calls_under_ids_that_fit(ids: CallIds, given_id: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call(given_id), call("z", "time")]},
        {"role": "tool", "tool_call_id": "z", "content": "noon"},
        {"role": "tool", "tool_call_id": given_id, "content": "rain"},
    ]
    said, second, first = plain_messages(messages, ids)
    assert said["content"] == ""
    made = [one["id"] for one in said["tool_calls"]]
    assert all(ids.fits(one) for one in made)
    assert len(set(made)) == 2
    assert [first["tool_call_id"], second["tool_call_id"]] == made
    assert (first["name"], second["name"]) == ("weather", "time")
    assert said["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    text = with_text_arguments([said])[0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(text) == {"city": "Rome"}


def test_calls_and_results_without_ids_go_by_their_order() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call(None), call(None, "time")]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "content": "one too many"},
    ]
    said, rain, noon, odd = plain_messages(messages)
    assert [rain["tool_call_id"], noon["tool_call_id"]] == [c["id"] for c in said["tool_calls"]]
    assert (rain["name"], noon["name"]) == ("weather", "time")
    assert odd == {"role": "tool", "content": "one too many"}


def test_a_result_without_an_id_answers_the_first_open_call() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call("a"), call("b", "time")]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "content": "noon"},
    ]
    assert [m["tool_call_id"] for m in plain_messages(messages)[1:]] == ["a", "b"]


@pytest.mark.parametrize("calls", ["x", [5], [{"function": 5}], [{"function": {"arguments": "{"}}]])
def test_odd_calls_in_messages_are_left_to_the_template(calls: Any) -> None:
    assert plain_messages([{"role": "assistant", "tool_calls": calls}])[0]["content"] == ""


def test_no_calls_are_no_key() -> None:
    assert plain_messages([{"role": "assistant", "content": "a", "tool_calls": []}]) == [
        {"role": "assistant", "content": "a"}
    ]
    with pytest.raises(RemoteError, match="content that is text"):
        plain_messages([{"role": "user", "content": {}}])
