"""The models of a daemon as Anthropic's API lists them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def model_list(listed: Mapping[str, Any]) -> dict[str, Any]:
    """`GET /v1/models`, from what it is in OpenAI's API."""
    models = [one_model(model) for model in listed["data"]]
    return {
        "data": models,
        "has_more": False,
        "first_id": models[0]["id"] if models else None,
        "last_id": models[-1]["id"] if models else None,
    }


def one_model(listed: Mapping[str, Any]) -> dict[str, Any]:
    """`GET /v1/models/{id}`, from what it is in OpenAI's API."""
    created = datetime.fromtimestamp(listed["created"], UTC)
    return {
        "type": "model",
        "id": listed["id"],
        "display_name": listed["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": listed["meta"]["n_ctx"],
    }
