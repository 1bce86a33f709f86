"""Forks processes in which the modules of mlxsup are already imported; see `support.daemon.warm`.

Run as a program, with the number of a socket, and room for the command lines of its children. No
context of ZeroMQ, no thread and no event loop may exist here: each child inherits what does.

On Linux its children fork, too: a daemon its workers, its gateway, its readers of folders. mlxsup
itself executes them, because a Mac must; MLX on the CPU starts its threads with its first
computation, so that a process that has only imported it may fork.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import logging
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

FDS = 4
"""Of a request: standard input, output and error, and the pipe that gets the child's life."""

LENGTH = struct.Struct("I")
LIFE = struct.Struct("i")
"""The child's process id when it begins; its return code, as subprocess gives it, at its end."""

FOR_CHILDREN = ("MLXSUP_SABOTAGE", "MLXSUP_LOOP_PROBE", "MLXSUP_NEW_CHILDREN")
"""With one of these variables, all that mlxsup starts is a new interpreter. Two of them change it
by PYTHONPATH; the last one is for tests of the start itself."""

CHILDREN_FORK = sys.platform == "linux"

POPEN = subprocess.Popen

PROGRAMS = (
    "mlxsup.gateway.__main__",
    "mlxsup.gateway.converter",
    "mlxsup.supervisor.memory.folder_reader",
    "mlxsup.worker.__main__",
    "mlxsup.worker.engines.mlx.estimate",
)


def import_everything() -> None:
    """Imports the command line, every command, and all that a daemon starts."""
    import mlxsup.cli
    import mlxsup.supervisor.daemon
    from mlxsup.supervisor.config.tables import FileTable

    FileTable.model_validate({})  # pydantic builds what it validates with at the first use
    for module in pkgutil.walk_packages(mlxsup.cli.__path__, "mlxsup.cli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    if CHILDREN_FORK:
        from mlxsup.worker.engines.mlx import imports, warm_up

        for name in PROGRAMS:
            importlib.import_module(name)
        imports.import_everything()
        # As in tests/mlx: without the 1,024 tokens after these, a load takes a fifth of its time.
        vars(warm_up)["SHOWN"] = warm_up.SHOWN[:1]


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an interpreter or the C library reads when it starts; a warm one
    always buffers."""
    prefixes = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_")
    read = {k: v for k, v in environment.items() if v and k.startswith(prefixes)}
    read.pop("PYTHONUNBUFFERED", None)
    return read


class ForkingPopen(subprocess.Popen[Any]):
    """Forks a program of mlxsup where `Popen` would execute it; no worker may, because MLX runs."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Collection[int] = (),
        **options: Any,
    ) -> None:
        environment = os.environ if env is None else env
        if is_own(args) and not any(name in environment for name in FOR_CHILDREN):

            def run_instead() -> NoReturn:
                _run_instead(args, dict(environment), pass_fds)

            options["preexec_fn"] = run_instead
        super().__init__(args, env=env, pass_fds=pass_fds, **options)


def is_own(args: Sequence[str]) -> bool:
    """True for `python -P -m mlxsup.…` in this interpreter, where these can be forked."""
    is_module = [*args[:3]] == [sys.executable, "-P", "-m"] and args[3].startswith("mlxsup.")
    return CHILDREN_FORK and is_module


def _run_instead(
    args: Sequence[str], environment: dict[str, str], pass_fds: Collection[int]
) -> NoReturn:
    """Runs a program in a process that was just forked, beside the frames of its parent's program.

    What these frames hold is never let go, for it is the parent's: sockets, threads, event loops.
    """
    code = 1
    try:
        gc.freeze()
        gc.enable()  # subprocess disables it around the fork
        first = 3
        for fd in [*sorted(pass_fds), os.sysconf("SC_OPEN_MAX")]:
            os.closerange(first, fd)
            first = fd + 1
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
            if isinstance(logger, logging.Logger):
                logger.handlers.clear()
                logger.setLevel(logging.NOTSET)
        logging.root.setLevel(logging.WARNING)
        renew_streams()
        os.environ.clear()
        os.environ.update(environment)
        name_process(args)
        run(args[1:])
        code = 0
    except SystemExit as ended:
        match ended.code:
            case None:
                code = 0
            case int(code):
                pass
            case message:
                print(message, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - nothing may return into the parent's frames
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def renew_streams() -> None:
    """Those of the parent know whether its own files were terminals, and could seek."""
    for place, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        new = open(  # noqa: SIM115 - it stays open until the process ends
            place,
            "w" if place else "r",
            buffering=1 if name == "stderr" else -1,
            encoding=old.encoding,
            errors=old.errors,
            closefd=False,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def name_process(args: Sequence[str]) -> None:
    """Make the system show as many of these words as the command line as fit into the server's."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    words = b"\0".join(os.fsencode(word) for word in args)[: end - begin - 1]
    ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


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
        renew_streams()
        if request["has_own_group"]:
            os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])

    @staticmethod
    def _tell(life: int, number: int) -> None:
        try:
            os.write(life, LIFE.pack(number))
        except BrokenPipeError:
            pass  # whoever asked for the child is no longer interested


def run(arguments: Sequence[str]) -> None:
    """Runs what stands behind the interpreter on a command line: `-m MODULE` or `-c PROGRAM`."""
    kind, what, *more = (one for one in arguments if one != "-P")
    is_worker = what.startswith("mlxsup.worker")
    vars(subprocess)["Popen"] = POPEN if is_worker else ForkingPopen
    if what == "mlxsup.downloader":  # its library reads the environment when it is imported
        for name in [name for name in sys.modules if name.startswith("huggingface_hub")]:
            del sys.modules[name]
    if kind == "-m":
        sys.argv = [what, *more]
        for name in (what, f"{what}.__main__"):  # it runs anew, with its own name
            if not hasattr(sys.modules.get(name), "__path__"):
                sys.modules.pop(name, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *more]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


class QuickEnd:
    """Ends a child once its threads and exit functions have ended, and leaves the interpreter up.

    Taking it down would write to all memory that the child shares with the server, and so copy it,
    which takes longer than most commands.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)  # the first to be registered is the last to be called

    def run(self, arguments: list[str]) -> None:
        """Runs what an interpreter was given, and remembers how it ended."""
        try:
            run(arguments)
            self._code = 0
        except SystemExit as ended:
            self._code = (
                0 if ended.code is None else ended.code if isinstance(ended.code, int) else None
            )
            raise

    def _leave(self) -> None:
        if self._code is None:  # the interpreter tells of the exception
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # the interpreter tells of that, too
            return
        os._exit(self._code & 0xFF)


def main() -> None:
    """Serves; ends as a child when that does."""
    end = QuickEnd()
    import_everything()
    gc.freeze()
    request = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is not None:
        if CHILDREN_FORK:
            name_process([sys.executable, *request["arguments"]])
        end.run(request["arguments"])


if __name__ == "__main__":
    main()
