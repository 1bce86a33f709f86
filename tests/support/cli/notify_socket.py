"""The socket of a service manager, played: what a daemon says there."""

from __future__ import annotations

import select
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Self

TIME_LIMIT_S = 60.0


class NotifySocket:
    """Receives what is sent to `NOTIFY_SOCKET`.

    Attributes:
        address: the value of that variable.

    Args:
        folder: where the socket is; None: it has an abstract name.
    """

    def __init__(self, folder: Path | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if folder is None:
            name = f"mlxsup-test-{uuid.uuid4().hex}"
            self.address, bound = f"@{name}", f"\0{name}"
        else:
            self.address = bound = str(folder / "notify.sock")
        self._socket.bind(bound)
        self._socket.setblocking(False)
        # One message in each, as systemd would take it: its lines.
        self.heard: list[list[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def variables(self, *, watchdog_s: float = 0.0, pid: int | None = None) -> dict[str, str]:
        """What a service manager would put into the environment of its service."""
        given = {"NOTIFY_SOCKET": self.address}
        if watchdog_s:
            given["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        if pid is not None:
            given["WATCHDOG_PID"] = str(pid)
        return given

    def take(self, limit_s: float = 0.0) -> list[str] | None:
        """The next message; None if there is none within the limit."""
        if not select.select([self._socket], [], [], limit_s)[0]:
            return None
        message = self._socket.recv(65536).decode().split("\n")
        self.heard.append(message)
        return message

    def take_all(self) -> list[list[str]]:
        """What has come since the last look."""
        found = []
        while (message := self.take()) is not None:
            found.append(message)
        return found

    def until(self, is_wanted: Callable[[list[str]], bool]) -> list[str]:
        """The next message of this kind; those before it are only in `heard`."""
        while True:
            message = self.take(TIME_LIMIT_S)
            assert message is not None, f"not heard; only {self.heard}"
            if is_wanted(message):
                return message

    def until_line(self, start: str) -> str:
        """The next line that begins so."""

        def is_wanted(message: list[str]) -> bool:
            return any(line.startswith(start) for line in message)

        return next(line for line in self.until(is_wanted) if line.startswith(start))
