"""Clients that behave while others do not: what they see is the promise."""

from __future__ import annotations

import threading
import time

import msgpack

from mlxsup.protocol.ids import unpack_tokens

from support.faults import undisturbed
from support.raw_client import RawClient

MAX_TOKENS = 3_000_000
PAUSE_S = 0.005
LOOK_S = 0.5
CALM_PINGS = 100


class PingLoop(threading.Thread):
    """Another client that pings all the while: how long the supervisor's loop stands still.

    Attributes:
        calm_s: the longest of the pings before.
        longest_s: the longest of those during.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self._client = RawClient(endpoint)
        self._ended = threading.Event()
        self.calm_s = self.longest_s = 0.0

    def __enter__(self) -> PingLoop:
        return self

    def begin(self) -> None:
        """Pings on its own, then beside the others until the block ends."""
        self.calm_s = max(self._ping() for _ in range(CALM_PINGS))
        self.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.is_alive():
            self.join()
        self._client.__exit__()

    def run(self) -> None:
        """Pings."""
        while not self._ended.wait(PAUSE_S):
            self.longest_s = max(self.longest_s, self._ping())

    def _ping(self) -> float:
        start_s = time.monotonic()
        self._client.say([msgpack.packb({"type": "ping", "id": "p"})])
        while not self._client.has_news(LOOK_S):
            if self._ended.is_set():
                return time.monotonic() - start_s
        self._client.hear_any()
        return time.monotonic() - start_s


class RawStream(threading.Thread):
    """One stream, read as it travels: each piece's number, each token, and exactly one end.

    Args:
        endpoint: of the daemon.
        model: with the fake engine, whose answer is known without asking anybody.
        prompt: of the stream.
    """

    def __init__(self, endpoint: str, model: str, prompt: str) -> None:
        super().__init__(daemon=True)
        self._client = RawClient(endpoint)
        self._model, self._prompt = model, prompt
        self._tokens: list[int] = []
        self._numbers: list[int] = []
        self._ends: list[dict[str, object]] = []
        self._has_started = threading.Event()
        self._ended = threading.Event()
        self._is_left = threading.Event()
        body = msgpack.packb({"prompt": prompt, "max_tokens": MAX_TOKENS})
        self._client.say([msgpack.packb({"type": "generate", "id": "s", "model": model}), body])
        self.start()
        assert self._has_started.wait(60), f"no first token: {self._ends}"

    def __enter__(self) -> RawStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left.set()
        self.join()
        self._client.__exit__()

    def run(self) -> None:
        """Reads until the answer to a ping that follows the end."""
        while not self._is_left.is_set():
            if not self._client.has_news(LOOK_S):
                continue
            message = self._client.hear_any()
            if message["type"] == "deltas":
                for delta in message["deltas"]:
                    self._numbers.append(delta["seq"])
                    self._tokens += unpack_tokens(delta.get("tokens", b""))
                self._has_started.set()
            elif message["type"] in ("done", "failed"):
                self._ends.append(message)
                self._ended.set()
            elif message["type"] == "reply":
                return

    def judged(self, problems: list[str]) -> int:
        """Cancels it, adds what was wrong, and returns the number of its tokens."""
        self._client.say([msgpack.packb({"type": "cancel", "id": "s"})])
        self._ended.wait(60)
        self._client.say([msgpack.packb({"type": "ping", "id": "p"})])
        self.join(60)
        ends = [(end["type"], end.get("finish_reason"), end.get("seq")) for end in self._ends]
        if ends != [("done", "cancelled", len(self._numbers))]:
            problems.append(f"the stream of {self._model} ended with {ends}")
        if self._numbers != list(range(len(self._numbers))):
            problems.append(f"pieces of the stream of {self._model} are missing or doubled")
        if self._tokens != undisturbed(self._prompt, len(self._tokens)):
            problems.append(f"wrong tokens in the stream of {self._model}")
        return len(self._tokens)
