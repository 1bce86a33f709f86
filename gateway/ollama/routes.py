"""The routes of Ollama's API."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mlxsup.protocol.states import State

from .. import limits
from ..adding import Adding, line_of
from ..answers import OpenAnswers, answer
from ..body import Bodies, read_json
from ..converter import Api
from ..daemon import answered
from ..descriptions import Descriptions
from ..failure import bad_field
from ..keys import CALLER
from ..names import row_of
from ..operator import Operator
from .events import OllamaShape
from .models import loaded_list, shown, tag_list, version
from .requests import OllamaAsk

GONE = (State.STOPPED, State.FAILED)


class Ollama:
    """Ollama's API."""

    def __init__(
        self,
        bodies: Bodies,
        models: Descriptions,
        open_answers: OpenAnswers,
        adding: Adding,
        operator: Operator,
    ) -> None:
        self._bodies = bodies
        self._daemon = open_answers.daemon
        self._models = models
        self._open_answers = open_answers
        self._adding = adding
        self._operator = operator
        self._began = time.time()

    def routes(self) -> list[Route]:
        """Return all of them."""
        return [
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/tags", self.tags, methods=["GET"]),
            Route("/api/ps", self.loaded, methods=["GET"]),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/version", self.version, methods=["GET"]),
            Route("/api/pull", self.pull, methods=["POST"]),
            Route("/api/delete", self.delete, methods=["DELETE"]),
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
        if ask.is_empty and ask.parameters.get("keep_alive") == 0:
            row = row_of(await self._daemon.status(), ask.target or ask.model)
            if row is not None and row["state"] in GONE:  # or it would be loaded first
                return JSONResponse(OllamaShape(ask, "", int(time.time())).emptied())
        return await answer(request, self._open_answers, ask, sent, OllamaShape)

    async def tags(self, request: Request) -> Response:
        """`GET /api/tags`."""
        return JSONResponse(tag_list(await self._models.all(), self._began))

    async def loaded(self, request: Request) -> Response:
        """`GET /api/ps`."""
        return JSONResponse(loaded_list(await self._models.all(), time.time()))

    async def show(self, request: Request) -> Response:
        """`POST /api/show`."""
        body = await read_json(request)
        return JSONResponse(shown(await self._models.one(_name_in(body)), self._began))

    async def pull(self, request: Request) -> Response:
        """`POST /api/pull`: adds a model, and answers once it is on the disk."""
        if not self._adding.may(request.scope[CALLER]):
            self._operator.check(request)
        body = await read_json(request)
        steps = self._adding.pull(_name_in(body))
        if body.get("stream") is False:
            *_, last = [step async for step in steps]
            status = HTTPStatus.BAD_REQUEST if "error" in last else HTTPStatus.OK
            return JSONResponse(last, status)
        first, second = await anext(steps), await anext(steps)  # or a refusal, as an error

        async def lines() -> AsyncIterator[bytes]:
            yield line_of(first)
            yield line_of(second)
            async for step in steps:
                yield line_of(step)

        return StreamingResponse(lines(), media_type=OllamaShape.STREAM_TYPE)

    async def delete(self, request: Request) -> Response:
        """`DELETE /api/delete`: takes a model out of the configuration; its files stay."""
        self._operator.check(request)
        meant = await self._daemon.meant(_name_in(await read_json(request)))
        await answered(self._daemon.client.remove(meant.model), limits.CHANGE_LIMIT_S)
        return Response()

    async def version(self, request: Request) -> Response:
        """`GET /api/version`."""
        return JSONResponse(version())


def _name_in(body: Mapping[str, Any]) -> str:
    """Return the model that a body names, under its present or its former key."""
    name = body.get("model") or body.get("name")
    if not isinstance(name, str):
        raise bad_field("model", "model must be the name of a model; GET /api/tags lists them")
    return name
