"""The routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxsup.client import AsyncClient, ConnectionLost, RequestError

from . import limits
from .answers import OpenAnswers, answer
from .body import Disconnected, read_json
from .failure import Failure
from .guard import Guard
from .openai.chunks import ChatShape, CompletionShape
from .openai.errors import body_of, failure_of, headers_of
from .openai.models import model_list, one_model, readiness
from .openai.requests import read_chat, read_completion

MISSING = {
    "/v1/embeddings": "embeddings",
    "/v1/audio/{rest:path}": "audio",
    "/v1/images/{rest:path}": "images",
    "/v1/moderations": "moderation",
}
"""Parts of the API that no model of a daemon can answer yet."""


class Gateway:
    """The routes, and what they share.

    Attributes:
        open_answers: what is being answered.

    Args:
        connect: makes the client of the daemon, when the loop runs.
    """

    def __init__(self, connect: Callable[[], AsyncClient]) -> None:
        self.open_answers = OpenAnswers()
        self._connect = connect
        self._created = int(time.time())
        self._client: AsyncClient | None = None

    def app(self, host: str) -> Guard:
        """The whole application.

        Args:
            host: the address that it listens at.
        """
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completion, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            *(
                Route(path, _missing(what), methods=["GET", "POST"])
                for path, what in MISSING.items()
            ),
        ]
        handlers: dict[Any, Any] = {
            HTTPException: _on_http_exception,
            Failure: _on_failure,
            Disconnected: _on_disconnected,
            Exception: _on_bug,
        }
        routed = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)
        routed.router.redirect_slashes = False
        return Guard(routed, [f"[{host}]" if ":" in host else host])

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self._connect() as self._client:
            yield

    # ------------------------------------------------------------ routes

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        ask = read_chat(await read_json(request))

        def shape(name: str, created: int) -> ChatShape:
            return ChatShape(f"chatcmpl-{name}", created, ask.model, ask.n)

        return await answer(request, self._daemon, ask, self.open_answers, shape)

    async def completion(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        ask = read_completion(await read_json(request))

        def shape(name: str, created: int) -> CompletionShape:
            return CompletionShape(f"cmpl-{name}", created, ask.model, ask.n)

        return await answer(request, self._daemon, ask, self.open_answers, shape)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse(model_list(await self._status(), self._created))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{id}`."""
        name = request.path_params["name"]
        return JSONResponse(one_model(await self._status(), name, self._created))

    async def health(self, request: Request) -> Response:
        """`GET /health`: the gateway answers, whatever the daemon does."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: the daemon answers, and has a model that could."""
        is_ready, states = readiness(await self._status())
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        word = "ready" if is_ready else "every model has failed"
        return JSONResponse({"status": word, "models": states}, status)

    # ------------------------------------------------------------ inside

    @property
    def _daemon(self) -> AsyncClient:
        assert self._client is not None, "the lifespan has begun before any request"
        return self._client

    async def _status(self) -> dict[str, Any]:
        """The daemon's status.

        Raises:
            Failure: it does not answer.
        """
        try:
            async with asyncio.timeout(limits.STATUS_LIMIT_S):
                return await self._daemon.status()
        except (RequestError, ConnectionLost) as error:
            raise failure_of(error) from None
        except TimeoutError:
            raise Failure(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the daemon did not answer within {limits.STATUS_LIMIT_S:g} s",
                code="daemon_silent",
                is_retryable=True,
                retry_after_s=1.0,
            ) from None


def _missing(what: str) -> Any:
    """A route that says what is not there."""

    async def say(request: Request) -> NoReturn:
        message = f"mlxsup serves language models only: {what} are not there yet"
        raise Failure(
            HTTPStatus.NOT_IMPLEMENTED, message, code="not_implemented", is_retryable=False
        )

    return say


async def _on_failure(request: Request, failure: Failure) -> Response:
    return JSONResponse(body_of(failure), failure.status, headers_of(failure))


async def _on_disconnected(request: Request, _: Disconnected) -> Response:
    """Nobody reads it."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _on_bug(request: Request, _: Exception) -> Response:
    """`Guard` logs the exception, which Starlette raises again after this answer."""
    failure = Failure(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "internal error of the gateway; see `mlxsup logs mlxsup-gateway`",
        code="internal",
        is_retryable=False,
    )
    return await _on_failure(request, failure)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """What Starlette refuses by itself: unknown paths, and methods that a path does not take."""
    path = f"{request.method} {request.url.path[:200]}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"{path}: no such path; see docs/gateway.md"
    else:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "others").split(", ")))
        message = f"{path}: this path takes {allowed}"
    words = {404: "unknown_path", 405: "method_not_allowed"}
    failure = Failure(
        error.status_code,
        message,
        code=words.get(error.status_code, "http_error"),
        headers=dict(error.headers or {}),
    )
    return await _on_failure(request, failure)
