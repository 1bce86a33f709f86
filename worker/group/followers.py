"""The other ranks of a group, as the leader sees them: started, told what to do, and watched.

The first sign that one is lost ends the leader, from whichever thread sees it, because its main
thread may be waiting for that rank in native code. The supervisor then kills what is left of the
process group; ranks on other hosts see the end of their pipe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn

from mlxsup.protocol.clock import PULSE_S, Clock
from mlxsup.protocol.codec import DecodeError, to_map
from mlxsup.protocol.group import (
    AGENT,
    LINK_LIMIT_S,
    LOAD_LIMIT_S,
    READ_BYTES,
    has_no_mlxsup,
    host_argv,
    shell_prints,
)
from mlxsup.protocol.launch import ExitCode, GroupHost, LaunchSpec
from mlxsup.protocol.message import Message
from mlxsup.protocol.text import last_words, log_line, rank_name
from mlxsup.protocol.worker_messages import RankState

from .frames import (
    TO_LEADER,
    Beat,
    Call,
    Failed,
    FrameError,
    FrameReader,
    FrameWriter,
    Greeting,
    Loaded,
    Progress,
    Stop,
    ToFollower,
    Who,
    pack_frame,
)

STDERR = 2

SSH_FAILED = 255
CULPRIT_S = 0.2
"""How long the rank whose error is the cause may take to say so, once another one has failed."""

LAST_WORDS_S = 0.5
"""How long what a lost rank has printed may take to arrive."""

STOP_LIMIT_S = 2.0

QUIET_S = 2 * PULSE_S
"""So long may the time between two beats be that come in time."""

MOST_LINES = 20
"""Of what a rank has printed, the last: one of them may be why it is lost."""


class Follower:
    """One other rank, and the process through which the leader reaches it.

    Attributes:
        rank: its number.
        host: where it runs.
        greeting: what it is; None until it has said so.
        unreachable: why it will not say so; empty while it may.
        progress: of its load; None until that has begun.
        loaded: what its load found out; None until it has ended.
        begun, ended: calls, as it said last.
        heard: bytes that have reached it, as it said last.
        available_bytes: memory of its host, as it said last.
        heard_at: when a beat last showed that it hears this process.

    Args:
        rank: from 1.
        host: see the attribute.
        group: hears, on other threads, of what a load waits for, and when the rank is lost.
    """

    def __init__(self, rank: int, host: GroupHost, group: Followers) -> None:
        self.rank = rank
        self.host = host
        self.greeting: Greeting | None = None
        self.unreachable = ""
        self.progress: Progress | None = None
        self.loaded: Loaded | None = None
        self.begun = self.ended = self.heard = 0
        self.available_bytes = 0
        self.heard_at = group.clock.now()
        self._group = group
        self._failed: Failed | None = None
        self._last_lines: deque[str] = deque(maxlen=MOST_LINES)
        self._process = subprocess.Popen(
            host_argv(host, AGENT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._writer = FrameWriter(self._process.stdin.fileno())
        self._reader = FrameReader(self._process.stdout.fileno(), TO_LEADER)
        self._listening = self._start(self._listen, "frames")
        self._relaying = self._start(self._relay, "log")
        self._start(self._watch, "exit")

    def __str__(self) -> str:
        """Name it for people."""
        return rank_name(self.rank, self.host.ssh, self.host.address)

    def state(self) -> RankState:
        """Return its state for people."""
        if self.greeting is None:
            return RankState(rank=self.rank, name=str(self), state="starting")
        silent_s = self.silent_s()
        return RankState(
            rank=self.rank,
            name=str(self),
            state="ready" if self.loaded else "loading",
            silent_s=silent_s,
            is_behind=silent_s > QUIET_S or self.begun < self._group.sent,
            active_bytes=self.loaded.active_bytes if self.loaded else 0,
        )

    def silent_s(self) -> float:
        """Return for how many seconds of this process it has not shown that it hears it."""
        return self._group.clock.now() - self.heard_at

    def _start(self, run: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=run, name=f"rank-{self.rank}-{name}", daemon=True)
        thread.start()
        return thread

    def send(self, frame: bytes) -> None:
        """Send a frame; do nothing if the rank is gone, as its own thread is about to say."""
        with suppress(BrokenPipeError):
            self._writer.write_frame(frame)

    def ping(self) -> None:
        """Show that the leader is there."""
        with suppress(BrokenPipeError):
            self._writer.ping()

    def end(self, within_s: float = 0.0) -> None:
        """Wait for the end of the process through which it is reached, and kill it if it has not
        come within so many seconds."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()

    # ------------------------------------------------------------ on its threads

    def _listen(self) -> None:
        try:
            while True:
                message = self._reader.read()
                if message is not None:
                    self._hear(message)
        except EOFError:
            pass  # `_watch` sees the exit
        except (FrameError, DecodeError) as error:
            code, cause = ExitCode.RANK_LOST, f"{self} sent no frame: {error}"
            if self.greeting is None:
                code, cause = ExitCode.BAD_LAUNCH, f"{cause}; install the same mlxsup on every host"
                if isinstance(error, FrameError):
                    cause = f"{self}: {shell_prints(error.received)}"
            self._group.lose(code, cause)

    def _hear(self, message: Message) -> None:
        match message:
            case Beat():
                # In a call it reads nothing, so what it hears may have to wait in its agent.
                if message.heard > self.heard or message.begun > message.ended:
                    self.heard_at = self._group.clock.now()
                self.heard, self.begun, self.ended = message.heard, message.begun, message.ended
                self.available_bytes = message.available_bytes
                return
            case Greeting():
                self.greeting = message
            case Progress():
                self.progress = message
            case Loaded():
                self.loaded = message
            case Failed():
                self._failed = message
        self._group.news.set()

    def _relay(self) -> None:
        """Copy what it prints to this process's log, each line with its rank."""
        assert self._process.stderr is not None
        for line in iter(partial(self._process.stderr.readline, READ_BYTES), b""):
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last_lines.append(text)
            print(f"{self}: {text}", file=sys.stderr, flush=True)

    def _watch(self) -> None:
        """Wait for its exit, and judge it once what it said before has been read."""
        code = self._process.wait()
        self._listening.join(LAST_WORDS_S)
        self._relaying.join(LAST_WORDS_S)
        said = f": {words}" if (words := last_words(self._last_lines)) else ""
        if self.greeting is None and self.host.ssh and code == SSH_FAILED:
            self.unreachable = f"{self} is unreachable{said}"
            self._group.news.set()
        elif not self.unreachable:
            self._group.lose(*self._judge(code, said))

    def _judge(self, code: int, said: str) -> tuple[int, str]:
        if self._failed is not None:
            return self._failed.code, f"{self}: {self._failed.text}"
        if self.greeting is None and has_no_mlxsup(code, said):
            python = self.host.python or sys.executable
            return ExitCode.BAD_LAUNCH, f"{self} has no mlxsup at {python}; set python of this host"
        return ExitCode.RANK_LOST, f"{self} was lost with {_name_end(code)}{said}"


def _name_end(code: int) -> str:
    """Return the signal that ended a rank, or else its exit code.

    Args:
        code: of its agent, which adds 128 to the number of a signal; negative if a signal has ended
            the agent itself.
    """
    try:
        return signal.Signals(-code if code < 0 else code - 128).name
    except ValueError:
        return f"exit code {code}"


def place_on_host(hosts: Sequence[GroupHost], rank: int) -> int:
    """Return how many lower ranks run on the same machine as this one."""
    return [one.ssh for one in hosts[:rank]].count(hosts[rank].ssh)


class Followers:
    """All other ranks of the leader.

    Attributes:
        ranks: in the order of their hosts.
        news: set when a rank has said something that a load waits for.
        sent: calls that were sent to all of them.
        clock: stands still while this process does, and perhaps all of them do.

    Args:
        spec: the leader's launch spec, with at least two hosts.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._losing = threading.Lock()
        self._is_over = threading.Event()
        self.news = threading.Event()
        self.sent = 0
        self.clock = Clock()
        self.ranks: list[Follower] = []
        for number, host in enumerate(spec.hosts[1:], 1):
            follower = Follower(number, host, self)
            self.ranks.append(follower)
            launch = replace(spec, path=host.path or spec.path, hosts=(), token="", endpoint="")
            gpu = place_on_host(spec.hosts, number)
            who = Who(launch=to_map(launch), address=host.address, gpu=gpu)
            follower.send(pack_frame(who))
        threading.Thread(target=self._pulse, name="group-pulse", daemon=True).start()

    def send(self, message: ToFollower) -> None:
        """Send all of them a message."""
        if isinstance(message, Call):
            self.sent = message.number
        frame = pack_frame(message)
        for follower in self.ranks:
            follower.send(frame)

    def lose(self, code: int, cause: str) -> None:
        """End this process because a rank is lost; the first cause that is known counts.

        Returns:
            Only while the group stops, when no rank is missed any longer.
        """
        with self._losing:
            if not self._is_over.is_set():
                end_group(code, cause)

    def blame(self) -> None:
        """Give the rank that is the cause of an error here the time to say so; this process then
        ends with that. Return if no rank is lost."""
        self._is_over.wait(CULPRIT_S)

    def stop(self) -> None:
        """Have all of them close their engines and exit; end those that do not."""
        with self._losing:
            self._is_over.set()
        self.send(Stop())
        ends_at = time.monotonic() + STOP_LIMIT_S
        for follower in self.ranks:
            follower.end(max(0.0, ends_at - time.monotonic()))

    def _pulse(self) -> None:
        """Ping every rank, and notice those that would have said nothing for too long by the next
        time."""
        while not self._is_over.wait(PULSE_S):
            for follower in list(self.ranks):
                follower.ping()
                limit_s = LOAD_LIMIT_S if follower.loaded is None else LINK_LIMIT_S
                if follower.silent_s() + PULSE_S > limit_s:
                    cause = f"{follower} has given no sign of life for {limit_s:g} s"
                    if follower.greeting is None:
                        follower.unreachable = cause
                        self.news.set()
                    else:
                        self.lose(ExitCode.RANK_LOST, f"{cause}, in call {follower.begun}")


def end_group(code: int, cause: str) -> NoReturn:
    """End the leader at once, from any thread; its last line says why."""
    print(log_line("group ends", code=int(code), cause=cause), file=sys.stderr, flush=True)
    # The ring prints its own errors meanwhile; none may follow the line that people are shown.
    standard_error = os.dup(STDERR)
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
    os.write(standard_error, f"{cause}\n".encode())
    os._exit(code)
