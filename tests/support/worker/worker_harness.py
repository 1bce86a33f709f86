"""A small supervisor for tests: one real worker process over real sockets."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil
import zmq

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import Decoder, encode, encode_body, to_line
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import RequestKey, unpack_tokens
from mlxsup.protocol.launch import worker_argv
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import (
    WORKER_TO_SUPERVISOR,
    Acceptance,
    Accepted,
    CancelRow,
    Dispatch,
    Exit,
    Heartbeat,
    Hello,
    Ready,
    Rejected,
    Resume,
    Step,
)

from support.client.pieces import body_of
from support.daemon import warm
from support.eventually import TIMEOUT_S
from support.worker.turn_bench import make_spec

M = TypeVar("M", bound=Message)

FORBIDDEN_IN_LOGS = re.compile(
    r"rope|Stream\(|InvalidStateError|Failed to|Traceback|never awaited", re.IGNORECASE
)
TOKEN = "token-of-this-incarnation"


@dataclass(slots=True)
class Stream:
    """The answer to one request so far."""

    acceptance: Acceptance | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: RemoteError | None = None
    steps: list[int] = field(default_factory=list)
    prefill_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Return True if its end has come."""
        return self.finish is not None or self.error is not None


class WorkerHarness:
    """Spawns a worker with the fake engine, talks to it, and leaves nothing behind.

    Args:
        engine: `fake` or `mlx`.
        path: the model folder.
        fake: the fake engine's options.
        receive_limit: high-water mark of the receiving side, small to press back soon.
        log_may_hold: words of the forbidden ones that the test provokes.
        is_new: whether it is a new interpreter, and a child of this process; otherwise it is
            forked with everything imported, see `support.daemon.warm`.
        overrides: other fields of the launch spec.
    """

    def __init__(
        self,
        *,
        engine: str = "fake",
        path: str = "/nowhere/model",
        fake: dict[str, Any] | None = None,
        receive_limit: int = 1000,
        log_may_hold: Iterable[str] = (),
        is_new: bool = True,
        **overrides: Any,
    ) -> None:
        # A short folder: a socket's path has 103 bytes at most.
        self.folder = Path(tempfile.mkdtemp(prefix="mlxsup-"))
        self.endpoint = f"ipc://{self.folder}/w.sock"
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._bind(zmq.DEALER, self.endpoint, receive_limit)
        self._beats: zmq.Socket[bytes] = self._bind(zmq.PULL, self.endpoint + ".beat", 100)
        self._decoder = Decoder(WORKER_TO_SUPERVISOR, is_strict=False)
        self._log_may_hold = {word.lower() for word in log_may_hold}
        self.messages: list[Message] = []
        self.streams: dict[int, Stream] = defaultdict(Stream)
        self._next_key = 1
        self._log_path = self.folder / "worker.log"
        spec_pipe, its_end = os.pipe()
        self._pipe = os.fdopen(its_end, "wb", buffering=0)
        with self._log_path.open("wb") as log, os.fdopen(spec_pipe, "rb") as stdin:
            streams = (stdin, log, log)
            self.process = warm.start(worker_argv(), streams, has_own_group=True, is_new=is_new)
        values = {
            "token": TOKEN,
            "endpoint": self.endpoint,
            "supervisor_pid": psutil.Process(self.process.pid).ppid(),
            "max_concurrency": 8,
            "prefix_cache_bytes": 0,
            "fake": fake or {},
        }
        self.spec = make_spec(engine=engine, path=path, **(values | overrides))
        self._pipe.write(to_line(self.spec))

    def _bind(self, kind: int, endpoint: str, limit: int) -> zmq.Socket[bytes]:
        bound: zmq.Socket[bytes] = self._context.socket(kind)
        bound.set(zmq.LINGER, 0)
        bound.set(zmq.RCVHWM, limit)
        bound.bind(endpoint)
        return bound

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        log = self.close()
        found = {m.group().lower() for m in FORBIDDEN_IN_LOGS.finditer(log)} - self._log_may_hold
        if kind is None:
            assert not found, f"the worker's log holds {found} (J1):\n{log}"
        else:
            print(f"--- the worker's log\n{log}---")

    def close(self) -> str:
        """Kill the process group, close everything, and return the log."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.close_pipe()
        self.socket.close()
        self._beats.close()
        self._context.term()
        log = self.log()
        shutil.rmtree(self.folder)
        return log

    def close_pipe(self) -> None:
        """Do what the worker takes as the supervisor's death."""
        self._pipe.close()

    def log(self) -> str:
        """Return what the worker has written so far."""
        return self._log_path.read_text(errors="replace")

    def send(self, message: Message) -> None:
        """Send one message."""
        self.socket.send_multipart(encode(message))

    def receive(self, timeout_s: float = TIMEOUT_S) -> Message:
        """Return the next message, noted in `messages` and `streams`."""
        if not self.socket.poll(int(timeout_s * 1000)):
            raise AssertionError(f"no message within {timeout_s:g} s; had {self.messages[-5:]}")
        message = self._decoder.decode(self.socket.recv_multipart())
        self._note(message)
        return message

    def receive_what_is_there(self, timeout_s: float = 0.0) -> list[Message]:
        """Return the messages that have come by now."""
        received = []
        while self.socket.poll(int(timeout_s * 1000)):
            received.append(self.receive())
        return received

    def wait_for(self, kind: type[M], timeout_s: float = TIMEOUT_S) -> M:
        """Return the next message of this kind; others before it are noted."""
        until = time.monotonic() + timeout_s
        while True:
            message = self.receive(max(0.0, until - time.monotonic()))
            if isinstance(message, kind):
                return message

    def wait_until_ready(self, timeout_s: float = TIMEOUT_S) -> Ready:
        """Wait for HELLO, the load and READY."""
        hello = self.wait_for(Hello, timeout_s)
        assert (hello.token, hello.pid) == (TOKEN, self.process.pid)
        return self.wait_for(Ready, timeout_s)

    def beat(self, timeout_s: float = TIMEOUT_S) -> Heartbeat:
        """Return the next heartbeat."""
        assert self._beats.poll(int(timeout_s * 1000)), f"no heartbeat within {timeout_s:g} s"
        message = self._decoder.decode(self._beats.recv_multipart())
        assert isinstance(message, Heartbeat)
        return message

    def has_beat(self, timeout_s: float) -> bool:
        """Return True if a heartbeat waits, or comes within the time."""
        return bool(self._beats.poll(int(timeout_s * 1000)))

    def dispatch(
        self,
        prompt: str = "",
        body: bytes | None = None,
        resume: Resume | None = None,
        **parameters: Any,
    ) -> int:
        """Dispatch a request, or one that resumes, and return its key."""
        key, self._next_key = self._next_key, self._next_key + 1
        if resume is not None:
            body = b""
        if body is None:
            if prompt:
                parameters["prompt"] = prompt
            body = encode_body(RequestBody.from_wire(parameters))
        self.send(Dispatch(key=RequestKey(key), resume=resume, body=body))
        return key

    def cancel(self, key: int) -> None:
        """Cancel one request."""
        self.send(CancelRow(key=RequestKey(key)))

    def finish(self, *keys: int, timeout_s: float = TIMEOUT_S) -> list[Stream]:
        """Receive until each of these streams is over, and return them."""
        until = time.monotonic() + timeout_s
        while not all(self.streams[key].is_over for key in keys):
            self.receive(max(0.0, until - time.monotonic()))
        return [self.streams[key] for key in keys]

    def exit_code(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the worker's exit; negative for a signal."""
        return self.process.wait(timeout_s)

    def ask_for_exit(self) -> int:
        """Ask for the exit as a supervisor does; return the exit code."""
        self.send(Exit())
        return self.exit_code()

    def _note(self, message: Message) -> None:
        self.messages.append(message)
        match message:
            case Accepted(key=key, acceptance=acceptance):
                stream = self.streams[key]
                assert not stream.is_over, "accepted after its end"
                assert stream.acceptance is None, "accepted twice"
                stream.acceptance = acceptance
            case Rejected(key=key, error=error):
                assert not self.streams[key].is_over, "two ends"
                self.streams[key].error = error
            case Step(step=step, rows=rows):
                for row in rows:
                    stream = self.streams[row.key]
                    assert not stream.is_over, f"request {row.key} continued after its end"
                    stream.text += body_of(row).text
                    stream.tokens += unpack_tokens(row.tokens)
                    stream.finish = row.finish
                    stream.steps.append(step)
                    if row.prefill_s is not None:
                        assert stream.prefill_s is None, "two first tokens"
                        stream.prefill_s = row.prefill_s
