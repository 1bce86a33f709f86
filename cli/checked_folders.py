"""What `mlxsup start` says of model folders that cannot be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .exit_status import CliError, ExitStatus
from .terminal.output import Output

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig


def refuse_wrong_folders(configuration: DaemonConfig) -> None:
    """Refuses what `--model` names if it cannot be loaded.

    Raises:
        CliError: names the first such folder, and what to name instead.
    """
    from mlxsup.supervisor.config.model_folders import model_problems

    for problem in model_problems(configuration).values():
        raise CliError(
            problem.text, code="model_folder", hint=problem.hint, status=ExitStatus.USAGE
        )


def warn_of_folders(configuration: DaemonConfig, output: Output) -> None:
    """Says which models of a file will fail to load; the others are served."""
    from mlxsup.supervisor.config.model_folders import model_problems, sentence

    for name, problem in model_problems(configuration).items():
        output.note(f"warning: {name}: {sentence(problem)}")
