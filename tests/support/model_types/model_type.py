"""One model type as the table of model types names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """A configuration that makes a tiny model.

    Attributes:
        name: of the row in docs/models.md; the model type, with a suffix if it has several rows.
        config: what config.json holds.
        caches: the kinds of cache of its layers; found by looking, not written by hand.
    """

    name: str
    config: dict[str, Any]
    caches: str = ""
