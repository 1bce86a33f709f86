"""`python -P -m mlxsup.worker.group.agent`: starts a follower on its host, and ends it.

A follower may hold the interpreter's lock in native code, or be stopped: then it notices neither
that its leader is gone nor a signal that asks it to end. This process never imports MLX, so it
always notices. It passes on what the leader sends, and exits as the follower does; a signal of
number n becomes 128 + n, because ssh returns 255 for every signal.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from mlxsup.protocol.clock import PULSE_S, Clock
from mlxsup.protocol.group import LINK_LIMIT_S, LOAD_LIMIT_S, READ_BYTES

from ..bootstrap import die_with_parent

FOLLOWER = "mlxsup.worker.group.follower"

STDIN = 0

SERVES = signal.SIGUSR2
"""From the follower, whose leader will not hold the interpreter's lock for long any more."""

MAX_HELD_BYTES = 64 * 1024 * 1024
"""What waits for a follower that reads nothing; beyond it, the leader waits, too."""


def main() -> int:
    """Start the follower, and pass on what arrives until one side ends; return the exit code."""
    # A group ends through its leader: by a message, by the end of the pipe, or by SIGKILL. The
    # supervisor's signals go to the whole process group: only the leader may act on SIGTERM, and
    # SIGUSR1 asks the ranks for their stacks.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # This process may be stopped when the connection ends. A rank that is stopped before it has
    # asked to die with this process is ended by it alone.
    die_with_parent(signal.SIGCONT)
    limit_s = LOAD_LIMIT_S

    def serve(number: int, frame: object) -> None:
        nonlocal limit_s
        limit_s = LINK_LIMIT_S

    signal.signal(SERVES, serve)
    follower = subprocess.Popen(
        [sys.executable, "-P", "-m", FOLLOWER], stdin=subprocess.PIPE, bufsize=0
    )
    is_over = threading.Event()
    exiting = threading.Thread(target=_exit_with, args=(follower, is_over), daemon=True)
    exiting.start()
    assert follower.stdin is not None
    cause = _pass_on(follower.stdin.fileno(), lambda: limit_s)
    is_over.set()
    follower.kill()
    follower.wait()
    with suppress(BrokenPipeError):  # if the leader is gone
        print(f"mlxsup agent: {cause}; rank ended", file=sys.stderr)
    return 128 + signal.SIGKILL


def _exit_with(follower: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    """Exit as soon as the follower has, unless this process ends it. It writes to standard output
    itself, nothing is held."""
    code = follower.wait()
    if not is_over.is_set():
        os._exit(code if code >= 0 else 128 - code)


def _pass_on(target: int, limit_s: Callable[[], float]) -> str:
    """Copy standard input to a pipe; return why that is over.

    Time counts only while this process is awake, so a machine that slept or a tree that was stopped
    ends nothing.

    Args:
        target: the pipe.
        limit_s: how long standard input may be silent, now.
    """
    os.set_blocking(target, False)
    held = bytearray()
    clock = Clock()
    heard_at = clock.now()
    while clock.now() - heard_at < limit_s():
        poll = select.poll()
        poll.register(STDIN, select.POLLIN if len(held) < MAX_HELD_BYTES else 0)
        if held:
            poll.register(target, select.POLLOUT)
        events = dict(poll.poll(int(PULSE_S * 1000)))
        if events.get(STDIN, 0) & select.POLLIN:
            piece = os.read(STDIN, READ_BYTES)
            if not piece:
                return "the leader is gone"
            held += piece
            heard_at = clock.now()
        elif STDIN in events:
            return "the leader is gone"
        if held:
            try:
                del held[: os.write(target, held)]
            except BlockingIOError:
                pass  # the pipe is full: what is held leaves when the follower reads
            except BrokenPipeError:
                signal.pause()  # the follower has exited, and `_exit_with` is about to say how
    return f"no sign of the leader for {limit_s():g} s"


if __name__ == "__main__":
    sys.exit(main())
