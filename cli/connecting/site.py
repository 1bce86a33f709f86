"""What a program is connected to: the gateway of a daemon, its models, and a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxsup.protocol.key_file import digest_of, have_been_made, read_keys

from ..connection import Target, unknown_model
from ..exit_status import CliError
from ..keys import usable_keys
from ..model_rows import row_called
from .tools import ANY_KEY, Model, Site


def site_of(status: Mapping[str, Any], name: str | None, key: str | None) -> Site:
    """The site that a daemon's status describes.

    Args:
        status: of the daemon.
        name: of the model that the program uses first, as requests may call it: also an alias, or
            `NAME:PRESET`; None: the first that is READY.
        key: of the gateway; None for none.

    Raises:
        CliError: it has no gateway, no models, or none of this name.
    """
    url = gateway_url(status, ", which other programs need")
    rows = status["models"]
    if name is not None and _row_meant(status, name) is None:
        presets = [f"{row['name']}:{preset}" for row in rows for preset in row["presets"]]
        raise unknown_model(name, [*(row["name"] for row in rows), *presets])
    if not rows:
        hint = "add one to the configuration, then `mlxsup reload`"
        raise CliError("the daemon has no models", code="no_models", hint=hint)
    ready = [row["name"] for row in rows if row["state"] == "READY"]
    first = name or (ready or [row["name"] for row in rows])[0]
    contexts = {row["name"]: row["context_length"] for row in rows}
    meant = _row_meant(status, first) or rows[0]
    others = [Model(name=one, context=size) for one, size in contexts.items() if one != first]
    model = Model(name=first, context=meant["context_length"])
    return Site(url=url, model=model, models=[model, *others], key=key or ANY_KEY)


def gateway_url(status: Mapping[str, Any], purpose: str) -> str:
    """Where programs of this machine reach the daemon's gateway.

    Args:
        status: of the daemon.
        purpose: what needs it, behind the sentence of the error; may be empty.

    Raises:
        CliError: it has none, or it does not listen.
    """
    gateway = status.get("gateway")
    if not gateway or not gateway.get("url"):
        what = "the daemon serves no HTTP" if not gateway else f"HTTP is {gateway['state']}"
        hint = (
            "add `[gateway]` to the configuration, or start it with `mlxsup start --http`"
            if not gateway
            else "`mlxsup status` shows why"
        )
        raise CliError(f"{what}{purpose}", code="no_gateway", hint=hint)
    return _reachable(gateway["url"])


def is_key_missing(target: Target, given: str | None) -> bool:
    """Whether the gateway needs a key, and none was given.

    Raises:
        CliError: the one that was given is unknown, or the keys cannot be read.
    """
    with usable_keys(target) as place:
        keys = read_keys(place.file)
    if keys is None and not have_been_made(place):
        return False
    if given is not None and digest_of(given) not in {one.digest for one in keys or ()}:
        raise CliError(
            "the gateway knows no such key",
            code="unknown_key",
            hint="`mlxsup key list` shows what keys there are, `mlxsup key new NAME` makes one",
        )
    return given is None


def _row_meant(status: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The model that requests with this name reach; None if there is none."""
    row = row_called(status, name)
    if row is not None:
        return row
    base, _, preset = name.rpartition(":")
    row = row_called(status, base)
    return row if row is not None and preset in row["presets"] else None


def _reachable(url: str) -> str:
    """A URL for programs of this machine: one that listens everywhere is reached at loopback."""
    return url.replace("://0.0.0.0:", "://127.0.0.1:").replace("://[::]:", "://[::1]:")
