"""What other prompts share with a chat's, found out from the template."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mlxsup.worker.engines.mlx import chat_checkpoints
from mlxsup.worker.engines.mlx.chat_checkpoints import find_checkpoints
from mlxsup.worker.engines.mlx.checkpoints import plan_checkpoints, split_at

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


def encode(text: str) -> list[int]:
    """Special tokens whole, words and all else by the character."""
    return [hash(piece) % 2**31 for piece in re.findall(r"<[^>]*>|[a-z]+|.|\n", text)]


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def found(messages: Messages, **changes: Any) -> list[str]:
    """What lies before each checkpoint."""
    rendered = render(messages)
    tokens = encode(rendered)
    options: dict[str, Any] = {"render": render, "encode": encode} | changes
    counts = find_checkpoints(messages, rendered, tokens, **options)
    pieces = re.findall(r"<[^>]*>|[a-z]+|.|\n", rendered)
    return ["".join(pieces[:count]) for count in counts]


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


def test_reasoning_that_is_stripped_later_is_not_shared() -> None:
    chain = [*CHAT, said("assistant", "<think>call</think>tool"), said("assistant", "more")]
    assert found(chain)[-1] == render(CHAT).removesuffix("<think>")


def test_without_a_system_prompt_what_comes_before_the_question_is_shared() -> None:
    assert found([said("user", "hello there")])[0] == "<|user|>"


def test_a_question_that_begins_as_the_ones_tried_changes_nothing() -> None:
    for text in ("a", "b", "a b", "b a"):
        assert found([said("system", "s"), said("user", text)])[0] == "<|system|>s\n<|user|>"


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
    trials = [[chat[0], said("user", "a")], [chat[0], said("user", "b")]]
    assert asked == [*trials, [*chat, said("assistant", "x"), said("user", "y")]]
    asked.clear()
    begun = [*chat, said("assistant", "I")]
    found(begun, render=recorded)
    assert asked == [*trials, [*begun, said("user", "y")]]


def test_a_prompt_that_is_shared_whole_gets_no_checkpoint_behind_it() -> None:
    def plain(messages: Messages) -> str:
        return "".join(f"<|{m['role']}|>{m['content']}" for m in messages)

    chat = [said("user", "hello")]
    tokens = encode(plain(chat))
    assert find_checkpoints(chat, plain(chat), tokens, render=plain, encode=encode) == (1,)


def test_up_to_a_length_a_whole_prompt_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = render([CHAT[0], said("user", "a")])
    for most, is_whole in ((len(trial), True), (len(trial) - 1, False)):
        monkeypatch.setattr(chat_checkpoints, "WHOLE_CHARACTERS", most)
        seen: list[str] = []
        found(CHAT, encode=lambda text, seen=seen: seen.append(text) or encode(text))
        assert (trial in seen) is is_whole


@pytest.mark.parametrize("question", ["and now", "\ud800 \U0001f600"])
def test_the_special_token_at_the_very_beginning_serves(
    monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    chat = [*CHAT[:-1], said("user", question)]
    expected = found(chat)
    monkeypatch.setattr(chat_checkpoints, "WHOLE_CHARACTERS", 10)
    assert found(chat, special_tokens=["<|system|>"]) == expected


def test_long_prompts_are_tokenised_from_the_last_special_token_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = found(CHAT)
    monkeypatch.setattr(chat_checkpoints, "WHOLE_CHARACTERS", 10)
    seen: list[str] = []

    def counted(text: str) -> list[int]:
        seen.append(text)
        return encode(text)

    specials = ["<|system|>", "<|user|>", "<|assistant|>"]
    rendered = render(CHAT)
    counts = find_checkpoints(
        CHAT, rendered, encode(rendered), render=render, encode=counted, special_tokens=specials
    )
    pieces = re.findall(r"<[^>]*>|[a-z]+|.|\n", rendered)
    assert ["".join(pieces[:count]) for count in counts] == expected
    # The tail of the next turn is short; that of the system prompt is the rest of this prompt.
    assert "<|assistant|><think>" in seen
    assert rendered not in seen


def test_a_tokenizer_that_does_not_begin_anew_gets_no_checkpoint_far_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_checkpoints, "WHOLE_CHARACTERS", 10)
    whole = render(CHAT)

    def odd(text: str) -> list[int]:
        return encode(text) if text == whole else [1, *encode(text)]

    counts = find_checkpoints(
        CHAT, whole, encode(whole), render=render, encode=odd, special_tokens=["<|user|>"]
    )
    assert counts == ()
    assert find_checkpoints(CHAT, whole, encode(whole), render=render, encode=encode) == ()


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
        (tuple(range(20, 160, 20)), 0, 0, 160, (20, 40, 60, 80, 100, 120, 140, 159)),
        (tuple(range(20, 180, 20)), 0, 0, 180, (20, 40, 60, 80, 100, 120, 140, 179)),
        (tuple(range(20, 1000, 20)), 0, 0, 1000, (20, 40, 60, 80, 100, 120, 140, 999)),
    ],
)
def test_checkpoints_lie_apart_and_within_the_prompt(
    wanted: tuple[int, ...], known: int, shared: int, prompt: int, expected: tuple[int, ...]
) -> None:
    places = plan_checkpoints(wanted, known=known, shared=shared, prompt_tokens=prompt)
    assert places == expected
    tokens = list(range(prompt))
    pieces = split_at(tokens, known, places)
    assert [token for piece in pieces for token in piece] == tokens[known:]
    assert all(pieces)
