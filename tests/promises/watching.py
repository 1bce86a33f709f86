"""Eyes on a daemon: when pieces came, when a process ended, when a state changed."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import psutil

from mlxsup.client import Client, ConnectionLost, RequestError

from support.streams import Reader

Change = dict[str, Any]


class TimedReader(Reader):
    """A reader that knows when each piece came, and when the stream ended."""

    def __init__(self, client: Client, model: str, prompt: str, **parameters: Any) -> None:
        self.times: list[float] = []
        self.ended_at = 0.0
        super().__init__(client, model, prompt, **parameters)

    def run(self) -> None:
        """Reads."""
        try:
            for delta in self.stream:
                self.times.append(time.monotonic())
                self.tokens += delta.token_ids
                self.has_started.set()
        except (RequestError, ConnectionError) as error:
            self.error = error
        finally:
            self.ended_at = time.monotonic()
            self.has_started.set()

    @property
    def largest_gap_ms(self) -> float:
        """The longest wait between two pieces."""
        times = list(self.times)
        return 1000 * max(after - before for before, after in pairwise(times))


class Changes(threading.Thread):
    """The state changes of a daemon, each with the time when it was heard of."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self._events = client.events()
        client.ping()  # answered in order: the subscription is there now
        self._heard: list[tuple[float, Change]] = []
        self._news = threading.Condition()
        self.start()

    def run(self) -> None:
        """Listens."""
        try:
            for change in self._events:
                with self._news:
                    self._heard.append((time.monotonic(), change))
                    self._news.notify_all()
        except ConnectionLost:
            pass  # the daemon has ended

    def first(
        self, is_wanted: Callable[[Change], bool], timeout_s: float = 60.0
    ) -> tuple[float, Change]:
        """The first change that is wanted, since the beginning; waits for it."""

        def find() -> tuple[float, Change] | None:
            return next((heard for heard in self._heard if is_wanted(heard[1])), None)

        with self._news:
            found = self._news.wait_for(find, timeout_s)
        assert found is not None, f"no such change within {timeout_s:g} s"
        return found

    def ready_at(self, model: str, generation: int, timeout_s: float = 60.0) -> float:
        """When that life of the model was READY."""

        def is_ready(change: Change) -> bool:
            life = change.get("model"), change.get("generation"), change.get("to")
            return life == (model, generation, "READY")

        return self.first(is_ready, timeout_s)[0]

    def left_ready_at(self, model: str, generation: int, timeout_s: float = 60.0) -> float:
        """When that life of the model was READY no more."""

        def has_left(change: Change) -> bool:
            life = change.get("model"), change.get("generation"), change.get("from")
            return life == (model, generation, "READY") and change["to"] != "READY"

        return self.first(has_left, timeout_s)[0]


class ExitWatch(threading.Thread):
    """When a process ended, by the kernel's own news where there is one.

    Args:
        pid: of the process.
        lived_at: when it was last known to live; one that has gone since then ended, at the
            earliest, at that time.

    Raises:
        psutil.NoSuchProcess, ProcessLookupError: there is none, and `lived_at` is not given.
    """

    def __init__(self, pid: int, lived_at: float | None = None) -> None:
        super().__init__(daemon=True)
        self._ended_at = 0.0
        self._wait: Callable[[], object]
        try:
            self._wait = _wait_of(pid)
        except (psutil.NoSuchProcess, ProcessLookupError):
            if lived_at is None:
                raise
            self._ended_at = lived_at
            self._wait = bool
        self.start()

    def run(self) -> None:
        """Waits."""
        self._wait()
        self._ended_at = self._ended_at or time.monotonic()

    def ended_at(self, timeout_s: float = 60.0, what: str = "") -> float:
        """When it ended; waits for that, and names what it was if it does not."""
        self.join(timeout_s)
        assert not self.is_alive(), f"the process did not end within {timeout_s:g} s: {what}"
        return self._ended_at


def _wait_of(pid: int) -> Callable[[], object]:
    """What returns when the process has ended."""
    process = psutil.Process(pid)
    if not hasattr(os, "pidfd_open"):
        return process.wait
    descriptor = os.pidfd_open(pid)

    def wait() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        os.close(descriptor)

    return wait


@contextmanager
def peak_rss(process: psutil.Process) -> Iterator[list[float]]:
    """Samples its memory, in MB; the list's last item is by how much it has grown at most."""
    before, grown, ended = process.memory_info().rss, [0.0], threading.Event()

    def sample() -> None:
        while not ended.wait(0.02):
            grown.append(max(grown[-1], (process.memory_info().rss - before) / 1e6))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield grown
    finally:
        ended.set()
        thread.join()
