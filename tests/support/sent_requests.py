"""What becomes of a request that the gateway has read: what the client sends, or its refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from mlxsup.client import RequestError
from mlxsup.client.parameters import encode_generate
from mlxsup.gateway.ask import Ask
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.openai.errors import failure_of
from mlxsup.protocol.ids import RequestId

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
"""Any value that JSON has."""

HEADER = (
    "priority", "timeout_s", "queue_timeout_s", "first_token_timeout_s", "client", "keep_alive",
)  # fmt: skip
"""The arguments of `generate` that the supervisor reads; the others are in the body."""


def frames_of(name: str, model: str, given: Mapping[str, Any]) -> list[bytes]:
    """What the client sends for these arguments of `generate`.

    Raises:
        RequestError: one of them is wrong.
    """
    body = {key: value for key, value in given.items() if key not in HEADER}
    header: dict[str, Any] = {key: given.get(key) for key in HEADER}
    return encode_generate(RequestId(name), model, body, resume=True, notices=False, **header)


def sent(ask: Ask) -> list[list[bytes]]:
    """What the client sends for each answer.

    Raises:
        RequestError: a parameter is wrong.
    """
    return [frames_of("x", ask.model, choice) for choice in ask.choices()]


def outcome(do: Callable[[], object]) -> object:
    """What it returns; for a request that is refused, the status of that."""
    try:
        return do()
    except Failure as failure:
        return failure.status
    except RequestError as error:
        return failure_of(error).status
