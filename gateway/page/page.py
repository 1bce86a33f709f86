"""The page's routes: the page itself, its files, and what it asks for again and again.

It asks once a second instead of following events, so it needs no state for a lost connection.
There is no cookie, which a browser would send for pages of other sites, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import cache
from html import escape
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mlxsup.protocol.folders import log_path
from mlxsup.protocol.states import Priority
from mlxsup.store.hub_search import SearchError, find_repositories
from mlxsup.store.local_models import find_models
from mlxsup.store.sources import EXAMPLE

from .. import limits
from ..body import read_json
from ..daemon import Daemon, answered
from ..failure import Failure, bad_field, check_choice
from ..fields import FOR_EVER
from ..keys import CALLER, Caller
from ..operator import MOST_CHARACTERS, Operator
from .history import History
from .logs import OWN_LOGS, end_of, lines_of, read_part
from .recorded import Recorder

FILES = Path(__file__).parent / "files"
INDEX = "index.html"
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
TOKEN_MARK = "{token}"
RUNNING = "Ollama is running"

HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""No page of another site may show this one in a frame, and none of its files is from elsewhere."""

MOST_READERS = 2
"""Threads that read files for the page at once: a disk that hangs takes no more of them."""

FIND_LIMIT_S = 20.0
"""For the models on this machine, which may be on several disks."""

MOST_FOUND = 500

REQUEST_ACTIONS = ("cancel", "pause", "resume", "prioritize")

OPEN_KEYS = (
    "name", "aliases", "state", "progress", "retry_in_s", "context_length", "generation", "since_s",
    "running", "queued", "tokens_per_s", "batching", "capabilities",
)  # fmt: skip
"""What a key that is no operator's gets to know of a model."""

Value = TypeVar("Value")


class Found(NamedTuple):
    """A model on this machine that the daemon does not serve.

    Attributes:
        reference: its repository, or its folder: what the daemon gets.
        told: to the page, which names the model by `key` and never by a path.
    """

    reference: str
    told: dict[str, Any]


@cache
def _index() -> str:
    return (FILES / INDEX).read_text("utf-8")


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Return the bytes and the type of each file that the page loads, by name."""
    files = sorted(file for file in FILES.iterdir() if file.suffix in TYPES)
    return {file.name: (file.read_bytes(), TYPES[file.suffix]) for file in files}


class Page:
    """The routes of the page for browsers."""

    def __init__(self, daemon: Daemon, operator: Operator) -> None:
        self._operator = operator
        self._daemon = daemon
        self._history = History()
        self._recorder: Recorder | None = None
        self._readers = asyncio.Semaphore(MOST_READERS)
        self._search = asyncio.Lock()
        self._page = _index().replace(TOKEN_MARK, escape(operator.token))
        self._files = _files()

    @property
    def open_paths(self) -> list[str]:
        """Return the paths that a browser must get before its user can type a key."""
        return ["/", *(f"/page/{name}" for name in self._files)]

    def routes(self) -> list[Route]:
        """Return the routes of the page."""
        return [
            Route("/", self.index, methods=["GET"]),
            Route("/page/state", self.state, methods=["GET"]),
            Route("/page/requests", self.requests, methods=["GET"]),
            Route("/page/crashes", self.crashes, methods=["GET"]),
            Route("/page/history", self.history, methods=["GET"]),
            Route("/page/found", self.found, methods=["GET"]),
            Route("/page/search", self.search, methods=["GET"]),
            Route("/page/settings", self.settings, methods=["GET"]),
            Route("/page/log", self.log, methods=["GET"]),
            Route("/page/log/process", self.log_of_process, methods=["GET"]),
            Route("/page/log/file", self.log_file, methods=["GET"]),
            *(
                Route(f"/page/requests/{action}", self.act, methods=["POST"])
                for action in REQUEST_ACTIONS
            ),
            Route("/page/models/add", self.add, methods=["POST"]),
            Route("/page/models/remove", self.remove, methods=["POST"]),
            Route("/page/models/keep", self.keep, methods=["POST"]),
            Route("/page/models/configure", self.configure, methods=["POST"]),
            Route("/page/{name}", self.file, methods=["GET"]),
        ]

    # ------------------------------------------------------------ the page

    async def index(self, request: Request) -> Response:
        """`GET /`: the page for browsers; programs look for Ollama there."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(RUNNING, headers=HEADERS)
        return Response(self._page, media_type="text/html", headers=HEADERS)

    async def file(self, request: Request) -> Response:
        """`GET /page/NAME`: a script or a style sheet."""
        found = self._files.get(request.path_params["name"])
        if found is None:
            names = ", ".join(self._files)
            message = f"no file of the page is called so; there are {names}"
            raise Failure(HTTPStatus.NOT_FOUND, message, code="unknown_path")
        data, kind = found
        return Response(data, headers={**HEADERS, "content-type": kind})

    # ------------------------------------------------------------ what it shows

    async def state(self, request: Request) -> Response:
        """`GET /page/state`: the daemon's status, and `missing`: why a caller with a key that is no
        operator's gets less of it; empty for operators."""
        refusal = self._operator.refusal(request)
        caller: Caller = request.scope[CALLER]
        if refusal is not None and not caller.has_key:
            raise refusal
        status = await self._daemon.status()
        self._history.take(status)
        if refusal is not None:
            rows = [{key: row.get(key) for key in OPEN_KEYS} for row in status["models"]]
            status = {"version": status.get("version"), "models": rows}
        return JSONResponse({"status": status, "missing": refusal.message if refusal else ""})

    async def requests(self, request: Request) -> Response:
        """`GET /page/requests`: those that are open, and the last that have ended."""
        self._operator.check(request)
        recorder = self._recorder_of(await self._daemon.status())
        listed = await answered(self._daemon.client.requests())
        return JSONResponse({**listed, "ended": await self._read(recorder.ended)})

    async def crashes(self, request: Request) -> Response:
        """`GET /page/crashes`: the last ones, and why."""
        self._operator.check(request)
        recorder = self._recorder_of(await self._daemon.status())
        return JSONResponse({"crashes": await self._read(recorder.crashes)})

    async def history(self, request: Request) -> Response:
        """`GET /page/history?after=SECONDS`: samples of the last hour."""
        self._operator.check(request)
        text = request.query_params.get("after", "0")
        try:
            after = float(text[:32])
        except ValueError:
            raise bad_field("after", "after must be seconds since the epoch") from None
        return Response(self._history.after(after), media_type="application/json")

    async def found(self, request: Request) -> Response:
        """`GET /page/found`: models on this machine that the daemon does not serve yet."""
        self._operator.check(request)
        found = await self._find()
        return JSONResponse({"models": [one.told for one in found], "example": EXAMPLE})

    async def search(self, request: Request) -> Response:
        """`GET /page/search?words=WORDS`: models that the hub finds, those with most downloads
        first."""
        self._operator.check(request)
        words = request.query_params.get("words", "").strip()
        if not 0 < len(words) <= MOST_CHARACTERS or not words.isprintable():
            raise bad_field("words", f"words must be text of 1 to {MOST_CHARACTERS} characters")
        try:
            async with self._search:
                found = await find_repositories(words)
        except SearchError as error:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            message = "; ".join(filter(None, [error.message, error.hint]))
            raise Failure(status, message, code="hub_unavailable", is_retryable=True) from None
        return JSONResponse({"models": [asdict(one) for one in found]})

    async def settings(self, request: Request) -> Response:
        """`GET /page/settings?model=NAME`: what the configuration says about a model."""
        self._operator.check(request)
        name = request.query_params.get("model", "")
        return JSONResponse(await self._settings(name))

    async def _settings(self, name: str) -> dict[str, Any]:
        if not 0 < len(name) <= MOST_CHARACTERS:
            raise bad_field("model", "model must be the name of a model")
        return await answered(self._daemon.client.settings(name), limits.CHANGE_LIMIT_S)

    async def log(self, request: Request) -> Response:
        """`GET /page/log?name=NAME&cursor=CURSOR`: lines of a log; see `logs.read_part`."""
        path = await self._log_path(request)
        part = await self._read(read_part, path, request.query_params.get("cursor", "")[:64])
        return JSONResponse({**part._asdict(), "path": str(path)})

    async def log_file(self, request: Request) -> Response:
        """`GET /page/log/file?name=NAME`: the end of a log, to be kept."""
        data = await self._read(end_of, await self._log_path(request))
        return Response(data, media_type="text/plain; charset=utf-8", headers=HEADERS)

    async def log_of_process(self, request: Request) -> Response:
        """`GET /page/log/process?name=NAME&generation=N`: the last lines of one process."""
        path, text = await self._log_path(request), request.query_params.get("generation", "")
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise bad_field("generation", "generation must be an integer of 1 or more")
        return JSONResponse({"lines": await self._read(lines_of, path, int(text))})

    # ------------------------------------------------------------ what it changes

    async def act(self, request: Request) -> Response:
        """`POST /page/requests/cancel`, `pause`, `resume` and `prioritize`."""
        action = request.url.path.rpartition("/")[2]
        more = ("priority",) if action == "prioritize" else ()
        body = await self._operator.asked(request, "request", *more)
        named, client = body["request"], self._daemon.client
        if action == "prioritize":
            words = [one.value for one in Priority]
            priority = check_choice("priority", words, body["priority"])
            return JSONResponse(await answered(client.prioritize(named, priority)))
        calls = {"cancel": client.cancel, "pause": client.pause, "resume": client.resume}
        return JSONResponse(await answered(calls[action](named)))

    async def add(self, request: Request) -> Response:
        """`POST /page/models/add`: serve one more model, which `found` has listed under this key,
        or whose repository, address or name is `model`.
        """
        body = await self._operator.asked(request, optional=("model", "found"))
        if len(body) != 1:
            raise bad_field("model", "exactly one of model and found is needed")
        if "found" in body:
            matches = (one for one in await self._find() if one.told["key"] == body["found"])
            if (found := next(matches, None)) is None:
                raise bad_field("found", "the model is not there any longer: look again")
            named = found.reference
        else:
            named = body["model"].strip()
            if not named or not named.isprintable() or named.startswith(("/", "~", ".")):
                raise bad_field("model", "name a model by OWNER/NAME or its address, not by a path")
        call = self._daemon.client.add(named)
        return JSONResponse(await answered(call, limits.CHANGE_LIMIT_S))

    async def remove(self, request: Request) -> Response:
        """`POST /page/models/remove`: take a model out of the configuration; its files stay."""
        body = await self._operator.asked(request, "model")
        call = self._daemon.client.remove(body["model"])
        return JSONResponse(await answered(call, limits.CHANGE_LIMIT_S))

    async def keep(self, request: Request) -> Response:
        """`POST /page/models/keep`: a model that is loaded stays, however idle it is."""
        body = await self._operator.asked(request, "model")
        call = self._daemon.client.load(body["model"], keep_alive=FOR_EVER)
        return JSONResponse(await answered(call))

    async def configure(self, request: Request) -> Response:
        """`POST /page/models/configure`: change settings of a model, those that `settings` lists;
        null takes one out.
        """
        self._operator.check(request)
        body = await read_json(request)
        if unknown := sorted(body.keys() - {"model", "changes"}):
            raise bad_field(unknown[0][:64], f"unknown field {unknown[0][:64]!r}")
        model, changes = body.get("model"), body.get("changes")
        if not isinstance(model, str):
            raise bad_field("model", "model must be the name of a model")
        if not isinstance(changes, dict) or not changes:
            raise bad_field("changes", "changes must be an object of texts by key")
        known = {one["key"] for one in (await self._settings(model))["settings"]}
        for key, text in changes.items():
            if key not in known:  # others, such as a folder, are for the command line
                raise bad_field("changes", f"{key[:128]!r} cannot be set on the page")
            if text is not None and not (isinstance(text, str) and len(text) <= MOST_CHARACTERS):
                message = f"{key} must be text of at most {MOST_CHARACTERS} characters, or null"
                raise bad_field("changes", message)
        call = self._daemon.client.configure(changes)
        return JSONResponse(await answered(call, limits.CHANGE_LIMIT_S))

    async def _log_path(self, request: Request) -> Path:
        """Return the log that an operator asks for by its name."""
        self._operator.check(request)
        name, status = request.query_params.get("name", ""), await self._daemon.status()
        if name not in [*OWN_LOGS, *(row["name"] for row in status["models"])]:
            raise bad_field("name", f"name must be the name of a model, or {' or '.join(OWN_LOGS)}")
        return log_path(Path(status["log_dir"]), name)

    def _recorder_of(self, status: dict[str, Any]) -> Recorder:
        if self._recorder is None:  # a daemon keeps its folder of logs, and this gateway its daemon
            self._recorder = Recorder(Path(status["log_dir"]))
        return self._recorder

    async def _find(self) -> list[Found]:
        """Return the models on this machine, as they are now."""
        status = await self._daemon.status()
        folders = [row["folder"] for row in status["models"] if row["folder"]]
        return await self._read(find, folders, limit_s=FIND_LIMIT_S)

    async def _read(
        self, read: Callable[..., Value], *arguments: Any, limit_s: float | None = None
    ) -> Value:
        """Return what a function reads in a thread."""
        try:
            async with asyncio.timeout(limit_s or limits.STATUS_LIMIT_S):
                await self._readers.acquire()
                reading = asyncio.create_task(asyncio.to_thread(read, *arguments))
                reading.add_done_callback(self._on_read)
                return await asyncio.shield(reading)
        except TimeoutError:
            message = "the disk does not answer"
        except OSError as error:
            message = f"the disk cannot be read: {error.strerror or error}"
        raise Failure(HTTPStatus.SERVICE_UNAVAILABLE, message, code="unreadable", is_retryable=True)

    def _on_read(self, reading: asyncio.Task[Any]) -> None:
        self._readers.release()
        if not reading.cancelled():
            reading.exception()  # it may come when nothing waits for it any longer


def find(folders: Collection[str]) -> list[Found]:
    """Return the models on this machine that are none of the daemon's; reads disks."""
    served = {os.path.realpath(folder) for folder in folders}
    models = [one for one in find_models() if os.path.realpath(one.path) not in served]
    return [
        Found(
            one.repo or str(one.path),
            {
                "key": hashlib.sha256(os.fsencode(one.path)).hexdigest()[:32],
                "title": one.title,
                "origin": one.origin,
                "size_bytes": one.description.size_bytes,
                "quantization": one.description.quantization,
                "context_length": one.description.context_length,
                "problem": one.problem.text if one.problem is not None else "",
            },
        )
        for one in models[:MOST_FOUND]
    ]
