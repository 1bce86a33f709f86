"""A real daemon with a gateway, and what tests need to talk HTTP to it byte by byte."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from mlxsup.client import Client

from support.daemon.daemon import Daemon
from support.eventually import TIMEOUT_S, eventually

CHAT = "/v1/chat/completions"

STREAMED = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
"""The paths that stream answers."""

COMPLETE = ("[DONE]", "message_stop", "response.completed", "response.incomplete")
"""Events with which answers end that are whole."""


class HttpDaemon(Daemon):
    """`mlxsup start --http` at a port that is free.

    Attributes:
        url: where its gateway listens.
    """

    url: str
    listen = "127.0.0.1:0"

    def start_command(self) -> list[str]:
        return [*super().start_command(), "--http", self.listen]

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        """Start it and return when its gateway answers, too."""
        super().start(environment=environment)
        with self.client() as client:
            self.url = gateway_of(client)["url"]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the gateway."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return status and body of a GET."""
        return self.ask("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body of a POST."""
        return self.ask("POST", path, json.dumps(body).encode())

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        key: str = "",
    ) -> tuple[int, dict[str, Any]]:
        """Return status and body of a request on its own connection, with a key if one is given."""
        connection = http.client.HTTPConnection(*self.address, timeout=TIMEOUT_S)
        given = {"Content-Type": "application/json", **(headers or {})}
        if key:
            given["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, path, body, given)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """Return a connection on which nothing was said."""
        return socket.create_connection(self.address, timeout=TIMEOUT_S)


def gateway_of(client: Client, *, after: int | None = None) -> dict[str, Any]:
    """Return the gateway in the status, once it listens.

    Args:
        client: of its daemon.
        after: the pid of an earlier one, which does not count.
    """

    def listens() -> dict[str, Any] | None:
        value: dict[str, Any] = client.status()["gateway"]
        is_there = value["state"] == "listening" and value["pid"] != after
        return value if is_there else None

    return eventually(listens, what="a gateway that listens")


class SseReader(threading.Thread):
    """A thread that reads a streamed answer to its end.

    Attributes:
        status: of the response.
        headers: of the same, in lower case.
        events: the data of its events; `[DONE]` as text.
        is_cut: whether the response ended without its closing mark.
        has_text: set with the first piece of text, or at the end.
        times: when each event came, by the monotonic clock.

    Args:
        daemon: whose gateway.
        body: of the request, besides `stream`.
        path: that it is sent to.
    """

    def __init__(self, daemon: HttpDaemon, body: dict[str, Any], path: str = CHAT) -> None:
        super().__init__(daemon=True)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.events: list[Any] = []
        self.is_cut = False
        self.has_text = threading.Event()
        self.times: list[float] = []
        self._path = path
        self._connection = http.client.HTTPConnection(*daemon.address, timeout=TIMEOUT_S)
        self._body = json.dumps({**body, "stream": True}).encode()
        self.start()

    @property
    def text(self) -> str:
        """The content so far."""
        return "".join(text_in(one) for one in self.events if one != "[DONE]")

    @property
    def last_at(self) -> float:
        """When the last event came; 0 if none has."""
        return self.times[-1] if self.times else 0.0

    @property
    def is_complete(self) -> bool:
        """True if a client would take it for a whole answer."""
        kinds = [one if one == "[DONE]" else one.get("type") for one in self.events]
        return not self.is_cut or any(kind in COMPLETE for kind in kinds)

    def run(self) -> None:
        """Read."""
        try:
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", self._path, self._body, headers)
            response = self._connection.getresponse()
            self.status = response.status
            self.headers = {name.lower(): value for name, value in response.getheaders()}
            for data in _events(response):
                self.times.append(time.monotonic())
                self.events.append(data if data == "[DONE]" else json.loads(data))
                if not self.has_text.is_set() and self.text:
                    self.has_text.set()
        except (http.client.IncompleteRead, ConnectionError):
            self.is_cut = True
        finally:
            self._connection.close()
            self.has_text.set()

    def started(self) -> SseReader:
        """Wait for text."""
        assert self.has_text.wait(TIMEOUT_S)
        assert self.text, (self.status, self.events)
        return self

    def finished(self) -> SseReader:
        """Wait for the end."""
        self.join(TIMEOUT_S)
        assert not self.is_alive(), "the stream did not end"
        return self


def everything(connection: socket.socket) -> bytes:
    """Return all that comes until the other side closes."""
    pieces = []
    try:
        while piece := connection.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the data of each event; a response without its closing mark raises IncompleteRead."""
    rest = b""
    while piece := response.read1(65536):
        *blocks, rest = (rest + piece).split(b"\n\n")
        for line in (one for block in blocks for one in block.split(b"\n")):
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").decode()


def chat(prompt: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat with one message, to the model `m` unless it says otherwise."""
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], **fields}


def asked_at(path: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """Return the body of a request with one message, as this path takes it."""
    if path == "/v1/responses":
        return {"model": "m", "input": prompt, "max_output_tokens": max_tokens}
    if path == "/v1/completions":
        return {"model": "m", "prompt": prompt, "max_tokens": max_tokens}
    return chat(prompt, max_tokens=max_tokens)


def text_in(event: dict[str, Any]) -> str:
    """Return the text that an event of any of these paths brings."""
    if choices := event.get("choices"):
        return str(choices[0].get("text") or choices[0].get("delta", {}).get("content") or "")
    delta = event.get("delta", "")
    if event.get("type") == "response.output_text.delta":
        return str(delta)
    return str(delta.get("text", "")) if event.get("type") == "content_block_delta" else ""
