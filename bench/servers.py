"""The servers that benchmarks ask: mlxsup, and mlx_lm.server beside it, by the same calls.

Both are asked from one event loop, and both tell a token by the piece of text that carries it.
"""

from __future__ import annotations

import asyncio
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
from typing import Any, Protocol, Self
from urllib.error import URLError
from urllib.request import urlopen

from mlxsup.cli.benchmark import (
    DONE,
    PATH,
    Address,
    Burst,
    ask_over_http,
    checked,
    read_stream,
    text_of,
)
from mlxsup.client import AsyncClient

from support.eventually import eventually
from support.gateway.http_daemon import HttpDaemon

OnToken = Callable[[float], None]
LINE_LIMIT = 2**20
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One stream, read to its end.

    Attributes:
        asked_at, first_at, ended_at: `time.perf_counter` in seconds.
        prompt_tokens, tokens: as the server counted them.
    """

    asked_at: float
    first_at: float
    ended_at: float
    prompt_tokens: int
    tokens: int

    @property
    def first_token_s(self) -> float:
        """Time to first token."""
        return self.first_at - self.asked_at


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
            AssertionError: it did not end with exactly `max_tokens` tokens.
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
        first_at = 0.0
        stream = self._client.generate(model, prompt=prompt, max_tokens=max_tokens, ignore_eos=True)
        async for delta in stream:
            if delta.text:
                now = time.perf_counter()
                first_at = first_at or now
                if on_token is not None:
                    on_token(now)
        result = stream.result
        assert len(result.token_ids) == max_tokens, result
        return Answer(
            asked_at=asked_at,
            first_at=first_at,
            ended_at=time.perf_counter(),
            prompt_tokens=result.usage.prompt_tokens,
            tokens=len(result.token_ids),
        )


class ServerProcess:
    """Somebody else's server as a child process, at a port that was free.

    Args:
        name: for reports.
        arguments: behind `python`; the address is added.
        environment: what differs from that of this process.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._port = free_port()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the server
        self._process = subprocess.Popen(
            [sys.executable, *arguments, "--host", "127.0.0.1", "--port", str(self._port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """Of the child process."""
        return self._process.pid

    @property
    def port(self) -> int:
        """Where it listens, on this machine only."""
        return self._port

    @property
    def url(self) -> str:
        """The same as a URL."""
        return f"http://127.0.0.1:{self._port}"

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


class MlxLmServer(ServerProcess):
    """`python -m mlx_lm server`, over its OpenAI-compatible interface.

    Args:
        models: folders by the names that `ask` takes. The server goes by folder; it holds one
            model at a time, and loads whichever a request names.
        options: of its command line.
        cache: its folder of downloaded models; without it, the usual one.
    """

    def __init__(
        self, models: Mapping[str, Path], *options: str, cache: Path | None = None
    ) -> None:
        self._models = models
        super().__init__(
            "mlx_lm.server",
            ["-m", "mlx_lm", "server", "--log-level", "WARNING", *options],
            {} if cache is None else {"HF_HUB_CACHE": str(cache)},
        )

    async def ask(
        self, model: str, prompt: str, max_tokens: int, on_token: OnToken | None = None
    ) -> Answer:
        """See `Server`."""
        asked_at = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=LINE_LIMIT)
        writer.write(self._request(model, prompt, max_tokens))
        first_at = 0.0
        usage: dict[str, Any] = {}
        is_complete = False
        # It answers in HTTP 1.0: the end of the connection is the end of the answer.
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            is_complete = line.startswith(b"data: [DONE]")
            if is_complete:
                continue
            event = json.loads(line.removeprefix(b"data: "))
            usage = event.get("usage") or usage
            if any(choice["text"] for choice in event["choices"]):
                now = time.perf_counter()
                first_at = first_at or now
                if on_token is not None:
                    on_token(now)
        writer.close()
        await writer.wait_closed()
        assert is_complete, "mlx_lm.server left a stream unfinished"
        assert usage["completion_tokens"] == max_tokens, usage
        return Answer(
            asked_at=asked_at,
            first_at=first_at,
            ended_at=time.perf_counter(),
            prompt_tokens=usage["prompt_tokens"],
            tokens=max_tokens,
        )

    def _request(self, model: str, prompt: str, max_tokens: int) -> bytes:
        body = json.dumps(
            {
                "model": str(self._models[model]),
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\n"
            f"Host: 127.0.0.1:{self._port}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def free_port() -> int:
    """A port that nobody listens at."""
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
        process: None for mlxsup, whose daemon has several.
    """

    name: str
    address: Address
    models: Mapping[str, str]
    process: ServerProcess | None = None

    async def ask(
        self, model: str, prompt: str, max_tokens: int, on_token: OnToken | None = None
    ) -> Answer:
        """See `Server`."""
        asked_at = time.perf_counter()

        def on_event(at: float, data: bytes) -> None:
            if on_token is not None and data.strip() != DONE and text_of(json.loads(data)):
                on_token(at)

        body = self._body(model, prompt, max_tokens)
        read = checked(await read_stream(self.address, PATH, body, "", on_event), max_tokens)
        return Answer(
            asked_at=asked_at,
            first_at=read.times[0],
            ended_at=time.perf_counter(),
            prompt_tokens=read.prompt_tokens,
            tokens=read.tokens,
        )

    async def burst(self, model: str, prompts: Sequence[str], tokens: int) -> Burst:
        """Sends all prompts at once.

        An event may hold several tokens; the last one of an answer is counted as often as it takes.

        Raises:
            AnswerError: an answer has another length, or is not whole.
            OSError: a connection has failed.
        """
        bodies = [self._body(model, prompt, tokens) for prompt in prompts]
        return await ask_over_http(self.address, bodies, tokens)

    def _body(self, model: str, prompt: str, tokens: int) -> dict[str, Any]:
        name = self.models[model]
        return {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}


def gateway(daemon: HttpDaemon, models: Sequence[str]) -> OverHttp:
    """Return the gateway of a daemon as a server."""
    return OverHttp(name="mlxsup", address=daemon.address, models={name: name for name in models})


def mlx_lm(process: ServerProcess, folders: Mapping[str, Path]) -> OverHttp:
    """Return mlx_lm.server as a server; it holds one model at a time."""
    names = {name: str(folder) for name, folder in folders.items()}
    return OverHttp(
        name=process.name, address=("127.0.0.1", process.port), models=names, process=process
    )
