"""How the markers that a tokenizer knows become the parts of an answer."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
from mlx_lm import tool_parsers
from mlx_lm.tool_parsers import glm47

from mlxsup.worker.engines.mlx.channels import GLM_PARSERS, ChatFormat, chat_format
from mlxsup.worker.text import harmony, tool_formats
from mlxsup.worker.text.channels import NORMAL, REASONING, TOOL, ChannelRules
from mlxsup.worker.text.tool_calls import CallIds

pytestmark = pytest.mark.mlx


def parse(text: str, tools: Any = None) -> Any:
    """Stands for a parser of mlx-lm."""
    return []


class Tokenizer:
    """As much of mlx-lm's tokenizer as tells of chats; a character's id is its code point."""

    def __init__(
        self,
        *vocabulary: str,
        think: tuple[str, str] | None = None,
        calls: tuple[str, str] | None = None,
        kind: str | None = None,
        structure: Sequence[str] = (),
        transitions: dict[str, list[tuple[str, str]]] | None = None,
        chat_template: Any = None,
    ) -> None:
        self._vocabulary = vocabulary
        self.has_thinking = think is not None
        nothing: tuple[str | None, str | None] = (None, None)
        self.think_start, self.think_end = think or nothing
        self.has_tool_calling = calls is not None
        self.tool_call_start, self.tool_call_end = calls or nothing
        self.tool_parser = parse
        self.init_kwargs = {} if kind is None else {"tool_parser_type": kind}
        self.structural_markers = structure
        self.response_transitions = transitions or {}
        self.response_initial_state: str | None = None
        self.chat_template = chat_template

    def get_vocab(self) -> dict[str, int]:
        return {marker: place for place, marker in enumerate(self._vocabulary)}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]


def format_of(*vocabulary: str, **settings: Any) -> ChatFormat:
    tokenizer: Any = Tokenizer(*vocabulary, **settings)
    return chat_format(tokenizer)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


THINK = ("<think>", "</think>")
CALLS = ("<call>", "</call>")
HARMONY = ("<|channel|>", "<|message|>", "<|start|>")


def test_a_model_without_markers_has_content_alone() -> None:
    assert format_of() == ChatFormat(rules=ChannelRules())
    assert not format_of().is_harmony


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


def test_reasoning_ends_where_its_marker_says() -> None:
    found = format_of(think=THINK)
    assert (found.reasoning, found.content_after) == (THINK, (ids("</think>"),))
    assert found.rules == ChannelRules(
        transitions={NORMAL: [("<think>", REASONING)], REASONING: [("</think>", NORMAL)]}
    )


@pytest.mark.parametrize(
    "pair", [("<|START_THINKING|>", "<|END_THINKING|>"), ("[THINK]", "[/THINK]")]
)
def test_a_pair_that_mlx_lm_does_not_know_counts_only_as_a_pair(pair: tuple[str, str]) -> None:
    assert format_of(*pair).reasoning == pair
    assert format_of(pair[0]).reasoning is None
    assert format_of(pair[1]).reasoning is None
    assert format_of(*pair, think=THINK).reasoning == THINK, "mlx-lm's knowledge comes first"


def test_structure_is_no_part_of_the_content() -> None:
    own = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    for marker in own:
        assert format_of(marker).rules.transitions == {NORMAL: [(marker, NORMAL)]}
    found = format_of(own[2], own[1], "other", structure=["<s>"])
    assert found.rules.transitions == {
        NORMAL: [("<s>", NORMAL), (own[1], NORMAL), (own[2], NORMAL)]
    }


def test_calls_begin_in_the_content_and_in_the_reasoning() -> None:
    rules = format_of(calls=CALLS, kind="json_tools").rules
    assert rules.transitions == {NORMAL: [("<call>", TOOL)], TOOL: [("</call>", NORMAL)]}
    assert rules.parse_tool_call is parse
    assert (rules.call_ids, rules.needs_ends) == (CallIds.OURS, False)
    assert (rules.has_bare_calls, rules.needs_tools) == (False, False)
    both = format_of(calls=CALLS, think=THINK, kind="json_tools").rules
    assert both.transitions == {
        NORMAL: [("<think>", REASONING), ("<call>", TOOL)],
        REASONING: [("</think>", NORMAL), ("<call>", TOOL)],
        TOOL: [("</call>", NORMAL)],
    }


def test_calls_without_an_end_marker_end_with_the_answer() -> None:
    rules = format_of(calls=("<call>", ""), kind="json_tools").rules
    assert rules.transitions == {NORMAL: [("<call>", TOOL)]}


def test_a_format_that_leads_to_calls_by_itself_is_not_told_where_they_begin() -> None:
    own = {NORMAL: [("<go>", TOOL)], "odd": [("<back>", NORMAL)]}
    rules = format_of(calls=CALLS, kind="json_tools", transitions=own).rules
    assert rules.transitions == {
        NORMAL: [("<go>", TOOL)],
        "odd": [("<back>", NORMAL)],
        TOOL: [("</call>", NORMAL)],
    }
    silent = format_of(calls=CALLS, kind="json_tools", transitions={"odd": [("<back>", NORMAL)]})
    assert silent.rules.transitions[NORMAL] == [("<call>", TOOL)]


def test_an_answer_begins_where_the_tokenizer_says() -> None:
    tokenizer: Any = Tokenizer()
    tokenizer.response_initial_state = REASONING
    assert chat_format(tokenizer).rules.initial == REASONING


@pytest.mark.parametrize(
    ("kind", "call_ids", "needs_ends"),
    [
        ("json_tools", CallIds.OURS, False),
        ("kimi_k2", CallIds.NUMBERED, True),
        ("qwen3_coder", CallIds.OURS, True),
        (None, CallIds.OURS, True),
    ],
)
def test_what_a_parser_of_mlx_lm_needs(
    kind: str | None, call_ids: CallIds, needs_ends: bool
) -> None:
    rules = format_of(calls=CALLS, kind=kind).rules
    assert (rules.call_ids, rules.needs_ends) == (call_ids, needs_ends)
    assert rules.parse_tool_call is parse


def test_parsers_that_read_too_much_are_replaced_or_held_back() -> None:
    mistral = format_of(calls=CALLS, kind="mistral").rules
    assert mistral.parse_tool_call is tool_formats.MISTRAL.parse
    assert mistral.call_ids is tool_formats.MISTRAL.call_ids
    for kind in ("glm47", "laguna"):
        glm = format_of(calls=CALLS, kind=kind).rules.parse_tool_call
        assert glm is not None
        assert glm is not parse
        with pytest.raises(ValueError):
            glm("weather<arg_key>city", None)


def test_every_parser_that_is_that_of_glm_is_held_back() -> None:
    """mlx-lm has it under more than one name."""
    same = {
        module.name
        for module in pkgutil.iter_modules(tool_parsers.__path__)
        if import_module(f"mlx_lm.tool_parsers.{module.name}").parse_tool_call
        is glm47.parse_tool_call
    }
    assert same == GLM_PARSERS


@pytest.mark.parametrize(
    ("vocabulary", "template", "expected"),
    [
        (("<|python_tag|>",), "{{ tool_calls }}", tool_formats.LLAMA),
        (("<|python_tag|>",), {"default": "", "tool_use": "{{ tool_calls }}"}, tool_formats.LLAMA),
        ((), "Action: ```json", tool_formats.COMMAND_R),
        (("<|tool_call|>",), None, tool_formats.GRANITE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_formats_of_ours_are_known_by_vocabulary_and_template(
    vocabulary: tuple[str, ...], template: Any, expected: tool_formats.ToolFormat
) -> None:
    rules = format_of(*vocabulary, chat_template=template).rules
    assert rules.transitions[NORMAL] == [(marker, TOOL) for marker in expected.begins]
    assert rules.parse_tool_call is expected.parse
    assert rules.call_ids is expected.call_ids
    assert rules.has_bare_calls == expected.has_bare_calls
    assert rules.needs_tools == expected.needs_tools
    assert rules.needs_ends == expected.needs_ends


def test_a_model_without_a_template_has_no_format_of_calls() -> None:
    assert format_of("<|python_tag|>", chat_template=None).rules.parse_tool_call is None
