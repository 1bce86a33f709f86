"""Which model is meant if none is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .exit_status import CliError, ExitStatus


def only_model(status: Mapping[str, Any], command: str, after: str = "") -> str:
    """Return the name of the only model that is configured.

    Args:
        status: of the daemon.
        command: how it is typed, up to the name that is missing.
        after: what follows the name.

    Raises:
        CliError: usage; there is none, or more than one.
    """
    names = sorted(str(row["name"]) for row in status["models"])
    if len(names) == 1:
        return names[0]
    message = f"name a model; configured: {', '.join(names) or 'none'}"
    hint = f"for example `{command} {names[0]}{after}`" if names else "see `mlxsup status`"
    raise CliError(message, code="usage", hint=hint, status=ExitStatus.USAGE)
