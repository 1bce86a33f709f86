"""The models of a daemon as LM Studio's API lists them: editors read the context length there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .descriptions import Described, Descriptions, find
from .names import Names
from .openai.models import no_model


class LmStudio:
    """LM Studio's lists.

    Args:
        names: of models.
        status: asks the daemon for its status; raises `Failure`.
        descriptions: of its models.
    """

    def __init__(
        self,
        names: Names,
        status: Callable[[], Awaitable[Mapping[str, Any]]],
        descriptions: Descriptions,
    ) -> None:
        self._names = names
        self._status = status
        self._descriptions = descriptions

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/v0/models", self.older_list, methods=["GET"]),
            Route("/api/v0/models/{name:path}", self.older_model, methods=["GET"]),
            Route("/api/v1/models", self.newer_list, methods=["GET"]),
        ]

    async def older_list(self, request: Request) -> Response:
        """`GET /api/v0/models`."""
        models = await self._descriptions.of(await self._status())
        return JSONResponse({"object": "list", "data": [_older(model) for model in models]})

    async def older_model(self, request: Request) -> Response:
        """`GET /api/v0/models/{id}`."""
        name = request.path_params["name"]
        status, meant = await self._status(), await self._names.meant(name)
        found = find(await self._descriptions.of(status), name, meant)
        if found is None:
            raise no_model(status, name)
        return JSONResponse(_older(found))

    async def newer_list(self, request: Request) -> Response:
        """`GET /api/v1/models`."""
        models = await self._descriptions.of(await self._status())
        return JSONResponse({"models": [_newer(model) for model in models]})


def _older(model: Described) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "type": "llm",
        "publisher": model.publisher,
        "arch": model.family,
        "compatibility_type": "mlx",
        "quantization": model.quantization,
        "state": "loaded" if model.is_loaded else "not-loaded",
        "max_context_length": model.context_length,
        **({"loaded_context_length": model.context_length} if model.is_loaded else {}),
        "capabilities": ["tool_use"] if model.takes_tools else [],
    }


def _newer(model: Described) -> dict[str, Any]:
    instance = {"id": model.name, "config": {"context_length": model.context_length}}
    return {
        "type": "llm",
        "publisher": model.publisher,
        "key": model.name,
        "display_name": model.name,
        "architecture": model.family or None,
        "quantization": {"name": model.quantization or None, "bits_per_weight": model.bits},
        "size_bytes": model.size_bytes,
        "params_string": model.parameter_size or None,
        "loaded_instances": [instance] if model.is_loaded else [],
        "max_context_length": model.context_length,
        "format": "mlx",
        "capabilities": {"vision": False, "trained_for_tool_use": model.takes_tools},
        "description": None,
    }
