"""The models of a daemon as OpenAI's API lists them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from mlxsup.protocol.tasks import Task

from ..errors import HOW_TO_ADD, advice_of
from ..failure import Failure
from ..names import Meant, names_of, row_of
from ..pictures import takes_pictures

OWNER = "mlxsup"

STATES = {
    "READY": "loaded",
    "LOADING": "loading",
    "PENDING": "loading",
    "BACKOFF": "loading",
    "DRAINING": "unloading",
    "STOPPING": "unloading",
    "STOPPED": "unloaded",
    "FAILED": "unloaded",
}
"""What programs that know several models call the states of one, after llama.cpp's router."""


OUTPUTS = {Task.GENERATE: "text", Task.EMBED: "embeddings", Task.RERANK: "scores"}
"""What a model makes, in OpenRouter's form of a list."""


def model_list(status: Mapping[str, Any], created: int) -> dict[str, Any]:
    """`GET /v1/models`.

    Args:
        status: of the daemon.
        created: seconds since the epoch; a model has no date of its own.
    """
    data = []
    for row in status["models"]:
        own, *variants = names_of(row)
        data.append(_model(row, own, created))
        data += [_variant(row, name, created) for name in variants]
    return {"object": "list", "data": data}


def one_model(status: Mapping[str, Any], name: str, meant: Meant, created: int) -> dict[str, Any]:
    """`GET /v1/models/{id}`.

    Raises:
        Failure: no model has this name; the message lists those that there are.
    """
    row = row_of(status, meant.model)
    if row is not None:
        base, _, variant = name.rpartition(":")
        is_variant = row_of(status, base) is row and variant in (*row["presets"], *row["adapters"])
        return (_variant if is_variant else _model)(row, name, created)
    raise no_model(status, name)


def no_model(status: Mapping[str, Any], name: str) -> Failure:
    """Return the refusal of a name that no model has; the message lists those that there are."""
    known = sorted(row["name"] for row in status["models"])
    names = {one.lower(): one for one in _names_of(status)}
    close = [names[one] for one in difflib.get_close_matches(name.lower(), names)]
    return Failure(
        HTTPStatus.NOT_FOUND,
        f"there is no model {name[:100]!r}; configured: {', '.join(known) or 'none'}"
        + (advice_of(close) or HOW_TO_ADD),
        code="model_not_found",
        param="model",
        detail={"known": known, "close": close},
    )


def check_ready(status: Mapping[str, Any], name: str, meant: Meant) -> str:
    """Return the name of a model that answers at once; for routers in front of several gateways.

    Raises:
        Failure: 404, no model has this name; or 503, it is not READY: with the time to ask again
            unless it is not on its way there.
    """
    row = row_of(status, meant.model)
    if row is None:
        raise no_model(status, name)
    state = row["state"]
    if state == "READY":
        return str(row["name"])
    comes = STATES.get(state) == "loading"
    raise Failure(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"{row['name']} is {state}",
        code="model_not_ready",
        is_retryable=comes,
        retry_after_s=(row.get("retry_in_s") or 1.0) if comes else None,
    )


def readiness(status: Mapping[str, Any]) -> tuple[bool, dict[str, str]]:
    """Return whether any model could answer, and the state of each."""
    states = {row["name"]: row["state"] for row in status["models"]}
    return any(state != "FAILED" for state in states.values()), states


def status_of(state: str) -> dict[str, Any]:
    """`status` of a model in this state: `value`, and `failed` if it is not loaded for that."""
    value: dict[str, Any] = {"value": STATES.get(state, "unloaded")}
    return {**value, "failed": True} if state == "FAILED" else value


def _names_of(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield every name that `GET /v1/models` lists."""
    for row in status["models"]:
        yield from names_of(row)
        yield from row["aliases"]


def _variant(row: Mapping[str, Any], name: str, created: int) -> dict[str, Any]:
    return _model(row, name, created) | {"parent": row["name"], "aliases": []}


def _model(row: Mapping[str, Any], name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "aliases": row["aliases"],
        "status": status_of(row["state"]),
        "architecture": {
            "input_modalities": ["text", "image"] if takes_pictures(row) else ["text"],
            "output_modalities": [OUTPUTS[Task(row.get("task") or Task.GENERATE)]],
        },
        "max_model_len": row["context_length"],
        "meta": {"n_ctx": row["context_length"]},
    }
