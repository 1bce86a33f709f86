"""Tool calls: what each format reads, ids, and messages that bring calls and results back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
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
from mlxsup.worker.text.chat_messages import plain_messages, text_of_messages, with_text_arguments
from mlxsup.worker.text.tool_calls import CallIds, ToolCallParser, ToolCallReader
from mlxsup.worker.text.tool_formats import (
    ToolFormat,
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
def test_parsers_read_calls(parse: Parser, text: str, calls: list[dict[str, Any]]) -> None:
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
def test_parsers_refuse_text_that_is_no_call(parse: Parser, text: str, words: str) -> None:
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
def test_a_bad_call_counts_nothing(calls: Any) -> None:
    reader = ToolCallReader(named("f"), 7)
    assert read(reader, calls) is None
    assert reader.count == 0
    assert reader.read("text", None) is None


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


KINDS = list(dict.fromkeys(kind for kind, _, _ in WRITTEN))


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", ["{", "no call", '{"a": ', "[" * 3000, "x(", '[{"name": 5}]'])
def test_a_bad_call_stays_text_with_a_warning(kind: ToolFormat, broken: str) -> None:
    whole = kind.begins[0] + broken + (kind.ends[0] if kind.ends else "")
    got = parse(kind, [whole])
    assert text_of(got) == whole
    assert [piece.warning for piece in got if piece.warning] == [UNREADABLE_CALL]


@pytest.mark.parametrize("kind", KINDS)
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


@settings(max_examples=40)
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


def called(call_id: Any = None, **function: Any) -> dict[str, Any]:
    return ({} if call_id is None else {"id": call_id}) | {"function": function}


def test_messages_become_plain_and_keep_what_else_they_say() -> None:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}], "x": 1},
        {"role": "system", "content": None},
        {"role": "assistant", "tool_calls": None},
    ]
    assert plain_messages(given) == [
        {"role": "user", "content": "ab", "x": 1},
        {"role": "system", "content": ""},
        {"role": "assistant", "content": ""},
    ]
    assert given[1] == {"role": "system", "content": None}, "the request's own stay as they are"


@pytest.mark.parametrize(
    "content", [5, {}, [{"type": "image"}], [{"text": "a"}, {"text": 5}], [{"text": "a"}, "b"]]
)
def test_content_that_is_no_text_is_refused_C7(content: Any) -> None:
    with pytest.raises(RemoteError) as caught:
        plain_messages([{"role": "user", "content": content}])
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.message.startswith("messages takes content that is text, not ")


@pytest.mark.parametrize(
    ("arguments", "plain"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("{", "{"), ("[" * 100_000, "[" * 100_000), ({"b": 2},) * 2],
)
def test_arguments_are_maps_if_they_can_be(arguments: Any, plain: Any) -> None:
    messages = [{"role": "assistant", "tool_calls": [called("i", name="f", arguments=arguments)]}]
    [message] = plain_messages(messages)
    assert message["tool_calls"] == [
        {"type": "function", "id": "i", "function": {"name": "f", "arguments": plain}}
    ]


def test_arguments_are_text_for_templates_that_need_it() -> None:
    calls = [called("i", name="f", arguments={"a": "é"}), called("j", arguments="x"), {"id": 5}]
    messages: list[dict[str, Any]] = [
        {"role": "user"},
        {"role": "assistant", "tool_calls": calls, "x": 1},
    ]
    assert with_text_arguments(messages) == [
        {"role": "user"},
        {"role": "assistant", "x": 1,
         "tool_calls": [called("i", name="f", arguments='{"a": "é"}'), *calls[1:]]},
    ]  # fmt: skip


def test_results_belong_to_the_latest_calls_and_each_to_one() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [called("a", name="f")]},
        {"role": "assistant", "tool_calls": [called("b", name="g"), called("c", name="h")]},
        {"role": "tool", "tool_call_id": "a", "content": "too late"},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "tool", "name": "own", "content": "3"},
    ]
    assert plain_messages(messages)[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": "too late"},
        {"role": "tool", "tool_call_id": "c", "content": "1", "name": "h"},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "tool", "tool_call_id": "b", "content": "3", "name": "own"},
    ]


CHAT_TOOL = {"type": "function", "function": {"name": "f"}}


def said(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


def body(**values: Any) -> RequestBody:
    return RequestBody.from_wire({"messages": said("Hi"), "messages_as_text": True} | values)


def test_texts_become_paragraphs_and_empty_ones_leave_no_gap() -> None:
    parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
    messages = said("Be brief.", "", None, parts)
    assert text_of_messages(body(messages=messages)) == "Be brief.\n\nin parts"


def test_a_request_that_needs_a_template_is_told_that_there_is_none() -> None:
    expected: list[tuple[dict[str, Any], str, str]] = [
        ({"messages_as_text": False}, ": send prompt instead of messages", "messages"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            ", which chat_template_kwargs are for",
            "chat_template_kwargs",
        ),
        ({"tools": [CHAT_TOOL]}, ", which tools are shown with", "tools"),
        # What is said first is what helps with all of them.
        (
            {
                "messages_as_text": False,
                "chat_template_kwargs": {"a": 1},
                "tools": [CHAT_TOOL],
            },
            ": send prompt instead of messages",
            "messages",
        ),
    ]
    for asked, problem, parameter in expected:
        with pytest.raises(RemoteError) as caught:
            text_of_messages(body(**asked))
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        assert caught.value.message == f"this model has no chat template{problem}"
        assert caught.value.detail == {"parameter": parameter}
