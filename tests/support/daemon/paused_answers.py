"""Answers that are paused again and again, beside the same answers without a pause."""

from __future__ import annotations

from typing import Any

from mlxsup.protocol.states import Channel

from support.worker.loop_driver import Answer, LoopDriver

TURNS_TO_A_TOKEN = 200
"""More than any engine needs from a dispatch to the first token of a short prompt."""


def turn_until(worker: LoopDriver, answer: Answer, tokens: int) -> None:
    """Until the answer has that many tokens, or is over."""
    for _ in range(tokens * TURNS_TO_A_TOKEN):
        if len(answer.tokens) >= tokens or answer.is_over:
            return
        worker.turn()
    raise AssertionError("no tokens come")


def answer_with_pauses(worker: LoopDriver, every: int, *, keep: bool, **parameters: Any) -> Answer:
    """An answer that is paused after that many tokens, again and again."""
    key = worker.dispatch(**parameters)
    answer = worker.answers[key]
    while not answer.is_over:
        turn_until(worker, answer, len(answer.tokens) + every)
        if not answer.is_over and worker.pause(key, keep=keep).is_paused:
            worker.come_back(key)
    return answer


def assert_same(answer: Answer, whole: Answer) -> None:
    """In its tokens, its end, and the text of each channel."""
    assert (answer.tokens, answer.finish) == (whole.tokens, whole.finish)
    for channel in Channel:
        assert answer.text_of(channel) == whole.text_of(channel)
