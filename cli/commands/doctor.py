"""`mlxsup doctor`: look for what is wrong, and name what fixes it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

import click

from ..connection import Target, daemon_options
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output, width_of
from ..terminal.text import counted, wrapped

if TYPE_CHECKING:
    from ..doctor.finding import Finding
    from ..doctor.installed import Setting

COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
"""In the order of the report: the most important findings come last, next to the prompt."""

INDENT = max(map(len, COLOURS)) + 2


@click.command()
@daemon_options
def doctor(target: Target, output: Output) -> int:
    """Example: mlxsup doctor

    Checks the installation, configuration, models, folders, memory, daemon and service. For each
    problem it says why it matters and how to fix it. It changes nothing. The exit code is 1 if
    there is a problem; notes do not count.
    """
    from concurrent.futures import wait

    from ..doctor.finding import LIMIT_S, begin, examine
    from ..doctor.installed import find_setting

    def waiting_for(subjects: Sequence[str]) -> None:
        output.note(f"still checking: {', '.join(subjects)}")

    reading = begin(lambda: find_setting(target))
    if wait([reading], timeout=LIMIT_S).not_done:
        raise CliError(
            f"the configuration could not be read within {LIMIT_S:.0f} s",
            code="timeout",
            hint="a disk of the configuration or its models does not respond; see `mount`",
        )
    setting = reading.result()
    found = examine(_checks(setting), on_slow=waiting_for)
    findings = [_with_options(one, target) for one in found]
    problems = _count(findings, "problem")
    if output.is_json:
        output.object(
            {
                "config": None if setting.counting is None else str(setting.counting.path),
                "endpoint": setting.endpoint,
                "problems": problems,
                "notes": _count(findings, "note"),
                "findings": [asdict(one) for one in findings],
            }
        )
    else:
        width = width_of(sys.stdout)
        for level in COLOURS:
            for one in findings:
                if one.level == level:
                    output.data("\n".join(lines_of(one, width, output)))
        output.data("\n".join(wrapped(_summary(findings), width)))
    return ExitStatus.FAILED if problems else ExitStatus.OK


def _checks(setting: Setting) -> dict[str, Callable[[], Iterable[Finding]]]:
    from ..doctor import installed, running

    checks: dict[str, Callable[[Setting], Iterable[Finding]]] = {
        "software": installed.check_software,
        "configuration": installed.check_configuration,
        "models": installed.check_models,
        "downloads": installed.check_downloads,
        "folders": installed.check_folders,
        "memory": installed.check_memory,
        "daemon": running.check_daemon,
        "service": running.check_services,
    }
    return {name: partial(check, setting) for name, check in checks.items()}


def _with_options(finding: Finding, target: Target) -> Finding:
    """Return the finding, whose commands have the options that were given."""
    command = finding.command
    if command.startswith("mlxsup "):
        command = target.repeat_in(f"`{command}`").strip("`")
    return replace(finding, fix=target.repeat_in(finding.fix), command=command)


def _count(findings: Iterable[Finding], level: str) -> int:
    return sum(one.level == level for one in findings)


def _summary(findings: Sequence[Finding]) -> str:
    """Return `2 problems, 1 note`."""
    problems, notes = _count(findings, "problem"), _count(findings, "note")
    noted = counted(notes, "note")
    if problems:
        found = counted(problems, "problem")
        return f"{found}, {noted}" if notes else found
    return f"no problems; {noted}" if notes else "no problems found"


def lines_of(one: Finding, width: int | None, output: Output) -> list[str]:
    """Return a finding as people read it, on a terminal with `width` columns; None: in a pipe."""
    word = one.level.value.ljust(INDENT)
    first, *lines = wrapped(f"{one.subject}: {one.what}", width, INDENT)
    styled = output.style(word, sys.stdout, COLOURS[one.level.value])
    lines.insert(0, styled + first[INDENT:])
    for name, text in (("why", one.why), ("fix", one.fix)):
        if text:
            lines += wrapped(f"{name}: {text}", width, INDENT)
    if one.command:
        command = output.style(one.command, sys.stdout, "bold")
        lines.append(f"{' ' * INDENT}run: {command}")  # never broken: it is to be copied
    return lines
