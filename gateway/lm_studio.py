"""The models of a daemon as LM Studio's API lists them: editors read the context length there."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxsup.protocol.tasks import Task

from .descriptions import Described, Descriptions

_TYPES = {Task.GENERATE: "llm", Task.EMBED: "embeddings", Task.RERANK: "rerank"}
_KINDS = {**_TYPES, Task.EMBED: "embedding"}
"""The same in the newer list."""


def routes(models: Descriptions) -> list[Route]:
    """Return the lists, older and newer ones."""

    async def older_list(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_older(one) for one in await models.all()]})

    async def older_model(request: Request) -> Response:
        return JSONResponse(_older(await models.one(request.path_params["name"])))

    async def newer_list(_: Request) -> Response:
        return JSONResponse({"models": [_newer(one) for one in await models.all()]})

    return [
        Route("/api/v0/models", older_list, methods=["GET"]),
        Route("/api/v0/models/{name:path}", older_model, methods=["GET"]),
        Route("/api/v1/models", newer_list, methods=["GET"]),
    ]


def _older(model: Described) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "type": "vlm" if model.sees_images else _TYPES[model.task],
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
        "type": _KINDS[model.task],
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
        "capabilities": {"vision": model.sees_images, "trained_for_tool_use": model.takes_tools},
        "description": None,
    }
