"""An address of this machine: whether a program can listen there, and which one does."""

from __future__ import annotations

import socket
from contextlib import suppress

import psutil

from mlxsup.protocol.gateway import Address

from .terminal.text import cut, in_a_line

NEXT_PORTS = 20
"""So many ports after a taken one are tried."""

MAX_COLUMNS = 40
"""Of the name of a program: a process may call itself anything."""


def refused_at(address: Address) -> OSError | None:
    """Return why no program can listen at an address; None if one can."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address.host, address.port))
        except OSError as error:
            return error
    return None


def holder_of(address: Address) -> str:
    """Return ` by nginx (pid 4711)`, the program that listens there; empty if it is not known."""
    with suppress(psutil.Error):  # not every system says it to every user
        for one in psutil.net_connections("tcp"):
            if one.status != psutil.CONN_LISTEN or not one.laddr or one.pid is None:
                continue
            if one.laddr.port == address.port:
                process = psutil.Process(one.pid)
                name = cut(in_a_line(process.name()), MAX_COLUMNS)
                if "mlxsup.gateway" in process.cmdline():
                    name = "the gateway of another mlxsup daemon"
                return f" by {name} (pid {one.pid})"
    return ""


def free_address(address: Address) -> str:
    """Return the same host with one of the next ports that is free; empty if none is."""
    for port in range(address.port + 1, min(address.port + 1 + NEXT_PORTS, 65536)):
        other = Address(host=address.host, port=port)
        if refused_at(other) is None:
            return str(other)
    return ""
