"""Where prompts part: checkpoints of chats, and the tree of kept token sequences."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxsup.worker.engines.mlx import checkpoints
from mlxsup.worker.engines.mlx.checkpoints import (
    BEGINNINGS,
    find_checkpoints,
    plan_checkpoints,
)
from mlxsup.worker.engines.mlx.prefix_index import Node, PrefixIndex, as_tokens, shared_length

Messages = list[dict[str, Any]]


def render(messages: Messages) -> str:
    """As a template that keeps reasoning only behind the last question."""
    last = max(n for n, message in enumerate(messages) if message["role"] == "user")
    parts = []
    for number, message in enumerate(messages):
        text = message["content"]
        if message["role"] == "assistant" and number < last:
            text = re.sub("<think>.*</think>", "", text)
        parts.append(f"<|{message['role']}|>{text}\n")
    return "".join([*parts, "<|assistant|><think>"])


PIECE = r"<[^>]*>|[a-z]+|.|\n"
"""Special tokens whole, words and all else by the character."""


def encode(text: str) -> list[int]:
    return [hash(piece) % 2**31 for piece in re.findall(PIECE, text)]


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def text_before(rendered: str, counts: Sequence[int]) -> list[str]:
    pieces = re.findall(PIECE, rendered)
    return ["".join(pieces[:count]) for count in counts]


def found(messages: Messages, **changes: Any) -> list[str]:
    """What lies before each checkpoint."""
    rendered = render(messages)
    options: dict[str, Any] = {"render": render, "encode": encode} | changes
    counts = find_checkpoints(messages, rendered, encode(rendered), **options)
    return text_before(rendered, counts)


CHAT = [
    said("system", "be good"),
    said("user", "hello"),
    said("assistant", "<think>well</think>hi"),
    said("user", "and now"),
]


def test_a_chat_shares_its_system_prompt_and_what_its_next_turn_shows() -> None:
    system, turn = found(CHAT)
    assert system == "<|system|>be good\n<|user|>"
    assert turn == render(CHAT).removesuffix("<think>")


@pytest.mark.parametrize("spaces", ["", " ", "\n\n"])
def test_white_space_that_joins_the_token_before_it_is_not_shared(
    spaces: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = render

    def shouted(messages: Messages) -> str:
        return plain(messages).replace("<|user|>", "<|user|>!")

    monkeypatch.setattr(sys.modules[__name__], "PIECE", r"<[^>]*>|[a-z]+|!\s*|.|\n")
    monkeypatch.setattr(sys.modules[__name__], "render", shouted)
    chat = [CHAT[0], said("user", f"{spaces}hello")]
    assert found(chat)[0] == "<|system|>be good\n<|user|>"


def test_reasoning_that_is_stripped_later_is_not_shared() -> None:
    chain = [*CHAT, said("assistant", "<think>call</think>tool"), said("assistant", "more")]
    assert found(chain)[-1] == render(CHAT).removesuffix("<think>")


@pytest.mark.parametrize("refused", ["a", "y"])
def test_a_template_that_refuses_a_trial_costs_that_checkpoint_alone(refused: str) -> None:
    def picky(messages: Messages) -> str:
        if messages[-1]["content"] == refused:
            raise RuntimeError("no")
        return render(messages)

    assert found(CHAT, render=picky) == [found(CHAT)[1 if refused == "a" else 0]]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_template_is_asked_about_these_chats(role: str) -> None:
    chat = [said(role, "be good"), said("user", "hello")]
    asked: list[Messages] = []

    def recorded(messages: Messages) -> str:
        asked.append(messages)
        return render(messages)

    found(chat, render=recorded)
    trials = [[chat[0], said("user", text)] for text in BEGINNINGS]
    assert asked == [*trials, [*chat, said("assistant", "x"), said("user", "y")]]
    asked.clear()
    begun = [*chat, said("assistant", "I")]
    found(begun, render=recorded)
    assert asked == [*trials, [*begun, said("user", "y")]]


def test_up_to_a_length_a_whole_prompt_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = render([CHAT[0], said("user", "a")])
    for most, is_whole in ((len(trial), True), (len(trial) - 1, False)):
        monkeypatch.setattr(checkpoints, "WHOLE_CHARACTERS", most)
        seen: list[str] = []
        found(CHAT, encode=lambda text, seen=seen: seen.append(text) or encode(text))
        assert (trial in seen) is is_whole


@pytest.mark.parametrize("question", ["and now", "\ud800 \U0001f600"])
@pytest.mark.parametrize("specials", [["<|system|>"], ["<|system|>", "<|user|>", "<|assistant|>"]])
def test_long_prompts_are_tokenised_from_the_last_special_token_on(
    monkeypatch: pytest.MonkeyPatch, question: str, specials: list[str]
) -> None:
    """The one at the very beginning serves, too."""
    chat = [*CHAT[:-1], said("user", question)]
    expected = found(chat)
    monkeypatch.setattr(checkpoints, "WHOLE_CHARACTERS", 10)
    seen: list[str] = []

    def counted(text: str) -> list[int]:
        seen.append(text)
        return encode(text)

    assert found(chat, encode=counted, special_tokens=specials) == expected
    if "<|assistant|>" in specials:
        # The tail of the next turn is short; that of the system prompt is the rest of this prompt.
        assert "<|assistant|><think>" in seen
        assert render(chat) not in seen


def test_a_tokenizer_that_does_not_begin_anew_gets_no_checkpoint_far_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints, "WHOLE_CHARACTERS", 10)

    def odd(text: str) -> list[int]:
        return encode(text) if text == render(CHAT) else [1, *encode(text)]

    assert found(CHAT, encode=odd, special_tokens=["<|user|>"]) == []
    assert found(CHAT) == [], "there is no special token"


@pytest.mark.parametrize(
    ("wanted", "known", "shared", "prompt", "expected"),
    [
        ((), 0, 0, 100, (99,)),
        ((40, 90), 0, 0, 100, (40, 90)),
        ((40, 90), 60, 60, 100, (90,)),
        ((40,), 40, 70, 100, (70, 99)),
        ((10, 20, 30), 0, 0, 17, (16,)),
        ((), 0, 0, 16, ()),
        ((), 99, 99, 100, ()),
        ((40,), 0, 120, 100, (40, 99)),
        ((100,), 84, 0, 100, ()),
        (tuple(range(20, 140, 20)), 0, 0, 140, (20, 40, 60, 80, 100, 120, 139)),
        (tuple(range(20, 180, 20)), 0, 0, 180, (20, 40, 60, 80, 100, 120, 140, 179)),
        (tuple(range(20, 1000, 20)), 0, 0, 1000, (20, 40, 60, 80, 100, 120, 140, 999)),
    ],
)
def test_checkpoints_lie_apart_and_within_the_prompt(
    wanted: tuple[int, ...], known: int, shared: int, prompt: int, expected: tuple[int, ...]
) -> None:
    places = plan_checkpoints(wanted, known=known, shared=shared, prompt_tokens=prompt)
    assert places == expected


SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


def sequence_of(node: Node[int]) -> tuple[int, ...]:
    """The tokens that lead to a node."""
    above = sequence_of(node.parent) if node.parent is not None else ()
    return (*above, *map(int, node.run))


def naive_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(SEQUENCES, SEQUENCES)
def test_shared_length_is_that_of_the_common_beginning(
    one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    assert shared_length(as_tokens(one), as_tokens(other)) == naive_shared(one, other)
    assert shared_length(as_tokens(one), as_tokens(())) == 0


class IndexMachine(RuleBasedStateMachine):
    """The tree beside a plain dict of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.index: PrefixIndex[int] = PrefixIndex()
        self.values: dict[tuple[int, ...], int] = {}
        self.nodes: dict[tuple[int, ...], Node[int]] = {}

    @rule(sequence=SEQUENCES, value=st.integers(0, 9))
    def add(self, sequence: tuple[int, ...], value: int) -> None:
        node = self.index.add(as_tokens(sequence), value)
        assert self.nodes.get(sequence, node) is node
        self.values[sequence] = value
        self.nodes[sequence] = node

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.values:
            sequence = data.draw(st.sampled_from(sorted(self.values)))
            del self.values[sequence]
            self.index.remove(self.nodes.pop(sequence))

    @rule(sequence=SEQUENCES)
    def look_up(self, sequence: tuple[int, ...]) -> None:
        path = self.index.path(as_tokens(sequence))
        shared = max((naive_shared(known, sequence) for known in self.values), default=0)
        assert path[-1][1] == shared
        on_path = {
            sequence_of(node): node.value
            for node, matched in path
            if node.value is not None and matched == node.end
        }
        beginnings = {k: v for k, v in self.values.items() if k == sequence[: len(k)]}
        assert on_path == beginnings

    @rule(sequence=SEQUENCES, longest=st.integers(1, 9))
    def look_below(self, sequence: tuple[int, ...], longest: int) -> None:
        path = self.index.path(as_tokens(sequence))
        lead = sequence[: path[-1][1]]
        below = [sequence_of(node) for node in self.index.below(path[-1][0], longest=longest)]
        fitting = [k for k in self.values if k[: len(lead)] == lead and len(k) <= longest]
        assert sorted(below) == sorted(fitting)
        if len(path) > 1:
            rest = self.index.below(path[-2][0], besides=path[-1][0], longest=longest)
            lead = sequence_of(path[-2][0])
            fitting = [k for k in self.values if k[: len(lead)] == lead and len(k) <= longest]
            assert sorted([*below, *map(sequence_of, rest)]) == sorted(fitting)

    @invariant()
    def runs_are_shared_and_none_is_left_over(self) -> None:
        beginnings = {k[:n] for k in self.values for n in range(1, len(k) + 1)}
        assert self.index.held_bytes == 4 * len(beginnings)
        (root, _), *_ = self.index.path(as_tokens(()))
        waiting = list(root.children.values())
        while waiting:
            node = waiting.pop()
            assert node.value is not None or len(node.children) > 1
            assert node.end == len(sequence_of(node))
            waiting.extend(node.children.values())


IndexMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)

TestIndex = IndexMachine.TestCase


def test_a_look_up_beside_long_and_many_sequences_takes_no_time() -> None:
    """Expected: 0.1 ms beside one of 100,000 tokens, 15 ms where 4,096 of them part one by one."""
    numbers = np.random.default_rng(0)
    index: PrefixIndex[int] = PrefixIndex()
    giant = as_tokens(numbers.integers(0, 1000, 100_000).astype(np.int32))
    index.add(giant, 0)
    for place in reversed(range(4095)):  # each parts from the one run that is left above
        index.add(np.concatenate([giant[:place], as_tokens([1001, place])]), place)
    short = as_tokens([*giant[:3].tolist(), 2000, *range(100)])
    began_s = time.thread_time()
    assert index.path(short)[-1][1] == 3
    assert index.path(giant)[-1][1] == 100_000
    assert time.thread_time() - began_s < 0.5
