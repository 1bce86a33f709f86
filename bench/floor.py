"""The child process that drives BatchGenerator alone (`bench/in_process.py`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from support.child import Child

ROWS = 16


class Floor:
    """A model in its own process, asked for one burst at a time.

    Attributes:
        ready_s: from the beginning of its imports until it had answered something.
        started_s: the same from outside: the start of the interpreter counts, too.

    Args:
        model: its folder.
        rows: how many prompts it reads and answers at once.
    """

    def __init__(self, model: Path, rows: int = ROWS) -> None:
        begin = time.perf_counter()
        self._child = Child("-m", "bench.in_process", model, rows)
        self.ready_s = float(self._child.line()["ready_s"])
        self.started_s = time.perf_counter() - begin

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._child.kill()
        else:
            self.close()

    def burst(
        self, prompts: Sequence[str], sent_s: Sequence[float], tokens: int
    ) -> list[list[float]]:
        """When each token of each answer was there, in seconds after the first prompt was sent.

        Args:
            prompts: texts.
            sent_s: when each of them is sent, in seconds.
            tokens: length of each answer.
        """
        job = {"prompts": list(prompts), "sent_s": list(sent_s), "tokens": tokens}
        times: list[list[float]] = self._child.ask(job)["times"]
        assert [len(own) for own in times] == [tokens] * len(prompts), "an answer ended early"
        return times

    def close(self) -> None:
        """Ends the child."""
        self._child.end()
