"""The routes of Ollama's API."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, NoReturn

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxsup.client import AsyncClient
from mlxsup.protocol.states import State

from ..answers import OpenAnswers, answer
from ..bodies import Bodies
from ..body import read_json
from ..conversion import Api
from ..descriptions import Descriptions, find
from ..failure import Failure, bad_field
from ..names import Names, row_of
from ..openai.models import no_model
from .events import OllamaShape
from .models import loaded_list, shown, tag_list, version
from .requests import OllamaAsk

DELETE = "/api/delete"

COMMANDS = {
    "/api/pull": "`mlxsup pull REPO` downloads a model, and `mlxsup run REPO` serves it at once",
    "/api/push": "nothing is published from here",
    "/api/create": "`mlxsup convert SOURCE` makes a model of a GGUF file or of another model",
    "/api/blobs/{digest}": "`mlxsup convert SOURCE` makes a model of a GGUF file",
    "/api/copy": "`mlxsup convert SOURCE TARGET` writes a model to a new folder",
    DELETE: "`mlxsup rm REPO` removes a model's files, `mlxsup unload MODEL` its process",
}
"""Routes that are not served here, and the command for each."""

GONE = (State.STOPPED, State.FAILED)


class Ollama:
    """Ollama's API.

    Args:
        bodies: reads those of requests.
        names: of models.
        daemon: its client, once the application runs.
        status: asks it for its status; raises `Failure`.
        descriptions: of its models.
        open_answers: where answers are listed while they run.
    """

    def __init__(
        self,
        bodies: Bodies,
        names: Names,
        daemon: Callable[[], AsyncClient],
        status: Callable[[], Awaitable[Mapping[str, Any]]],
        descriptions: Descriptions,
        open_answers: OpenAnswers,
    ) -> None:
        self._bodies = bodies
        self._names = names
        self._daemon = daemon
        self._status = status
        self._descriptions = descriptions
        self._open_answers = open_answers
        self._began = time.time()

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/tags", self.tags, methods=["GET"]),
            Route("/api/ps", self.loaded, methods=["GET"]),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/version", self.version, methods=["GET"]),
            *(
                Route(path, _elsewhere(says), methods=["DELETE" if path == DELETE else "POST"])
                for path, says in COMMANDS.items()
            ),
        ]

    async def chat(self, request: Request) -> Response:
        """`POST /api/chat`."""
        return await self._answer(request, Api.OLLAMA_CHAT)

    async def generate(self, request: Request) -> Response:
        """`POST /api/generate`."""
        return await self._answer(request, Api.GENERATE)

    async def _answer(self, request: Request, api: Api) -> Response:
        ask, sent = await self._bodies.read(request, api)
        assert isinstance(ask, OllamaAsk)

        def shape(_: str, created: int) -> OllamaShape:
            return OllamaShape(ask, created)

        if ask.is_empty and ask.parameters.get("keep_alive") == 0:
            row = row_of(await self._status(), ask.target or ask.model)
            if row is not None and row["state"] in GONE:  # or it would be loaded first
                return JSONResponse(shape("", int(time.time())).emptied())
        return await answer(request, self._daemon(), ask, sent, self._open_answers, shape)

    async def tags(self, request: Request) -> Response:
        """`GET /api/tags`."""
        models = await self._descriptions.of(await self._status())
        return JSONResponse(tag_list(models, self._began))

    async def loaded(self, request: Request) -> Response:
        """`GET /api/ps`."""
        models = await self._descriptions.of(await self._status())
        return JSONResponse(loaded_list(models, time.time()))

    async def show(self, request: Request) -> Response:
        """`POST /api/show`."""
        body = await read_json(request)
        name = body.get("model") or body.get("name")
        if not isinstance(name, str):
            raise bad_field("model", "model takes the name of a model; GET /api/tags lists them")
        status, meant = await self._status(), await self._names.meant(name)
        found = find(await self._descriptions.of(status), name, meant)
        if found is None:
            raise no_model(status, name)
        return JSONResponse(shown(found, self._began))

    async def version(self, request: Request) -> Response:
        """`GET /api/version`."""
        return JSONResponse(version())


def _elsewhere(says: str) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that says what is done at the command line."""

    async def say(request: Request) -> NoReturn:
        message = f"this is not available over HTTP: {says}"
        raise Failure(HTTPStatus.NOT_IMPLEMENTED, message, code="not_implemented")

    return say
