"""Rows that do not fit into their budget leave and return, and nobody's answer changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxsup.protocol.cache_cost import GROWTH_TOKENS
from mlxsup.protocol.states import Priority

from support.core.rows_in_memory import NO_LIMIT, bytes_for, finish_in_turns
from support.daemon.paused_answers import assert_same, turn_until
from support.worker.loop_driver import LoopDriver

LENGTH = 24
PROMPTS = ["Once upon a time", "There was a fox who", "In the deep", "Nobody knew"]


@pytest.fixture(autouse=True)
def no_limit_afterwards(worker: LoopDriver) -> Iterator[None]:
    yield
    worker.set_budget(NO_LIMIT)
    worker.loop.drain()


def lengths(worker: LoopDriver) -> list[int]:
    """Tokens of each prompt."""
    found = []
    for prompt in PROMPTS:
        answer = worker.answer(prompt=prompt, max_tokens=1)
        assert answer.acceptance is not None
        found.append(len(answer.acceptance.prompt_tokens) // 4)
    return found


@pytest.mark.bits
def test_answers_in_too_little_memory_equal_the_undisturbed_ones(worker: LoopDriver) -> None:
    whole = [worker.answer(prompt=prompt, max_tokens=LENGTH) for prompt in PROMPTS]
    longest = max(lengths(worker))
    # Two rows join; then they grow, and there is too little for both.
    worker.set_budget(bytes_for(worker, rows=2, longest=longest + GROWTH_TOKENS))
    keys = [worker.dispatch(prompt=prompt, max_tokens=LENGTH) for prompt in PROMPTS]
    turn_until(worker, worker.answers[keys[0]], 5)
    worker.set_budget(bytes_for(worker, rows=2, longest=longest + 8))
    left = finish_in_turns(worker, keys)
    assert left[:2] == keys[2:], "no room for them at first"
    grows = bytes_for(worker, rows=1, longest=1) < bytes_for(worker, rows=1, longest=2)
    assert (keys[1] in left) is grows, "it left in the middle of its answer"
    assert keys[0] not in left, "it was the first, and ran through"
    for key, alone in zip(keys, whole, strict=True):
        assert_same(worker.answers[key], alone)
    assert not worker.engine.has_rows()
    assert worker.engine.bytes_held().kept == 0


def test_the_lowest_class_leaves_first_and_the_last_served_of_it(worker: LoopDriver) -> None:
    longest = max(lengths(worker))
    classes = [Priority.BATCH, Priority.BATCH, Priority.INTERACTIVE, Priority.NORMAL]
    keys = [
        worker.dispatch(prompt=PROMPTS[0], max_tokens=LENGTH, as_class=as_class)
        for as_class in classes
    ]
    for key in keys:
        turn_until(worker, worker.answers[key], 1)
    left: list[int] = []
    for rows in (3, 2, 1):
        worker.set_budget(bytes_for(worker, rows=rows, longest=longest + LENGTH))
        while len(left) < 4 - rows:
            worker.turn()
            left += [k for k in keys if worker.answers[k].is_paused and k not in left]
    assert left == [keys[1], keys[0], keys[3]]
    for key in left:
        worker.come_back(key)
    worker.set_budget(NO_LIMIT)
    worker.finish(*keys)


def test_kept_states_go_before_rows_do(worker: LoopDriver) -> None:
    key, other = (worker.dispatch(prompt=prompt, max_tokens=LENGTH) for prompt in PROMPTS[:2])
    turn_until(worker, worker.answers[key], 3)
    worker.pause(key, keep=True)
    assert worker.engine.bytes_held().kept > 0
    answer = worker.answers[other]
    turn_until(worker, answer, len(answer.tokens) + 1)
    assert answer.acceptance is not None
    length = len(answer.acceptance.prompt_tokens) // 4 + len(answer.tokens)
    worker.set_budget(bytes_for(worker, rows=1, longest=length + 2))
    turn_until(worker, answer, len(answer.tokens) + 1)
    assert worker.engine.bytes_held().kept == 0
    assert not answer.is_paused
    worker.set_budget(NO_LIMIT)
    worker.come_back(key)
    worker.finish(key, other)
