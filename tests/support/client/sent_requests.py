"""The requests of the daemon that a request over HTTP becomes, or its refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from mlxsup.client import RequestError
from mlxsup.gateway.ask import Ask
from mlxsup.gateway.converter import OPTIONS, encode_ask
from mlxsup.gateway.errors import failure_of
from mlxsup.gateway.failure import Failure
from mlxsup.protocol.client_messages import Generate
from mlxsup.protocol.codec import Decoder, decode_body

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
"""Any value that JSON has."""


def asked_in(frames: list[bytes]) -> dict[str, Any]:
    """Return the arguments of `generate` that a request of the client stands for.

    Raises:
        DecodeError, RemoteError: a daemon, or a worker, would refuse it.
    """
    header = Decoder([Generate], is_strict=True).decode(frames)
    given = {name: getattr(header, name) for name in ("model", *OPTIONS)}
    given |= decode_body(header.body).to_wire()
    return {name: value for name, value in given.items() if value is not None}


def sent(ask: Ask) -> list[list[bytes]]:
    """Return the frames that the client sends for each answer.

    Raises:
        RequestError: a parameter is wrong.
    """
    return [frames for _, frames in encode_ask(ask)]


def outcome(do: Callable[[], object]) -> object:
    """Return its result, or the status of its refusal."""
    try:
        return do()
    except Failure as failure:
        return failure.status
    except RequestError as error:
        return failure_of(error).status
