"""`hosts` and `origins` of `[gateway]`: who else may be meant, and which pages may ask."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mlxsup.protocol.gateway import GatewayRules

from .gateway_table import GatewayTable
from .model_names import Problem

_HOST = r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])"
HOST = re.compile(_HOST)
ORIGIN = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]{{0,31}}://{_HOST}(?::[0-9]{{1,5}})?")

HOST_EXPECTED = 'names without a scheme, a port or a path, such as "ai.example"'
ORIGIN_EXPECTED = (
    "a scheme and a name, with a port if it is not the usual one and no path, such as "
    '"https://chat.example"'
)

MAX_SITES = 32
"""They travel with the command that starts the gateway."""

USUAL_PORTS = {"http": "80", "https": "443"}


def site_problems(table: GatewayTable) -> Iterator[Problem]:
    """Yield what is wrong with the two lists."""
    for key, values in (("hosts", table.hosts), ("origins", table.origins)):
        if len(values) > MAX_SITES:
            yield ("gateway", key), f"takes at most {MAX_SITES}, not {len(values)}"
    for host in table.hosts:
        if not HOST.fullmatch(host):
            yield ("gateway", "hosts"), f"takes {HOST_EXPECTED}, not {host[:60]!r}"
    for origin in table.origins:
        if not ORIGIN.fullmatch(origin):
            yield ("gateway", "origins"), f"takes {ORIGIN_EXPECTED}, not {origin[:60]!r}"


def origin_as_sent(origin: str) -> str:
    """The origin as browsers send it: in small letters, without the usual port."""
    scheme, _, rest = origin.lower().partition("://")
    return f"{scheme}://{rest.removesuffix(':' + USUAL_PORTS.get(scheme, ''))}"


def rules_of(table: GatewayTable) -> GatewayRules:
    """Return what a table says about requests."""
    return GatewayRules(
        names=tuple(table.names.items()),
        hosts=tuple(table.hosts),
        origins=tuple(origin_as_sent(origin) for origin in table.origins),
        needs_keys=table.keys == "required",
    )
