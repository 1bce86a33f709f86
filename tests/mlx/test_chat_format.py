"""Reasoning, content and tool calls of real tokenizers and templates, harmony among them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.worker.answer import AnswerText
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx import batch as mlx_batch
from mlxsup.worker.engines.mlx.chat_format import ChatFormat, chat_format
from mlxsup.worker.engines.mlx.sampler import RowDraws, make_draws
from mlxsup.worker.engines.mlx.text import MlxText, load_text
from mlxsup.worker.rows import NO_CALLS_KNOWN
from mlxsup.worker.text import harmony, tool_formats
from mlxsup.worker.text.channels import NORMAL, REASONING, TOOL, ChannelParser
from mlxsup.worker.text.tool_calls import ToolCallReader

from support.models.tiny_model import VOCABULARY_SIZE, add_tokens, make_tiny_model
from support.worker.loop_driver import LoopDriver, check_resumes
from support.worker.mlx_rows import driven_engine

pytestmark = pytest.mark.mlx


MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

TEMPLATE = (
    "{% if tools %}[tools] {% for tool in tools %}{{ tool.function.name }}{% endfor %};{% endif %}"
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}"
    "<tool_call>{{ tool_call.name or tool_call.function.name }}:"
    "{{ tool_call.function.arguments.city }}</tool_call>{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>{% endif %}"
    "{{ mood or '' }}{% endif %}"
)

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]

FORM = {"type": "regex", "regex": "[0-9]{5}"}


def mark(folder: Path) -> None:
    """Give the tokenizer its own markers, in the place of its last entries."""
    add_tokens(folder, MARKERS, is_special=False)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDriver]:
    folder = make_tiny_model(tmp_path_factory.mktemp("marked"))
    mark(folder)
    with driven_engine(folder, 8) as driver:
        yield driver


@pytest.fixture(scope="module")
def text(worker: LoopDriver) -> MlxText:
    text = worker.engine.text
    assert isinstance(text, MlxText)
    return text


def rendered(text: MlxText, **parameters: Any) -> str:
    values = {"messages": [{"role": "user", "content": "hi"}]} | parameters
    return text.decode(text.encode(RequestBody.from_wire(values)).tokens)


def test_tools_and_keyword_arguments_reach_the_template(text: MlxText) -> None:
    plain = rendered(text, chat_template_kwargs={"enable_thinking": False})
    assert plain == "[user] hi;[assistant]"
    with_tools = rendered(text, tools=TOOLS, chat_template_kwargs={"mood": "calm"})
    assert with_tools == "[tools] weather;[user] hi;[assistant]<think>calm"
    for choice, shown in (("auto", "[tools] weather;"), ("none", "")):
        got = rendered(text, tools=TOOLS, tool_choice=choice)
        assert got == shown + "[user] hi;[assistant]<think>"


def test_calls_and_their_answers_are_rendered(text: MlxText) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "sunny"},
    ]
    got = rendered(text, messages=messages, chat_template_kwargs={"enable_thinking": False})
    assert got == (
        "[user] hi;[assistant] <tool_call>weather:Rome</tool_call>;[tool] sunny;[assistant]"
    )


def test_a_prompt_that_opens_the_reasoning_is_seen(text: MlxText) -> None:
    def channel(**values: Any) -> Channel:
        opening = text.encode(RequestBody.from_wire(values)).opening
        return ChannelParser(text.channel_rules, opening, ToolCallReader(None, 0)).channel

    messages = [{"role": "user", "content": "hi"}]
    assert channel(messages=messages) is Channel.REASONING
    off = {"enable_thinking": False}
    assert channel(messages=messages, chat_template_kwargs=off) is Channel.CONTENT
    assert channel(prompt="<think>a</think>") is Channel.CONTENT
    assert channel(prompt="<think>a</think>b<think>") is Channel.REASONING


OFF = {"enable_thinking": False}


@pytest.mark.parametrize(
    "typed", ["<think>", "what does <think>\n", "a <think> b </think> <think>"]
)
def test_markers_in_messages_open_nothing(text: MlxText, typed: str) -> None:
    for role in ("user", "system", "assistant", "tool"):
        messages = [{"role": role, "content": typed}, {"role": "user", "content": typed}]
        for said in (messages, messages[:1]):
            asked = RequestBody(messages=said, continue_final_message=False)
            assert text.encode(asked).opening == "[assistant]<think>"
            got = text.encode(replace(asked, chat_template_kwargs=OFF))
            assert got.opening == "[assistant]"


def test_a_closed_reasoning_of_the_template_is_content(text: MlxText) -> None:
    said = [{"role": "user", "content": "</think><think>"}]
    extra = OFF | {"mood": "<think>\n\n</think>\n\n"}
    opening = text.encode(RequestBody(messages=said, chat_template_kwargs=extra)).opening
    parser = ChannelParser(text.channel_rules, opening, ToolCallReader(None, 0))
    assert opening.endswith("</think>\n\n")
    assert parser.channel is Channel.CONTENT


def test_a_raw_prompt_opens_the_reasoning_at_its_end_alone(text: MlxText) -> None:
    def opening(prompt: str) -> str:
        as_text = text.encode(RequestBody(prompt=prompt))
        as_tokens = text.encode(RequestBody(prompt_tokens=as_text.tokens))
        assert as_text == as_tokens
        return as_text.opening

    assert opening("user: hi\nassistant: <think>\n") == "<think>"
    assert opening("what does <think> mean?") == ""
    assert opening("2+2=") == ""


@pytest.mark.parametrize("ends", ["X", "XXX"])
def test_reasoning_that_would_end_the_answer_ends_alone(
    text: MlxText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    [end] = text.encode(RequestBody(prompt="X")).tokens
    folder = make_tiny_model(tmp_path / "model", eos_token_id=end)
    mark(folder)
    with driven_engine(folder) as driver:
        script(monkeypatch, driver, "hm" + ends)
        got = driver.answer(messages=ASK, response_format=FORM, max_tokens=40)
    assert got.text_of(Channel.REASONING) == "hm"
    assert (len(got.text), got.text.isdigit(), got.finish) == (5, True, FinishReason.STOP)


def test_a_form_holds_although_the_user_types_a_marker(worker: LoopDriver) -> None:
    got = worker.answer(
        messages=[{"role": "user", "content": "what is <think>"}],
        chat_template_kwargs=OFF,
        response_format=FORM,
    )
    assert got.text.isdigit()
    assert len(got.text) == 5
    assert got.text_of(Channel.REASONING) == ""


def test_tokens_become_channels_and_calls(text: MlxText) -> None:
    said = 'hm</think>ok <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    tokens = text.encode(RequestBody(prompt=said)).tokens
    answer = AnswerText(text, (), "<think>", ToolCallReader(TOOLS, seed=1), min_tokens=0)
    pieces = [piece for token in tokens for piece in answer.add(token)] + answer.finish()
    by_channel: dict[Channel, str] = {}
    for piece in pieces:
        by_channel[piece.channel] = by_channel.get(piece.channel, "") + piece.text
    assert by_channel[Channel.REASONING] == "hm"
    assert by_channel[Channel.CONTENT] == "ok "
    assert json.loads(by_channel[Channel.TOOL_CALL])["function"]["name"] == "weather"
    assert answer.has_calls


def test_markers_that_mlx_lm_does_not_know(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    add_tokens(folder, ["[THINK]", "[/THINK]", "<|START_RESPONSE|>"], is_special=True)
    text = load_text(folder, eos_token_ids=None, vocabulary_size=VOCABULARY_SIZE)
    parser = ChannelParser(text.channel_rules, "", ToolCallReader(None, 0))
    got = parser.add("[THINK]hm[/THINK]<|START_RESPONSE|>yes")
    assert [(piece.channel.value, piece.text) for piece in got] == [
        ("reasoning", "hm"),
        ("content", "yes"),
    ]
    assert text.encode(RequestBody(prompt="a [THINK]")).opening == "[THINK]"


def check_told_once(worker: LoopDriver, form: Any, expected: list[str]) -> None:
    got = worker.answer(prompt="call", tools=TOOLS, max_tokens=4, seed=1, response_format=form)
    assert [delta.warning for delta in got.deltas if delta.warning] == expected
    rest = worker.answer(got.resume_after(2))
    assert not [delta.warning for delta in rest.deltas if delta.warning]
    assert rest.tokens == got.tokens[2:]
    plain = worker.answer(prompt="call", max_tokens=4)
    assert not [delta.warning for delta in plain.deltas if delta.warning]


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
OF_JSON = {"type": "json_schema", "json_schema": {"schema": {
    "type": "object", "properties": {"a": {"type": "string", "maxLength": 60}}, "required": ["a"],
}}}  # fmt: skip


BARE = '{"name": "weather", "parameters": {}}'


@pytest.mark.parametrize(
    ("form", "thought", "calls"),
    [
        (FORM, "", [CALL, CALL]),
        (OF_JSON, "hm</think>", [CALL, CALL]),
        (FORM, "hm</think>", [BARE]),
        (OF_JSON, "", [BARE]),
    ],
)
def test_the_model_chooses_between_a_call_and_the_form(
    worker: LoopDriver, monkeypatch: pytest.MonkeyPatch, form: Any, thought: str, calls: list[str]
) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"enable_thinking": bool(thought)},
        "response_format": form,
    }
    count = script(monkeypatch, worker, thought + "".join(calls))
    called = worker.answer(None, **asked, tools=TOOLS, max_tokens=count)
    names = [json.loads(line) for line in called.text_of(Channel.TOOL_CALL).splitlines()]
    assert [one["function"]["name"] for one in names] == ["weather"] * len(calls)
    assert called.text_of(Channel.CONTENT) == ""
    is_whole = calls[0] != CALL  # behind a marked one others may follow
    assert called.finish is (FinishReason.TOOL_CALLS if is_whole else FinishReason.LENGTH)
    check_resumes(worker, called, range(0, count, 5))
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        formed = worker.answer(None, **asked, **more, max_tokens=count + 80)
        assert formed.text_of(Channel.CONTENT)[0] in "0123456789{"
        assert not formed.text_of(Channel.TOOL_CALL)


def test_calls_that_the_model_does_not_know_are_told_once(tmp_path: Path) -> None:
    with driven_engine(make_tiny_model(tmp_path)) as worker:
        check_told_once(worker, None, [NO_CALLS_KNOWN])


@pytest.mark.bits
def test_half_a_tool_call_goes_on_rightly_F10(worker: LoopDriver) -> None:
    """A grammar makes the tiny model write one, with reasoning before it and text behind it."""
    # llguidance would take a whole marker for its token, and grammars hold no special tokens: so
    # the marker's first character is a choice, and a bias makes it.
    regex = (
        r'M<think>[a-z]{4}M</think>ok M<tool_call>\{"name":"f","arguments":\{"x":[0-9]{2}\}\}'
        "M</tool_call> [a-z]{5}"
    ).replace("M<", "(<|#)")
    whole = worker.answer(
        messages=[{"role": "user", "content": "call"}],
        tools=[{"type": "function", "function": {"name": "f"}}],
        chat_template_kwargs=OFF,
        temperature=1.0,
        seed=6,
        presence_penalty=0.5,
        logit_bias={"60": 100, "35": -100},
        response_format={"type": "regex", "regex": regex},
    )
    assert whole.finish is FinishReason.TOOL_CALLS
    assert len(whole.text_of(Channel.REASONING)) == 4
    call = json.loads(whole.text_of(Channel.TOOL_CALL))
    assert 0 <= json.loads(call["function"]["arguments"])["x"] <= 99
    check_resumes(worker, whole, range(0, len(whole.tokens), 2), at_once=8)


# ---------------------------------------------------------------- what tells of a model's chats


def ids(text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
    assert not add_special_tokens
    return tuple(map(ord, text))


def format_of(
    *vocabulary: str,
    think: tuple[str, str] | None = None,
    calls: tuple[str, str] | None = None,
    kind: str | None = None,
    chat_template: Any = None,
) -> ChatFormat:
    """Of as much of mlx-lm's tokenizer as counts; a character's id is its code point."""
    think_start, think_end = think or (None, None)
    call_start, call_end = calls or (None, None)
    tokenizer: Any = SimpleNamespace(
        get_vocab=lambda: {marker: place for place, marker in enumerate(vocabulary)},
        encode=ids,
        has_thinking=think is not None,
        think_start=think_start,
        think_end=think_end,
        has_tool_calling=calls is not None,
        tool_call_start=call_start,
        tool_call_end=call_end,
        tool_parser=lambda text, tools=None: [],
        init_kwargs={} if kind is None else {"tool_parser_type": kind},
        structural_markers=(),
        response_transitions={},
        response_initial_state=None,
        chat_template=chat_template,
    )
    return chat_format(tokenizer)


THINK = ("<think>", "</think>")
CALLS = ("<call>", "</call>")
HARMONY = ("<|channel|>", "<|message|>", "<|start|>")


def test_headers_count_only_if_all_three_of_their_markers_are_there() -> None:
    found = format_of(*HARMONY)
    assert found == ChatFormat(
        rules=harmony.harmony_rules(),
        content_after=(ids("<|channel|>final"), ids("<|message|>")),
        is_harmony=True,
    )
    assert found.reasoning is None
    for missing in HARMONY:
        assert not format_of(*(marker for marker in HARMONY if marker != missing)).is_harmony


@pytest.mark.parametrize(
    "pair", [("<|START_THINKING|>", "<|END_THINKING|>"), ("[THINK]", "[/THINK]")]
)
def test_a_pair_that_mlx_lm_does_not_know_counts_only_as_a_pair(pair: tuple[str, str]) -> None:
    assert format_of(*pair).reasoning == pair
    assert format_of(pair[0]).reasoning is None
    assert format_of(pair[1]).reasoning is None
    assert format_of(*pair, think=THINK).reasoning == THINK, "mlx-lm's knowledge comes first"


def test_calls_begin_in_the_content_and_in_the_reasoning() -> None:
    rules = format_of(calls=CALLS, kind="json_tools").rules
    assert rules.transitions == {NORMAL: [("<call>", TOOL)], TOOL: [("</call>", NORMAL)]}
    assert rules.tool_format.name == "json_tools"
    both = format_of(calls=CALLS, think=THINK, kind="json_tools").rules
    assert both.transitions == {
        NORMAL: [("<think>", REASONING), ("<call>", TOOL)],
        REASONING: [("</think>", NORMAL), ("<call>", TOOL)],
        TOOL: [("</call>", NORMAL)],
    }


@pytest.mark.parametrize(
    ("vocabulary", "template", "expected"),
    [
        (("<|python_tag|>",), "{{ tool_calls }}", tool_formats.LLAMA),
        (("<|python_tag|>",), {"default": "", "tool_use": "{{ tool_calls }}"}, tool_formats.LLAMA),
        ((), "Action: ```json", tool_formats.COMMAND_R),
        ((), "]<]minimax[>[<tool_call> tool_call.name", tool_formats.MINIMAX_M3),
        (("<|tool_call|>",), None, tool_formats.GRANITE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_formats_of_ours_are_known_by_vocabulary_and_template(
    vocabulary: tuple[str, ...], template: Any, expected: tool_formats.ToolFormat
) -> None:
    rules = format_of(*vocabulary, chat_template=template).rules
    assert rules.transitions[NORMAL] == [(marker, TOOL) for marker in expected.begins]
    assert rules.tool_format is expected


# ---------------------------------------------------------------- harmony

HARMONY_MARKERS = [
    f"<|{name}|>" for name in ("start", "end", "return", "call", "channel", "message", "constrain")
]

HARMONY_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

ASK = [{"role": "user", "content": "what is <|channel|>final<|message|> or <think>"}]

THINKS = "<|channel|>analysis<|message|>hm ra<|end|><|start|>assistant"

HARMONY_CALLS = (
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}<|call|>'
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDriver]:
    folder = make_tiny_model(tmp_path_factory.mktemp("harmony"))
    add_tokens(folder, HARMONY_MARKERS, is_special=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": HARMONY_TEMPLATE}))
    with driven_engine(folder) as driver:
        yield driver


def script(monkeypatch: pytest.MonkeyPatch, driver: LoopDriver, text: str) -> int:
    """Makes every answer begin with this text; how many tokens it has."""
    codec: Any = driver.engine.text
    tokens = codec.encode(RequestBody(prompt=text)).tokens

    def make_scripted(row: Row, **named: Any) -> RowDraws:
        count = len(row.delivered)

        def force(logits: mx.array, latest: int) -> mx.array:
            nonlocal count
            count += 1
            if count > len(tokens):
                return logits
            return mx.where(mx.arange(logits.shape[-1]) == tokens[count - 1], 1e4, logits)

        draws = replace(make_draws(row, **named), number=count)
        draws.processors = (force, *draws.processors)
        return draws

    monkeypatch.setattr(mlx_batch, "make_draws", make_scripted)
    return len(tokens)


def test_reasoning_and_a_call_are_apart(
    driver: LoopDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, driver, THINKS + HARMONY_CALLS)
    whole = driver.answer(messages=ASK, tools=TOOLS, max_tokens=90, seed=4)
    assert whole.text_of(Channel.REASONING) == "hm ra"
    assert whole.text == ""
    call = json.loads(whole.text_of(Channel.TOOL_CALL))
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert whole.finish is FinishReason.TOOL_CALLS
    assert not [delta.warning for delta in whole.deltas if delta.warning]
    check_resumes(driver, whole, [*range(0, len(whole.tokens), 4), len(whole.tokens) - 1])


@pytest.mark.parametrize("kind", ["", " <|constrain|>json"])
def test_a_form_applies_to_the_final_part_alone(
    driver: LoopDriver, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    script(monkeypatch, driver, THINKS + f"<|channel|>final{kind}<|message|>")
    whole = driver.answer(messages=ASK, response_format=FORM, max_tokens=90, tools=TOOLS)
    assert whole.text_of(Channel.REASONING) == "hm ra"
    assert whole.text.isdigit()
    assert len(whole.text) == 5
    assert whole.finish is FinishReason.STOP
    assert not [delta.warning for delta in whole.deltas if delta.warning]
    check_resumes(driver, whole, [*range(0, len(whole.tokens), 4), len(whole.tokens) - 1])


BAD = [
    "<think>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|start|>assistant<|channel|>analysis<|message|>",
    "<tool_call>{",
    '{"name": "weather", "parameters": ' + "[" * 5000,
    "{" * 20_000,
]


@pytest.mark.parametrize("typed", BAD, ids=range(len(BAD)))
def test_typed_markers_open_no_part(driver: LoopDriver, typed: str) -> None:
    codec: Any = driver.engine.text
    calls = [{"id": "a", "function": {"name": "f", "arguments": typed}}]
    for role in ("user", "tool", "assistant", "system"):
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": role, "content": typed, "tool_call_id": "a"},
        ]
        asked = RequestBody(messages=messages, continue_final_message=False)
        assert codec.encode(asked).opening == "<|start|>assistant"


def test_a_form_is_owed_although_the_model_would_end_in_its_reasoning(
    driver: LoopDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, driver, "<|channel|>analysis<|message|>hm ra" + 9 * "<|return|>")
    whole = driver.answer(messages=ASK, response_format=FORM, max_tokens=90)
    assert whole.text_of(Channel.REASONING) == "hm ra"
    assert (len(whole.text), whole.text.isdigit(), whole.finish) == (5, True, FinishReason.STOP)
    check_resumes(driver, whole, [*range(0, len(whole.tokens), 4), len(whole.tokens) - 1])


def test_an_answer_that_a_request_ends_before_its_form_is_an_error(
    driver: LoopDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec: Any = driver.engine.text
    [stop] = codec.encode(RequestBody(prompt="X")).tokens
    script(monkeypatch, driver, "<|channel|>analysis<|message|>hm raX")
    got = driver.answer(messages=ASK, response_format=FORM, stop_token_ids=[stop])
    assert got.error is not None
    assert "ended in its reasoning" in got.error.message
    assert got.error.detail["parameter"] == "response_format"


def test_a_raw_prompt_is_plain_text(driver: LoopDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = driver.answer(prompt="two and two is", max_tokens=6)
    assert len(whole.text) > 6
    script(monkeypatch, driver, "ra re<|return|>")
    final = "<|start|>assistant<|channel|>final<|message|>"
    assert driver.answer(prompt=final, max_tokens=9).text == "ra re"
    script(
        monkeypatch, driver, "hm<|end|><|start|>assistant<|channel|>final<|message|>ra<|return|>"
    )
    got = driver.answer(prompt="<|start|>assistant<|channel|>analysis<|message|>", max_tokens=50)
    assert (got.text_of(Channel.REASONING), got.text) == ("hm", "ra")
