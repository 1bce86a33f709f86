"""`mlxsup key`: the keys of the HTTP gateway."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from mlxsup.protocol.close_names import close_names
from mlxsup.protocol.key_file import (
    NAME,
    NAME_EXPECTED,
    Key,
    add_key,
    read_keys,
    revoke_key,
)
from mlxsup.protocol.text import timestamp

from ..connection import Target, daemon_options, read_toml
from ..exit_status import CliError, ExitStatus
from ..keys import key_file
from ..terminal.output import Output

HEADINGS = ("NAME", "ACCOUNT", "OPERATOR", "CREATED")


@click.group()
def key() -> None:
    """Example: mlxsup key new laptop

    Makes, lists and revokes the API keys of the HTTP gateway. Once there is one, every request
    needs one.
    """


@key.command(short_help="Make a key.")
@click.argument("name")
@click.option(
    "--account",
    metavar="NAME",
    help="The table under [clients] that its requests belong to; by default the key's name.",
)
@click.option("--operator", "is_operator", is_flag=True, help="It may load and unload models, too.")
@daemon_options
def new(name: str, account: str | None, is_operator: bool, target: Target, output: Output) -> None:
    """Example: mlxsup key new laptop --account alice

    Prints a new key, which nothing shows again: only a hash of it is kept. It works at once.
    """
    for what in (name, account or name):
        if not NAME.fullmatch(what):
            raise CliError(
                f"a name takes {NAME_EXPECTED}",
                code="usage",
                hint="for example `mlxsup key new laptop`",
                status=ExitStatus.USAGE,
            )
    created = timestamp(time.time())
    with key_file(target) as path:
        is_first = read_keys(path) is None
        made = add_key(
            path, name=name, account=account or name, is_operator=is_operator, created=created
        )
    if made is None:
        hint = f"`mlxsup key revoke {name}` ends it; or choose another name"
        raise CliError(f"there is a key called {name!r}", code="key_exists", hint=hint)
    if output.is_json:
        output.object({"name": name, "account": account or name, "is_operator": is_operator,
                       "key": made, "path": str(path)})  # fmt: skip
        return
    output.data(made)
    output.note(f"keep it: nothing shows it again; `mlxsup key revoke {name}` ends it")
    output.note(f"its hash is in {path}")
    if is_first:
        output.note("from now on every request over HTTP needs a key")
    if account is not None and target.config is not None and not _is_listed(account, target.config):
        output.note(
            f"{target.config} has no table [clients.{account}] yet: see config.example.toml"
        )


@key.command("list", short_help="List the keys.")
@daemon_options
def list_keys(target: Target, output: Output) -> None:
    """Example: mlxsup key list

    Lists the names of the keys, whose account each has, and which of them are of operators.
    """
    with key_file(target) as path:
        keys = read_keys(path)
    if output.is_json:
        output.object({"path": str(path), "is_needed": keys is not None, "keys": [
            {"name": one.name, "account": one.account, "is_operator": one.is_operator,
             "created": one.created} for one in keys or ()]})  # fmt: skip
    elif keys:
        output.data("\n".join(_table(keys)))
    elif keys is None:
        output.data(
            "no keys: none is needed, but a gateway that other machines reach refuses every request"
        )
    else:
        output.data(f"no keys: every request is refused until there is one, or {path} is removed")


@key.command(short_help="Revoke a key.")
@click.argument("name")
@daemon_options
def revoke(name: str, target: Target, output: Output) -> None:
    """Example: mlxsup key revoke laptop

    From now on, requests with this key are refused. Answers that have begun are not cut off.
    """
    with key_file(target) as path:
        known = [one.name for one in read_keys(path) or ()]
        left = revoke_key(path, name)
    if left is None:
        close = close_names(name, known, most=1)
        hint = f"did you mean {close[0]}?" if close else "see `mlxsup key list`"
        raise CliError(f"no key is called {name!r}", code="unknown_key", hint=hint)
    if output.is_json:
        output.object({"name": name, "left": len(left)})
        return
    output.data(f"{name} is revoked")
    if not left:
        output.note(f"no key is left: every request is refused, unless {path} is removed")


def _is_listed(account: str, config: Path) -> bool:
    clients = read_toml(config).get("clients", {})
    return isinstance(clients, dict) and account in clients


def _table(keys: Sequence[Key]) -> list[str]:
    rows = [HEADINGS] + [
        (one.name, one.account, "yes" if one.is_operator else "no", one.created) for one in keys
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
