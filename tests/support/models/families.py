"""The chats of some families of models: a tiny model with their templates, markers and calls."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxsup.worker.engines.mlx.text import MlxText, load_text

from support.models.tiny_model import VOCABULARY_SIZE, add_tokens, make_tiny_model

PACKAGE = Path(os.environ.get("MLXSUP_CHAT_TEMPLATES") or Path(sys.prefix, "share/chat-templates"))

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER},
    }
]

ARGUMENTS = {"city": "Köln", "days": 2}

SPELLED = json.dumps(ARGUMENTS, ensure_ascii=False)

AS_JSON = f'{{"name": "weather", "arguments": {SPELLED}}}'

IN_TAGS = f"<tool_call>\n{AS_JSON}\n</tool_call>"

CHATML = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]

CHATML_TURN = ("<|im_start|>assistant\n", "<|im_end|>")

# Written from the format of Hermes 2 Pro.
HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for tool_call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ tool_call.function.name | tojson }}, '
    '"arguments": {{ tool_call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{# parsed as tool_call.name #}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Written from the format of Mistral's tokenizer v3, which demands ids of nine characters.
MISTRAL = (
    "<s>{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('ids of calls have nine characters') }}{% endif %}"
    '{"name": {{ call.function.name | tojson }}, "arguments": '
    '{{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9"
    " %}{{ raise_exception('ids of results have nine characters') }}{% endif %}[TOOL_RESULTS]"
    '{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)

# Written from the format of Kimi K2, which takes the name of a result from its id.
KIMI = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'tool' %}{% if not m.tool_call_id.startswith('functions.') %}"
    "{{ raise_exception('ids name the function') }}{% endif %}"
    "## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}"
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)

DEEPSEEK_TOKENS = [
    f"<｜tool▁{part}｜>"
    for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin")
]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models: the call as it writes it, and what stands around its turn."""

    name: str
    template: str
    tokens: Sequence[str]
    said: str
    turn: tuple[str, str]
    opening: str = ""


FAMILIES = [
    Family(name="qwen2.5", template="qwen2_5.jinja", tokens=CHATML, said=IN_TAGS, turn=CHATML_TURN),
    Family(
        name="qwen3",
        template="qwen3.jinja",
        tokens=[*CHATML, "<think>", "</think>"],
        said=f"<think>\nhm\n</think>\n\n{IN_TAGS}",
        turn=CHATML_TURN,
    ),
    Family(
        name="qwen-coder",
        template="qwen3_5_nothink.jinja",
        tokens=[*CHATML, "<think>", "</think>"],
        said="<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        turn=CHATML_TURN,
    ),
    Family(name="hermes", template=HERMES, tokens=CHATML, said=IN_TAGS, turn=CHATML_TURN),
    Family(
        name="mistral-v3",
        template=MISTRAL,
        tokens=["[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[INST]", "[/INST]"],
        said=f"[TOOL_CALLS] [{AS_JSON}]",
        turn=("[/INST]", "</s>"),
    ),
    Family(
        name="kimi-k2",
        template=KIMI,
        tokens=["<|im_end|>", "<|im_middle|>", "<|tool_calls_section_begin|>"],
        said="<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{SPELLED}<|tool_call_end|><|tool_calls_section_end|>",
        turn=("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
    ),
    Family(
        name="gpt-oss",
        template="gptoss.jinja",
        tokens=["<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>"],
        said="<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{SPELLED}",
        turn=("<|start|>assistant", "<|call|>"),
        opening="<|start|>assistant",
    ),
    Family(
        name="llama3.1",
        template="llama3_1.jinja",
        tokens=["<|python_tag|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        said=f'{{"name": "weather", "parameters": {SPELLED}}}',
        turn=("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    ),
    Family(
        name="glm4",
        template="glm4moe.jinja",
        tokens=[
            *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|user|>", "<|assistant|>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ],
        said="\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>",
        turn=("<|assistant|>", "<|observation|>"),
    ),
    Family(
        name="deepseek-v3",
        template="deepseekv3.jinja",
        tokens=[*DEEPSEEK_TOKENS, "<think>", "</think>"],
        said="<think>\nhm\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        f"<｜tool▁sep｜>weather\n```json\n{SPELLED}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        turn=("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    ),
]


def load(folder: Path, family: Family) -> MlxText:
    template = family.template
    if template.endswith(".jinja"):
        path = PACKAGE / "trl" / "chat_templates" / template
        if not path.exists():
            pytest.skip("the package of chat templates is not there: make setup")
        template = path.read_text()
    make_tiny_model(folder)
    add_tokens(folder, list(family.tokens), is_special=False)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return load_text(folder, eos_token_ids=None, vocabulary_size=VOCABULARY_SIZE)
