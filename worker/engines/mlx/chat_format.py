"""What mlx-lm's tokenizer knows about a model's chats: its markers, and how it writes calls."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...text import harmony, tool_formats
from ...text.channels import NORMAL, REASONING, TOOL, ChannelRules
from ...text.tool_formats import ToolFormat
from .tokenizer import tool_template

OWN_REASONING = (
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("[THINK]", "[/THINK]"),
    ("<mm:think>", "</mm:think>"),
)  # fmt: skip
"""Markers around the reasoning of Command A, Magistral and MiniMax M3, unknown to mlx-lm."""

OWN_STRUCTURE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
"""Markers around an answer's content, Command A's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """What a model's answers look like.

    Attributes:
        rules: how it marks its parts.
        reasoning: the markers around reasoning; None if there are none, or if there are headers.
        content_after: ids after which the content begins if the prompt has opened another part,
            in the order in which they come.
        is_harmony: whether headers say what a part is.
    """

    rules: ChannelRules
    reasoning: tuple[str, str] | None = None
    content_after: tuple[tuple[int, ...], ...] = ()
    is_harmony: bool = False


def chat_format(tokenizer: TokenizerWrapper) -> ChatFormat:
    """Return the markers of a model, put together as mlx-lm's own server does (0.32.2), and
    ours."""
    vocabulary = tokenizer.get_vocab()

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    if all(marker in vocabulary for marker in ("<|channel|>", "<|message|>", "<|start|>")):
        return ChatFormat(
            rules=harmony.harmony_rules(),
            content_after=(ids("<|channel|>final"), ids("<|message|>")),
            is_harmony=True,
        )
    reasoning = None
    if tokenizer.has_thinking:
        reasoning = (tokenizer.think_start, tokenizer.think_end)
    else:
        known = (pair for pair in OWN_REASONING if all(marker in vocabulary for marker in pair))
        reasoning = next(known, None)
    return ChatFormat(
        rules=_rules(tokenizer, reasoning),
        reasoning=reasoning,
        content_after=(ids(reasoning[1]),) if reasoning else (),
    )


def _rules(tokenizer: TokenizerWrapper, reasoning: tuple[str, str] | None) -> ChannelRules:
    transitions: dict[str, list[tuple[str, str]]] = {}

    def add(state: str, marker: str | None, target: str) -> None:
        if marker:
            transitions.setdefault(state, []).append((marker, target))

    own = tokenizer.response_transitions
    calls = _tool_format(tokenizer)
    if reasoning is not None:
        add(NORMAL, reasoning[0], REASONING)
        add(REASONING, reasoning[1], NORMAL)
    # A format with its own states for calls says by itself where they begin.
    is_told = TOOL in {target for edges in own.values() for _, target in edges}
    for marker in calls.begins:
        if not is_told:
            add(NORMAL, marker, TOOL)
        if reasoning is not None:
            add(REASONING, marker, TOOL)
    for marker in calls.ends:
        add(TOOL, marker, NORMAL)
    vocabulary = tokenizer.get_vocab()
    own_structure = [marker for marker in OWN_STRUCTURE if marker in vocabulary]
    for marker in (*tokenizer.structural_markers, *own_structure):
        add(NORMAL, marker, NORMAL)
    for state, edges in own.items():
        for marker, target in edges:
            add(state, marker, target)
    return ChannelRules(
        transitions=transitions,
        initial=tokenizer.response_initial_state,
        tool_format=calls,
    )


def _tool_format(tokenizer: TokenizerWrapper) -> ToolFormat:
    """Return how the model writes calls, as mlx-lm recognises it, or else as we do."""
    template = tool_template(tokenizer.chat_template)
    own = tool_formats.own_format(tokenizer.get_vocab(), template)
    if not tokenizer.has_tool_calling or own is tool_formats.MINIMAX_M3:
        return own  # mlx-lm takes MiniMax M3's marks for those of JSON
    return tool_formats.format_of_mlx_lm(
        str(tokenizer.init_kwargs.get("tool_parser_type")),
        tokenizer.tool_call_start,
        tokenizer.tool_call_end or "",
    )
