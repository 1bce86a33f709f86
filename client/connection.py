"""A session and its link: opens the link when something is sent, and drops it when it is lost.

One thread (or one event loop) owns a connection and calls `pump` whenever there may be news.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import zmq

from mlxsup.protocol.clock import PULSE_S, Clock
from mlxsup.protocol.folders import LOCK_NAME
from mlxsup.protocol.ids import RequestId

from .errors import ConnectionLost
from .link import CLOSE_LINGER_MS, Link, LinkState
from .session import Inbox, Outcome, Session

MESSAGES_PER_PUMP = 256
"""After this many messages `pump` returns, so that a flood does not starve its caller."""

LinkChanged = Callable[[Link | None, Link | None], None]
"""Called with the old link, before it is closed, and with the new one."""


RAISE_LIMIT = "close some files, or raise their limit, `ulimit -n`"
LINK_DESCRIPTORS = 16
"""More than a context and a link open."""


def check_descriptors() -> None:
    """Raise OSError if a link may not get its file descriptors: libzmq then ends the process."""
    with ExitStack() as opened:
        for _ in range(LINK_DESCRIPTORS // 2):
            for end in os.pipe():
                opened.callback(os.close, end)


class RequestIds:
    """Ids that no other client of the machine is likely to use, so that logs are unambiguous."""

    def __init__(self) -> None:
        self._prefix = os.urandom(4).hex()
        self._count = itertools.count(1)

    def next(self) -> RequestId:
        """Return an id that was not used before; may be called from any thread."""
        return RequestId(f"{self._prefix}-{next(self._count)}")


class Connection:
    """The work of a client, apart from its thread or event loop.

    Args:
        endpoint: where the supervisor listens.
        on_link: called when the link changes.
        clock: tells silence from a time in which this process did not run.
        is_busy: looks whether the supervisor's process wants to run.
    """

    def __init__(
        self,
        endpoint: str,
        on_link: LinkChanged | None = None,
        clock: Clock | None = None,
        is_busy: Callable[[], bool] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.link: Link | None = None
        self._on_link = on_link
        self._clock = clock or Clock()
        self._is_busy = is_busy or partial(is_daemon_busy, endpoint)
        self._session = Session()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    @property
    def delay_s(self) -> float | None:
        """Return the seconds until `pump` must be called; None if nothing is open."""
        deadline = self._session.deadline
        if deadline is None:
            return None
        # At least once a pulse: the clock must be asked, or the wait counts as a pause.
        return min(PULSE_S, self._clock.delay_until(deadline))

    def open_stream(self, request_id: RequestId, frames: list[bytes], inbox: Inbox) -> None:
        """Send a `Generate`."""
        self._settle()
        self._session.open_stream(request_id, inbox, self._clock.now())
        self._send(frames)

    def open_command(
        self,
        request_id: RequestId,
        frames: list[bytes],
        inbox: Inbox,
        *,
        is_subscription: bool = False,
    ) -> None:
        """Send a command."""
        self._settle()
        self._session.open_command(
            request_id, inbox, self._clock.now(), is_subscription=is_subscription
        )
        self._send(frames)

    def cancel(self, request_id: RequestId) -> None:
        """Ask for the end of a stream or a subscription."""
        self._carry_out(self._session.cancel(request_id))

    def pump(self) -> bool:
        """Receive what has come; return whether there may be more at once."""
        link = self.link
        if link is None:
            return False
        # Checked first: what had arrived before the end of the connection is read below.
        is_lost = link.update() is LinkState.LOST
        if link.has_message() and self._receive(link):
            return True
        if self.link is not link:
            return False
        if is_lost:
            self._drop(_lost(link, self.endpoint))
        elif self._session.is_silent(self._clock.now(), self._is_busy):
            message = f"the daemon at {self.endpoint} stopped responding"
            self._drop(ConnectionLost(message, self.endpoint, LOOK))
        return False

    def pump_messages(self) -> bool:
        """Do the same when only messages can be new: neither the link's end nor its silence."""
        return self.link is not None and self._receive(self.link)

    def _receive(self, link: Link) -> bool:
        """Handle what has come; return whether there may be more."""
        for _ in range(MESSAGES_PER_PUMP):
            frame = link.receive()
            if frame is None:
                return False
            self._carry_out(self._session.receive(frame, self._clock.now()))
            if self.link is not link or not link.has_message():
                return False
        return True

    def close(self) -> None:
        """End everything that is open; `terminate` must follow."""
        self._carry_out(self._session.close(self.endpoint))
        is_peer_there = self.link is not None and self.link.update() is not LinkState.LOST
        self._replace_link(None, is_peer_there=is_peer_there)

    def terminate(self) -> None:
        """Wait until what was sent has left, at most half a second."""
        self._context.term()

    def _settle(self) -> None:
        """Read a lost connection to its end, so that what is opened next is not part of it."""
        if self.link is not None and self.link.update() is LinkState.LOST:
            while self.pump():
                pass

    def _send(self, frames: list[bytes]) -> None:
        if self.link is None:
            try:
                check_descriptors()
                self._replace_link(Link(self._context, self.endpoint))
            except (OSError, zmq.ZMQError) as error:
                message = f"cannot connect to {self.endpoint}: {error.strerror}"
                hint = RAISE_LIMIT if error.errno in (errno.EMFILE, errno.ENFILE) else ""
                self._drop(ConnectionLost(message, self.endpoint, hint))
                return
        if self.link is not None:
            self.link.send(frames)

    def _carry_out(self, outcome: Outcome) -> None:
        for inbox, item in outcome.deliveries:
            inbox.put(item)
        if self.link is not None:
            for frames in outcome.sends:
                self.link.send(frames)

    def _drop(self, error: ConnectionLost) -> None:
        self._replace_link(None)
        self._carry_out(Outcome(deliveries=self._session.lose(error)))

    def _replace_link(self, link: Link | None, *, is_peer_there: bool = False) -> None:
        old, self.link = self.link, link
        if self._on_link is not None:
            self._on_link(old, link)
        if old is not None:
            # No reader must wait for data that no peer will take.
            old.close(CLOSE_LINGER_MS if is_peer_there else 0)


LOOK = "`mlxsup status` shows whether it is running"
AGAIN = "`mlxsup start` starts it again"
TOO_MANY = "it has too many connections or is shutting down; close some, or try again later"


def _lost(link: Link, endpoint: str) -> ConnectionLost:
    if link.was_turned_away:
        message = f"the daemon at {endpoint} refused the connection"
        return ConnectionLost(message, endpoint, TOO_MANY, is_turned_away=True)
    if link.was_heard:
        return ConnectionLost(f"the daemon at {endpoint} is gone", endpoint, AGAIN)
    if link.was_connected:
        # libzmq completes the handshake before the daemon looks at who has come.
        message = f"the daemon at {endpoint} ended the connection before it answered"
        return ConnectionLost(message, endpoint, TOO_MANY, is_turned_away=True)
    message = f"no daemon answers at {endpoint}"
    if link.was_reset:
        hint = "it may have too many connections or has just ended; try again"
        return ConnectionLost(message, endpoint, hint, is_turned_away=True)
    return ConnectionLost(message, endpoint, hint="start one with `mlxsup start`")


# ---------------------------------------------------------------- the process of the daemon

SCHEME = "ipc://"


def daemon_pid(endpoint: str) -> int | None:
    """Return the pid that the lock beside a daemon's socket names; None if there is none.

    Args:
        endpoint: `ipc://…`; any other names no process of this machine.
    """
    if not endpoint.startswith(SCHEME):
        return None
    lock = Path(endpoint.removeprefix(SCHEME)).parent / LOCK_NAME
    try:
        return int(lock.read_bytes()[:256].split()[0])
    except (OSError, ValueError, IndexError):
        return None


def is_daemon_busy(endpoint: str) -> bool:
    """True if the daemon wants to run: it waits for the CPU or for a disk, or computes.

    A daemon that sleeps has done all that it had to do, so it has sent what it owed; one that was
    stopped or has ended sends nothing any more. On macOS the system calls a sleeping process
    running, too, so there only a stopped or ended one is not busy.
    """
    import psutil  # only when a daemon is silent: every command would wait for it

    pid = daemon_pid(endpoint)
    if pid is None:
        return False
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    except (psutil.Error, ValueError):  # it has ended, or the number is no pid
        return False
