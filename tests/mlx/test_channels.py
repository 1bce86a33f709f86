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
from mlxsup.worker.channels import ChannelRules
from mlxsup.worker.mlx_engine import MlxEngine
from mlxsup.worker.mlx_text import MlxText, load_text
from mlxsup.worker.tool_calls import ToolCallReader
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
    """Gives the tokenizer markers of its own, in the place of its last entries."""
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
    return text.decode(text.encode(RequestBody(**values)).tokens)


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


@pytest.mark.parametrize("content", [None, 5, [{"type": "image_url"}]])
def test_content_that_is_no_text_is_the_requests_own_error_G6(text: MlxText, content: Any) -> None:
    with pytest.raises(RemoteError, match="content that is text"):
        rendered(text, messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"tools": [{"name": "x"}]}, "tools takes a list of"),
        ({"tools": {}}, "tools takes a list of"),
        ({"chat_template_kwargs": [1]}, "a map with names"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "names that are not mlxsup's own"),
    ],
)
def test_wrong_template_parameters_are_refused_C7(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(RemoteError, match=words):
        RequestBody(prompt="x", **parameters)


def test_a_prompt_that_opens_the_reasoning_is_seen(text: MlxText) -> None:
    def channel(**values: Any) -> Channel:
        return text.encode(RequestBody(**values)).channel

    messages = [{"role": "user", "content": "hi"}]
    assert channel(messages=messages) is Channel.REASONING
    off = {"enable_thinking": False}
    assert channel(messages=messages, chat_template_kwargs=off) is Channel.CONTENT
    assert channel(prompt="<think>a</think>") is Channel.CONTENT
    assert channel(prompt="<think>a</think>b<think>") is Channel.REASONING


def test_tokens_become_channels_and_calls(text: MlxText) -> None:
    said = 'hm</think>ok <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    tokens = text.encode(RequestBody(prompt=said)).tokens
    answer = AnswerText(text, (), Channel.REASONING, ToolCallReader(TOOLS, seed=1))
    pieces = [piece for token in tokens for piece in answer.add(token)] + answer.finish()
    by_channel: dict[Channel, str] = {}
    for piece in pieces:
        by_channel[piece.channel] = by_channel.get(piece.channel, "") + piece.text
    assert by_channel[Channel.REASONING] == "hm"
    assert by_channel[Channel.CONTENT] == "ok "
    assert json.loads(by_channel[Channel.TOOL_CALL])["function"]["name"] == "weather"
    assert answer.has_calls


def test_a_plain_model_has_no_rules(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    plain = load_text(folder, eos_token_ids=None, vocabulary_size=VOCABULARY_SIZE)
    assert plain.channel_rules == ChannelRules()


@pytest.mark.bits
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_half_a_tool_call_goes_on_rightly_F10(tmp_path: Path, temperature: float) -> None:
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
        temperature=temperature,
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
