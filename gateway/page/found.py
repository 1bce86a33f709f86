"""The models on this machine that a daemon could serve besides its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from typing import Any, NamedTuple

from mlxsup.store.search import find_models

MOST_FOUND = 500


class Found(NamedTuple):
    """A model on this machine.

    Attributes:
        reference: its repository, or its folder: what the daemon gets.
        told: to the page, which names the model by `key` and never by a path.
    """

    reference: str
    told: dict[str, Any]


def find(folders: Collection[str]) -> list[Found]:
    """Return the models that are none of the daemon's; reads disks.

    Args:
        folders: of the daemon's models.
    """
    served = {os.path.realpath(folder) for folder in folders}
    models = [one for one in find_models() if os.path.realpath(one.path) not in served]
    return [
        Found(
            one.repo or str(one.path),
            {
                "key": hashlib.sha256(os.fsencode(one.path)).hexdigest()[:32],
                "title": one.title,
                "origin": one.origin,
                "size_bytes": one.description.size_bytes,
                "quantization": one.description.quantization,
                "context_length": one.description.context_length,
                "problem": one.problem.text if one.problem is not None else "",
            },
        )
        for one in models[:MOST_FOUND]
    ]
