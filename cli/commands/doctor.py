"""`mlxsup doctor`: look for what is wrong, and name what fixes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from ..connection import Target, daemon_options
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output

if TYPE_CHECKING:
    from ..doctor.finding import Finding


@click.command()
@daemon_options
def doctor(target: Target, output: Output) -> int:
    """Example: mlxsup doctor

    Looks at what is installed, the configuration, its models, folders, memory, the daemon and the
    machine, and says of everything that is wrong why it matters and what fixes it. Changes nothing.
    Exits with 1 if there is a problem; notes are no problems.
    """
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
