"""The servers that benchmarks ask: mlxsup, and mlx_lm.server beside it, by the same calls.

Both are asked from one event loop, and both tell a token by the piece of text that carries it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self
from urllib.error import URLError
from urllib.request import urlopen

from mlxsup.client import AsyncClient

from .openai_stream import (
    DONE,
    PATH,
    Address,
    AnswerError,
    checked,
    read_stream,
    text_of,
)
from support.eventually import eventually
from support.gateway.http_daemon import HttpDaemon

OnToken = Callable[[float], None]
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One stream, read to its end.

    Attributes:
        asked_at: `time.perf_counter` in seconds.
        times: when each token was there, by the same clock.
        prompt_tokens: as the server counted them.
        cached_tokens: of these, the ones that it did not have to read.
    """

    asked_at: float
    times: Sequence[float]
    prompt_tokens: int
    cached_tokens: int

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.asked_at


class Server(Protocol):
    """What a benchmark can ask."""

    @property
    def name(self) -> str:
        """Its name in the report."""

    async def ask(
        self, model: str, prompt: str, max_tokens: int, on_token: OnToken | None = None
    ) -> Answer:
        """Streams one greedy answer; `on_token` gets the time of each piece of text.

        Raises:
            AnswerError: it did not end with exactly `max_tokens` tokens, or was refused.
            RequestError, OSError: the daemon refused or lost it; the connection has failed.
        """


class Mlxsup:
    """mlxsup, through its asynchronous client."""

    name = "mlxsup"

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(
        self, model: str, prompt: str, max_tokens: int, on_token: OnToken | None = None
    ) -> Answer:
        """See `Server`."""
        asked_at = time.perf_counter()
        times: list[float] = []
        stream = self._client.generate(
            model, prompt=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        )
        async for delta in stream:
            now = time.perf_counter()
            times += [now] * len(delta.token_ids)
            if delta.text and on_token is not None:
                on_token(now)
        usage = stream.result.usage
        if len(times) != max_tokens:
            raise AnswerError(f"the answer has {len(times)} tokens instead of {max_tokens}")
        return Answer(
            asked_at=asked_at,
            times=times,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
        )


class ServerProcess:
    """Somebody else's server as a child process, at a port that was free.

    Args:
        name: for reports.
        command: that starts it; the address is added.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._port = free_port()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the server
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(self._port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )

    @property
    def pid(self) -> int:
        """Return the child's process id."""
        return self._process.pid

    @property
    def port(self) -> int:
        """Return the port it listens on, on this machine only."""
        return self._port

    def __enter__(self) -> Self:
        try:
            eventually(self._is_up, timeout_s=START_TIMEOUT_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._log.closed:
            return
        text = self._end()
        if error is not None or "Traceback" in text:
            print(text)
        assert "Traceback" not in text, f"{self.name} failed"

    def give_up(self) -> None:
        """Ends it before its time; whatever it has printed is no failure of the benchmark."""
        if not self._log.closed:
            self._end()

    def _end(self) -> str:
        """Ends the process; returns what it printed."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._log:
            self._log.seek(0)
            return self._log.read()

    def _is_up(self) -> bool:
        assert self._process.poll() is None, f"{self.name} has ended"
        try:
            with urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5.0) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except (URLError, ConnectionError):
            return False


def mlx_lm_server(folder: Path | None = None, *options: str) -> ServerProcess:
    """Return `python -m mlx_lm server`; it holds one model at a time, the one a request names.

    Args:
        folder: of a model that it loads at its start.
        options: of its command line.
    """
    model = [] if folder is None else ["--model", str(folder)]
    arguments = ["-m", "mlx_lm", "server", "--log-level", "WARNING", *model, *options]
    return ServerProcess("mlx_lm.server", [sys.executable, *arguments])


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class OverHttp:
    """One of them; see `Server`.

    Attributes:
        name: for reports.
        address: host and port.
        models: what it calls them, by the names that `ask` takes.
    """

    name: str
    address: Address
    models: Mapping[str, str]

    async def ask(
        self, model: str, prompt: str, max_tokens: int, on_token: OnToken | None = None
    ) -> Answer:
        """See `Server`."""
        asked_at = time.perf_counter()
        events: list[tuple[float, bytes]] = []

        def on_event(at: float, data: bytes) -> None:
            events.append((at, data))
            if on_token is not None and data.strip() != DONE and text_of(json.loads(data)):
                on_token(at)

        name = self.models[model]
        body = {"model": name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
        read = checked(await read_stream(self.address, PATH, body, on_event), max_tokens)
        letters = [(at, len(text_of(json.loads(data)))) for at, data in events[:-1]]
        return Answer(
            asked_at=asked_at,
            times=token_times(letters, max_tokens),
            prompt_tokens=read.prompt_tokens,
            cached_tokens=read.cached_tokens,
        )


def token_times(events: Sequence[tuple[float, int]], tokens: int) -> list[float]:
    """Return when each token was there; an event with text holds one of them or more.

    Args:
        events: time and letters of each, not more with text than tokens; what one holds beyond
            the first token is guessed from its letters.
        tokens: how many there are.
    """
    extra, letters = tokens - sum(count > 0 for _, count in events), sum(n for _, n in events)
    times: list[float] = []
    given = seen = 0
    for at, count in events:
        if count:
            seen += count
            due = round(extra * seen / letters)
            times += [at] * (1 + due - given)
            given = due
    return times


def gateway(daemon: HttpDaemon, models: Sequence[str]) -> OverHttp:
    """Return the gateway of a daemon as a server."""
    return OverHttp(name="mlxsup", address=daemon.address, models={name: name for name in models})


def peer(process: ServerProcess, folders: Mapping[str, Path]) -> OverHttp:
    """Return another server, which calls its models by their folders."""
    names = {name: str(folder) for name, folder in folders.items()}
    return OverHttp(name=process.name, address=("127.0.0.1", process.port), models=names)
