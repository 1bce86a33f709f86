"""A daemon in this process and its loop: the test plays the clients, and speaks for the workers.

Each worker is a shell that writes down its launch spec and then waits: a real process with a pid,
pipes and signals, which starts in milliseconds. What a worker would say, the test says over a
separate socket, with the token of that spec.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from mlxsup.protocol.client_messages import SUPERVISOR_TO_CLIENT, Alive, Generate
from mlxsup.protocol.codec import Decoder, encode, read_line
from mlxsup.protocol.ids import ModelName, RequestId, RequestKey, pack_tokens
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason, WorkerPhase
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    SUPERVISOR_TO_WORKER,
    Acceptance,
    Accepted,
    Dispatch,
    Heartbeat,
    Hello,
    Ready,
    RowDelta,
    Step,
)
from mlxsup.supervisor.config.load import read_config
from mlxsup.supervisor.daemon import run_daemon

from support.daemon.daemon import fake, toml_of
from support.eventually_async import eventually_async

M = TypeVar("M", bound=Message)

NOTE_SPEC = 'read -r line; printf "%s\\n" "$line" > "$0/$$.new"; mv "$0/$$.new" "$0/$$.spec"; '
"""What each worker's process does first; its folder is `$0`."""

WAIT = "exec cat > /dev/null"
"""Until its standard input ends, or a signal comes."""

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Peer:
    """A client of the daemon."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._decoder = Decoder(SUPERVISOR_TO_CLIENT, is_strict=False)

    async def say(self, message: Message) -> None:
        """Sends a message."""
        await self._socket.send_multipart(encode(message))

    async def hear_any(self) -> Message:
        """The next message, whatever it is."""
        return self._decoder.decode(await self._socket.recv_multipart())

    async def hear(self, kind: type[M]) -> M:
        """The next message but for signs of life, which must be of this kind."""
        while isinstance(message := await self.hear_any(), Alive):
            pass
        assert isinstance(message, kind), message
        return message

    async def ask(self, message: Message, kind: type[M]) -> M:
        """The answer to a message."""
        await self.say(message)
        return await self.hear(kind)

    def close(self) -> None:
        """Leaves."""
        self._socket.close(linger=0)


class PlayedWorker:
    """One life of a worker: its process, and the test's voice.

    Attributes:
        spec: what the process was started with.
        pid: of the process.
    """

    def __init__(self, context: zmq.asyncio.Context, spec: LaunchSpec, pid: int) -> None:
        self.spec = spec
        self.pid = pid
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(spec.endpoint)
        self._beats = context.socket(zmq.PUSH)
        self._beats.connect(spec.endpoint + ".beat")
        self._decoder = Decoder(SUPERVISOR_TO_WORKER, is_strict=False)
        self._steps = 0

    async def say(self, message: Message) -> None:
        """Sends a message."""
        await self.socket.send_multipart(encode(message))

    def hello(self) -> Hello:
        """Its first message."""
        spec = self.spec
        return Hello(
            model=spec.model,
            generation=spec.generation,
            token=spec.token,
            pid=self.pid,
            version=VERSION,
        )

    async def come_up(self) -> None:
        """Greets and is ready."""
        await self.say(self.hello())
        await self.say(Ready(context_length=4096, fingerprint="f", backend="fake"))

    async def beat(self) -> None:
        """A sign of life of one that is idle."""
        idle = Heartbeat(step=self._steps, phase=WorkerPhase.IDLE, phase_s=0.1)
        await self._beats.send_multipart(encode(idle))

    async def hear_any(self) -> Message:
        """The next message, whatever it is."""
        return self._decoder.decode(await self.socket.recv_multipart())

    async def hear(self, kind: type[M]) -> M:
        """The next message, which must be of this kind."""
        message = await self.hear_any()
        assert isinstance(message, kind), message
        return message

    async def accept(self) -> RequestKey:
        """Takes the request that is dispatched next; returns its key."""
        key = (await self.hear(Dispatch)).key
        acceptance = Acceptance(
            prompt_tokens=pack_tokens([1, 2]),
            opening="",
            parameters={"max_tokens": 9},
            seed=7,
            fingerprint="f",
        )
        await self.say(Accepted(key=key, acceptance=acceptance, tokenize_s=0.0))
        return key

    async def step(self, *rows: RowDelta) -> None:
        """One engine step."""
        self._steps += 1
        await self.say(Step(step=self._steps, rows=list(rows)))

    def close(self) -> None:
        """Ends its connections; what was said still leaves."""
        self.socket.close(linger=5000)
        self._beats.close(linger=0)

    def die(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Its process dies of a signal, and its connections with it."""
        os.kill(self.pid, number)
        self.close()


def token(key: RequestKey, number: int, *, is_last: bool = False) -> RowDelta:
    """One row's piece of a step: a token whose text is its number."""
    finish = FinishReason.STOP if is_last else None
    return RowDelta(key=key, text=f"{number} ", tokens=pack_tokens([number]), finish=finish)


def generate(id: str = "r", model: str = "a", **fields: Any) -> Generate:
    """A request."""
    return Generate(id=RequestId(id), model=ModelName(model), body=b"body", **fields)


class Stage:
    """What a test has in its hands while the daemon serves.

    Attributes:
        folder: holds `run`, `logs` and the configuration.
        endpoint: the daemon's.
        changes: of models' states, in order.
    """

    def __init__(self, folder: Path, endpoint: str, changes: list[dict[str, Any]]) -> None:
        self.folder = folder
        self.endpoint = endpoint
        self.changes = changes
        self._context = zmq.asyncio.Context()
        self._parts: list[Peer | PlayedWorker] = []

    def peer(self) -> Peer:
        """Another client."""
        peer = Peer(self._context, self.endpoint)
        self._parts.append(peer)
        return peer

    async def worker(self, model: str = "a", generation: int = 1) -> PlayedWorker:
        """This life of a model's worker, once its process runs."""

        def started() -> tuple[LaunchSpec, int] | None:
            for path in self.folder.glob("*.spec"):
                spec = read_line(LaunchSpec, path.read_bytes(), "a launch spec")
                if (spec.model, spec.generation) == (model, generation):
                    return spec, int(path.stem)
            return None

        spec, pid = await eventually_async(started, 60.0)
        worker = PlayedWorker(self._context, spec, pid)
        self._parts.append(worker)
        return worker

    async def ready(self, model: str = "a", generation: int = 1) -> PlayedWorker:
        """The same, when it is READY."""
        worker = await self.worker(model, generation)
        await worker.come_up()
        await self.until(model, "READY", generation)
        return worker

    async def until(self, model: str, state: str, generation: int = 1) -> dict[str, Any]:
        """The change that took a model to a state in this generation."""

        def found() -> dict[str, Any] | None:
            wanted = (model, state, generation)
            for change in self.changes:
                if (change.get("model"), change.get("to"), change.get("generation")) == wanted:
                    return change
            return None

        return await eventually_async(found, 60.0)

    def log(self, name: str = "mlxsup") -> str:
        """A log file, as far as it is written."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    async def logged(self, text: str, name: str = "mlxsup") -> None:
        """Waits until a log file contains a text; the daemon's own, at the start of a word."""
        path = self.folder / "logs" / f"{name}.log"
        wanted = f" {text}" if name == "mlxsup" else text
        await eventually_async(lambda: path.exists() and wanted in path.read_text(), 60.0)

    def write_config(
        self, models: dict[str, dict[str, Any]], supervisor: dict[str, Any] | None = None
    ) -> None:
        """Writes the configuration file."""
        write_config(self.folder, models, supervisor)

    def close(self) -> None:
        """Closes its peers and workers."""
        for part in self._parts:
            part.close()
        self._context.term()


def write_config(
    folder: Path, models: dict[str, dict[str, Any]], supervisor: dict[str, Any] | None = None
) -> Path:
    """Writes a configuration with its run and log folders inside `folder`; returns the file."""
    top = {"runtime_dir": f"{folder}/run", "log_dir": f"{folder}/logs", **(supervisor or {})}
    tables = {"supervisor": top} | {f'models."{name}"': e for name, e in models.items()}
    path = folder / "config.toml"
    path.write_text(toml_of(tables))
    return path


@contextmanager
def short_folder() -> Iterator[Path]:
    """A new folder whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def restored_process() -> Iterator[None]:
    """Gives back what a daemon changes of its process: signals, umask, limits."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    umask = os.umask(0o022)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.umask(umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def play(
    body: Callable[[Stage], Awaitable[None]],
    models: dict[str, dict[str, Any]] | None = None,
    *,
    supervisor: dict[str, Any] | None = None,
    process: str = WAIT,
    argv: Sequence[str] | None = None,
    folder: Path | None = None,
    exit_grace_s: float = 2.0,
    on_change: Callable[[dict[str, Any]], None] = lambda change: None,
) -> int:
    """Runs a daemon while `body` runs, ends it, and returns its exit code.

    Args:
        body: the test.
        models: entries by name; one, `a`, if not given.
        supervisor: further keys of `[supervisor]`.
        process: what a worker's process does, in shell.
        argv: the command that starts a worker, instead of that.
        folder: where everything is; a new one, removed at the end, if not given.
        exit_grace_s: from asking a worker to exit to SIGTERM, and from there to SIGKILL.
        on_change: called with each change of a state.
    """
    with short_folder() if folder is None else nullcontext(folder) as place:
        path = write_config(place, models or {"a": fake()}, supervisor)
        changes: list[dict[str, Any]] = []
        tests: list[asyncio.Task[None]] = []

        async def test(endpoint: str) -> None:
            stage = Stage(place, endpoint, changes)
            try:
                async with asyncio.timeout(300):
                    await body(stage)
            finally:
                stage.close()
                for _ in range(2):  # the second one hurries
                    os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.sleep(0)

        def changed(change: dict[str, Any]) -> None:
            changes.append(change)
            on_change(change)

        def listening(endpoint: str) -> None:
            tests.append(asyncio.get_running_loop().create_task(test(endpoint)))

        config = read_config(path)
        with restored_process():
            code = run_daemon(
                replace(config, core=replace(config.core, exit_grace_s=exit_grace_s)),
                on_change=changed,
                on_listening=listening,
                argv=argv or ["/bin/sh", "-c", NOTE_SPEC + process, str(place)],
            )
        tests[0].result()
        return code
