"""`[gateway]`: the table that makes the daemon run the HTTP gateway."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from pydantic import Field

from mlxsup.protocol.gateway import (
    ADDRESS_EXPECTED,
    DEFAULT_LISTEN,
    EXTRA_MODULES,
    INSTALL_HINT,
    KEYS_HINT,
    Address,
    is_loopback,
)
from mlxsup.protocol.key_file import KEYS_NAME, KeyFileError, read_keys

from .fields import documented
from .kinds import NameMap, Names, Table
from .values import HOSTS_EXPECTED, NAME_MAP_EXPECTED, ORIGINS_EXPECTED


class GatewayTable(Table):
    """`[gateway]`."""

    listen: str = Field(
        DEFAULT_LISTEN,
        title="where the HTTP gateway listens",
        description=ADDRESS_EXPECTED,
        json_schema_extra=documented(
            "; port 0: any that is free. An address that other machines reach needs"
            " [keys](gateway.md#keys)",
            "address",
        ),
    )
    names: NameMap = Field(
        {},
        title="names that programs use, and the models they mean",
        description=NAME_MAP_EXPECTED,
        json_schema_extra=documented(
            '; `*` stands for anything: `"claude-*" = "qwen"`. The first that fits counts, after'
            " the models' own names, aliases and presets",
        ),
    )
    hosts: Names = Field(
        [],
        title="further names in the `host` header, as a proxy passes them on",
        description=HOSTS_EXPECTED,
        json_schema_extra=documented(
            ': `hosts = ["ai.example"]`; see [behind a proxy](gateway.md#behind-a-proxy)', "names"
        ),
    )
    origins: Names = Field(
        [],
        title="pages of other sites that may ask (CORS)",
        description=ORIGINS_EXPECTED,
        json_schema_extra=documented(
            ': `origins = ["https://chat.example"]`; those that are not of this machine need'
            " [keys](gateway.md#pages-of-other-sites)",
            "origins",
        ),
    )


def gateway_problems(listen: str, runtime_dir: Path) -> Iterator[str]:
    """What keeps a gateway from running here, each a phrase that follows the name of the setting.

    Args:
        listen: where it is to listen.
        runtime_dir: where its keys are.
    """
    try:
        address = Address.parse(listen)
    except ValueError as error:
        yield f"{listen!r} {error}"
    else:
        yield from _key_problems(address, runtime_dir / KEYS_NAME)
    if missing := [name for name in EXTRA_MODULES if find_spec(name) is None]:
        yield f"needs {', '.join(missing)}: {INSTALL_HINT}"


def _key_problems(address: Address, path: Path) -> Iterator[str]:
    try:
        keys = read_keys(path)
    except KeyFileError as error:
        yield f"needs keys that can be used: {error}"
        return
    if not keys and not is_loopback(address.host):
        yield (
            f"'{address}' can be reached from other machines, and there is no key that would keep"
            f" strangers out: `{KEYS_HINT}` makes one"
        )
