"""What `mlxsup bench` measures now, and how long the rest takes."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from .live_line import LiveLine
from .output import Output
from .quantities import format_duration

if TYPE_CHECKING:
    from ..benchmark.run import Run
    from ..benchmark.sizes import Cell


class BenchProgress:
    """One line of a terminal, or a line for each size that is measured.

    Args:
        run: what has been measured so far.
        output: how to write output.
    """

    def __init__(self, run: Run, output: Output) -> None:
        self._run = run
        self._output = output
        self._line = LiveLine(output)

    def tell(self, cell: Cell, warmed_up: int | None) -> None:
        """A size is about to be measured.

        Args:
            cell: the size.
            warmed_up: how many sizes have been warmed up, if this is still done; else None.
        """
        run = self._run
        if warmed_up is not None:
            text = f"warming up {warmed_up + 1}/{len(run.cells)}: {cell}"
        else:
            text = f"{run.done + 1}/{run.bursts}: {cell}"
            if run.left_s is not None:
                text += f", about {format_duration(run.left_s)} left"
        if self._line.is_possible:
            self._line.show(text)
        else:
            self._output.note(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._line.clear()
