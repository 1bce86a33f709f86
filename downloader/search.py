"""Ask the hub for repositories with models in MLX's format, and how large they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.hf_api import ModelInfo

from mlxsup.protocol.download import DownloadProblem, FoundRepository, RepositoriesFound
from mlxsup.protocol.version import VERSION
from mlxsup.store.hub_cache import is_owned_repository

from .failures import DownloadError

MAX_FOUND = 30
FORMAT = "mlx"
"""The hub's tag of repositories that mlx-lm loads without conversion."""

LICENCE = "license:"
"""How the tag of a repository's licence begins."""

MOST_LICENCE = 64

NUMBER_BYTES = {"F64": 8, "I64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2}
"""Of a number of each type in a safetensors file; of all others one byte."""


def search(words: str) -> RepositoriesFound:
    """Return the repositories that fit the words, those with most downloads first.

    Raises:
        Exception: anything that `failures.explain` puts into words.
    """
    if constants.HF_HUB_OFFLINE:
        raise _offline()
    api = HfApi(library_name="mlxsup", library_version=VERSION)
    try:
        found = api.list_models(
            search=words,
            filter=FORMAT,
            sort="downloads",
            limit=MAX_FOUND,
            expand=["downloads", "safetensors", "gated", "tags"],
        )
        return RepositoriesFound(found=list(_found(found)))
    except OfflineModeIsEnabled:
        raise _offline() from None


def _found(models: Any) -> Iterator[FoundRepository]:
    """Yield what is known of each; a hub may say anything."""
    for model in models:
        if not isinstance(model, ModelInfo) or not is_owned_repository(str(model.id)):
            continue
        downloads = model.downloads
        yield FoundRepository(
            repo=model.id,
            downloads=downloads if isinstance(downloads, int) else 0,
            size_bytes=_size_bytes(model),
            is_gated=bool(model.gated),
            licence=_licence(model.tags),
        )


def _size_bytes(model: ModelInfo) -> int:
    """Return the size of the weights; 0 if the hub does not say it."""
    counts = getattr(model.safetensors, "parameters", None)
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


def _offline() -> DownloadError:
    return DownloadError(
        DownloadProblem.OFFLINE,
        "HF_HUB_OFFLINE is set, so the hub is not asked",
        "unset it to search; `mlxsup models` lists what is on this machine",
    )
