"""Calls of strict functions: behind its mark, a grammar holds a call to the family's own form and
to the schema; what no grammar holds is checked."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.states import Channel
from mlxsup.worker.engine import Prompt
from mlxsup.worker.engines.mlx.text import MlxText
from mlxsup.worker.text.call_grammars import call_grammar
from mlxsup.worker.text.channels import ChannelParser
from mlxsup.worker.text.grammar import LARK, NO_ARGUMENTS, Grammar, NoGrammarsError, closed
from mlxsup.worker.text.tool_calls import ToolCallReader
from mlxsup.worker.text.tool_formats import (
    COMMAND_A,
    DEEPSEEK,
    DSML,
    FORMS,
    GRANITE,
    LLAMA,
    MISTRAL,
    PHI,
    ToolFormat,
    format_of_mlx_lm,
)  # fmt: skip

from support.models.families import FAMILIES, Family, load
from support.worker.loop_driver import LoopDriver, check_resumes
from support.worker.mlx_rows import driven_engine

pytestmark = pytest.mark.mlx
pytest.importorskip("llguidance")

SPECIAL = range(2044, 2048)
"""Ids of tokens that are no text."""

HELD = [
    "qwen2.5",
    "qwen3",
    "qwen-coder",
    "hermes",
    "mistral-v3",
    "kimi-k2",
    "gpt-oss",
    "llama3.1",
    "glm4",
    "deepseek-v3",
]


def tool(name: str, parameters: Any, *, strict: bool | None = True) -> dict[str, Any]:
    function = {"name": name, "description": "", "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "</tool_call>", '"<think>"\n', "Köln"]},
        "day": {"$ref": "#/$defs/Day"},
    },
    "required": ["city", "day"],
    "$defs": {"Day": {"type": "integer", "minimum": 1, "maximum": 31}},
}
TOOLS = [tool("weather", WEATHER), tool("größe-of.it", None), tool("free", None, strict=False)]
MARKS = {
    "qwen-coder": "<tool_call>",
    "glm4": "<tool_call>",
    "qwen2.5": "<tool_call>",
    "qwen3": "hm</think><tool_call>",
    "hermes": "Well.\n<tool_call>",
    "mistral-v3": "[TOOL_CALLS]",
    "kimi-k2": "<|tool_calls_section_begin|>",
    "gpt-oss": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    "llama3.1": '{"name": "weather"',
    "deepseek-v3": "hm</think><｜tool▁calls▁begin｜>",
}


@pytest.fixture(scope="module", params=HELD)
def family(request: pytest.FixtureRequest) -> Family:
    return next(one for one in FAMILIES if one.name == request.param)


@pytest.fixture(scope="module")
def text(family: Family, tmp_path_factory: pytest.TempPathFactory) -> MlxText:
    return load(tmp_path_factory.mktemp("models") / family.name, family)


def constrained(text: MlxText, family: Family, tools: Sequence[Any] = TOOLS) -> Prompt:
    opening = "<think>" if "</think>" in MARKS[family.name] else family.opening
    body = RequestBody(prompt="x", tools=list(tools))
    return text.constrain(body, Prompt(tokens=[5], opening=opening))


def walk(text: MlxText, grammar: Any, said: str, draw: random.Random) -> str:
    """Return an answer that begins like this and goes on with any tokens that the grammar allows,
    until it lets go."""
    tokens = text.encode(RequestBody(prompt=said)).tokens
    for token in tokens:
        assert grammar.mask() is None, "held too early"
        grammar.accept(token)
    for _ in range(400):
        mask = grammar.mask()
        if mask is None:
            return text.decode(tokens)
        bits = int.from_bytes(mask, "little")
        token = draw.choice([place for place in range(len(mask) * 8) if bits >> place & 1])
        grammar.accept(token)
        if not grammar.is_end(token):
            tokens.append(token)
        if grammar.is_over:
            return text.decode(tokens)
    return ""


def test_whatever_is_drawn_behind_the_mark_is_a_call_by_the_schema(
    family: Family, text: MlxText
) -> None:
    names = set()
    for seed in range(6):
        prompt = constrained(text, family)
        said = walk(text, prompt.grammar, MARKS[family.name], random.Random(seed))
        if not said or said.endswith(("free", "free>")):
            continue  # without an end, or let go: tags are those of a schema alone
        parser = ChannelParser(text.channel_rules, prompt.opening, ToolCallReader(TOOLS, seed=7))
        pieces = parser.add(said) + parser.finish()
        lines = [piece.text for piece in pieces if piece.channel is Channel.TOOL_CALL]
        assert lines, said
        for line in lines:
            function = json.loads(line)["function"]
            names.add(function["name"])
            arguments = json.loads(function["arguments"])
            if function["name"] == "weather":
                assert arguments.keys() == {"city", "day"}, said
                assert arguments["city"] in WEATHER["properties"]["city"]["enum"]
                assert 1 <= arguments["day"] <= 31
            elif function["name"] == "größe-of.it":
                assert arguments == {}
            assert prompt.strict is not None
            assert prompt.strict.fit(line)
    assert "weather" in names


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> MlxText:
    family = next(one for one in FAMILIES if one.name == "qwen-coder")
    return load(tmp_path_factory.mktemp("models") / family.name, family)


FORMATS = [
    LLAMA, DEEPSEEK, DSML, PHI, GRANITE, COMMAND_A, MISTRAL,
    *filter(None, (format_of_mlx_lm(kind, "<c>", "</c>") for kind in FORMS)),
]  # fmt: skip


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("family", FORMATS, ids=lambda family: family.name)
def test_what_a_familys_grammar_allows_its_parser_reads(
    qwen: MlxText, family: ToolFormat, is_special: bool
) -> None:
    """With marks that are text, and with marks that are tokens."""
    marks = {"</parameter>", "</arg_value>", "</longcat_arg_value>", *family.ends}
    special = dict(zip(sorted(marks), SPECIAL, strict=False)) if is_special else {}
    written = {token: mark for mark, token in special.items()}
    tools = [
        ("noop-of.it", closed(NO_ARGUMENTS)),
        ("weather", WEATHER | {"additionalProperties": False}),
    ]
    grammar = call_grammar(family.forms, tools, ends=family.ends, special=special)
    assert grammar
    matcher = qwen.grammars.matcher({"type": LARK, LARK: grammar}, "tools")
    offered: Any = dict(tools)
    for seed in range(4):
        row = Grammar(matcher.deep_copy(), qwen.grammars.tokenizer.eos_tokens)
        draw, raw = random.Random(seed), b""
        while (mask := row.mask()) is not None:
            bits = int.from_bytes(mask, "little")
            token = draw.choice([place for place in range(len(mask) * 8) if bits >> place & 1])
            row.accept(token)
            if not row.is_end(token):
                raw += written.get(token, "").encode() or (qwen.token_bytes or [])[token]
        assert not row.error
        said = raw.decode()
        for end in family.ends:
            said = said.removesuffix(end)
        for call in family.parse(said, offered, False):
            if call["name"] == "weather":
                assert call["arguments"]["city"] in WEATHER["properties"]["city"]["enum"], said
                assert 1 <= call["arguments"]["day"] <= 31
            else:
                assert call["arguments"] == {}, said


def follows(text: MlxText, grammar: Any, *said: str) -> bool:
    """Return True if the grammar allows all texts; in every second one marks are plain text."""
    plain = text.grammars.tokenizer.tokenize_str
    for number, part in enumerate(said):
        tokens = plain(part) if number % 2 else text.encode(RequestBody(prompt=part)).tokens
        for token in tokens:
            mask = grammar.mask()
            if mask is not None and not int.from_bytes(mask, "little") >> token & 1:
                return False
            grammar.accept(token)
    return True


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> MlxText:
    family = next(one for one in FAMILIES if one.name == "llama3.1")
    return load(tmp_path_factory.mktemp("models") / family.name, family)


@pytest.mark.parametrize(
    ("said", "allowed"),
    [
        ('{"sum":3}', True),
        ('{"name": "weather", "parameters": {"city": "Rome", "day": 1}}', True),
        ('{\n  "name": "loose",\n  "arguments": {"any": [1]}\n}', True),
        ('{"type": "function", "name": "free", "parameters": {}}', True),
        ('{"name": "other"', False),
        ('{"sum": 3}', False),
        ('{"sum":3,"name"', False),
        ('{"name": "loose", "parameters": []', False),
        ('{"name": "weather", "parameters": {"day"', False),
        ("So", False),
    ],
)
@pytest.mark.parametrize("form", ["json_schema", "regex"])
def test_an_answer_of_a_form_may_be_a_bare_call_instead(
    llama: MlxText, form: str, said: str, allowed: bool
) -> None:
    schema = {"properties": {"sum": {"$ref": "#/$defs/n"}}, "required": ["sum"],
              "$defs": {"n": {"type": "integer"}}}  # fmt: skip
    forms: dict[str, Any] = {
        "json_schema": {"type": form, form: {"schema": schema, "strict": True}},
        "regex": {"type": form, form: r'\{"sum":[0-9]\}'},
    }
    tools = [tool("weather", WEATHER), tool("free", None), tool("loose", None, strict=False)]
    body = RequestBody(prompt="x", tools=tools, response_format=forms[form])
    grammar = llama.constrain(body, Prompt(tokens=[5])).grammar
    assert follows(llama, grammar, said) is allowed
    assert grammar is not None
    assert grammar.is_over is allowed, "nothing may follow"
    alone = llama.constrain(replace(body, tool_choice="none"), Prompt(tokens=[5])).grammar
    assert follows(llama, alone, said) is (allowed and "sum" in said)


NOTE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": ["string", "null"]},
        "lines": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        "why": {"type": "string"},
    },
    "required": ["path", "text"],
}
BEGIN, END = "<tool_call>\n<function=note>\n", "</function>\n</tool_call>"


def written(**values: str) -> str:
    given = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return "".join(given)


@pytest.mark.parametrize(
    ("said", "allowed"),
    [
        (written(path="a", text="b\nc"), True),
        (written(path="a", text="", lines="3", tags='["a", "b"]'), True),
        (written(path="a", text="x", lines="null"), True),
        (written(path="a", text="</parameter> and </function>\n</parameter>x"), True),
        (written(path="</tool_call>\n<think>", text="<function=note>"), True),
        (written(path="a"), False),
        (written(text="b", path="a"), False),
        (written(path="a", text="b", lines="3.5"), False),
        (written(path="a", text="b", tags='["c"]'), False),
        (written(path="a", text="b", other="c"), False),
        (written(path="a", other="c", text="b"), False),
        (written(path="a", text="b", why="c", other="d"), False),
        # A text that shows the tags themselves lets go of its call.
        (written(path="a", text=f"so:\n{BEGIN}{written(path='x')}{END}\n"), True),
        (written(path="<parameter=x>", other="c"), True),
    ],
)
def test_arguments_in_tags_are_those_of_the_schema(qwen: MlxText, said: str, allowed: bool) -> None:
    body = RequestBody(prompt="x", tools=[tool("note", NOTE)])
    grammar = qwen.constrain(body, Prompt(tokens=[5])).grammar
    assert follows(qwen, grammar, BEGIN, said, END + "\nfree again") is allowed


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"path": "a", "text": None}, True),
        ({"text": 'ü"\\\n\x7f\u2028', "path": "</tool_call>"}, True),
        ({"lines": 3, "path": "a", "text": "b", "tags": ["b"]}, True),
        ({"path": "a"}, False),
        ({"path": 1, "text": "b"}, False),
        ({"path": "a", "text": "b", "more": 1}, False),
    ],
)
def test_arguments_are_checked_whatever_their_order(
    qwen: MlxText, arguments: Any, is_right: bool
) -> None:
    body = RequestBody(prompt="x", tools=[tool("note", NOTE), tool("g", NOTE, strict=None)])
    strict = qwen.constrain(body, Prompt(tokens=[5])).strict
    assert strict is not None
    for name, expected in (("note", is_right), ("g", True)):
        function = {"name": name, "arguments": json.dumps(arguments)}
        assert strict.fit(json.dumps({"function": function})) is expected


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "array"},
        {"properties": {"a": {"type": "nonsense"}}},
        {"properties": {"a": {"$ref": "#/$defs/missing"}}, "required": ["a"]},
        {
            "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 1}},
            "required": ["a"],
        },
    ],
    ids=str,
)
def test_schema_that_nothing_can_match_is_the_tools_own_error(
    qwen: MlxText, parameters: Any
) -> None:
    tools = [tool("fine", NOTE), tool("bad.one", parameters), tool("other", None)]
    with pytest.raises(RemoteError, match=r"bad\.one") as caught:
        qwen.constrain(RequestBody(prompt="x", tools=tools), Prompt(tokens=[5]))
    assert caught.value.detail["parameter"] == "tools"
    loose = [tool("fine", NOTE), tool("bad.one", parameters, strict=False)]
    assert qwen.constrain(RequestBody(prompt="x", tools=loose), Prompt(tokens=[5])).strict


def test_schema_that_tags_cannot_say_is_checked_alone(qwen: MlxText) -> None:
    properties = {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}
    body = RequestBody(prompt="x", tools=[tool("f", {"type": "object", "properties": properties})])
    prompt = qwen.constrain(body, Prompt(tokens=[5]))
    assert (prompt.grammar is None, prompt.strict is None) == (True, False)


def test_recursive_schemas_huge_enums_and_many_tools_are_held(qwen: MlxText) -> None:
    tree = {"type": "object", "properties": {"in": {"type": "array", "items": {"$ref": "#"}}}}
    many = {"type": "object", "properties": {"word": {"enum": [f"w{n}" for n in range(2000)]}}}
    tools = [tool("tree", tree), tool("many", many), *(tool(f"t.{n}", NOTE) for n in range(126))]
    prompt = qwen.constrain(RequestBody(prompt="x", tools=tools), Prompt(tokens=[5]))
    said = "<tool_call>\n<function=many>\n<parameter=word>\nw1999"
    assert follows(qwen, prompt.grammar, said)
    assert prompt.strict is not None


def test_with_a_tokenizer_that_llguidance_does_not_know_an_answer_is_free_and_not_checked(
    qwen: MlxText, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> Any:
        raise NoGrammarsError(ErrorCode.INVALID_REQUEST, "unknown")

    monkeypatch.setattr(qwen.grammars, "_tokenizer", None)
    monkeypatch.setattr(qwen.grammars, "_make_tokenizer", unknown)
    prompt = Prompt(tokens=[5])
    assert qwen.constrain(RequestBody(prompt="x", tools=TOOLS), prompt) == prompt


# ---------------------------------------------------------------- with an engine


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDriver]:
    folder = tmp_path_factory.mktemp("models") / "hermes"
    load(folder, next(one for one in FAMILIES if one.name == "hermes"))
    with driven_engine(folder, 8) as driver:
        yield driver


def asked(worker: LoopDriver, seed: int) -> dict[str, Any]:
    """Return a request that is answered with one call after the other."""
    codec: Any = worker.engine.text
    mark = codec.tokenizer.convert_tokens_to_ids("<tool_call>")
    blanks = dict.fromkeys(map(str, codec.encode(RequestBody(prompt=" \t\r\n")).tokens), -100.0)
    return {
        "prompt": "data", "tools": TOOLS[:2], "seed": seed, "temperature": 1.2, "max_tokens": 120,
        "logit_bias": {str(mark): 100.0, **blanks},
    }  # fmt: skip


@pytest.mark.bits
def test_held_calls_beside_free_rows_change_none_of_them(worker: LoopDriver) -> None:
    free: list[dict[str, Any]] = [
        {"prompt": f"tell {n}", "max_tokens": 40, "temperature": n % 2, "seed": n} for n in range(3)
    ]
    alone = [worker.answer(**one).tokens for one in free]
    keys = [worker.dispatch(**one) for one in free]
    held = [worker.dispatch(**asked(worker, seed)) for seed in range(4)]
    assert [answer.tokens for answer in worker.finish(*keys)] == alone
    called = [answer.text_of(Channel.TOOL_CALL).splitlines() for answer in worker.finish(*held)]
    assert sum(map(len, called)) > 4
    for line in (line for lines in called for line in lines):
        function = json.loads(line)["function"]
        arguments = json.loads(function["arguments"])
        assert arguments.keys() == ({"city", "day"} if function["name"] == "weather" else set())
    assert not any(answer.warnings for answer in worker.answers.values())


@pytest.mark.bits
def test_half_a_held_call_goes_on_rightly(worker: LoopDriver) -> None:
    whole = worker.answer(**asked(worker, 8))
    assert whole.text_of(Channel.TOOL_CALL)
    check_resumes(worker, whole, range(0, len(whole.tokens), 5), at_once=8)


@pytest.mark.bits
def test_strict_changes_nothing_before_a_call(worker: LoopDriver) -> None:
    one: dict[str, Any] = {"prompt": "tell", "max_tokens": 60, "temperature": 1.0, "seed": 4}
    assert worker.answer(**one, tools=TOOLS).tokens == worker.answer(**one).tokens
