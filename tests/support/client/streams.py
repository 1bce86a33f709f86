"""Streams read in threads, to their end (J2)."""

from __future__ import annotations

import threading
from typing import Any, Self

from mlxsup.client import Client, RequestError, Result

from support.eventually import TIMEOUT_S


class Reader(threading.Thread):
    """A thread that reads one stream to its end.

    Attributes:
        text, tokens: what has come so far.
        error: what the stream ended with, if not well.
        has_started: set with the first token, or at the end.
    """

    def __init__(
        self, client: Client, model: str, prompt: str | None = None, /, **parameters: Any
    ) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self.has_started = threading.Event()
        self.stream = client.generate(model, prompt=prompt, **parameters)
        self.start()

    def run(self) -> None:
        """Read."""
        try:
            for delta in self.stream:
                self.text += delta.text
                self.tokens += delta.token_ids
                if self.tokens:
                    self.has_started.set()
        except (RequestError, ConnectionError) as error:
            self.error = error
        finally:
            self.has_started.set()

    def finished(self, timeout_s: float = TIMEOUT_S) -> Result:
        """Return the result, when the stream has ended well."""
        self.join(timeout_s)
        assert not self.is_alive(), "the stream did not end"
        if self.error is not None:
            raise AssertionError(f"the stream failed: {self.error!r}")
        return self.stream.result

    def failed(self, timeout_s: float = TIMEOUT_S) -> RequestError:
        """Return the error that the stream ended with."""
        self.join(timeout_s)
        assert not self.is_alive(), "the stream did not end"
        assert isinstance(self.error, RequestError), self.error
        return self.error

    def started(self, timeout_s: float = TIMEOUT_S) -> Self:
        """Wait for the first token."""
        assert self.has_started.wait(timeout_s)
        assert self.error is None, self.error
        return self
