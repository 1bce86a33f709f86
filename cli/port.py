"""An address of this machine: whether a program can listen there, and which one does."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import dropwhile

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


def listener_at(address: Address) -> int | None:
    """Return the process that listens there; None if the system does not say which."""
    with suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            port = one.laddr.port if one.laddr else None
            if one.status == psutil.CONN_LISTEN and port == address.port and one.pid is not None:
                return int(one.pid)
    return None


def program_of(pid: int) -> str:
    """Return the program with this pid, of Python also what it runs, in at most 40 columns; empty
    if there is none."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        name, words = str(process.name()), process.cmdline()
    except psutil.Error:
        return ""
    if "mlxsup.gateway" in words:
        return "the gateway of another mlxsup daemon"
    if name.startswith("python"):
        given = dropwhile(lambda word: word[:1] == "-" and word[:2] not in ("-m", "-c"), words[1:])
        match list(given):
            case ["-m", module, *_]:
                name = f"{name} -m {module}"
            case [script, *_] if script[:1] != "-":  # the text of -c is no name
                name = f"{name} {os.path.basename(script)}"
    return cut(in_a_line(name), MAX_COLUMNS)


def holder_of(address: Address) -> str:
    """Return ` by python3 (pid 4711)`, the program that listens there; empty if it is not known."""
    pid = listener_at(address)
    return "" if pid is None else f" by {program_of(pid) or 'a program'} (pid {pid})"


def free_address(address: Address) -> str:
    """Return the same host with one of the next ports that is free; empty if none is."""
    for port in range(address.port + 1, min(address.port + 1 + NEXT_PORTS, 65536)):
        other = Address(host=address.host, port=port)
        if refused_at(other) is None:
            return str(other)
    return ""
