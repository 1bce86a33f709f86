"""Who may change what the daemon serves over HTTP, and how a change is asked for.

Either an operator's key, or, where no keys are needed, the token that a page of this gateway
contains: only pages from here can read it, so whoever sends it back is one of them. Each gateway
makes its own.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .body import read_json
from .daemon import Daemon, answered
from .failure import Failure, bad_field
from .keys import CALLER, Caller, operator_needed

TOKEN_HEADER = "x-mlxsup-token"

ACTIONS = ("load", "unload", "restart")

MOST_CHARACTERS = 512
"""Of a field of a request."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Operator:
    """The actions, and the check that comes before them.

    Attributes:
        token: what a page has to send back.
    """

    def __init__(self, daemon: Daemon) -> None:
        self.token = secrets.token_urlsafe(24)
        self._daemon = daemon
        # Accepted, and not over: at most one for each action and model.
        self._under_way: dict[tuple[str, str], asyncio.Task[dict[str, Any]]] = {}

    def routes(self) -> list[Route]:
        """`POST /models/load`, `unload` and `restart`."""
        return [Route(f"/models/{action}", self.act, methods=["POST"]) for action in ACTIONS]

    def check(self, request: Request) -> None:
        """Refuse who is not an operator."""
        if (refusal := self.refusal(request)) is not None:
            raise refusal

    def refusal(self, request: Request) -> Failure | None:
        """Return why a caller is no operator; None if it is one."""
        caller: Caller = request.scope[CALLER]
        if caller.is_operator:
            return None
        given = request.headers.get(TOKEN_HEADER, "")
        is_page = hmac.compare_digest(given.encode(), self.token.encode())
        if is_page and not caller.has_key:
            return None
        if caller.has_key:
            return operator_needed("this")
        # A first key would lock out every program that has none.
        return Failure(
            HTTPStatus.FORBIDDEN,
            "without API keys, only the page at / may do this; use the page or the command "
            "line (`mlxsup add`, `rm`, `load`, `unload`, `restart`)",
            code="operator_only",
        )

    async def asked(
        self, request: Request, *needed: str, optional: Sequence[str] = ()
    ) -> dict[str, str]:
        """Return the fields of an operator's request, each a text that is not empty.

        Raises:
            Failure: the caller is no operator, or a field is unknown, missing or no such text.
        """
        self.check(request)
        body = await read_json(request)
        for name in (*needed, *body):
            if name not in (*needed, *optional):
                raise bad_field(name[:64], f"unknown field {name[:64]!r}")
            value = body.get(name)
            if not isinstance(value, str) or not 0 < len(value) <= MOST_CHARACTERS:
                raise bad_field(name, f"{name} must be text of 1 to {MOST_CHARACTERS} characters")
        return body

    async def act(self, request: Request) -> Response:
        """Ask the daemon for the action; answer as soon as it is accepted or refused."""
        body = await self.asked(request, "model")
        action, model = request.url.path.rpartition("/")[2], body["model"]
        await self._accepted(action, model)
        return JSONResponse({"success": True, "model": model})

    async def _accepted(self, action: str, model: str) -> None:
        """Return once the daemon has accepted it: a load may take minutes, and `/models/sse` says
        how far it has come.
        """
        if (action, model) in self._under_way:
            return
        client = self._daemon.client
        calls = {"load": client.load, "unload": client.unload, "restart": client.restart}
        task = asyncio.create_task(calls[action](model))
        self._under_way[action, model] = task
        task.add_done_callback(lambda done: self._on_end(action, model, done))
        # The daemon answers in order: a refusal comes before the answer to what was asked later.
        ping = asyncio.create_task(client.ping())
        try:
            await answered(_first(task, ping))
        finally:
            ping.cancel()
            await asyncio.gather(ping, return_exceptions=True)

    def _on_end(self, action: str, model: str, done: asyncio.Task[dict[str, Any]]) -> None:
        del self._under_way[action, model]
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.info("%s failed model=%s error=%s", action, model, error)


async def _first(*tasks: asyncio.Task[T]) -> T:
    """Return what the first task returns that has ended."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return next(task for task in tasks if task.done()).result()
