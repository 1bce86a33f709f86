"""The page's routes: the page itself, its files, and what it asks for again and again.

It asks once a second instead of following events, so it needs no state for a lost connection, and
it keeps its own curves. There is no cookie, which a browser would send for pages of other sites,
too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from html import escape
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from .. import limits
from ..background import background
from ..changes import Changes
from ..failure import Failure, bad_field
from ..operator import Operator
from .crashes import Crashes, lines_of

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

logger = logging.getLogger(__name__)

AskStatus = Callable[[], Awaitable[dict[str, Any]]]
"""Asks the daemon for its status; raises `Failure`."""


class Page:
    """What browsers get.

    Args:
        status: of the daemon.
        operator: checks who asks for more than the page.
    """

    def __init__(self, status: AskStatus, operator: Operator) -> None:
        self._status = status
        self._operator = operator
        self._crashes = Crashes()
        page = (FILES / INDEX).read_text("utf-8")
        self._page = page.replace(TOKEN_MARK, escape(operator.token))
        self._files = {
            file.name: (file.read_bytes(), TYPES[file.suffix])
            for file in sorted(FILES.iterdir())
            if file.suffix in TYPES
        }

    @property
    def open_paths(self) -> list[str]:
        """What a browser must get before anybody can type a key."""
        return ["/", *(f"/page/{name}" for name in self._files)]

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/", self.index, methods=["GET"]),
            Route("/page/state", self.state, methods=["GET"]),
            Route("/page/log", self.log, methods=["GET"]),
            Route("/page/{name}", self.file, methods=["GET"]),
        ]

    def watching(self, changes: Changes) -> AbstractAsyncContextManager[None]:
        """Notes the crashes of workers in the meantime, also those that no page sees.

        Args:
            changes: of all models.
        """
        return background(self._watch(changes), lost="crashes are no longer noted")

    # ------------------------------------------------------------ routes

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

    async def state(self, request: Request) -> Response:
        """`GET /page/state`: the daemon's status, and the last crashes."""
        self._operator.check(request)
        status = await self._status()
        self._crashes.observe(status)
        crashes = [asdict(crash) for crash in self._crashes.latest()]
        return JSONResponse({"status": status, "crashes": crashes})

    async def log(self, request: Request) -> Response:
        """`GET /page/log?model=NAME&generation=N`: the last lines of one process."""
        self._operator.check(request)
        model, text = (request.query_params.get(key, "") for key in ("model", "generation"))
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        if not is_number:
            raise bad_field("generation", "generation takes a number from 1 on")
        status = await self._status()
        if model not in [row["name"] for row in status["models"]]:
            raise bad_field("model", "model takes the name of a model; GET /v1/models lists them")
        lines = await asyncio.to_thread(lines_of, Path(status["log_dir"]), model, int(text))
        return JSONResponse({"model": model, "generation": int(text), "lines": lines})

    # ------------------------------------------------------------ inside

    async def _watch(self, changes: Changes) -> None:
        while True:
            try:
                with changes.follow() as follower:
                    await self._look()
                    async for _ in follower:
                        await self._look()
            except Failure as failure:
                logger.info("not watching for crashes: %s", failure.message)
            await asyncio.sleep(limits.FOLLOW_AGAIN_S)

    async def _look(self) -> None:
        """Asks for the status; if the daemon is too busy to answer, the next change asks again."""
        try:
            self._crashes.observe(await self._status())
        except Failure as failure:
            logger.info("did not look for crashes: %s", failure.message)
