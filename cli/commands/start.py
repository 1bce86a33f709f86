"""`mlxsup start`, and the daemon that it runs."""

from __future__ import annotations

import errno
import functools
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from mlxsup.protocol.discovery import endpoint_in
from mlxsup.protocol.folders import DEFAULT_LISTEN
from mlxsup.protocol.ids import ModelName

from ..arguments import complete_model
from ..configuration import first_configuration, read_configuration
from ..connection import (
    RUNNING_HINT,
    Target,
    config_option,
    output_options,
    status_of_daemon,
    target_to_reach,
)
from ..exit_status import PERMANENT_EXITS, CliError, ExitStatus, misuse
from ..terminal.output import Output, settle_streams

if TYPE_CHECKING:
    from mlxsup.protocol.gateway import Address
    from mlxsup.supervisor.config.load import DaemonConfig

NO_MODELS = (
    "no models yet: `mlxsup add MODEL` adds one, also while the daemon runs; `mlxsup models` lists"
    " what is on this machine"
)

HTTP_HINT = f"for example `mlxsup start --http {DEFAULT_LISTEN}`"

SHOW_DRAIN_TIMEOUT_S = 1.0
"""Lets a demonstration that is given up end soon."""


def service_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --service to a command that has `output`: launchd takes an exit code other than 0 as a
    reason for another start, so errors against which that does not help end with 0."""

    @click.option(
        "--service",
        "is_service",
        is_flag=True,
        help="Exit with 0 if a restart would not help; for launchd.",
    )
    @functools.wraps(function)
    def wrapper(*, is_service: bool, output: Output, **arguments: Any) -> Any:
        try:
            return function(output=output, **arguments)
        except CliError as error:
            if not (is_service and error.status in PERMANENT_EXITS):
                raise
            output.error(error)
            return ExitStatus.OK

    return cast(Callable[..., Any], wrapper)


@click.command()
@config_option
@click.option(
    "--model",
    "models",
    metavar="[NAME=]FOLDER_OR_REPO",
    multiple=True,
    help="Serve this folder, or OWNER/NAME in the Hugging Face cache, without a configuration "
    "file; may be repeated.",
)
@click.option(
    "--http",
    metavar="[HOST:PORT]",
    is_flag=False,
    flag_value=DEFAULT_LISTEN,
    help=f"Serve OpenAI's API over HTTP as well; by default at {DEFAULT_LISTEN}. A port is enough.",
)
@click.option(
    "--detach",
    "is_detached",
    is_flag=True,
    help="Return once the daemon answers; `mlxsup wait` waits for models.",
)
@click.argument("name", metavar="[MODEL]", required=False, shell_complete=complete_model)
@output_options
@service_option
@click.pass_context
def start(
    context: click.Context,
    name: str | None,
    config_path: Path | None,
    models: tuple[str, ...],
    http: str | None,
    is_detached: bool,
    output: Output,
) -> int:
    """Example: mlxsup start --config mlxsup.toml

    Runs the daemon in the foreground and prints each state change of a model.
    Without a file: mlxsup start --model mlx-community/SmolLM2-135M-Instruct
    While a daemon runs, `mlxsup start MODEL` is `mlxsup load MODEL`.
    """
    if name is not None:
        return _load(context, name, Target(config=config_path), output)
    if models and config_path is not None:
        raise misuse("use either --model or --config", "mlxsup start")
    if http is not None:
        _check_address(http)  # before a first configuration is written
    if models:
        configuration = configure(models, output, is_shown=not is_detached)
        refuse_wrong_folders(configuration)
        arguments = [argument for model in models for argument in ("--model", model)]
    else:
        path = first_configuration(config_path)
        configuration = read_configuration(path, is_looked_up=False)
        _warn_of_folders(configuration, output)
        arguments = ["--config", os.path.abspath(path.expanduser())]
    if http is not None:
        configuration = with_http(configuration, http)
        arguments += ["--http", http]
    warn_of_keys(configuration, output)
    if not configuration.models:
        output.note(Target(config=config_path).repeat_in(NO_MODELS))
    endpoint = _endpoint_of(configuration)
    target = target_to_reach(endpoint, config_path)
    first = _first_to_chat(configuration)
    if configuration.http is not None:
        _refuse_taken(configuration.http, endpoint)
    try:
        if not is_detached:
            return _run(configuration, first, target, output)
        from ..detach import report, start_detached

        started = start_detached(endpoint, configuration.log_dir, arguments)
        report(started, first, target, output)
        return ExitStatus.OK
    except CliError as error:
        if error.status is ExitStatus.ALREADY_RUNNING:
            # Not as a detached daemon put it, whose options are not the user's.
            error.hint = target.repeat_in(RUNNING_HINT)
        raise


def _load(context: click.Context, name: str, target: Target, output: Output) -> int:
    """Load a model of the daemon that runs."""
    if status_of_daemon(target) is None:
        quoted = shlex.quote(name)
        way = f"`mlxsup run {quoted}` starts one and chats with it"
        if name.endswith(".toml"):
            way = f"`mlxsup start --config {quoted}` starts one with this configuration"
        elif "/" in name:
            way = f"`mlxsup start --model {quoted}` starts one that serves it; {way}"
        raise CliError(
            f"no daemon runs that could load {name}", hint=way, status=ExitStatus.NO_DAEMON
        )
    from .lifecycle import load

    words = {"model": name, "is_json": output.is_json, "is_plain": output.is_plain}
    context.invoke(load, **words, config=target.config, is_dry=False)
    return ExitStatus.OK


def _endpoint_of(configuration: DaemonConfig) -> str:
    """Return where the daemon will listen, or say as it would why it cannot."""
    try:
        return endpoint_in(configuration.runtime_dir)
    except ValueError as error:
        message = f"the runtime folder cannot hold a socket: {error}"
        hint = "set another runtime_dir"
        raise CliError(message, hint=hint, status=ExitStatus.RUNTIME_FOLDER) from None


def _refuse_taken(address: Address, endpoint: str) -> None:
    """Refuse the address of `--http` if no program can listen there; it is no matter if a daemon
    runs at the endpoint, because then none is started.
    """
    from .. import port
    from ..lock_holder import lock_holder

    refused = port.refused_at(address)
    if refused is None or lock_holder(endpoint) is not None:
        return
    if refused.errno != errno.EADDRINUSE:
        raise CliError(
            f"HTTP cannot be served at {address}: {refused.strerror or refused}",
            code="address",
            hint=HTTP_HINT,
            status=ExitStatus.USAGE,
        )
    free = port.free_address(address)
    other = f"use another port: `mlxsup start --http {free}`" if free else "use another port"
    raise CliError(
        f"HTTP cannot be served at {address}: the port is taken{port.holder_of(address)}",
        code="address_taken",
        hint=f"{other}, or stop the other program",
        status=ExitStatus.ALREADY_RUNNING,
    )


def _first_to_chat(configuration: DaemonConfig) -> str:
    """Return the first model that writes text, as far as its folder says; empty if none does."""
    from mlxsup.protocol.tasks import Task
    from mlxsup.store.model_folder import describe

    for model in configuration.models:
        launch = model.launch
        if launch.engine == "mlx" and describe(Path(launch.path)).task is not Task.GENERATE:
            continue
        if not launch.pooling and launch.fake.get("task", Task.GENERATE) == Task.GENERATE:
            return str(model.name)
    return ""


def _run(configuration: DaemonConfig, first: str, target: Target, output: Output) -> int:
    from ..foreground import ChangePrinter, next_commands

    if target.endpoint is not None:
        hint = target.repeat_in("`mlxsup status`")
        output.note(f"commands in this folder need an option to find this daemon: {hint}")
    hint = target.repeat_in(f"{next_commands(first)} in another terminal; Ctrl-C ends the daemon")
    printer = ChangePrinter(output, hint)
    is_done = False
    try:
        code = serve(configuration, on_change=printer.changed, on_listening=printer.listening)
    finally:
        is_done = printer.close()
    if not is_done:
        # Its thread waits for a reader and holds the stream, which can be neither flushed nor
        # closed.
        os._exit(code)
    settle_streams()
    return code


def serve(
    configuration: DaemonConfig,
    *,
    on_change: Callable[[Mapping[str, Any]], None],
    on_listening: Callable[[str], None],
) -> int:
    """Run the daemon on the main thread until it is asked to end."""
    from mlxsup.supervisor.config.load import ConfigError
    from mlxsup.supervisor.daemon import run_daemon
    from mlxsup.supervisor.runtime_folder import AlreadyRunningError, RuntimeFolderError

    try:
        return run_daemon(configuration, on_change=on_change, on_listening=on_listening)
    except AlreadyRunningError as error:
        status = ExitStatus.ALREADY_RUNNING
        raise CliError(str(error), hint=RUNNING_HINT, status=status) from None
    except ConfigError as error:
        hint = "`mlxsup plan` shows what each model needs"
        raise CliError(str(error), hint=hint, status=ExitStatus.BAD_CONFIGURATION) from None
    except RuntimeFolderError as error:
        raise CliError(str(error), hint=error.hint, status=ExitStatus.RUNTIME_FOLDER) from None


def serve_two(
    configuration: DaemonConfig, folder: Path, *, on_listening: Callable[[str], None]
) -> int:
    """Run a daemon with the first two models, or with one under two names; for `mlxsup demo`.

    Everything else has its default: above all the restart limits, because there will be restarts.

    Args:
        configuration: names at least one model.
        folder: for its sockets and logs.
        on_listening: called with the endpoint once it answers there.
    """
    from mlxsup.protocol.gateway import GatewayRules
    from mlxsup.protocol.key_file import MARK_NAME, KeyPlace
    from mlxsup.supervisor.core.settings import CoreSettings, RestartSettings

    first, second = (*configuration.models, *configuration.models)[:2]
    if second is first:
        second = replace(first, name=ModelName(f"{first.name}-copy"))
    shown = replace(
        configuration,
        config_path=None,
        runtime_dir=folder / "run",
        keys=KeyPlace(folder / "keys.json", folder / "run" / MARK_NAME),
        log_dir=folder / "logs",
        core=CoreSettings(drain_timeout_s=SHOW_DRAIN_TIMEOUT_S),
        models=tuple(replace(one, restart=RestartSettings()) for one in (first, second)),
        gateway=None,
        gateway_rules=GatewayRules(),
    )
    return serve(shown, on_change=lambda _: None, on_listening=on_listening)


# ---------------------------------------------------------------- a configuration of options


def configure(models: Sequence[str], output: Output, *, is_shown: bool) -> DaemonConfig:
    """Return the configuration of `--model` options; print it if asked, so that the user can keep
    it.
    """
    from mlxsup.supervisor.config.load import ConfigError, config_of_folders, split_model

    folders: dict[str, Path | str] = {}
    for given in models:
        name, folder = split_model(given)
        if name in folders:
            hint = f"rename one of them: --model NAME={folder}"
            message = f"two models have the name {name}"
            raise CliError(message, hint=hint, status=ExitStatus.USAGE)
        folders[name] = folder
    try:
        configuration = config_of_folders(folders)
    except ConfigError as error:
        # Each problem begins with a place in a file that does not exist.
        message = "; ".join(problem.split(": ", 1)[1] for problem in error.problems)
        hint = "name it: --model NAME=FOLDER"
        raise CliError(message, hint=hint, status=ExitStatus.USAGE) from None
    if is_shown and output.is_json:
        output.object({"configuration": configuration.text})
    elif is_shown:
        output.data(configuration.text)
    return configuration


def with_http(configuration: DaemonConfig, listen: str) -> DaemonConfig:
    """Return the configuration with a gateway that listens there."""
    from mlxsup.protocol.gateway import Address
    from mlxsup.supervisor.config.check import gateway_problems

    rules, keys = configuration.gateway_rules, configuration.keys
    if problems := list(gateway_problems(listen, rules, keys)):
        target = Target(config=configuration.config_path)
        message = "; ".join(
            f"{'--http' if setting == 'listen' else f'gateway.{setting}'} {target.repeat_in(text)}"
            for setting, text in problems
        )
        raise CliError(message, hint=HTTP_HINT, status=ExitStatus.USAGE)
    return replace(configuration, http=Address.parse(listen))


def _check_address(listen: str) -> None:
    """Raise if that is no address."""
    from mlxsup.protocol.gateway import Address

    try:
        Address.parse(listen)
    except ValueError as error:
        message = f"--http {listen!r} {error}"
        raise CliError(message, hint=HTTP_HINT, status=ExitStatus.USAGE) from None


def refuse_wrong_folders(configuration: DaemonConfig) -> None:
    """Refuse the first folder of `--model` that cannot be loaded; say what to name instead."""
    from mlxsup.supervisor.config.model_folders import model_problems

    for problem in model_problems(configuration).values():
        status = ExitStatus.USAGE
        raise CliError(problem.text, code="model_folder", hint=problem.hint, status=status)


def warn_of_keys(configuration: DaemonConfig, output: Output) -> None:
    """Say that the gateway will refuse every request, if its keys are lost."""
    from mlxsup.protocol.key_file import find_trouble  # help would wait for its hashes

    has_gateway = configuration.http is not None or configuration.gateway is not None
    if has_gateway and (trouble := find_trouble(configuration.keys)):
        target = Target(config=configuration.config_path)
        ways = "`mlxsup key new NAME` makes a key, `mlxsup key off` ends the need for keys"
        output.note(
            f"warning: the HTTP gateway refuses every request: {trouble}; {target.repeat_in(ways)}"
        )


def _warn_of_folders(configuration: DaemonConfig, output: Output) -> None:
    """Say which models of a file will fail to load; the others are served."""
    from mlxsup.supervisor.config.model_folders import model_problems, sentence

    for name, problem in model_problems(configuration).items():
        output.note(f"warning: {name}: {sentence(problem)}")
