"""The daemon that is meant, others of this user, and who listens where the gateway is to."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from mlxsup.protocol.folders import CLIENT_SOCKET_NAME, LOCK_NAME
from mlxsup.protocol.gateway import EXTRA_MODULES, Address
from mlxsup.protocol.key_file import have_been_made
from mlxsup.protocol.version import VERSION

from ...lock_holder import lock_holder
from ..facts import DaemonFacts, GatewayFacts, OtherDaemon
from .machine import installer
from .setting import Setting

OWN_NAMES = ("mlxsup", "mlxsup.cli")
FIRST_WORDS = 5
"""Of a daemon's command line, up to `start`."""

NEXT_PORTS = 20
"""How many ports after a taken one are tried."""


def gather_daemon(setting: Setting) -> DaemonFacts:
    """Who holds the folder of the endpoint, and what answers there."""
    folder = Path(setting.endpoint.removeprefix("ipc://")).parent
    status, failure = _status(setting.endpoint)
    holder = lock_holder(setting.endpoint)
    recorded = None if holder is not None else _recorded(folder)
    counting = setting.configuration.counting
    config = None
    if counting is not None and counting.is_there:
        config = Path(os.path.realpath(counting.path))  # also of links that lead in a circle
    return DaemonFacts(
        endpoint=setting.endpoint,
        version=VERSION,
        config=config,
        holder=holder.pid if holder is not None else None,
        is_stopped=holder is not None and holder.is_stopped,
        is_beating=holder is not None and holder.is_beating,
        recorded=recorded,
        recorded_name="" if recorded is None else _name_of(recorded),
        leftovers=len([*folder.glob("*.sock")]),
        status=status,
        failure=failure,
        others=tuple(_others(folder)),
    )


def _status(endpoint: str) -> tuple[Mapping[str, Any] | None, str]:
    """What the daemon says of itself, or why it refuses to."""
    from mlxsup.client import Client, ConnectionLost, RequestError

    try:
        with Client(endpoint) as client:
            return client.status(), ""
    except ConnectionLost as error:
        return None, error.message if error.is_turned_away else ""
    except RequestError as error:
        return None, error.message
    except ValueError:
        return None, ""  # the path is too long, which is a finding about the folder


def _recorded(folder: Path) -> int | None:
    """The pid that a lock names, whoever has it by now."""
    with suppress(OSError, ValueError, IndexError):
        return int((folder / LOCK_NAME).read_text().split()[0])
    return None


def _name_of(pid: int) -> str:
    """The program with this pid; empty if there is none."""
    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(process.name())
    except psutil.Error:
        return ""


def _others(folder: Path) -> Iterator[OtherDaemon]:
    """The daemons of this user, except that of a folder."""
    for process in psutil.process_iter(["pid", "cmdline", "uids"]):
        words, users = process.info["cmdline"] or [], process.info["uids"]
        names = [Path(word).name for word in words[:FIRST_WORDS]]
        is_daemon = "start" in words and any(name in OWN_NAMES for name in names)
        if not is_daemon or users is None or users.real != os.getuid():
            continue
        try:
            held = [Path(file.path) for file in process.open_files()]
        except psutil.Error:
            continue  # it has ended by now
        folders = [path.parent for path in held if path.name == LOCK_NAME]
        if folders and not any(_is_same(one, folder) for one in folders):
            yield OtherDaemon(pid=process.pid, endpoint=f"ipc://{folders[0] / CLIENT_SOCKET_NAME}")


def _is_same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def gather_gateway(setting: Setting, daemon: DaemonFacts) -> GatewayFacts:
    """Whether a gateway can listen where it is to.

    Args:
        setting: says where.
        daemon: whose gateway it is; also one that does not answer.
    """
    try:
        address = Address.parse(setting.listen)
    except ValueError:  # none, or what is wrong with it is a finding
        address = None
    running = (daemon.status or {}).get("gateway") or {}
    is_ours = address is not None and running.get("address") == str(address)
    refused = None if address is None or is_ours else _refused(address)
    is_taken = refused is not None and refused.errno == errno.EADDRINUSE
    listener = _listener(address) if address is not None and is_taken else None
    return GatewayFacts(
        address=setting.listen if address is not None else "",
        missing=tuple(name for name in EXTRA_MODULES if find_spec(name) is None),
        installer=installer(),
        key_need="" if have_been_made(setting.keys) else setting.key_need,
        is_ours=is_ours or (listener is not None and _is_child(listener, daemon.holder)),
        refusal=(refused.strerror or str(refused)) if refused is not None else "",
        taken_by=f"{_name_of(listener)} (pid {listener})" if listener is not None else "",
        free_address=_free_address(address) if address is not None and is_taken else "",
    )


def _refused(address: Address) -> OSError | None:
    """Why nobody can listen at an address; None if somebody can."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address.host, address.port))
        except OSError as error:
            return error
    return None


def _listener(address: Address) -> int | None:
    """The process that listens there; None if the system does not say which."""
    with suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            is_it = (
                one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == address.port
            )
            if is_it and one.pid is not None:
                return int(one.pid)
    return None


def _is_child(pid: int, parent: int | None) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).ppid() == parent
    return False


def _free_address(address: Address) -> str:
    """The same host with one of the next ports that is free; empty if none is."""
    for port in range(address.port + 1, min(address.port + 1 + NEXT_PORTS, 65536)):
        other = Address(host=address.host, port=port)
        if _refused(other) is None:
            return str(other)
    return ""
