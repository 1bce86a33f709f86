"""The gateway's application by itself: requests as ASGI, and a daemon that is played."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Self, cast

from mlxsup.client import (
    AsyncClient,
    Channel,
    Delta,
    ErrorCode,
    FinishReason,
    Notice,
    RequestError,
    Result,
    Usage,
)
from mlxsup.client.async_streams import AsyncInbox, AsyncStream
from mlxsup.client.streams import value_of
from mlxsup.gateway.app import Gateway
from mlxsup.gateway.converter import Api
from mlxsup.gateway.guard import Guard
from mlxsup.gateway.keys import Keys
from mlxsup.gateway.sse import WRITE
from mlxsup.protocol.gateway import GatewayRules
from mlxsup.protocol.ids import RequestId

from support.client.sent_requests import asked_in

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSE, MESSAGE = "/v1/responses", "/v1/messages"
OLLAMA_CHAT, GENERATE = "/api/chat", "/api/generate"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETION: {"prompt": "hi"},
    RESPONSE: {"input": "hi"},
    MESSAGE: {"messages": HI, "max_tokens": 9},
    OLLAMA_CHAT: {"messages": HI},
    GENERATE: {"prompt": "hi"},
}
"""What each API needs in a body besides a model."""
BODY: dict[str, Any] = {"model": "m", **LEAST[CHAT]}
LEAST_OF: dict[Api, dict[str, Any]] = {
    Api.CHAT: BODY,
    Api.COMPLETION: {"model": "m", **LEAST[COMPLETION]},
    Api.RESPONSE: {"model": "m", **LEAST[RESPONSE]},
    Api.MESSAGE: {"model": "m", **LEAST[MESSAGE]},
    Api.COUNT: BODY,
    Api.RESPONSE_COUNT: {"model": "m", **LEAST[RESPONSE]},
    Api.OLLAMA_CHAT: BODY,
    Api.GENERATE: {"model": "m", **LEAST[GENERATE]},
    Api.TOKENIZE: {"model": "m", "prompt": "hi"},
    Api.TEMPLATE: BODY,
    Api.DETOKENIZE: {"model": "m", "tokens": [1, 2]},
    Api.EMBEDDINGS: {"model": "m", "input": "hi"},
    Api.RERANK: {"model": "m", "query": "hi", "documents": ["a", "b"]},
    Api.OLLAMA_EMBED: {"model": "m", "input": ["hi"]},
    Api.OLLAMA_EMBEDDING: {"model": "m", "prompt": "hi"},
}
"""The least bodies."""

COMMANDS = (
    "cancel", "pause", "resume", "prioritize", "add", "remove", "load", "unload", "restart",
    "settings", "configure",
)  # fmt: skip

Item = Delta | Notice | Result | Exception | asyncio.Event
"""One step of a stream; an event is waited for."""


def delta(text: str, *, channel: Channel = Channel.CONTENT, **more: Any) -> Delta:
    """Return a piece with a token for each character."""
    return Delta(text=text, token_ids=list(range(len(text))), channel=channel, **more)


def result(text: str = "", reason: FinishReason = FinishReason.STOP, **more: Any) -> Result:
    """Return a whole answer to a prompt of five tokens, of which two were cached."""
    usage = Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=len(text))
    return Result(text=text, finish_reason=reason, usage=usage, **more)


def said(text: str) -> list[Item]:
    """Return how an answer of one piece goes."""
    return [delta(text), result(text)]


Change = dict[str, Any] | Exception


class PlayedEvents:
    """The changes that a played daemon tells.

    Attributes:
        items: what comes next; an exception ends it.
        is_closed: whether its reader has left.
    """

    def __init__(self) -> None:
        self.items: asyncio.Queue[Change] = asyncio.Queue()
        self.is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        item = await self.items.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_closed = True


class PlayedDaemon:
    """A client whose daemon does what the test says.

    Attributes:
        answers: what happens to each request, in the order of the requests; the test feeds others.
        inboxes: of the requests that were opened.
        cancelled: the names of those that were asked to end.
        asked: what each of them asks for, without the id and what `generate` always sends.
        state: of the only model.
        subscriptions: those that were opened.
        opened: the same, one after the other, for a test that waits for the next.
        presets: of the only model, by name.
        row: what else the status says of it.
        log_dir: the folder with the logs.
        stopping: how it ends; None while it does not.
        commands: those about requests and models that it got, with their arguments.
    """

    def __init__(self, *answers: Sequence[Item]) -> None:
        self.answers = list(answers)
        self.inboxes: list[AsyncInbox] = []
        self.cancelled: set[str] = set()
        self.asked: list[dict[str, Any]] = []
        self.state: str | Exception = "READY"
        self.subscriptions: list[PlayedEvents] = []
        self.opened: asyncio.Queue[PlayedEvents] = asyncio.Queue()
        self.presets: dict[str, dict[str, Any]] = {}
        self.adapters: dict[str, str] = {}
        self.row: dict[str, Any] = {"folder": None, "repo": None, "context_length": 64}
        self.log_dir = "/nowhere"
        self.stopping: dict[str, Any] | None = None
        self.commands: list[tuple[Any, ...]] = []
        self._plays: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def send_encoded(self, _: RequestId, frames: list[bytes], on_notice: Any) -> AsyncStream:
        """Read the request as a daemon does."""
        self.asked.append(asked_in(frames))
        self.inboxes.append(inbox := AsyncInbox())
        ends = asyncio.Event()

        def cancel(name: str) -> None:
            self.cancelled.add(name)
            ends.set()

        if self.answers[len(self.inboxes) - 1 :]:
            items = self.answers[len(self.inboxes) - 1]
            self._plays.add(asyncio.create_task(_play(inbox, items, ends)))
        return AsyncStream(RequestId(f"r{len(self.inboxes)}"), inbox, cancel, on_notice)

    async def ping(self) -> dict[str, Any]:
        """Answer at once."""
        return {}

    async def command(self, *words: Any) -> dict[str, Any]:
        """Take a command: its name and its arguments."""
        self.commands.append(words)
        return {}

    def __getattr__(self, name: str) -> Any:
        """Return a command of a client by its name."""
        if name not in COMMANDS:
            raise AttributeError(name)

        async def command(*given: Any, **more: Any) -> dict[str, Any]:
            return await self.command(name, *given, *more.values())

        return command

    def events(self) -> PlayedEvents:
        """Return changes that the test feeds."""
        self.subscriptions.append(PlayedEvents())
        self.opened.put_nowait(self.subscriptions[-1])
        return self.subscriptions[-1]

    async def status(self) -> dict[str, Any]:
        """Return a status with one model."""
        if isinstance(self.state, Exception):
            raise self.state
        row = {
            "name": "m", "aliases": ["n"], "presets": self.presets, "adapters": self.adapters,
            "state": self.state,
            "footprint_bytes": 0, "tokens_per_s": 0.0, "running": [], "queued": 0, **self.row,
        }  # fmt: skip
        memory = {"budget_bytes": 2**30}
        return {
            "models": [row], "memory": memory, "log_dir": self.log_dir, "stopping": self.stopping,
        }  # fmt: skip


async def _play(inbox: AsyncInbox, items: Sequence[Item], ends: asyncio.Event) -> None:
    """Feed an answer; an event is waited for, or until the answer is cancelled, which ends it."""
    for item in items:
        await asyncio.sleep(0)
        if not isinstance(item, asyncio.Event):
            inbox.put(cast(Any, item))
            continue
        waits = [asyncio.create_task(one.wait()) for one in (item, ends)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        if ends.is_set():
            inbox.put(result("", FinishReason.CANCELLED))
            return


class FedDaemon(PlayedDaemon):
    """A client whose requests and pings get what the test puts into their inboxes.

    Attributes:
        pings: the inboxes of pings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pings: list[AsyncInbox] = []

    async def ping(self) -> dict[str, Any]:
        """Wait to be fed."""
        self.pings.append(AsyncInbox())
        return value_of(await self.pings[-1].get())


@dataclass(slots=True)
class Response:
    """The response of an application.

    Attributes:
        status: of the response.
        headers: by lower-case name.
        body: as far as it came.
        is_whole: whether the application said that nothing follows.
        asked: what the daemon was asked for it.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        """Return the body as an object."""
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def error(self) -> dict[str, Any]:
        """The error in the body."""
        value: dict[str, Any] = self.json()["error"]
        return value

    def lines(self) -> list[dict[str, Any]]:
        """Return the objects of a stream of Ollama's, or the only one of a whole answer."""
        return [json.loads(line) for line in self.body.splitlines()]

    def events(self) -> list[Any]:
        """Return the data of each event of a stream; `[DONE]` as text."""
        lines = [line for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        texts = [line.removeprefix("data: ") for line in lines]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]

    def named_events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return name and data of each event of a stream whose events have names."""
        blocks = [block.split("\n") for block in self.body.decode().split("\n\n")]
        pairs = [block for block in blocks if len(block) == 2]
        return [
            (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
            for name, data in pairs
        ]

    def comments(self) -> list[str]:
        """Return the comments of a stream."""
        return [line[2:] for line in self.body.decode().split("\n\n") if line.startswith(": ")]


class Site:
    """The application in front of a played daemon; see `Gateway`, and `app` there.

    Its keys are read before each request.
    """

    def __init__(
        self,
        daemon: PlayedDaemon,
        host: str = "127.0.0.1",
        keys: Keys | None = None,
        names: Sequence[tuple[str, str]] = (),
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        *,
        refuses_unread: bool = False,
        adds_models: bool = False,
    ) -> None:
        self.daemon = daemon
        rules = GatewayRules(
            names=dict(names),
            hosts=tuple(hosts),
            origins=tuple(origins),
            refuses_unread=refuses_unread,
            adds_models=adds_models,
        )
        self.gateway = Gateway(lambda: cast(AsyncClient, daemon), rules)
        self._keys = keys or Keys()
        self._app: Guard = self.gateway.app(host, self._keys)

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str | tuple[str, ...]] | None = None,
        query: str = "",
        until: Awaitable[object] | None = None,
        on_sent: Callable[[Response], None] = lambda response: None,
        has_life: bool = True,
        is_whole: bool = True,
    ) -> Response:
        """Send one request.

        Args:
            method, path: of it; the path without its query.
            body: bytes, or what becomes JSON; None for none.
            headers: those that differ from what a client sends; an empty one is left out, and one
                with several values comes as often.
            query: of the address.
            until: the client leaves when this is over; None: it stays.
            on_sent: called after each message of the application.
            has_life: whether the application lives for this request only, and not as long as a
                block of `life`.
            is_whole: whether all of the body comes.
        """
        self._keys.look()
        data = _bytes_of(body)
        usual = {"host": "localhost:8484", "content-type": "application/json"}
        given = [
            (name.encode(), value.encode("latin-1"))
            for name, values in {**usual, **(headers or {})}.items()
            for value in ((values,) if isinstance(values, str) else values)
            if value
        ]
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "root_path": "", "scheme": "http", "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8484),
            "headers": given,
        }  # fmt: skip
        pieces = [{"type": "http.request", "body": data, "more_body": not is_whole}]
        response = Response(asked=self.daemon.asked)

        async def receive() -> MutableMapping[str, Any]:
            if pieces:
                return pieces.pop()
            await (until if until is not None else asyncio.Event().wait())
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                response.body += message.get("body", b"")
                response.is_whole = not message.get("more_body", False)
            on_sent(response)

        def write(data: bytes) -> None:
            assert response.status, "the head is sent before any piece"
            response.body += data
            on_sent(response)

        scope["extensions"] = {WRITE: write}
        async with self.life() if has_life else nullcontext():
            await self._app(scope, receive, send)
        return response

    def routes(self) -> list[tuple[str, str]]:
        """Return every method and path that the application takes, their parameters filled in."""
        routed: Any = self._app._app
        return [
            (method, re.sub(r"{[^}]*}", "m", route.path))
            for route in routed.routes
            for method in sorted(route.methods)
        ]

    def life(self) -> _Lifespan:
        """Return a context in which the application lives."""
        return _Lifespan(self._app)


def _bytes_of(body: Any) -> bytes:
    """Return a body as it is sent: None for none, bytes as they are, all else as JSON."""
    if isinstance(body, bytes):
        return body
    return b"" if body is None else json.dumps(body).encode()


class _Lifespan:
    """The application between its start and its end."""

    def __init__(self, app: Guard) -> None:
        self._app = app
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._said: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(
            self._app({"type": "lifespan", "state": {}}, self._messages.get, self._said.put)
        )
        await self._messages.put({"type": "lifespan.startup"})
        assert (await self._said.get())["type"] == "lifespan.startup.complete"

    async def __aexit__(self, *_: object) -> None:
        await self._messages.put({"type": "lifespan.shutdown"})
        await self._task


def post(path: str, *items: Item, count: int = 1, **fields: Any) -> Response:
    """Return the response to a request whose answers go so; whole, unless `stream` is true.

    Args:
        path: of an API in `LEAST`.
        items: of each answer; none: a piece and its end.
        count: of answers.
        fields: of the body besides the least.
    """
    daemon = PlayedDaemon(*[list(items) or said("a")] * count)
    daemon.presets = {"warm": {"temperature": 0.8}}
    body = {"model": "m", "stream": False, **LEAST[path], **fields}
    return asyncio.run(Site(daemon).ask("POST", path, body))


def refused(code: str, **detail: Any) -> RequestError:
    """Return an error of the daemon."""
    return RequestError(ErrorCode(code), f"it is {code}", detail=detail)
