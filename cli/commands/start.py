"""`mlxsup start`; architecture.md says what else knows the supervisor in the command line."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from mlxsup.protocol.gateway import DEFAULT_LISTEN, Address, GatewayRules
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.key_file import MARK_NAME, KeyPlace, find_trouble
from mlxsup.protocol.places import config_places, endpoint_in, find_config

from ..checked_folders import refuse_wrong_folders, warn_of_folders
from ..connection import RUNNING_HINT, Target, output_options, target_to_reach
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output, settle_streams

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig

NO_FILE_HINT = "write one with `mlxsup init`, or name one with --config FILE"
NO_FILE_TO_START_HINT = f"{NO_FILE_HINT}, or use none: `mlxsup start --model FOLDER`"

SHOW_DRAIN_TIMEOUT_S = 1.0
"""Lets a demonstration that is given up end soon."""


def service_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --service to a command that has `output`: launchd takes an exit code other than 0 as a
    reason for another start, so errors against which that does not help end with 0."""

    @click.option(
        "--service",
        "is_service",
        is_flag=True,
        help="Exit with 0 if another start would not help; for launchd.",
    )
    @functools.wraps(function)
    def wrapper(*, is_service: bool, output: Output, **arguments: Any) -> Any:
        from ..service.facts import PERMANENT_EXITS

        try:
            return function(output=output, **arguments)
        except CliError as error:
            if not (is_service and error.status in PERMANENT_EXITS):
                raise
            output.error(error)
            return ExitStatus.OK

    return cast(Callable[..., Any], wrapper)


@click.command()
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Configuration file; by default, the one that `mlxsup config path` prints.",
)
@click.option(
    "--model",
    "models",
    metavar="[NAME=]FOLDER_OR_REPO",
    multiple=True,
    help="Serve this folder, or OWNER/NAME of the Hugging Face cache, without a configuration"
    " file; may be repeated.",
)
@click.option(
    "--http",
    metavar="[HOST:PORT]",
    is_flag=False,
    flag_value=DEFAULT_LISTEN,
    help=f"Serve OpenAI's API over HTTP as well; by default at {DEFAULT_LISTEN}.",
)
@click.option("--detach", "is_detached", is_flag=True, help="Return once the daemon answers.")
@click.option(
    "--wait", "is_waiting", is_flag=True, help="With --detach: return once its models are READY."
)
@click.option(
    "--save",
    "saved_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --model: write the configuration to FILE, and use it from there.",
)
@output_options
@service_option
def start(
    config_path: Path | None,
    models: tuple[str, ...],
    http: str | None,
    is_detached: bool,
    is_waiting: bool,
    saved_path: Path | None,
    output: Output,
) -> int:
    """Example: mlxsup start --config mlxsup.toml

    Runs the daemon in the foreground, and prints a line for each change of a model's state.
    Without a file: mlxsup start --model mlx-community/SmolLM2-135M-Instruct
    """
    _check_options(
        {
            "use either --model or --config": models and config_path is not None,
            "--save takes models: use it with --model": saved_path is not None and not models,
            "--wait takes --detach; or use `mlxsup wait`": is_waiting and not is_detached,
        }
    )
    if saved_path is not None:
        from ..saved_configuration import save_configuration

        configuration, text = read_models(models)
        if http is not None:
            with_http(configuration, http)  # checked before anything is written
        refuse_wrong_folders(configuration)
        save_configuration(saved_path, text, http, _endpoint_of(configuration), output)
        models, http, config_path = (), None, saved_path
    if models:
        configuration = configure(models, output, is_shown=not is_detached)
        refuse_wrong_folders(configuration)
        arguments = [argument for model in models for argument in ("--model", model)]
    else:
        path = find_configuration(config_path, hint=NO_FILE_TO_START_HINT)
        configuration = read_configuration(path, is_looked_up=False)
        warn_of_folders(configuration, output)
        arguments = ["--config", os.path.abspath(path.expanduser())]
    if http is not None:
        configuration = with_http(configuration, http)
        arguments += ["--http", http]
    warn_of_keys(configuration, output)
    target = target_to_reach(_endpoint_of(configuration), config_path)
    try:
        if is_detached:
            from ..detach import start_detached
            from ..detached_start import report

            endpoint, log_dir = _endpoint_of(configuration), configuration.log_dir
            started = start_detached(endpoint, log_dir, arguments)
            report(started, target, output, is_waiting=is_waiting)
            return ExitStatus.OK
        return _run(configuration, target, output)
    except CliError as error:
        if error.status is ExitStatus.ALREADY_RUNNING:
            # Not as a detached one put it, whose options are not the user's.
            error.hint = target.repeat_in(RUNNING_HINT)
        raise


def _check_options(mistakes: Mapping[str, object]) -> None:
    """Refuses the first of the mistakes that was made."""
    for message, is_made in mistakes.items():
        if is_made:
            hint = "see `mlxsup start -h`"
            raise CliError(message, code="usage", hint=hint, status=ExitStatus.USAGE)


def _endpoint_of(configuration: DaemonConfig) -> str:
    """Where the daemon will listen.

    Raises:
        CliError: the path of its socket would be too long.
    """
    try:
        return endpoint_in(configuration.runtime_dir)
    except ValueError as error:
        # As the daemon would say, which cannot be asked at such an endpoint.
        raise CliError(
            f"the runtime folder's path is too long: {error}",
            code="runtime_folder",
            hint="set a shorter runtime_dir",
            status=ExitStatus.RUNTIME_FOLDER,
        ) from None


def _run(configuration: DaemonConfig, target: Target, output: Output) -> int:
    from ..terminal.change_printer import ChangePrinter

    if target.endpoint is not None:
        hint = target.repeat_in("`mlxsup status`")
        output.note(f"commands in this folder and shell need an option to find it: {hint}")
    printer = ChangePrinter(output)
    is_done = False
    try:
        code = serve(configuration, on_change=printer.changed, on_listening=printer.listening)
    finally:
        is_done = printer.close()
    if not is_done:
        # Its thread waits for a reader and holds the stream, which nobody can flush or close.
        os._exit(code)
    settle_streams()
    return code


def serve(
    configuration: DaemonConfig,
    *,
    on_change: Callable[[Mapping[str, Any]], None],
    on_listening: Callable[[str], None],
) -> int:
    """Runs the daemon on the main thread until it is asked to end.

    Args:
        configuration: what to run.
        on_change: called with each change of a model.
        on_listening: called with the endpoint once it answers there.

    Raises:
        CliError: another one is running, its folder cannot be used, or the models that are pinned
            do not fit into the machine.
    """
    from mlxsup.supervisor.config.load import ConfigError
    from mlxsup.supervisor.daemon import run_daemon
    from mlxsup.supervisor.runtime_folder import AlreadyRunningError, RuntimeFolderError

    try:
        return run_daemon(configuration, on_change=on_change, on_listening=on_listening)
    except AlreadyRunningError as error:
        raise CliError(
            str(error),
            code="already_running",
            hint=RUNNING_HINT,
            status=ExitStatus.ALREADY_RUNNING,
        ) from None
    except ConfigError as error:
        raise CliError(
            str(error),
            code="bad_configuration",
            hint="`mlxsup plan` shows what each model needs",
            status=ExitStatus.BAD_CONFIGURATION,
        ) from None
    except RuntimeFolderError as error:
        raise CliError(
            str(error),
            code="runtime_folder",
            hint=error.hint,
            status=ExitStatus.RUNTIME_FOLDER,
        ) from None


def serve_two(
    configuration: DaemonConfig,
    folder: Path,
    *,
    on_listening: Callable[[str], None],
    http: Address | None = None,
    on_change: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> int:
    """Runs a daemon with the first two models, or with one under two names; for `mlxsup demo`.

    Everything else has its default: above all the restart limits, because there will be restarts.

    Args:
        configuration: names at least one model.
        folder: for its sockets and logs.
        on_listening: called with the endpoint once it answers there.
        http: where its gateway listens; None: there is none.
        on_change: called with each change of a model, and of the gateway.

    Raises:
        CliError: its folder cannot be used.
    """
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
        gateway=http,
        gateway_rules=GatewayRules(),
    )
    return serve(shown, on_change=on_change, on_listening=on_listening)


def configure(models: Sequence[str], output: Output, *, is_shown: bool) -> DaemonConfig:
    """The configuration of `--model` options.

    Args:
        models: each a folder or a repository, with or without `NAME=`.
        output: how to write output.
        is_shown: whether to print it, so that the user can keep it.

    Raises:
        CliError: a name is invalid, or given twice.
    """
    configuration, text = read_models(models)
    if is_shown and output.is_json:
        output.object({"configuration": text})
    elif is_shown:
        output.data(text)
    return configuration


def read_models(models: Sequence[str]) -> tuple[DaemonConfig, str]:
    """The configuration of `--model` options, and the file that would say the same.

    Raises:
        CliError: a name is invalid, or given twice.
    """
    from mlxsup.supervisor.config.folders import config_of_folders, split_model
    from mlxsup.supervisor.config.load import ConfigError

    folders: dict[str, Path | str] = {}
    for given in models:
        name, folder = split_model(given)
        if name in folders:
            message = f"two models are called {name}"
            hint = f"rename one of them: --model NAME={folder}"
            raise CliError(message, code="usage", hint=hint, status=ExitStatus.USAGE)
        folders[name] = folder
    try:
        return config_of_folders(folders)
    except ConfigError as error:
        # Each problem begins with a place in a file that does not exist.
        message = "; ".join(problem.split(": ", 1)[1] for problem in error.problems)
        hint = "name it: --model NAME=FOLDER"
        raise CliError(message, code="usage", hint=hint, status=ExitStatus.USAGE) from None


def warn_of_keys(configuration: DaemonConfig, output: Output) -> None:
    """Say that the gateway will refuse every request, if its keys are lost."""
    has_gateway = configuration.http is not None or configuration.gateway is not None
    if has_gateway and (trouble := find_trouble(configuration.keys)):
        target = Target(config=configuration.config_path)
        ways = "`mlxsup key new NAME` makes a key, `mlxsup key off` ends the need for keys"
        output.note(
            f"warning: the HTTP gateway refuses every request: {trouble}; {target.repeat_in(ways)}"
        )


def with_http(configuration: DaemonConfig, listen: str) -> DaemonConfig:
    """The configuration, with a gateway that listens there.

    Raises:
        CliError: it is no address, or needs keys that are not there, or the extra is not installed.
    """
    from mlxsup.supervisor.config.gateway_table import gateway_problems

    rules, keys = configuration.gateway_rules, configuration.keys
    if problems := list(gateway_problems(listen, rules, keys)):
        target = Target(config=configuration.config_path)
        message = "; ".join(
            f"{'--http' if setting == 'listen' else f'gateway.{setting}'} {target.repeat_in(text)}"
            for setting, text in problems
        )
        hint = f"for example `mlxsup start --http {DEFAULT_LISTEN}`"
        raise CliError(message, code="usage", hint=hint, status=ExitStatus.USAGE)
    return replace(configuration, http=Address.parse(listen))


def read_configuration(
    path: Path, *, has_sockets: bool = False, is_looked_up: bool = True
) -> DaemonConfig:
    """A checked configuration.

    Args:
        path: the file.
        has_sockets: whether sockets must fit into its runtime folder.
        is_looked_up: whether repositories are looked up in the cache, whose disk may not answer;
            a daemon does that by itself.

    Raises:
        CliError: the file is missing or wrong; the message names every problem.
    """
    expanded = path.expanduser()
    try:
        expanded.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise CliError(
            f"no configuration file at {path}",
            code="bad_configuration",
            hint=f"write one with `mlxsup init {shlex.quote(str(path))}`, or name another one",
            status=ExitStatus.BAD_CONFIGURATION,
        ) from None
    except OSError:
        pass  # it cannot be read, as is said below
    from mlxsup.supervisor.config.load import looked_up, read_config

    with configuration_errors(path):
        configuration = read_config(expanded, has_sockets=has_sockets)
    return looked_up(configuration) if is_looked_up else configuration


@contextmanager
def configuration_errors(path: Path) -> Iterator[None]:
    """Says what is wrong with a configuration that is read or checked.

    Args:
        path: the file, as the user named it.

    Raises:
        CliError: names every problem.
    """
    from mlxsup.supervisor.config.load import ConfigError

    try:
        yield
    except ConfigError as error:
        target = Target(config=path)
        lines = "".join(f"\n  {target.repeat_in(problem)}" for problem in error.problems)
        raise CliError(
            f"{path} is not a valid configuration:{lines}",
            code="bad_configuration",
            hint=f"fix it, then `mlxsup config check {shlex.quote(str(path))}`",
            status=ExitStatus.BAD_CONFIGURATION,
        ) from None


def find_configuration(given: Path | None, *, hint: str = NO_FILE_HINT) -> Path:
    """The file that `start` reads.

    Args:
        given: that of `--config`.
        hint: what to do if there is no file.

    Raises:
        CliError: there is none in any of its places.
    """
    found = find_config(given)
    if found is not None:
        return found.path
    looked = ", ".join(str(place.path) for place in config_places())
    raise CliError(
        f"no configuration file: there is none of {looked}",
        code="bad_configuration",
        hint=hint,
        status=ExitStatus.BAD_CONFIGURATION,
    )
