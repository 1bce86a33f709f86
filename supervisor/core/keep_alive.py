"""How long a model stays loaded while it is idle: as its latest request says, or as configured.

It belongs to the model and not to the request, so whoever asks last decides. It does not outlive
an unload: a model that went because of a 0 would go again as soon as a person has loaded it.
"""

from __future__ import annotations

import math

from mlxsup.protocol.errors import ErrorCode, RemoteError

FOR_EVER = -1.0
"""The `keep_alive` of a request whose model is not to be unloaded as idle."""


def check_keep_alive(value: float | None, *, least_s: float = 0.0) -> None:
    """Checks what a request or a load says.

    Args:
        value: seconds, or `FOR_EVER`; None: nothing.
        least_s: the fewest seconds that make sense.

    Raises:
        RemoteError: `invalid_request`.
    """
    if value is None or value == FOR_EVER or least_s <= value < math.inf:
        return
    least = "above 0" if least_s else "of 0 or more"
    raise RemoteError(
        ErrorCode.INVALID_REQUEST,
        f"keep_alive must be seconds {least}, or -1 to keep the model loaded, not {value:g}",
        detail={"parameter": "keep_alive"},
    )


def stays_s(keep_alive_s: float | None, configured_s: float) -> float | None:
    """How long a model stays after it has become idle, in seconds; None: for ever.

    Args:
        keep_alive_s: of its latest request or load; None: that said nothing.
        configured_s: the key `idle_unload_s`, in which 0 means for ever.
    """
    if keep_alive_s is None:
        return configured_s or None
    return None if keep_alive_s == FOR_EVER else keep_alive_s
