"""Ask the hub for repositories with models in MLX's format, and how large they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx2
from huggingface_hub import constants, get_session, get_token, hf_raise_for_status

from mlxsup.protocol.download import FoundRepository, RepositoriesFound
from mlxsup.protocol.version import VERSION
from mlxsup.store.hub_cache import is_owned_repository

MAX_FOUND = 30
FORMAT = "mlx"
"""The hub's tag of repositories that mlx-lm loads without conversion."""

LICENCE = "license:"
"""How the tag of a repository's licence begins."""

MOST_LICENCE = 64

NUMBER_BYTES = {"F64": 8, "I64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2}
"""Of a number of each type in a safetensors file; of all others one byte."""

LIMITS = httpx2.Timeout(15.0, connect=4.0)
"""A person waits for the answer, so nothing is tried again, as `HfApi.list_models` does for half a
minute; seconds."""


def search(words: str) -> RepositoriesFound:
    """Return the repositories that fit the words, those with most downloads first.

    Raises:
        Exception: anything that `failures.explain` puts into words.
    """
    headers = {"user-agent": f"mlxsup/{VERSION}"}
    if token := get_token():  # models of its user are found, too
        headers["authorization"] = f"Bearer {token}"
    response = get_session().get(
        f"{constants.ENDPOINT}/api/models",
        params={
            "search": words,
            "filter": FORMAT,
            "sort": "downloads",
            "limit": MAX_FOUND,
            "expand": ["downloads", "safetensors", "gated", "tags"],
        },
        headers=headers,
        timeout=LIMITS,
    )
    hf_raise_for_status(response)
    found = response.json()
    if not isinstance(found, list):
        raise ValueError("an answer to something else")
    return RepositoriesFound(found=list(_found(found)))


def _found(models: list[Any]) -> Iterator[FoundRepository]:
    """Yield what is known of each; a hub may say anything."""
    for model in models:
        repo = model.get("id") if isinstance(model, dict) else None
        if not isinstance(repo, str) or not is_owned_repository(repo):
            continue
        downloads = model.get("downloads")
        yield FoundRepository(
            repo=repo,
            downloads=downloads if isinstance(downloads, int) else 0,
            size_bytes=_size_bytes(model.get("safetensors")),
            is_gated=bool(model.get("gated")),
            licence=_licence(model.get("tags")),
        )


def _size_bytes(weights: object) -> int:
    """Return the size of the weights; 0 if the hub does not say it."""
    counts = weights.get("parameters") if isinstance(weights, Mapping) else None
    if not isinstance(counts, dict):
        return 0
    return sum(
        NUMBER_BYTES.get(str(kind), 1) * count
        for kind, count in counts.items()
        if isinstance(count, int) and count > 0
    )


def _licence(tags: Any) -> str:
    """Return what the tags of a repository say of its licence; empty if nothing."""
    texts = tags if isinstance(tags, list) else ()
    marked = (text for text in texts if isinstance(text, str) and text.startswith(LICENCE))
    return next(marked, "").removeprefix(LICENCE)[:MOST_LICENCE]
