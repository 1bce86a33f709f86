"""Storms of connections, and what a daemon that is full of them still does (P24)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgpack
import psutil
import pytest
import zmq
from mlxsup.client import Client, RequestError
from mlxsup.supervisor.doors import MAX_OF_ONE_PROCESS
from mlxsup.supervisor.runtime import FILES_PER_MODEL, RESERVED_FILES
from promises.crowd_process import Crowd
from support.bad_input import generate, header, pack
from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.faults import undisturbed
from support.raw_client import RawClient
from support.streams import Reader


def socket_path(daemon: Daemon) -> str:
    return daemon.endpoint.removeprefix("ipc://")


class LimitedDaemon(Daemon):
    """May open so many files."""

    open_files = 4096

    def command_under_limit(self, *arguments: str) -> list[str]:
        line = f'ulimit -n {self.open_files}; exec "$@"'
        return ["sh", "-c", line, "sh", *Daemon.command(*arguments)]

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        """Starts it under the limit."""
        self.command = self.command_under_limit  # type: ignore[method-assign]
        super().start(environment=environment)
        del self.command


@contextmanager
def most_files(process: psutil.Process) -> Iterator[list[int]]:
    """The last item is the most files that the process had open at any look."""
    ended, seen = threading.Event(), [process.num_fds()]

    def look() -> None:
        while not ended.wait(0.01):
            seen.append(max(seen[-1], process.num_fds()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        ended.set()
        looking.join()


@pytest.mark.parametrize("models", [1, 6])
def test_storms_of_silent_connections_break_no_stream_P24(models: int) -> None:
    names = [f"m{number}" for number in range(models)]
    entry = fake(fake={"step_s": 0.005}, max_concurrency=4)
    with LimitedDaemon(dict.fromkeys(names, entry)) as daemon, daemon.client() as client:
        for name in names:
            wait_for_state(client, name, "READY")
        assert daemon.process is not None
        process = psutil.Process(daemon.process.pid)
        with most_files(process) as files, ExitStack() as crowds:
            readers = [Reader(client, n, f"s {n}", max_tokens=400).started() for n in names]
            storms = [
                crowds.enter_context(Crowd("storm", socket_path(daemon), "3000", "2"))
                for _ in range(2)
            ]
            for storm in storms:
                assert storm.result()["connected"] == 6000
            for reader, name in zip(readers, names, strict=True):
                assert reader.finished().token_ids == undisturbed(f"s {name}", 400)
        assert files[-1] < daemon.open_files - 256
        assert [row(client, name)["generation"] for name in names] == [1] * models
