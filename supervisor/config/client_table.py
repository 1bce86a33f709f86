"""`[clients.NAME]`: what a client is granted."""

from __future__ import annotations

from pydantic import Field

from ..core.settings import ClientSettings
from .fields import default_of, documented, integer
from .kinds import CLASS_EXPECTED, Class, Number, Table

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000


class ClientTable(Table):
    """`[clients.NAME]`."""

    weight: Number = Field(
        default_of(ClientSettings, "weight"),
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        title="its share of each model, next to other clients that wait for it",
        description=f"a number from {MIN_WEIGHT} to {MAX_WEIGHT:,}",
        json_schema_extra=documented(
            f"; with 2 it gets twice the engine's time; from {MIN_WEIGHT} to {MAX_WEIGHT:,}",
            "factor",
        ),
    )
    priority: Class = Field(
        default_of(ClientSettings, "priority").value,
        title="the class of its requests that name none",
        description=CLASS_EXPECTED,
    )
    max_priority: Class = Field(
        default_of(ClientSettings, "max_priority").value,
        title="the highest class that its requests may name",
        description=CLASS_EXPECTED,
        json_schema_extra=documented("; others are refused. Below `normal`, set `priority` too"),
    )
    max_queue: int = integer(
        ClientSettings,
        "max_queue",
        "its waiting requests; 0: max_queue_per_client",
        0,
        unit="requests",
        more="; beyond that they are answered `overloaded`",
    )
    max_running: int = integer(
        ClientSettings,
        "max_running",
        "its requests that run at once, over all models; 0: no limit",
        0,
        unit="requests",
        more="; more of them wait, and those of others start before them",
    )
