"""`mlxsup doctor`: looks for what is wrong, and proves on a model that nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..connection import Target, daemon_options
from ..exit_status import CliError, ExitStatus
from ..model_names import complete_model
from ..new_file import NewFile
from ..terminal.output import Output

if TYPE_CHECKING:
    from ..doctor.finding import Finding


@click.command()
@click.argument("model", metavar="[MODEL]", required=False, shell_complete=complete_model)
@click.option(
    "--prove",
    "is_proof",
    is_flag=True,
    help="Prove on a model what mlxsup promises: kills its worker twice, in its own daemon.",
)
@click.option(
    "--output",
    "saved_path",
    metavar="FILE",
    type=NewFile(),
    help="With --prove: where to save the figures; by default, a file in the log folder.",
)
@daemon_options
def doctor(
    model: str | None, is_proof: bool, saved_path: Path | None, target: Target, output: Output
) -> int:
    """Example: mlxsup doctor

    Looks at what is installed, the configuration, its models, folders, memory, the daemon and the
    machine, and says of everything that is wrong why it matters and what fixes it. Changes nothing.
    Exits with 1 if there is a problem; notes are no problems.

    mlxsup doctor --prove MODEL runs MODEL and a copy of it in its own daemon for about a
    minute: the same seed, two kills in the middle of an answer, how long the other model waits
    while a long prompt is read, and the memory after an unload. MODEL is a name in the
    configuration, a folder, or OWNER/NAME.
    """
    if is_proof:
        from ..proof.command import prove

        return prove(model, saved_path, target, output)
    if model is not None or saved_path is not None:
        given = "MODEL" if model is not None else "--output"
        raise CliError(
            f"{given} belongs to --prove",
            code="usage",
            hint="see `mlxsup doctor -h`",
            status=ExitStatus.USAGE,
        )
    return _examine(target, output)


def _examine(target: Target, output: Output) -> int:
    from ..doctor.examination import LIMIT_S, begin, examine, settle
    from ..doctor.examinations import examinations
    from ..doctor.finding import Level
    from ..doctor.gathering.setting import find_setting
    from ..doctor.report import count, finding_maps, report_lines

    def waiting_for(subjects: Sequence[str]) -> None:
        output.note(f"still looking at: {', '.join(subjects)}")

    reading = begin(lambda: find_setting(target))
    if not settle([reading]):
        raise CliError(
            f"the configuration could not be read: nothing has answered for {LIMIT_S:.0f} s",
            code="timeout",
            hint="a disk that it is on, or names, does not answer (`mount`)",
        )
    setting = reading.result()
    found = examine(examinations(setting), on_slow=waiting_for)
    findings = [_with_options(one, target) for one in found]
    problems = count(findings, Level.PROBLEM)
    if output.is_json:
        counting = setting.configuration.counting
        output.object(
            {
                "config": None if counting is None else str(counting.path),
                "endpoint": setting.endpoint,
                "problems": problems,
                "notes": count(findings, Level.NOTE),
                "findings": finding_maps(findings),
            }
        )
    else:
        output.data("\n".join(report_lines(findings, output)))
    return ExitStatus.FAILED if problems else ExitStatus.OK


def _with_options(finding: Finding, target: Target) -> Finding:
    """The finding, whose commands have the options that were given."""
    command = finding.command
    if command.startswith("mlxsup "):
        command = target.repeat_in(f"`{command}`").strip("`")
    return replace(finding, fix=target.repeat_in(finding.fix), command=command)
