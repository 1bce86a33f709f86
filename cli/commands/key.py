"""`mlxsup key`: the keys of the HTTP gateway."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from mlxsup.protocol.key_file import (
    NAME,
    NAME_EXPECTED,
    add_key,
    find_trouble,
    have_been_made,
    read_keys,
    revoke_key,
    turn_off,
)
from mlxsup.protocol.suggestions import close_names, did_you_mean
from mlxsup.protocol.text import timestamp

from ..connection import Target, daemon_options, read_toml, status_of_daemon
from ..exit_status import CliError, ExitStatus
from ..keys import WAYS, find_keys, usable_keys
from ..terminal.output import Output, confirm
from ..terminal.tables import listing

sure_option = click.option("--yes", "is_sure", is_flag=True, help="Skip the question.")

HEADINGS = ("NAME", "ACCOUNT", "OPERATOR", "CREATED")


@click.group()
def key() -> None:
    """Example: mlxsup key new laptop

    Creates, lists and revokes the API keys of the HTTP gateway. Once a key exists, every request
    needs one; `mlxsup key off` ends that.
    """


@key.command(short_help="Create a key.")
@click.argument("name")
@click.option(
    "--account",
    metavar="NAME",
    help="The table under [clients] that its requests belong to; by default the key's name.",
)
@click.option("--operator", "is_operator", is_flag=True, help="It may load and unload models, too.")
@sure_option
@daemon_options
def new(
    name: str,
    account: str | None,
    is_operator: bool,
    is_sure: bool,
    target: Target,
    output: Output,
) -> None:
    """Example: mlxsup key new laptop --account alice

    Prints a new key, which nothing shows again: only a hash of it is kept. It works within a
    second. On a terminal it asks before the first one, after which every request needs a key.
    """
    for what in (name, account or name):
        if not NAME.fullmatch(what):
            raise CliError(
                f"a name must be {NAME_EXPECTED}",
                hint="for example `mlxsup key new laptop`",
                status=ExitStatus.USAGE,
            )
    created = timestamp(time.time())
    with usable_keys(target) as place:
        is_first = not have_been_made(place)
        if is_first and not is_sure and sys.stdin.isatty() and not _need(target):
            confirm(
                "It is the first key: from then on every request over HTTP needs one, also those of"
                " programs that use the gateway now. Make it?",
                declined="no key was made",
            )
        made = add_key(
            place, name=name, account=account or name, is_operator=is_operator, created=created
        )
    if made is None:
        hint = f"choose another name, or revoke it with `mlxsup key revoke {name}`"
        raise CliError(f"a key named {name!r} already exists", code="key_exists", hint=hint)
    value = {"name": name, "account": account or name, "is_operator": is_operator, "key": made}
    output.result({**value, "path": str(place.file)}, made)
    ends = target.repeat_in(f"`mlxsup key revoke {name}` revokes it")
    output.note(f"save this key now; it is not shown again. {ends}")
    output.note(f"its hash is in {place.file}")
    if is_first:
        output.note("every request over HTTP needs a key now")


@key.command("list", short_help="List the keys.")
@daemon_options
def list_keys(target: Target, output: Output) -> None:
    """Example: mlxsup key list

    Lists the names of the keys, whose account each has, and which of them are of operators.
    """
    with usable_keys(target) as place:
        keys = read_keys(place.file)
        is_needed = have_been_made(place)
    if output.is_json:
        output.object({"path": str(place.file), "is_needed": is_needed, "keys": [
            {"name": one.name, "account": one.account, "is_operator": one.is_operator,
             "created": one.created} for one in keys or ()]})  # fmt: skip
    elif keys:
        rows = [
            (one.name, one.account, "yes" if one.is_operator else "no", one.created) for one in keys
        ]
        output.show(listing(HEADINGS, rows))
    elif is_needed:
        ways = target.repeat_in(WAYS)
        output.data(f"HTTP is locked: no key exists. Every request is refused until {ways}")
        output.note(find_trouble(place))
    else:
        output.data("no keys: programs on this machine need none, and other machines are refused")


@key.command(short_help="Revoke a key.")
@click.argument("name")
@sure_option
@daemon_options
def revoke(name: str, is_sure: bool, target: Target, output: Output) -> None:
    """Example: mlxsup key revoke laptop

    Within a second, requests with this key are refused. Answers that have begun are not cut off. On
    a terminal it asks before the last one, after which every request is refused.
    """
    with usable_keys(target) as place:
        known = [one.name for one in read_keys(place.file) or ()]
        if known == [name] and not is_sure and sys.stdin.isatty():
            ways = target.repeat_in(WAYS)
            confirm(
                f"It is the last key: then every request is refused until {ways}. Revoke it?",
                declined="no key was revoked",
            )
        left = revoke_key(place, name)
    if left is None:
        hint = did_you_mean(close_names(name, known, most=1)) or "see `mlxsup key list`"
        raise CliError(f"there is no key named {name!r}", code="unknown_key", hint=hint)
    output.result({"name": name, "left": len(left)}, f"revoked {name}")
    if not left:
        ways = target.repeat_in(WAYS)
        output.note(f"HTTP is locked: no key is left. Every request is refused until {ways}")


@key.command(short_help="Remove all keys, and allow HTTP without keys.")
@sure_option
@daemon_options
def off(is_sure: bool, target: Target, output: Output) -> None:
    """Example: mlxsup key off

    Removes all keys, after asking. From then on programs of this machine need none.
    """
    place = find_keys(target)
    need = _need(target)
    if not is_sure:
        then = need or "every program of this machine may use the gateway without one"
        confirm(f"Remove all keys? {then[0].upper()}{then[1:]}.")
    with usable_keys(target):
        turn_off(place)
    value = {"path": str(place.file), "is_needed": bool(need)}
    output.result(value, "all keys are removed")
    output.note(need or "within a second, requests need none")


def _need(target: Target) -> str:
    """Return what keeps keys necessary although there is none, as a sentence; empty for nothing."""
    from mlxsup.protocol.gateway import key_need_in

    status: dict[str, Any] = {}
    with suppress(CliError):  # one that does not answer says nothing
        status = status_of_daemon(target) or {}
    path = target.find().config or (
        Path(status["config_path"]) if status.get("config_path") else None
    )
    given = (status.get("gateway") or {}).get("address")  # also with --http
    for table in (None if path is None else read_toml(path).get("gateway"), {"listen": given}):
        if need := key_need_in(table):
            setting, why = need
            return (
                f"keys stay necessary, because gateway.{setting} {why}: every request is refused,"
                " and the daemon does not start again, until `mlxsup key new NAME` has made one"
            )
    return ""
