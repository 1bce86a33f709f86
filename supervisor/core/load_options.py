"""What a load may ask for that the configuration says otherwise, until that is read again."""

from __future__ import annotations

from dataclasses import replace

from mlxsup.protocol.client_messages import Load
from mlxsup.protocol.context_length import MAX_CONTEXT_LENGTH
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.launch import LaunchSettings


def launch_asked_for(launch: LaunchSettings, context_length: int | None) -> LaunchSettings:
    """The launch of the configuration, or another one if the load asks for that.

    Raises:
        RemoteError: `invalid_request`.
    """
    if context_length is None:
        return launch
    if not 0 <= context_length <= MAX_CONTEXT_LENGTH:
        raise RemoteError(
            ErrorCode.INVALID_REQUEST,
            f"context_length takes an integer from 0 to {MAX_CONTEXT_LENGTH}, not {context_length}",
            detail={"parameter": "context_length"},
        )
    return replace(launch, context_length=context_length)


def refuse_dry(load: Load) -> None:
    """Refuses a dry run of a load that differs from what is configured.

    Raises:
        RemoteError: `invalid_request`.
    """
    if load.context_length is None and load.keep_alive is None:
        return
    name = "keep_alive" if load.context_length is None else "context_length"
    raise RemoteError(
        ErrorCode.INVALID_REQUEST,
        f"a dry run says what a load as configured would lead to: leave {name} out",
        detail={"parameter": name},
    )
