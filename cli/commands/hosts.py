"""`mlxsup hosts`: the hosts that serve one model together."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mlxsup.protocol.group import INSPECTION, HostReport, host_argv
from mlxsup.protocol.launch import GroupHost, LaunchSettings, child_environment

from ..connection import config_option, output_options
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output
from ..terminal.tables import listing
from ..terminal.text import format_bytes

ANSWER_LIMIT_S = 60.0
CONNECT_LIMIT_S = 5.0
NO_SUCH_PROGRAM = (126, 127)
MOST_TOLD = 200

HEADINGS = ("MODEL", "RANK", "HOST", "ADDRESS", "MEMORY", "VERSION", "RESULT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of looking at one host.

    Attributes:
        model: that it serves.
        rank: its number among the hosts.
        host: as configured.
        report: what it said; None if it said nothing.
        problem: why it cannot take part; empty if it can.
    """

    model: str
    rank: int
    host: GroupHost
    report: HostReport | None
    problem: str


@click.group()
def hosts() -> None:
    """Example: mlxsup hosts check

    Looks at the hosts that serve a model together, [[models.NAME.hosts]].
    """


@hosts.command(short_help="Check each host of a group.")
@click.argument("model", required=False)
@config_option
@output_options
def check(model: str | None, config_path: Path | None, output: Output) -> ExitStatus:
    """Example: mlxsup hosts check qwen

    Asks every configured host, over ssh, whether it could take part: its address, its versions of
    mlxsup and MLX, its files of the model, and the memory that is free there. Exits with 1 if one
    could not. No daemon is needed.
    """
    from ..configuration import find_configuration, read_configuration

    path = find_configuration(config_path)
    configured = [one for one in read_configuration(path).models if one.launch.hosts]
    chosen = [one for one in configured if model in (None, one.name)]
    if not chosen:
        what = "no model has hosts" if model is None else f"the model {model!r} has no hosts"
        hint = "a model that several hosts serve has a table [[models.NAME.hosts]] for each"
        raise CliError(f"{what} in {path}", hint=hint, status=ExitStatus.USAGE)
    findings = [found for one in chosen for found in look_at(one.name, one.launch)]
    value = {"hosts": [_plain(one) for one in findings]}
    output.result(value, listing(HEADINGS, [_cells(one) for one in findings], right=("MEMORY",)))
    return ExitStatus.FAILED if any(one.problem for one in findings) else ExitStatus.OK


def look_at(model: str, launch: LaunchSettings) -> list[Finding]:
    """Return what is found out about the hosts of a model, all asked at once."""
    places = list(enumerate(launch.hosts))
    with ThreadPoolExecutor(len(places)) as threads:
        asked = list(threads.map(lambda place: ask(launch, place[1]), places))
    return list(_compared(model, places, asked))


def ask(launch: LaunchSettings, host: GroupHost) -> HostReport | str:
    """Return what a host says about itself, or why it says nothing."""
    from mlxsup.protocol.codec import read_line

    command = host_argv(host, INSPECTION, launch.engine, host.path or launch.path, host.address)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(os.environ),  # as a worker calls ssh: without an agent's keys
        )
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"
    assert process.stdout is not None
    with process, ThreadPoolExecutor(1) as reader:
        try:
            line = reader.submit(process.stdout.readline).result(ANSWER_LIMIT_S)
            if line:
                report = read_line(HostReport, line, "its answer")
                return report if report.problem else _reached(host, report)
            return _silence(process, host)
        except TimeoutError:
            return f"no answer within {ANSWER_LIMIT_S:g} s"
        except ValueError as error:
            return str(error)
        finally:
            process.kill()


def _reached(host: GroupHost, report: HostReport) -> HostReport | str:
    try:
        socket.create_connection((host.address, report.port), CONNECT_LIMIT_S).close()
    except OSError as error:
        return f"{host.address} is not reached from here: {error.strerror or error}"
    return report


def _silence(process: subprocess.Popen[bytes], host: GroupHost) -> str:
    """Return why a process has ended without an answer."""
    assert process.stderr is not None
    said = process.stderr.read().decode(errors="replace").strip().splitlines()
    last = said[-1][:MOST_TOLD] if said else ""
    if process.wait() in NO_SUCH_PROGRAM:
        return f"it has no {host.python or command_name()}; set python of this host"
    return last or f"no answer, exit code {process.returncode}"


def command_name() -> str:
    """Return the interpreter that is run where a host names none."""
    return host_argv(GroupHost(), INSPECTION)[0]


def _compared(
    model: str,
    places: Sequence[tuple[int, GroupHost]],
    asked: Sequence[HostReport | str],
) -> Iterator[Finding]:
    """Yield a finding for each host: other versions and files than the first one's are problems."""
    first = asked[0]
    for (rank, host), said in zip(places, asked, strict=True):
        report = said if isinstance(said, HostReport) else None
        problem = said if isinstance(said, str) else said.problem
        if not problem and report is not None and isinstance(first, HostReport):
            for name, version in first.versions.items():
                if (theirs := report.versions.get(name)) != version:
                    problem = f"it has {name} {theirs}, not {version}"
            if not problem and report.fingerprint != first.fingerprint and not first.problem:
                problem = "its model files differ from those of the first host"
        yield Finding(model=model, rank=rank, host=host, report=report, problem=problem)


def _plain(one: Finding) -> dict[str, Any]:
    report = one.report
    return {
        "model": one.model,
        "rank": one.rank,
        "host": one.host.ssh or None,
        "address": one.host.address,
        "python": None if report is None else report.python,
        "versions": {} if report is None else report.versions,
        "available_bytes": None if report is None else report.available_bytes,
        "problem": one.problem or None,
    }


def _cells(one: Finding) -> tuple[str, ...]:
    report = one.report
    return (
        one.model,
        str(one.rank),
        one.host.ssh or "this machine",
        one.host.address,
        "" if report is None else format_bytes(report.available_bytes),
        "" if report is None else str(report.versions.get("mlxsup", "")),
        one.problem or "ok",
    )
