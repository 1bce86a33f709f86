"""What mlx-lm's tokenizer says of a model's chats reaches template and answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.worker.answer import AnswerText
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.text import MlxText, load_text
from mlxsup.worker.rows import NO_CALLS_KNOWN, NO_ROOM_FOR_CALLS
from mlxsup.worker.text.channels import ChannelParser, ChannelRules
from mlxsup.worker.text.tool_calls import ToolCallReader

from support.loop_driver import LoopDriver, check_every_resume
from support.mlx_rows import make_spec
from support.tiny_model import VOCABULARY_SIZE, add_tokens, make_tiny_model

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


def mark(folder: Path) -> None:
    """Gives the tokenizer its own markers, in the place of its last entries."""
    add_tokens(folder, MARKERS, is_special=False)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> MlxText:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    mark(folder)
    return load_text(folder, eos_token_ids=None, vocabulary_size=VOCABULARY_SIZE)


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


@pytest.mark.parametrize("content", [5, [{"type": "image_url"}]])
def test_content_that_is_no_text_is_the_requests_own_error_G6(text: MlxText, content: Any) -> None:
    with pytest.raises(RemoteError, match="content that is text"):
        rendered(text, messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"tools": [{"name": "x"}]}, "for each tool, not another map"),
        ({"tools": {}}, "tools takes a list of tools, not a map"),
        ({"chat_template_kwargs": [1]}, "a map with names"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "names that are not mlxsup's own"),
    ],
)
def test_wrong_template_parameters_are_refused_C7(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(RemoteError, match=words):
        RequestBody.from_wire({"prompt": "x", **parameters})


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
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_markers_in_messages_open_nothing(text: MlxText, typed: str, role: str) -> None:
    messages = [{"role": role, "content": typed}, {"role": "user", "content": typed}]
    for said in (messages, messages[:1]):
        got = text.encode(RequestBody(messages=said, chat_template_kwargs=OFF))
        assert got.opening == "[assistant]"
        opened = text.encode(RequestBody(messages=said)).opening
        assert opened == "[assistant]<think>"


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


def test_a_form_holds_although_the_user_types_a_marker(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    folder = make_tiny_model(tmp_path)
    mark(folder)
    engine = MlxEngine(make_spec(folder))
    driver = LoopDriver(engine, engine.load(lambda phase, at: None))
    got = driver.answer(
        messages=[{"role": "user", "content": "what is <think>"}],
        chat_template_kwargs=OFF,
        response_format={"type": "regex", "regex": "[0-9]{5}"},
    )
    assert got.text.isdigit()
    assert len(got.text) == 5
    assert got.text_of(Channel.REASONING) == ""
    driver.close()
    engine.close()


def test_tokens_become_channels_and_calls(text: MlxText) -> None:
    said = 'hm</think>ok <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    tokens = text.encode(RequestBody(prompt=said)).tokens
    answer = AnswerText(
        text, (), "<think>", ToolCallReader(TOOLS, seed=1), has_form=False, min_tokens=0
    )
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


@pytest.mark.parametrize(
    ("is_marked", "form", "expected"),
    [
        (False, None, [NO_CALLS_KNOWN]),
        (True, None, []),
        (True, {"type": "regex", "regex": "[0-9]{3}"}, [NO_ROOM_FOR_CALLS]),
        (True, {"type": "text"}, []),
    ],
)
def test_calls_that_cannot_be_are_told_once(
    tmp_path: Path, is_marked: bool, form: Any, expected: list[str]
) -> None:
    folder = make_tiny_model(tmp_path)
    if is_marked:
        mark(folder)
    engine = MlxEngine(make_spec(folder))
    driver = LoopDriver(engine, engine.load(lambda phase, at: None))
    got = driver.answer(prompt="call", tools=TOOLS, max_tokens=4, seed=1, response_format=form)
    assert [delta.warning for delta in got.deltas if delta.warning] == expected
    rest = driver.answer(got.resume_after(2))
    assert not [delta.warning for delta in rest.deltas if delta.warning]
    assert rest.tokens == got.tokens[2:]
    plain = driver.answer(prompt="call", max_tokens=4)
    assert not [delta.warning for delta in plain.deltas if delta.warning]
    driver.close()
    engine.close()


def test_a_plain_model_has_no_rules(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    plain = load_text(folder, eos_token_ids=None, vocabulary_size=VOCABULARY_SIZE)
    assert plain.channel_rules == ChannelRules()


@pytest.mark.bits
def test_half_a_tool_call_goes_on_rightly_F10(tmp_path: Path) -> None:
    """A grammar makes the tiny model write one, with reasoning before it and text behind it."""
    pytest.importorskip("llguidance")
    folder = make_tiny_model(tmp_path)
    mark(folder)
    engine = MlxEngine(make_spec(folder))
    driver = LoopDriver(engine, engine.load(lambda phase, at: None), 8)
    # llguidance would take a whole marker for its token, and grammars hold no special tokens: so
    # the marker's first character is a choice, and a bias makes it.
    regex = (
        r'M<think>[a-z]{4}M</think>ok M<tool_call>\{"name":"f","arguments":\{"x":[0-9]{2}\}\}'
        "M</tool_call> [a-z]{5}"
    ).replace("M<", "(<|#)")
    whole = driver.answer(
        prompt="call",
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
    check_every_resume(driver, whole, at_once=8)
    driver.close()
    engine.close()
