"""The models of a daemon as OpenAI's API lists them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from ..failure import Failure

OWNER = "mlxsup"

STATES = {
    "READY": "loaded",
    "LOADING": "loading",
    "PENDING": "loading",
    "BACKOFF": "loading",
    "DRAINING": "unloading",
    "STOPPING": "unloading",
    "STOPPED": "unloaded",
    "FAILED": "failed",
}
"""What programs that know several models call the states of one."""


def model_list(status: Mapping[str, Any], created: int) -> dict[str, Any]:
    """`GET /v1/models`.

    Args:
        status: of the daemon.
        created: seconds since the epoch; a model has no date of its own.
    """
    return {"object": "list", "data": [_model(row, created) for row in status["models"]]}


def one_model(status: Mapping[str, Any], name: str, created: int) -> dict[str, Any]:
    """`GET /v1/models/{id}`.

    Raises:
        Failure: no model has this name; the message lists those that there are.
    """
    for row in status["models"]:
        if row["name"] == name:
            return _model(row, created)
    known = [row["name"] for row in status["models"]]
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else f"configured: {', '.join(known) or 'none'}"
    raise Failure(
        HTTPStatus.NOT_FOUND,
        f"no model is called {name[:100]!r}; {advice}",
        code="model_not_found",
        param="model",
    )


def readiness(status: Mapping[str, Any]) -> tuple[bool, dict[str, str]]:
    """Whether any model could answer, and the state of each."""
    states = {row["name"]: row["state"] for row in status["models"]}
    return any(state != "FAILED" for state in states.values()), states


def _model(row: Mapping[str, Any], created: int) -> dict[str, Any]:
    return {
        "id": row["name"],
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "status": {"value": STATES.get(row["state"], "unloaded")},
        "meta": {"n_ctx": row["context_length"]},
    }
