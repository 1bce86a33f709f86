"""The options that tell a command where its daemon is, and the errors it may meet there."""

from __future__ import annotations

import functools
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from mlxsup.protocol import discovery
from mlxsup.protocol.discovery import (
    ENDPOINT_VARIABLE,
    Place,
    UnreadableConfigError,
    find_place,
    log_dir_of,
    socket_at,
)
from mlxsup.protocol.folders import default_log_dir, recorded_log_dir
from mlxsup.protocol.suggestions import close_names, did_you_mean

from .exit_status import CliError, ExitStatus, NoDaemonError
from .terminal.output import LiveLine, Output
from .terminal.text import counted

if TYPE_CHECKING:
    from mlxsup.client import Client, ConnectionLost, RequestError


NEWCOMER_HINT = "`mlxsup run MODEL` starts one that serves MODEL, and chats with it"

RUNNING_HINT = "see it with `mlxsup status`, end it with `mlxsup stop`"

REQUEST_HINTS = {
    "model_failed": "see `mlxsup why MODEL`, then `mlxsup restart MODEL`",
    "load_failed": "see `mlxsup logs MODEL`, fix the cause, then run `mlxsup restart MODEL`; after"
    " a change of the configuration, run `mlxsup reload`",
    "worker_crashed": "see `mlxsup why MODEL`; you can send the request again",
    "quarantined": "`mlxsup why MODEL` explains it; `mlxsup restart MODEL` lifts the quarantine",
    "unloaded": "load it with `mlxsup load MODEL`, then send the request again",
    "overloaded": "try again later; `mlxsup status` shows what is running",
    "queue_timeout": "see `mlxsup status`, or raise `queue_timeout_s`",
    "deadline_exceeded": "raise `timeout_s` or `first_token_timeout_s`",
    "context_length_exceeded": "shorten the prompt, or ask for fewer tokens",
    "insufficient_memory": "`mlxsup status` shows which models use the memory; a shorter prompt or"
    " answer needs less",
    "slow_consumer": "read the stream without delay",
    "shutting_down": "`mlxsup stop` returns when it has ended; then run `mlxsup start`",
    "unsupported_version": "mlxsup was upgraded; run `mlxsup stop`, then `mlxsup start`",
    "internal": "please report it with the file from `mlxsup why --report FILE`",
}
"""The hint for each error of a daemon, by its code."""

SILENCE = {
    "stopped": (
        ": it is stopped",
        "resume it with `kill -CONT {pid}`, or end it with `kill -KILL {pid}`",
    ),
    "busy": (
        ", although its process is alive: it is busy, or has too many open files",
        "try again in a moment; `mlxsup logs` may show the cause",
    ),
    "silent": (
        "",
        "see its log, or end it with `kill {pid}` and, if it is still there after a minute, "
        "`kill -KILL {pid}`",
    ),
}
"""The message and the hint for a daemon that lives and does not answer."""

REACH_S = 10.0
"""How long a command waits for a daemon that lives and is out of reach."""
START_S = 60.0
"""How long a command that needs a daemon, and would start one, waits for one that is starting."""
REACH_AGAIN_S = 0.1

_COMMAND = r"`mlxsup (?!(?:config|completion|convert|demo|init|pull)\b)([a-z-]+)([^`]*)(?<! -h)`"
"""A command of a hint that takes the options of `Target`."""

ONLY_CONFIG = frozenset({"start", "models", "plan", "show", "hosts", "service"})
"""Commands that take --config, and not --endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The daemon that is meant.

    Attributes:
        endpoint: as given with --endpoint.
        config: the file given with --config.
    """

    endpoint: str | None = None
    config: Path | None = None

    def find(self) -> Place:
        """Return where the daemon is, by the rule for every command (`discovery.find_place`)."""
        try:
            return find_place(self.endpoint, self.config)
        except UnreadableConfigError as error:
            raise _unreadable(error) from None
        except ValueError as error:
            raise CliError(str(error), status=ExitStatus.USAGE) from None

    def find_endpoint(self) -> str:
        """Return the endpoint of `find`.

        Raises:
            CliError: what counts does not name an endpoint.
        """
        return self.find().endpoint

    @property
    def endpoint_source(self) -> str:
        """Return what named the endpoint; empty if it follows from a file or is the default."""
        try:
            source = find_place(self.endpoint, self.config).source
        except ValueError:
            return ""
        return source if source in ("--endpoint", ENDPOINT_VARIABLE) else ""

    def repeat_in(self, hint: str) -> str:
        """Return the hint, in which each command has the options that were given, quoted.

        Returns:
            Nothing instead of a hint to start a daemon, if it would listen at another endpoint.
        """
        if "`mlxsup start`" in hint and self.endpoint_source:
            return ""
        return re.sub(_COMMAND, self._repeat, hint)

    def explain(self, error: CliError) -> CliError:
        """Return the error, with a hint that is about this daemon."""
        is_lost = error.code == "connection_lost" and "`mlxsup start`" in error.hint
        if is_lost and (source := self.endpoint_source):
            error.hint = f"check {source}: a daemon prints its endpoint when it starts"
        elif is_lost and self.find().config is None:
            error.hint = NEWCOMER_HINT
        else:
            error.hint = self.repeat_in(error.hint)
        return error

    def _repeat(self, command: re.Match[str]) -> str:
        word, rest = command.groups()
        if "--endpoint" in rest or "--config" in rest:
            return command.group()  # it says itself which daemon it means
        given: dict[str, object] = {"--endpoint": self.endpoint, "--config": self.config}
        options = "".join(
            f" {option} {shlex.quote(str(value))}"
            for option, value in given.items()
            if value is not None and not (word in ONLY_CONFIG and option == "--endpoint")
        )
        return f"`mlxsup {word}{rest}{options}`"


config_option = click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The configuration file.",
)
"""Of commands that read the file and ask no daemon; they get it as `config_path`."""


def output_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json and --no-color, which the command gets as `output`."""

    @click.option("--json", "is_json", is_flag=True, help="Print JSON, for programs.")
    @click.option("--no-color", "is_plain", is_flag=True, help="Print without colour.")
    @functools.wraps(function)
    def wrapper(*, is_json: bool, is_plain: bool, **arguments: Any) -> Any:
        return function(output=Output(is_json=is_json, is_plain=is_plain), **arguments)

    return cast(Callable[..., Any], wrapper)


def daemon_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --endpoint and --config, which the command gets as `target`, and `output_options`."""

    @click.option("--endpoint", metavar="ENDPOINT", help="Where the daemon listens (ipc://…).")
    @click.option(
        "--config",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="The daemon's configuration file.",
    )
    @functools.wraps(function)
    def wrapper(*, endpoint: str | None, config: Path | None, **arguments: Any) -> Any:
        target = Target(endpoint=endpoint, config=config)
        try:
            return function(target=target, **arguments)
        except CliError as error:
            target.explain(error)
            raise

    return output_options(cast(Callable[..., Any], wrapper))


def daemon_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `daemon_options`, and call the function with `client`, connected, and `output`."""

    @functools.wraps(function)
    def wrapper(*, target: Target, **arguments: Any) -> Any:
        with connect(target) as client:
            return function(client=client, **arguments)

    return daemon_options(wrapper)


def target_to_reach(endpoint: str, config: Path | None) -> Target:
    """Return the options with which commands in this shell reach a daemon, if they need any.

    Args:
        endpoint: where it listens.
        config: the file that was named when it was started.
    """
    if config is not None:
        return Target(config=config)
    try:
        is_found = find_place().endpoint == endpoint
    except ValueError:
        is_found = False
    return Target() if is_found else Target(endpoint=endpoint)


@contextmanager
def connect(target: Target, limit_s: float = REACH_S) -> Iterator[Client]:
    """Yield a client of the chosen daemon, once it answers.

    Args:
        target: the daemon.
        limit_s: how long to wait for one that lives and does not answer yet.

    Raises:
        NoDaemonError: no daemon runs there.
        CliError: the request failed, or a daemon that lives does not answer.
    """
    from mlxsup.client import Client

    endpoint = target.find_endpoint()
    with errors_explained(), Client(endpoint) as client:
        _reach(client, endpoint, limit_s)
        yield client


def status_of_daemon(target: Target, limit_s: float = REACH_S) -> dict[str, Any] | None:
    """Return the status of the daemon, reached as by `connect`; None if no daemon runs there."""
    try:
        with connect(target, limit_s) as client:
            return client.status()
    except NoDaemonError:
        return None


@contextmanager
def errors_explained() -> Iterator[None]:
    """Raise a client's errors as a sentence and the command that helps."""
    from mlxsup.client import ConnectionLost, RequestError

    try:
        yield
    except RequestError as error:
        raise explain_request_error(error) from None
    except ConnectionLost as error:
        raise explain_connection_lost(error) from None


def _reach(client: Client, endpoint: str, limit_s: float) -> None:
    """Wait until a daemon that lives answers.

    It may be starting, its queue of connections may be full, its files may have run out, or its
    socket was removed and it is about to make it again. libzmq reports all of that as it does its
    absence.

    Raises:
        ConnectionLost: it does not answer within the limit, or is stopped, silent or not there.
    """
    from mlxsup.client import ConnectionLost

    from .lock_holder import is_beating, lock_holder

    if not is_beating(endpoint):
        return
    until = time.monotonic() + limit_s
    with LiveLine(Output()) as line:
        while True:
            try:
                client.ping()
                return
            except ConnectionLost as error:
                if error.is_turned_away or time.monotonic() >= until:
                    raise
                holder = lock_holder(error.endpoint)
                if holder is None or holder.is_stopped or not holder.is_beating:
                    raise
            line.show("waiting for the daemon to answer")
            time.sleep(REACH_AGAIN_S)


def explain_connection_lost(error: ConnectionLost) -> CliError:
    """Return that no daemon answers; it names one that is alive but silent, or another user's."""
    from .lock_holder import is_forbidden, lock_holder

    if is_forbidden(error.endpoint):
        return CliError(
            f"the daemon at {error.endpoint} belongs to another user",
            hint="run this as that user; `mlxsup config path` shows why this daemon was chosen",
            status=ExitStatus.NO_PERMISSION,
        )
    message, hint = error.message, error.hint
    if not error.is_turned_away:
        holder = lock_holder(error.endpoint)
        if holder is None:
            return NoDaemonError(message, hint)
        condition = "stopped" if holder.is_stopped else "busy" if holder.is_beating else "silent"
        why, hint = (text.format(pid=holder.pid) for text in SILENCE[condition])
        message = f"the daemon with pid {holder.pid} does not answer at {error.endpoint}{why}"
    return CliError(message, code="connection_lost", hint=hint, status=ExitStatus.NO_DAEMON)


def explain_request_error(error: RequestError) -> CliError:
    """Return a daemon's error as a sentence and the command that helps."""
    detail = error.detail
    if error.code == "unknown_model" and "hint" not in detail:
        return _unknown_model(error.message, detail.get("close") or [], detail.get("known") or [])
    message = error.message
    sent = detail.get("tokens_sent")
    if error.code == "worker_crashed" and sent is not None and f" {sent} token" not in message:
        message += f" (after {counted(sent, 'token')})"
    if isinstance(detail.get("hint"), str):
        code = str(detail.get("problem") or error.code)
        status = ExitStatus.USAGE if code == "usage" else ExitStatus.FAILED
        return CliError(error.message, code=code, hint=detail["hint"], status=status)
    hint = REQUEST_HINTS.get(error.code, "")
    if error.code == "load_failed" and error.retryable:
        hint = "`mlxsup why MODEL` says what helps"
    if error.code == "invalid_request" and ("request" in detail or "numbers" in detail):
        hint = (
            "`mlxsup requests` lists the open requests; `mlxsup why ID` explains one that has ended"
        )
    model = detail.get("model")
    hint = hint.replace("MODEL", model) if isinstance(model, str) else hint
    return CliError(message, code=str(error.code), hint=hint)


def unknown_model(name: str, known: Sequence[str]) -> CliError:
    """Return the error for a name that is not configured, as a daemon would put it."""
    message = f"there is no model {name!r}; configured: {', '.join(sorted(known)) or 'none'}"
    return _unknown_model(message, close_names(name, known), known)


def _unknown_model(message: str, close: Sequence[str], known: Sequence[str]) -> CliError:
    hint = did_you_mean(close) or (
        "see `mlxsup status`" if known else "`mlxsup add MODEL` adds one"
    )
    return CliError(message, code="unknown_model", hint=hint)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a configuration file, unchecked; `mlxsup config check` does the checking."""
    try:
        return discovery.read_toml(path)
    except UnreadableConfigError as error:
        raise _unreadable(error) from None


def models_in(config: Path | None) -> dict[str, str]:
    """Return the models of an unchecked file by their names and aliases; none without a file."""
    tables = {} if config is None else read_toml(config).get("models")
    models = tables if isinstance(tables, dict) else {}
    found = {name: name for name in models}
    for name, entry in models.items():
        aliases = entry.get("aliases") if isinstance(entry, dict) else None
        for alias in aliases if isinstance(aliases, list) else ():
            found.setdefault(str(alias), name)
    return found


def _unreadable(error: UnreadableConfigError) -> CliError:
    path = shlex.quote(str(error.path))
    hint = f"check it with `mlxsup config check {path}`"
    if not os.path.lexists(error.path):
        hint = f"choose another file, or create it with `mlxsup init {path}`"
    return CliError(str(error), hint=hint, status=ExitStatus.BAD_CONFIGURATION)


def log_dir_left_by(target: Target) -> Path | None:
    """Return the folder in which the latest daemon there wrote its logs; None if there is none.

    Raises:
        CliError: what says where the daemon is cannot be read.
    """
    place = target.find()
    runtime_dir = socket_at(place.endpoint).parent
    path = recorded_log_dir(runtime_dir)
    if path is None and place.config is not None:
        path = log_dir_of(place.config)
    path = path or default_log_dir(runtime_dir)
    return path if path.is_dir() else None
