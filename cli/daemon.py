"""`mlxsup start` and `stop`. The one file of the command line that knows the supervisor."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .connection import Target, connect, daemon_options, output_options
from .exit_status import CliError, ExitStatus
from .output import Output
from .quantities import format_duration

if TYPE_CHECKING:
    from mlxsup.supervisor.config import DaemonConfig

CONFIG_VARIABLE = "MLXSUP_CONFIG"
DEFAULT_CONFIG = "~/.mlxsup/config.toml"
DEFAULT_DRAIN_S = 30.0
EXTRA_S = 15.0
"""What ending the processes may take after the drain: asking, SIGTERM, SIGKILL, reaping."""


@click.command(short_help="Run the daemon.")
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=f"The configuration; else that of {CONFIG_VARIABLE}, else {DEFAULT_CONFIG}.",
)
@output_options
def start(config_path: Path | None, output: Output) -> int:
    """Example: mlxsup start --config mlxsup.toml

    Runs the daemon in the foreground, and prints a line for each change of a model.
    """
    configuration = read_configuration(_find_configuration(config_path))
    from mlxsup.supervisor.app import run_daemon
    from mlxsup.supervisor.runtime import AlreadyRunningError, RuntimeFolderError

    from .change_printer import ChangePrinter

    printer = ChangePrinter(output)
    try:
        return run_daemon(configuration, on_change=printer.changed, on_listening=printer.listening)
    except AlreadyRunningError as error:
        raise CliError(
            str(error),
            code="already_running",
            hint="see it with `mlxsup status`, end it with `mlxsup stop`",
            status=ExitStatus.ALREADY_RUNNING,
        ) from None
    except RuntimeFolderError as error:
        raise CliError(
            str(error),
            code="runtime_folder",
            hint=error.hint,
            status=ExitStatus.RUNTIME_FOLDER,
        ) from None
    finally:
        printer.close()


def read_configuration(path: Path) -> DaemonConfig:
    """A checked configuration.

    Raises:
        CliError: the file is missing or wrong; names every problem.
    """
    expanded = path.expanduser()
    if not expanded.exists():
        raise CliError(
            f"there is no configuration file {path}",
            code="bad_configuration",
            hint="name one with `mlxsup start --config FILE`",
            status=ExitStatus.BAD_CONFIGURATION,
        )
    from mlxsup.supervisor.config import ConfigError, load_config

    try:
        return load_config(expanded)
    except ConfigError as error:
        lines = "".join(f"\n  {problem}" for problem in error.problems)
        raise CliError(
            f"{path} is not a valid configuration:{lines}",
            code="bad_configuration",
            hint=f"correct it, then `mlxsup config check {path}`",
            status=ExitStatus.BAD_CONFIGURATION,
        ) from None


def _find_configuration(given: Path | None) -> Path:
    return given or Path(os.environ.get(CONFIG_VARIABLE) or DEFAULT_CONFIG)


@click.command(short_help="End the daemon and every process.")
@click.option("--now", is_flag=True, help="Do not let running requests finish first.")
@click.option("--timeout", "timeout_s", metavar="S", type=float, help="Seconds that they may take.")
@daemon_options
def stop(now: bool, timeout_s: float | None, target: Target, output: Output) -> None:
    """Example: mlxsup stop

    Lets running requests finish, ends every process, and returns once all are gone.
    """
    from .processes import Watched

    with connect(target) as client:
        value = client.stop(now=now, timeout_s=timeout_s)
    watched = Watched([*value["pids"], value["supervisor_pid"]])
    start_s = time.monotonic()

    def say(waited_s: float, left: list[int]) -> None:
        output.note(f"waiting for {_processes(left)} ({format_duration(waited_s)} so far)")

    left = watched.wait(_limit_s(value, now=now, timeout_s=timeout_s), say)
    took_s = time.monotonic() - start_s
    if left:
        raise CliError(
            f"{_processes(left)} did not end within {format_duration(took_s)}",
            code="still_running",
            hint="end them with `mlxsup stop --now`",
        )
    if output.is_json:
        output.object({"stopped": True, **value, "took_s": round(took_s, 3)})
    else:
        count = len(value["pids"])
        workers = f"{count} worker{'' if count == 1 else 's'}"
        output.data(f"stopped the daemon (pid {value['supervisor_pid']}) and {workers}")


def _limit_s(value: dict[str, Any], *, now: bool, timeout_s: float | None) -> float:
    if now:
        return EXTRA_S
    if timeout_s is not None:
        return timeout_s + EXTRA_S
    configured = value.get("drain_timeout_s")
    return (configured if isinstance(configured, int | float) else DEFAULT_DRAIN_S) + EXTRA_S


def _processes(pids: list[int]) -> str:
    return f"process{'' if len(pids) == 1 else 'es'} {', '.join(map(str, pids))}"
