"""Several answers within a budget for their rows, dispatched as a supervisor does it."""

from __future__ import annotations

from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.states import PauseReason

from support.worker.loop_driver import MAX_TURNS, Answer, LoopDriver

NO_LIMIT = 1 << 60


def bytes_for(worker: LoopDriver, *, rows: int, longest: int) -> int:
    """What that many rows of that length take."""
    return cache_bytes(worker.facts.cache_layers, rows=rows, longest=longest)


def finish_in_turns(worker: LoopDriver, keys: list[int]) -> list[int]:
    """Turns until all are over; who has left returns, the first first, when another has ended or
    nobody runs.

    Returns:
        The keys of those that left for want of memory, in order, as often as they did.
    """
    answers = {key: worker.answers[key] for key in keys}
    left: list[int] = []
    outside: list[int] = []
    over = 0
    for _ in range(MAX_TURNS):
        ended = sum(answer.is_over for answer in answers.values())
        if ended == len(keys):
            return left
        if outside and (ended > over or len(outside) + ended == len(keys)):
            worker.come_back(outside.pop(0))
        over = ended
        worker.turn()
        for key, answer in answers.items():
            if answer.is_paused and key not in outside:
                assert answer.deltas[-1].pause_reason is PauseReason.MEMORY
                outside.append(key)
                left.append(key)
    raise AssertionError("no end")


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    """The tokens of each."""
    return [answer.tokens for answer in answers]
