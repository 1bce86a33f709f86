"""`[gateway]`: the table that makes the daemon run the HTTP gateway."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from mlxsup.protocol.gateway import (
    ADDRESS_EXPECTED,
    DEFAULT_LISTEN,
    EXTRA_MODULES,
    INSTALL_HINT,
    KEYS_HINT,
    Address,
    GatewayRules,
    find_key_need,
)
from mlxsup.protocol.key_file import KeyPlace, have_been_made

from .fields import documented
from .kinds import NameMap, Names, Table
from .values import HOSTS_EXPECTED, KEYS_EXPECTED, NAME_MAP_EXPECTED, ORIGINS_EXPECTED


class GatewayTable(Table):
    """`[gateway]`."""

    listen: str = Field(
        DEFAULT_LISTEN,
        title="where the HTTP gateway listens",
        description=ADDRESS_EXPECTED,
        json_schema_extra=documented(
            "; port 0: any that is free. An address that other machines reach needs"
            " [keys](http-api.md#keys)",
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
            ': `hosts = ["ai.example"]`; see [behind a proxy](http-api.md#behind-a-proxy). Those'
            " that are not of this machine need [keys](http-api.md#keys)",
            "names",
        ),
    )
    origins: Names = Field(
        [],
        title="pages of other sites that may ask (CORS)",
        description=ORIGINS_EXPECTED,
        json_schema_extra=documented(
            ': `origins = ["https://chat.example"]`; those that are not of this machine need'
            " [keys](http-api.md#pages-of-other-sites)",
            "origins",
        ),
    )
    keys: Literal["auto", "required"] = Field(
        "auto",
        title="whether each request needs an API key",
        description=KEYS_EXPECTED,
        json_schema_extra=documented(
            ". `auto`: from the first key on, and where other machines reach the gateway;"
            " `required`: always; see [keys](http-api.md#keys)",
            "word",
        ),
    )


def gateway_problems(listen: str, rules: GatewayRules, keys: KeyPlace) -> Iterator[tuple[str, str]]:
    """Yield what keeps a gateway from running here: the key of `[gateway]`, and a phrase behind it.

    Keys that were lost keep it from nothing: it runs, refuses every request and says why.

    Args:
        listen: where it is to listen.
        rules: what the configuration says about requests.
        keys: where its keys are.
    """
    try:
        address = Address.parse(listen)
    except ValueError as error:
        yield "listen", f"{listen!r} {error}"
    else:
        need = find_key_need(address, rules)
        if need is not None and not have_been_made(keys):
            setting, why = need
            missing_key = "there is no key that would keep strangers out"
            yield setting, f"{why}, and {missing_key}: `{KEYS_HINT}` makes one"
    if missing := [name for name in EXTRA_MODULES if find_spec(name) is None]:
        yield "listen", f"needs {', '.join(missing)}: {INSTALL_HINT}"
