"""Ctrl-C in a chat: it cancels the answer, at whatever moment it comes."""

from __future__ import annotations

import signal
from typing import Any, cast

import pytest

from mlxsup.cli.conversation.interrupts import Interrupts


class Answer:
    """Counts how often it was cancelled."""

    def __init__(self) -> None:
        self.cancels = 0

    def cancel(self) -> None:
        self.cancels += 1


@pytest.mark.parametrize("is_early", [True, False])
def test_an_interrupt_cancels_the_answer_even_before_there_is_one(is_early: bool) -> None:
    answer, before = Answer(), signal.getsignal(signal.SIGINT)
    with Interrupts(is_caught=True) as interrupts:
        if is_early:
            signal.raise_signal(signal.SIGINT)
        interrupts.cancel(cast(Any, answer))
        assert answer.cancels == is_early
        if not is_early:
            signal.raise_signal(signal.SIGINT)
        assert answer.cancels == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_person_an_interrupt_is_left_alone() -> None:
    answer = Answer()
    with Interrupts(is_caught=False) as interrupts:
        interrupts.cancel(cast(Any, answer))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert answer.cancels == 0
