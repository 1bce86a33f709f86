"""Ctrl-C while an answer comes."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from mlxsup.client.client import Stream


class Interrupts:
    """Lets Ctrl-C end an answer cleanly, without interrupting the code that reads it (D4).

    Args:
        is_caught: False leaves interrupts alone.
    """

    def __init__(self, *, is_caught: bool) -> None:
        self._is_caught = is_caught
        self._was_interrupted = False
        self._stream: Stream | None = None
        self._before: Any = None

    def cancel(self, stream: Stream) -> None:
        """Lets interrupts cancel this stream, even one that came before the stream existed."""
        self._stream = stream
        if self._was_interrupted:
            stream.cancel()

    def __enter__(self) -> Self:
        if self._is_caught:
            self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_caught:
            signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, *_: object) -> None:
        self._was_interrupted = True
        if self._stream is not None:
            self._stream.cancel()
