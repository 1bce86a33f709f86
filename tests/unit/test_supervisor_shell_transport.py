"""Sockets that cannot be made as they should be."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from mlxsup.supervisor.transport import bound_socket


def bind(option: zmq.SocketOption, number: int) -> tuple[list[object], Exception | None]:
    """What is done with a socket that refuses an option, and what comes of it."""
    done: list[object] = []

    def refuse(given: zmq.SocketOption, value: int) -> None:
        done.append((given, value))
        if given is option:
            raise zmq.ZMQError(number)

    socket = SimpleNamespace(
        setsockopt=refuse,
        bind=lambda endpoint: done.append(endpoint),
        close=lambda linger: done.append(("closed", linger)),
    )
    context: Any = SimpleNamespace(socket=lambda kind: socket)
    try:
        assert bound_socket(context, zmq.PULL, "e", {option: 7, zmq.LINGER: 0}) is socket
    except zmq.ZMQError as error:
        return done, error
    return done, None


def test_a_libzmq_that_cannot_ask_who_a_peer_is_serves_without() -> None:
    done, error = bind(zmq.IPC_FILTER_UID, errno.EINVAL)
    assert (done, error) == ([(zmq.IPC_FILTER_UID, 7), (zmq.LINGER, 0), "e"], None)


@pytest.mark.parametrize(
    ("option", "number"),
    [(zmq.IPC_FILTER_UID, errno.ENOMEM), (zmq.MAXMSGSIZE, errno.EINVAL)],
)
def test_any_other_refusal_of_an_option_leaves_no_socket_open(
    option: zmq.SocketOption, number: int
) -> None:
    done, error = bind(option, number)
    assert done == [(option, 7), ("closed", 0)]
    assert isinstance(error, zmq.ZMQError)
    assert error.errno == number
