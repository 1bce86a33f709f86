"""Forks processes in which the modules of mlxsup are already imported; see `support.daemon.warm`.

Run as a program, with the number of a socket. No context of ZeroMQ, no thread and no event loop may
exist here, because each child inherits what does.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import sys
import termios
from typing import Any

FDS = 4
"""Of a request: standard input, output and error, and the pipe that gets the child's life."""

LENGTH = struct.Struct("I")
LIFE = struct.Struct("i")
"""The child's process id when it begins; its return code, as subprocess gives it, at its end."""


def import_everything() -> None:
    """Imports the command line, every command, and the supervisor."""
    import mlxsup.cli
    import mlxsup.supervisor.daemon

    for module in pkgutil.walk_packages(mlxsup.cli.__path__, "mlxsup.cli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


class Server:
    """Forks a child for each request, until the other end is closed.

    Args:
        control: where requests come from.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lives: dict[int, int] = {}
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)

    def serve(self) -> dict[str, Any] | None:
        """Returns the request in each child, and None here when nobody asks any longer."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with those who ask
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                        self._reap()
                    elif (request := self._receive()) is None:
                        return None
                    elif self._forked(*request):
                        return request[0]

    def _reap(self) -> None:
        while self._lives:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            life = self._lives.pop(pid)
            self._tell(life, os.waitstatus_to_exitcode(status))
            os.close(life)

    def _receive(self) -> tuple[dict[str, Any], list[int]] | None:
        head, fds, _, _ = socket.recv_fds(self._control, LENGTH.size, FDS, socket.MSG_WAITALL)
        if not head:
            return None
        length = LENGTH.unpack(head)[0]
        text = self._control.recv(length, socket.MSG_WAITALL)
        return json.loads(text), fds

    def _forked(self, request: dict[str, Any], fds: list[int]) -> bool:
        *streams, life = fds
        pid = os.fork()
        if pid == 0:
            self._become(request, streams, [life, *self._lives.values()])
            return True
        self._lives[pid] = life
        self._tell(life, pid)
        for fd in streams:
            os.close(fd)
        return False

    def _become(self, request: dict[str, Any], streams: list[int], lives: list[int]) -> None:
        """Takes on what a new process would have from its parent, and nothing of the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for place, fd in enumerate(streams):
            os.dup2(fd, place)
        for fd in [*streams, *lives]:
            os.close(fd)
        for end in (self._control, self._woken, self._waker):
            end.close()
        if os.isatty(0):  # its own session, so that the keys and the end of the terminal reach it
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        for place, name in enumerate(("stdin", "stdout", "stderr")):
            # Those of the server know whether its own files were terminals, and could seek.
            old = getattr(sys, name)
            new = open(  # noqa: SIM115 - until the end
                place,
                "w" if place else "r",
                buffering=1 if name == "stderr" else -1,
                encoding=old.encoding,
                errors=old.errors,
                closefd=False,
            )
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])

    @staticmethod
    def _tell(life: int, number: int) -> None:
        try:
            os.write(life, LIFE.pack(number))
        except BrokenPipeError:
            pass  # whoever asked for the child is no longer interested


def run(arguments: list[str]) -> None:
    """Runs what stands behind the interpreter on a command line: `-m MODULE` or `-c PROGRAM`."""
    kind, what, *more = arguments
    if kind == "-m":
        sys.argv = [what, *more]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *more]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def main() -> None:
    """Serves; ends as a child when that does."""
    import_everything()
    gc.freeze()
    request = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is not None:
        run(request["arguments"])


if __name__ == "__main__":
    main()
