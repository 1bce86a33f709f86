"""Sets up a worker before its life: the launch spec, signals, fault handler, parent watch."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import queue
import signal
import sys
import threading

from mlxsup.protocol.codec import MAX_LINE_BYTES, read_line
from mlxsup.protocol.launch import LaunchSpec

SWITCH_INTERVAL_S = 0.001

ORPHANED_EXIT = 1
"""The exit code of an orphan: nobody is left to read it, but it must not be 0."""

_PR_SET_PDEATHSIG = 1


class LaunchError(Exception):
    """The launch spec is missing or wrong; the message is one sentence (exit 64)."""


class OrphanedError(Exception):
    """The supervisor named in the launch spec is not this process's parent."""


def read_launch_spec(descriptor: int) -> LaunchSpec:
    """Reads one line from the pipe, and nothing after it.

    Raises:
        LaunchError: there is no spec, or it cannot be used.
    """
    received = bytearray()
    while not received.endswith(b"\n"):
        try:
            piece = os.read(descriptor, MAX_LINE_BYTES)
        except OSError as error:
            raise LaunchError(f"standard input cannot be read: {error.strerror}") from None
        received += piece
        if not piece or len(received) > MAX_LINE_BYTES:
            break
    if not received:
        raise LaunchError(
            "there is no launch spec on standard input; `mlxsup start` starts the workers"
        )
    try:
        return read_line(LaunchSpec, bytes(received), "the launch spec on standard input")
    except ValueError as error:
        raise LaunchError(str(error)) from None


def wait_for_spec(spec_pipe: int, ready_pipe: int) -> LaunchSpec:
    """Import everything, say so, and return the launch spec once a model needs this process.

    So a prewarmed worker begins. It is spawned and not forked: MLX and the tokenizers start
    threads, and a forked process must not use Metal. It has no token and no socket until it has a
    model, so taking it over needs no second handshake.

    From the start on, the process ends at once when the supervisor closes the pipe of the spec.

    Args:
        spec_pipe: where the spec will come from, a line of JSON.
        ready_pipe: gets one byte when everything is imported, and is closed.

    Raises:
        LaunchError: the spec is wrong.
        ImportError: MLX cannot be imported.
    """
    # One entry at most: the spec, or what is wrong with it.
    received: queue.SimpleQueue[LaunchSpec | LaunchError] = queue.SimpleQueue()

    def read() -> None:
        try:
            received.put(read_launch_spec(spec_pipe))
        except LaunchError as error:
            received.put(error)
        end_with(spec_pipe)

    threading.Thread(target=read, name="parent-watch", daemon=True).start()
    from .engines.mlx.imports import import_everything

    import_everything()
    os.write(ready_pipe, b"\0")
    os.close(ready_pipe)
    found = received.get()
    if isinstance(found, LaunchError):
        raise found
    return found


def watch_pipe(descriptor: int) -> None:
    """Start a thread that ends the process when the pipe reaches its end (E6)."""
    threading.Thread(target=end_with, args=(descriptor,), name="parent-watch", daemon=True).start()


def end_with(descriptor: int) -> None:
    """Wait for the end of a pipe, and end the process at once."""
    while os.read(descriptor, 4096):
        pass
    os._exit(ORPHANED_EXIT)


def die_with_parent(sent: signal.Signals = signal.SIGKILL) -> None:
    """On Linux: asks the kernel to kill this process when its parent thread ends.

    Works even while the GIL is held forever. Other systems have nothing like it.

    Args:
        sent: SIGCONT for a process that may be stopped, and has more to do than to die.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, sent, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def check_parent(supervisor_pid: int) -> None:
    """Notices a supervisor that died before `die_with_parent` was called.

    Raises:
        OrphanedError: the parent is another process.
    """
    parent = os.getppid()
    if parent != supervisor_pid:
        raise OrphanedError(f"the daemon {supervisor_pid} is gone: the parent is {parent}")


def prepare_process() -> None:
    """Sets up signals and the interpreter; call once, on the main thread, before anything else.

    A terminal's Ctrl-C is for the supervisor to handle: it drains. SIGHUP keeps its default, so
    that the kernel's hangup to an orphaned process group ends this process. SIGUSR1 prints every
    thread's stack to the log, no matter what the owner thread is stuck in (F5).
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    # A template is Python code on a helper thread: this makes it yield sooner (G1).
    sys.setswitchinterval(SWITCH_INTERVAL_S)
