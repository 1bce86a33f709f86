"""The routes."""

from __future__ import annotations

import difflib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxsup.client import AsyncClient
from mlxsup.protocol.gateway import GatewayRules, is_loopback
from mlxsup.protocol.version import VERSION

from . import lm_studio, openapi
from .adding import Adding
from .answers import Answer, MakeShape, OpenAnswers, answer, read_whole
from .anthropic import events as anthropic
from .body import Bodies, Disconnected
from .changes import Changes
from .converter import Api
from .daemon import Daemon
from .descriptions import Descriptions
from .errors import draining, error_response
from .failure import Failure, bad_field
from .guard import Guard
from .headers import is_anthropic
from .keys import CALLER, Caller, Keys
from .metrics import CONTENT_TYPE
from .names import row_of
from .ollama.routes import Ollama
from .openai.chunks import ChatShape, CompletionShape
from .openai.models import check_ready, model_list, one_model, readiness
from .operator import Operator
from .page.page import Page
from .responses.events import ResponseShape
from .responses.kept import KeptResponses, list_items
from .tokens import CountShape, PromptShape, TokensShape
from .vectors.answers import VectorShape

_NO_CONVERSATIONS = (
    "conversations are not kept here: continue a response with `previous_response_id`"
)
_ONLY_TEXT = "mlxsup serves language models only: {} not there yet"
_NOT_OVER_HTTP = "this is not available over HTTP: {}"
_NO_SCORES = "texts are not scored in pairs: POST /v1/rerank ranks documents for a query"

MISSING = {
    "/v1/audio/{rest:path}": _ONLY_TEXT.format("audio is"),
    "/v1/images/{rest:path}": _ONLY_TEXT.format("images are"),
    "/v1/score": _NO_SCORES,
    "/v1/moderations": _ONLY_TEXT.format("moderation is"),
    "/v1/responses/compact": "no input is compacted here: send fewer items, or a summary of them",
    "/v1/responses/{id}/cancel": (
        "no response runs in the background here: end the connection of one to cancel it"
    ),
    "/v1/conversations": _NO_CONVERSATIONS,
    "/v1/conversations/{rest:path}": _NO_CONVERSATIONS,
    "/api/push": _NOT_OVER_HTTP.format("nothing is published from here"),
    "/api/create": _NOT_OVER_HTTP.format(
        "`mlxsup convert SOURCE` makes a model of a GGUF file or of another model"
    ),
    "/api/blobs/{digest}": _NOT_OVER_HTTP.format(
        "`mlxsup convert SOURCE` makes a model of a GGUF file"
    ),
    "/api/copy": _NOT_OVER_HTTP.format(
        "`mlxsup convert SOURCE TARGET` writes a model to a new folder"
    ),
}
"""Parts of the APIs that are not there, and what is said instead."""

VECTOR_PATHS = {
    "/v1/embeddings": Api.EMBEDDINGS,
    "/v1/rerank": Api.RERANK,
    "/v2/rerank": Api.RERANK,
    "/rerank": Api.RERANK,
    "/api/embed": Api.OLLAMA_EMBED,
    "/api/embeddings": Api.OLLAMA_EMBEDDING,
}


CLOSE = 0.8
"""The least likeness to a route, from 0 to 1, of a path that counts as mistyped."""


class Gateway:
    """The routes, and what they share.

    Attributes:
        daemon: that answers.
        open_answers: what is being answered.
        operator: what only operators may do.
        kept: the responses that can be continued.

    Args:
        connect: makes the client of the daemon, when the loop runs.
        rules: the configuration's.
    """

    def __init__(self, connect: Callable[[], AsyncClient], rules: GatewayRules) -> None:
        self.daemon = Daemon(list(rules.names.items()))
        self.open_answers = OpenAnswers(self.daemon)
        self._adding = Adding(self.daemon, is_automatic=rules.adds_models)
        self.kept = KeptResponses()
        self._bodies = Bodies(
            self.daemon, self._adding, self.kept, refuses_unread=rules.refuses_unread
        )
        self._rules = rules
        self._connect = connect
        self._created = int(time.time())
        self.operator = Operator(self.daemon)
        self._changes = Changes(self.daemon.meter.changed, self.open_answers)
        self._page = Page(self.daemon, self.operator)
        self._descriptions = Descriptions(self.daemon)
        self._ollama = Ollama(
            self._bodies, self._descriptions, self.open_answers, self._adding, self.operator
        )

    def app(self, host: str, keys: Keys) -> Guard:
        """Return the whole application."""
        input_count = partial(CountShape, object="response.input_tokens")
        routes = [
            self._answered("/v1/chat/completions", Api.CHAT, ChatShape),
            self._answered("/v1/completions", Api.COMPLETION, CompletionShape),
            Route("/v1/responses", self.response, methods=["POST"]),
            self._answered("/v1/responses/input_tokens", Api.RESPONSE_COUNT, input_count),
            Route("/v1/responses/{id}", self.kept_response, methods=["GET"]),
            Route("/v1/responses/{id}", self.forget_response, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
            self._answered("/v1/messages", Api.MESSAGE, anthropic.MessageShape),
            self._answered("/v1/messages/count_tokens", Api.COUNT, CountShape),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            self._answered("/detokenize", Api.DETOKENIZE, PromptShape),
            self._answered("/apply-template", Api.TEMPLATE, PromptShape),
            *(self._answered(path, api, VectorShape) for path, api in VECTOR_PATHS.items()),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/models", self.models, methods=["GET"]),
            *self.operator.routes(),
            *self._changes.routes(),
            *self._page.routes(),
            *self._ollama.routes(),
            *lm_studio.routes(self._descriptions),
            *openapi.routes(),
            *(
                Route(path, _missing(sentence), methods=["GET", "POST"])
                for path, sentence in MISSING.items()
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
        own = f"[{host}]" if ":" in host else host
        return Guard(
            routed,
            [own, *self._rules.hosts] if is_loopback(host) else None,
            keys,
            self.daemon.meter,
            open_paths=[*self._page.open_paths, *openapi.PATHS],
            origins=self._rules.origins,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with (
            self.daemon.connected(self._connect()),
            self._changes.watching(self.daemon.client),
        ):
            try:
                yield
            finally:
                await self._bodies.close()

    # ------------------------------------------------------------ routes

    async def answer(self, request: Request, *, api: Api, shape: MakeShape) -> Response:
        """Answer a request in the form of its API; see `answers.answer`."""
        ask, sent = await self._bodies.read(request, api)
        return await answer(request, self.open_answers, ask, sent, shape)

    async def response(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        shape = partial(ResponseShape, keep=partial(self.kept.keep, _key_of(request)))
        return await self.answer(request, api=Api.RESPONSE, shape=shape)

    async def kept_response(self, request: Request) -> Response:
        """`GET /v1/responses/{id}`."""
        if request.query_params.get("stream", "false") != "false":
            raise bad_field("stream", "stream: a finished response cannot be streamed")
        kept = self.kept.find(_key_of(request), request.path_params["id"])
        return Response(kept.json, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """`GET /v1/responses/{id}/input_items`."""
        kept = self.kept.find(_key_of(request), request.path_params["id"])
        page = list_items(kept.inputs, request.query_params)
        return Response(page, media_type="application/json")

    async def forget_response(self, request: Request) -> Response:
        """`DELETE /v1/responses/{id}`."""
        id = request.path_params["id"]
        self.kept.remove(_key_of(request), id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        ask, sent = await self._bodies.read(request, Api.TOKENIZE)
        whole, shape = Answer(self.open_answers, ask, sent), TokensShape()
        results, headers = await read_whole(request, ask, whole, shape)
        row = row_of(await self.daemon.status(), ask.target or ask.model)
        shape.context_length = row["context_length"] if row is not None else None
        return Response(shape.body(results), headers=headers, media_type="application/json")

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`, and the same at `GET /models`."""
        listed = model_list(await self.daemon.status(), self._created)
        if is_anthropic(request.scope):
            listed = anthropic.model_list(listed)
        return JSONResponse(listed)

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{id}`."""
        name = request.path_params["name"]
        status, meant = await self.daemon.status(), await self.daemon.meant(name)
        listed = one_model(status, name, meant, self._created)
        if is_anthropic(request.scope):
            listed = anthropic.one_model(listed)
        return JSONResponse(listed)

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return JSONResponse({"version": VERSION})

    async def health(self, request: Request) -> Response:
        """`GET /health`: the gateway answers, whatever the daemon does."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: the daemon answers, does not end, and has a model that could; with
        `?model=`, that one answers at once."""
        status = await self.daemon.status()
        if status["stopping"]:
            raise draining()
        if name := request.query_params.get("model", ""):
            ready = check_ready(status, name, await self.daemon.meant(name))
            return JSONResponse({"status": "ready", "models": {ready: "READY"}})
        is_ready, states = readiness(status)
        code = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        problem = "every model has failed" if states else "no model is configured"
        word = "ready" if is_ready else problem
        return JSONResponse({"status": word, "models": states}, code)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`; also while the daemon does not answer."""
        try:
            status = await self.daemon.status()
        except Failure:
            status = None
        return Response(self.daemon.meter.page(status), media_type=CONTENT_TYPE)

    def _answered(self, path: str, api: Api, shape: MakeShape) -> Route:
        return Route(path, partial(self.answer, api=api, shape=shape), methods=["POST"])


def _key_of(request: Request) -> str:
    caller: Caller = request.scope[CALLER]
    return caller.key


def _missing(message: str) -> Any:
    """Return a route that says what is not there."""

    async def say(request: Request) -> NoReturn:
        raise Failure(
            HTTPStatus.NOT_IMPLEMENTED, message, code="not_implemented", is_retryable=False
        )

    return say


async def _on_failure(request: Request, failure: Failure) -> Response:
    return error_response(request.scope, failure)


async def _on_disconnected(request: Request, _: Disconnected) -> None:
    """Send no answer, as no client reads it, and count none."""


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
    """Return the refusal of an unknown path, or of a method that a path does not take."""
    path = f"{request.method} {request.url.path[:200]}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"{path}: no such path; {_advice_on(request)}"
    else:
        allowed = sorted((error.headers or {}).get("Allow", "another one").split(", "))
        message = f"{path}: the method must be {' or '.join(allowed)}"
    words = {404: "unknown_path", 405: "method_not_allowed"}
    failure = Failure(
        error.status_code,
        message,
        code=words.get(error.status_code, "http_error"),
        headers=dict(error.headers or {}),
    )
    return await _on_failure(request, failure)


def _advice_on(request: Request) -> str:
    """Return which path may have been meant: `/v1` is easily forgotten, or written twice."""
    asked = request.url.path[:200]
    routes = (route.path for route in request.app.routes if isinstance(route, Route))
    known = [
        path
        for path in routes
        if path not in ("/", *MISSING) and not path.startswith("/page/") and "{" not in path
    ]
    parts = [path for path in known if path.endswith(asked) or asked.endswith(path)]
    close = difflib.get_close_matches(asked, parts, n=1, cutoff=0)
    close = close or difflib.get_close_matches(asked, known, n=1, cutoff=CLOSE)
    if close:
        return f"did you mean {close[0]}?"
    return (
        "OpenAI's API is at /v1/chat/completions, Anthropic's at /v1/messages, Ollama's at"
        " /api/chat"
    )
