"""Start daemons, and see when pieces come, processes end and states change."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from mlxsup.client import Client, ConnectionLost, RequestError

from support.client.streams import Reader
from support.daemon.child import Child
from support.daemon.daemon import Daemon, wait_for_state

TESTS = Path(__file__).parents[1]
SOON: dict[str, Any] = {"max_restarts": 1_000_000, "backoff_initial_s": 0.05, "backoff_max_s": 0.1}
"""A `restart` table for models that die again and again without being given up."""

Change = dict[str, Any]


def main_process(daemon: Daemon) -> psutil.Process:
    """Return the supervisor's process."""
    assert daemon.process is not None
    return psutil.Process(daemon.process.pid)


@contextmanager
def serving(
    models: dict[str, dict[str, Any]], supervisor: dict[str, Any] | None = None
) -> Iterator[tuple[Daemon, Client]]:
    """A daemon with a client, once all preloaded models are READY."""
    with Daemon(models, supervisor) as started, started.client() as client:
        for name, entry in models.items():
            if entry.get("preload"):
                wait_for_state(client, name, "READY", 120.0)
        yield started, client


@contextmanager
def doomed(
    models: dict[str, dict[str, Any]], supervisor: dict[str, Any] | None = None
) -> Iterator[tuple[Daemon, Client]]:
    """A daemon that the block ends; what is left of it is killed."""
    started = Daemon(models, supervisor)
    try:
        started.start()
        with started.client() as client:
            yield started, client
    finally:
        if started.process is not None:
            started.kill()
        started.__exit__(None, None, None)


class TimedReader(Reader):
    """A reader that notes when each piece came, and when the stream ended."""

    def __init__(self, client: Client, model: str, prompt: str, **parameters: Any) -> None:
        self.times: list[float] = []
        self.ended_at = 0.0
        super().__init__(client, model, prompt, **parameters)

    def run(self) -> None:
        """Read to the end."""
        try:
            for delta in self.stream:
                self.times.append(time.monotonic())
                self.text += delta.text
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
        return largest_gap_ms(self.times)


def largest_gap_ms(times: list[float], begin: float = 0.0, end: float = float("inf")) -> float:
    """Return the longest wait between two pieces that has begun or ended in this time."""
    gaps = [b - a for a, b in pairwise(list(times)) if b > begin and a < end]
    return 1000 * max(gaps)


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
        """Listen until the daemon ends."""
        try:
            for change in self._events:
                with self._news:
                    self._heard.append((time.monotonic(), change))
                    self._news.notify_all()
        except ConnectionLost:
            pass

    def first(self, is_wanted: Callable[[Change], bool], timeout_s: float = 60.0) -> float:
        """Wait for the first change that is wanted; return when it was heard of."""

        def find() -> float | None:
            return next((at for at, change in self._heard if is_wanted(change)), None)

        with self._news:
            found = self._news.wait_for(find, timeout_s)
        assert found is not None, f"no such change within {timeout_s:g} s"
        return found

    def ready_at(self, model: str, generation: int) -> float:
        """Return when that life of the model was READY."""
        life = (model, generation, "READY")
        return self.first(lambda c: (c.get("model"), c.get("generation"), c.get("to")) == life)

    def left_ready_at(self, model: str, generation: int) -> float:
        """Return when that life of the model was READY no more."""
        life = (model, generation, "READY")
        return self.first(
            lambda c: (
                (c.get("model"), c.get("generation"), c.get("from")) == life and c["to"] != "READY"
            )
        )


class ExitWatch(threading.Thread):
    """Notes when a process ended, by the kernel's own news where there is one."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self._descriptor = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        self._ended_at = 0.0
        self.start()

    def run(self) -> None:
        """Wait for the end."""
        if self._descriptor is None:
            self._process.wait()
        else:
            select.select([self._descriptor], [], [])
            os.close(self._descriptor)
        self._ended_at = time.monotonic()

    def ended_at(self, what: str = "the process", timeout_s: float = 60.0) -> float:
        """Wait for the end, and return when it came."""
        self.join(timeout_s)
        assert not self.is_alive(), f"{what} did not end within {timeout_s:g} s"
        return self._ended_at


@contextmanager
def peak_rss(process: psutil.Process) -> Iterator[list[float]]:
    """A list whose last item is by how many MB the process has grown at most."""
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


class Crowd(Child):
    """A process of clients that behave badly, once it has begun; `crowd.py` is what it does."""

    def __init__(self, *arguments: object) -> None:
        paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        super().__init__(
            "-m", "campaign.crowd", *arguments, cwd=TESTS, env={**os.environ, "PYTHONPATH": paths}
        )
        self.line()

    def result(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Tell it to end, and return what it says."""
        return self.end(timeout_s)


@contextmanager
def burning(count: int) -> Iterator[None]:
    """That many processes that take all the CPU time they get."""
    processes = [Child("-c", "while True: pass") for _ in range(count)]
    try:
        yield
    finally:
        for one in processes:
            one.kill()
