"""The gateway's spawn contract, and the addresses at which it may listen.

The supervisor binds the address, runs `python -P -m mlxsup.gateway`, which inherits the listening
socket, and writes one `GatewaySpec` as a line of JSON to its standard input. It keeps that pipe
open for as long as it lives: EOF on it means that the supervisor has died. The socket outlives the
process: who connects while the gateway is being replaced waits, and is not refused.

The gateway's event loop writes a byte into another pipe every second. The first one says that it
accepts connections; without any, the supervisor takes it for frozen. Connections cannot keep a byte
from its pipe, as they could a request to `/health`: they fill the listener's backlog and its slots.
"""

from __future__ import annotations

import ipaddress
import sys
from dataclasses import dataclass, field
from typing import Self

from .folders import DEFAULT_LISTEN

ADDRESS_EXPECTED = 'an address of this machine and a port, such as "127.0.0.1:8484"'
KEYS_HINT = "mlxsup key new NAME"
LOCAL_NAME = "localhost"
LOCAL_HOST = "127.0.0.1"

BEAT_S = 1.0
BEAT, BEAT_WITH_KEYS = b".", b"K"
"""What the gateway's loop writes; the second one while keys are in force, so that the supervisor
can tell the next process even if every file that says so is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address at which the gateway listens.

    Attributes:
        host: an IP address, without brackets.
        port: from 1 to 65535; 0 for any that is free.
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Return what people type into a program of this machine that asks for a server.

        An address that stands for all of the machine's opens in no browser.
        """
        here = {"0.0.0.0": LOCAL_HOST, "::": "::1"}.get(self.host, self.host)
        return f"http://{Address(host=here, port=self.port)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `HOST:PORT`, or a port of this machine alone: `8484`, `:8484`.

        Raises:
            ValueError: it is something else; the message says so, as a phrase that follows the
                value.
        """
        host, _, digits = text.rpartition(":")
        host = host or LOCAL_HOST
        host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        is_port = digits.isascii() and digits.isdigit() and len(digits) <= 5
        if not is_port or int(digits) > 65535:
            raise ValueError(f"is not {ADDRESS_EXPECTED}")
        try:
            ip = ipaddress.ip_address(LOCAL_HOST if host == LOCAL_NAME else host)
        except ValueError:
            raise ValueError(f"is not {ADDRESS_EXPECTED}") from None
        return cls(host=str(ip), port=int(digits))


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address, which `Address.parse` has read."""
    return ipaddress.ip_address(host).is_loopback


def is_local_name(name: str) -> bool:
    """True if a name or an address, as in the header `host` without its port, is of this machine
    on every machine."""
    name = name.lower()
    try:
        return is_loopback(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return name == LOCAL_NAME or name.endswith(f".{LOCAL_NAME}")


def is_local_origin(origin: str) -> bool:
    """True if the pages of an origin, as browsers send it, come from this machine."""
    host = origin.partition("://")[2]
    host = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return is_local_name(host)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRules:
    """The configuration's rules for requests.

    Attributes:
        names: names that requests may use, and the models they mean, in their order.
        hosts: names that requests may be sent to, besides those of this machine.
        origins: pages of other sites that may ask, as browsers send them.
        needs_keys: whether every request needs a key, wherever it may come from.
        refuses_unread: true if a field that is not read is an error, instead of named in a header.
        adds_models: true if a request for a model that is not served adds it.
    """

    names: dict[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    needs_keys: bool = False
    refuses_unread: bool = False
    adds_models: bool = False


def find_key_need(address: Address, rules: GatewayRules) -> tuple[str, str] | None:
    """Return the key of `[gateway]` because of which every request needs an API key, and what it
    has, as a phrase that follows it; None if requests of this machine need none."""
    if rules.needs_keys:
        return "keys", 'is "required"'
    if not is_loopback(address.host):
        return "listen", f"'{address}' can be reached from other machines"
    for host in rules.hosts:
        if not is_local_name(host):
            return "hosts", f"has {host[:60]!r}, a name that other machines use"
    for origin in rules.origins:
        if not is_local_origin(origin):
            return "origins", f"has {origin[:60]!r}, a page that is not of this machine"
    return None


def key_need_in(table: object) -> tuple[str, str] | None:
    """Return what `find_key_need` says of a table `[gateway]` that was not checked; None also if it
    is no table, or has no address."""
    if not isinstance(table, dict):
        return None

    def names(key: str) -> tuple[str, ...]:
        value = table.get(key)
        return tuple(map(str, value)) if isinstance(value, list) else ()

    try:
        address = Address.parse(str(table.get("listen", DEFAULT_LISTEN)))
    except ValueError:
        return None
    needs_keys = table.get("keys") == "required"
    rules = GatewayRules(hosts=names("hosts"), origins=names("origins"), needs_keys=needs_keys)
    return find_key_need(address, rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySpec:
    """Everything that a gateway gets at its start.

    Attributes:
        endpoint: where the daemon answers (`ipc://…`).
        host: the address that it listens at.
        port: the port that it listens at.
        listener: the descriptor of the listening socket.
        beat_pipe: the descriptor to which its event loop writes a byte every `BEAT_S` seconds.
        key_file: has the keys that it takes.
        key_mark: says whether keys were in force.
        has_had_keys: whether they were in force under this supervisor.
        log_level: `debug`, `info`, `warning` or `error`.
        rules: what the configuration says about requests.
    """

    endpoint: str
    host: str
    port: int
    listener: int
    beat_pipe: int
    key_file: str
    key_mark: str
    has_had_keys: bool = False
    log_level: str = "info"
    rules: GatewayRules = field(default_factory=GatewayRules)


def gateway_argv(python: str = sys.executable) -> list[str]:
    """Return the command of a gateway; -P keeps the working folder out of the import path."""
    return [python, "-P", "-m", "mlxsup.gateway"]
