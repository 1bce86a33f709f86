"""An answer that is read in its own thread while the command does something else."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxsup.client import ConnectionLost, RequestError
    from mlxsup.client.client import Stream

EXACT_BACKENDS = ("cpu", "fake")
"""The back-ends that resume exactly: on a GPU a resumed answer may round differently."""


class BackgroundAnswer(threading.Thread):
    """Reads a stream to its end.

    Args:
        model: the model that answers.
        stream: its answer.

    Attributes:
        text: what has come so far.
        token_ids: likewise.
        arrivals: when each piece came, in monotonic seconds.
    """

    def __init__(self, model: str, stream: Stream) -> None:
        super().__init__(daemon=True)
        self.model = model
        self.text = ""
        self.token_ids: list[int] = []
        self.arrivals: list[float] = []
        self._failure: RequestError | ConnectionLost | None = None
        self._grown = threading.Condition()
        self._has_ended = False
        self._stream = stream
        self.start()

    def run(self) -> None:
        """Reads the stream to its end."""
        from mlxsup.client import ConnectionLost, RequestError

        try:
            for delta in self._stream:
                with self._grown:
                    self.text += delta.text
                    self.token_ids += delta.token_ids
                    self.arrivals.append(time.monotonic())
                    self._grown.notify_all()
        except (RequestError, ConnectionLost) as error:
            self._failure = error
        with self._grown:
            self._has_ended = True
            self._grown.notify_all()

    @property
    def tokens(self) -> int:
        """How many have come so far."""
        return len(self.token_ids)

    def wait_for(self, tokens: int) -> bool:
        """Returns once there are that many tokens; False if the answer ended before."""
        with self._grown:
            self._grown.wait_for(lambda: self.tokens >= tokens or self._has_ended)
            return not self._has_ended

    def cancel(self) -> None:
        """Asks for its end."""
        self._stream.cancel()

    def finish(self) -> BackgroundAnswer:
        """Waits for its end.

        Raises:
            RequestError, ConnectionLost: it has no result.
        """
        self.join()
        if self._failure is not None:
            raise self._failure
        return self

    @property
    def resumed(self) -> int:
        """How many times it resumed after a crash."""
        return self._stream.result.resumed
