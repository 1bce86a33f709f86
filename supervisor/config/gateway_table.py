"""`[gateway]`: the table that makes the daemon run the HTTP gateway."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from pydantic import Field

from mlxsup.protocol.gateway import (
    ADDRESS_EXPECTED,
    DEFAULT_LISTEN,
    EXTRA_MODULES,
    INSTALL_HINT,
    Address,
)

from .fields import documented
from .kinds import Table


class GatewayTable(Table):
    """`[gateway]`."""

    listen: str = Field(
        DEFAULT_LISTEN,
        title="where the HTTP gateway listens, on this machine only",
        description=ADDRESS_EXPECTED,
        json_schema_extra=documented(
            "; port 0: any that is free. See [gateway.md](gateway.md)", "address"
        ),
    )


def gateway_problems(listen: str) -> Iterator[str]:
    """What keeps a gateway from running here, each a phrase that follows the name of the setting.

    Args:
        listen: where it is to listen.
    """
    try:
        Address.parse(listen)
    except ValueError as error:
        yield f"{listen!r} {error}"
    if missing := [name for name in EXTRA_MODULES if find_spec(name) is None]:
        yield f"needs {', '.join(missing)}: {INSTALL_HINT}"
