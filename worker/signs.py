"""What the owner thread publishes of its work, for the heartbeats."""

from __future__ import annotations

from collections.abc import Callable

from mlxsup.protocol.states import WorkerPhase

from .engine import Engine, StepResult
from .heartbeat import Board, Books
from .link import MessageLink
from .row_memory import RowMemory

LOOK_EVERY_S = 0.05
"""From step to step the memory is looked at no more often, unless the budget is another: beats come
twice a second."""


class Signs:
    """Publishes phases, books and memory.

    Attributes:
        steps: how many have ended.

    Args:
        board: where it publishes.
        engine: knows its memory and its chunks.
        link: counts messages.
        memory: knows its budget.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        board: Board,
        engine: Engine,
        link: MessageLink,
        memory: RowMemory,
        clock: Callable[[], float],
    ) -> None:
        self._board = board
        self._engine = engine
        self._link = link
        self._memory = memory
        self._clock = clock
        self._looks_at = float("-inf")
        self._looked_at_budget = 0
        self.steps = 0

    def between_steps(self) -> None:
        """Begins work outside a step, or its next part: each has the time limit of a step.

        The books stay those of the last step or wait: during this work they are incomplete.
        """
        self._board.publish(WorkerPhase.ROWS, step=self.steps)

    def step(
        self, phase: WorkerPhase, predicted_s: float, *, requests: int, preparing: int
    ) -> None:
        """Begins a step.

        Args:
            phase: what it does.
            predicted_s: how long it should take at most.
            requests, preparing: see `Books`.
        """
        if self._clock() >= self._looks_at or self._memory.budget != self._looked_at_budget:
            self._look(phase, predicted_s, requests, preparing)
            return
        self._board.publish(
            phase,
            step=self.steps,
            predicted_s=predicted_s,
            books=self._books(requests, preparing),
            budget=self._memory.budget,
        )

    def stepped(self, result: StepResult, *, reads: bool) -> None:
        """Note that a step has ended; see `Traffic.add`."""
        self.steps += 1
        self._board.traffic.add(result, reads=reads)

    def wait(self, phase: WorkerPhase, *, requests: int, preparing: int) -> None:
        """Begins a wait; the memory is that of now, because nobody will look again for a while."""
        self._look(phase, 0.0, requests, preparing)

    def _look(self, phase: WorkerPhase, predicted_s: float, requests: int, preparing: int) -> None:
        self._looks_at = self._clock() + LOOK_EVERY_S
        self._looked_at_budget = self._memory.budget
        self._board.publish(
            phase,
            step=self.steps,
            predicted_s=predicted_s,
            books=self._books(requests, preparing),
            held=self._engine.bytes_held(),
            budget=self._memory.budget,
            prefill_chunk=self._engine.prefill_chunk(),
        )

    def _books(self, requests: int, preparing: int) -> Books:
        return Books(
            requests=requests,
            preparing=preparing,
            sent=self._link.sent,
            received=self._link.received,
        )
