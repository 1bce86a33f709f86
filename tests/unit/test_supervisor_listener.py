"""The clients' listener when there is no file, no memory, or no path left."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mlxsup.supervisor.sockets import listener as listener_module
from mlxsup.supervisor.sockets.limits import KEPT_FILES
from mlxsup.supervisor.sockets.listener import Listener

from support.eventually_async import eventually_async


class Stage:
    """A listener whose `accept` can be made to fail."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "c.sock"
        self.taken: list[socket.socket] = []
        self.warnings: list[str] = []
        self.moment = 100.0
        self.listener = Listener(
            self.path,
            self.taken.append,
            now=lambda: self.moment,
            warn=self.warnings.append,
        )
        self.clients: list[socket.socket] = []

    def knock(self) -> None:
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(self.path))
        self.clients.append(client)

    async def taken_in_all(self, count: int) -> None:
        await eventually_async(lambda: len(self.taken) == count)

    def close(self) -> None:
        self.listener.close()
        for one in (*self.taken, *self.clients):
            one.close()


def run(body: Callable[[Stage], Awaitable[None]]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))

    async def main() -> None:
        stage = Stage(folder)
        try:
            async with asyncio.timeout(60):
                await body(stage)
        finally:
            stage.close()

    try:
        asyncio.run(main())
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPERM]
)
def test_a_client_that_cannot_be_accepted_waits_and_nothing_spins(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(stage: Stage) -> None:
        tries = 0

        def accept(self: socket.socket) -> tuple[socket.socket, object]:
            nonlocal tries
            tries += 1
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "accept", accept)
            stage.knock()
            await eventually_async(lambda: tries == 1)
            for _ in range(50):
                await asyncio.sleep(0)  # rounds of the loop
            assert tries == 1
            stage.listener.start()  # the next pulse
            await eventually_async(lambda: tries == 2)
        assert stage.warnings == [os.strerror(number)]
        stage.listener.start()
        await stage.taken_in_all(1)

    run(body)


def test_no_client_takes_one_of_the_last_files(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        free = KEPT_FILES + 3
        monkeypatch.setattr(listener_module, "free_files", lambda: free - len(stage.taken))
        for _ in range(5):
            stage.knock()
        await eventually_async(lambda: bool(stage.warnings))
        assert len(stage.taken) == 3
        free += 1
        stage.moment += 61.0
        stage.listener.start()
        await stage.taken_in_all(4)
        await eventually_async(lambda: len(stage.warnings) == 2)

    run(body)


def test_a_socket_is_made_again_and_those_in_its_queue_are_taken() -> None:
    async def body(stage: Stage) -> None:
        assert stage.listener.is_reachable
        stage.knock()
        stage.path.unlink()
        assert not stage.listener.is_reachable
        stage.listener.bind_again()
        assert stage.listener.is_reachable
        stage.knock()
        await stage.taken_in_all(2)

    run(body)


def test_the_file_of_another_is_not_removed_at_the_end() -> None:
    async def body(stage: Stage) -> None:
        stage.path.unlink()
        stage.path.write_text("another one's")
        stage.listener.close()
        assert stage.path.read_text() == "another one's"

    run(body)


def test_a_socket_that_cannot_be_made_again_leaves_the_old_one_open() -> None:
    async def body(stage: Stage) -> None:
        moved = stage.path.with_name("moved")
        stage.path.rename(moved)
        stage.path.mkdir()
        with pytest.raises(OSError, match=r"directory|permitted"):
            stage.listener.bind_again()
        stage.path.rmdir()
        moved.rename(stage.path)
        stage.knock()
        await stage.taken_in_all(1)

    run(body)
