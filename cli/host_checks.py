"""Ask the hosts that serve one model together whether each could take part."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit

from mlxsup.protocol.codec import read_line
from mlxsup.protocol.group import (
    INSPECTION,
    MOST_TOLD,
    OTHER_FILES,
    HostReport,
    has_no_mlxsup,
    host_argv,
    other_version,
    shell_prints,
)
from mlxsup.protocol.launch import GroupHost, LaunchSettings, child_environment

from .configuration import find_configuration, read_configuration
from .exit_status import CliError, ExitStatus, misuse
from .terminal.output import Output
from .terminal.tables import listing
from .terminal.text import format_bytes

ANSWER_LIMIT_S = 60.0
CONNECT_LIMIT_S = 5.0
LINK_LIMIT_S = 10.0
SSH_FAILED = 255
MOST_ASKED = 16
"""So many hosts are asked at the same time."""

ROUND_TRIPS = 20
LINK_BYTES = 8 * 2**20

HEADINGS = ("MODEL", "RANK", "HOST", "ADDRESS", "MEMORY", "LINK", "VERSION", "RESULT")


def check_hosts(
    model: str | None, places: Sequence[str], config_path: Path | None, output: Output
) -> ExitStatus:
    """Show what each host says; return whether all could take part.

    Args:
        model: a configured one; None: all that have hosts.
        places: `ADDRESS` of this machine and `NAME=ADDRESS` of others, instead of those configured.
        config_path: as given with --config.
        output: takes the table.
    """
    path = find_configuration(config_path)
    models = read_configuration(path).models
    chosen = [(str(one.name), one.launch) for one in models if model in (None, one.name)]
    tables = ""
    if places and chosen:
        given = tuple(_host(place) for place in places)
        if len(given) < 2 or given[0].ssh:
            said = "HOST must be the address of this machine, then NAME=ADDRESS of others"
            raise misuse(said, "mlxsup hosts check")
        chosen = [(name, replace(launch, hosts=given)) for name, launch in chosen]
        tables = _tables(chosen[0][0], given)
    chosen = [one for one in chosen if one[1].hosts]
    if not chosen:
        what = "no model has hosts" if model is None else f"no model {model!r} with hosts"
        hint = "`mlxsup hosts check MODEL ADDRESS NAME=ADDRESS` prints the tables that give it some"
        raise CliError(f"{what} in {path}", hint=hint, status=ExitStatus.USAGE)
    found = look_at(chosen)
    lines = listing(HEADINGS, map(_cells, found), right=("MEMORY", "LINK"))
    pasted = [[], *([(line, "")] for line in tables.splitlines())] if tables else []
    output.result({"hosts": found, "tables": tables or None}, [*lines, *pasted])
    return ExitStatus.FAILED if any(one["problem"] for one in found) else ExitStatus.OK


def _host(place: str) -> GroupHost:
    """Return the host that `ADDRESS` or `NAME=ADDRESS` means."""
    name, _, address = place.rpartition("=")
    return GroupHost(address=address, ssh=name)


def _tables(model: str, given: Sequence[GroupHost]) -> str:
    rows = [{"address": host.address, **({"ssh": host.ssh} if host.ssh else {})} for host in given]
    return tomlkit.dumps({"models": {model: {"hosts": rows}}})


def look_at(groups: Sequence[tuple[str, LaunchSettings]]) -> list[dict[str, Any]]:
    """Return what each host of some models says, as `--json` prints it; all are asked at once."""
    ranks = [
        (name, rank, launch, host)
        for name, launch in groups
        for rank, host in enumerate(launch.hosts)
    ]
    with ThreadPoolExecutor(min(len(ranks), MOST_ASKED)) as threads:
        # One host tells whether all of them together can divide the model.
        sizes = [len(launch.hosts) if rank == 0 else 1 for _, rank, launch, _ in ranks]
        answers = list(threads.map(lambda one, size: ask(one[2], one[3], size), ranks, sizes))
    found = []
    first = None
    for (name, rank, _, host), answer in zip(ranks, answers, strict=True):
        report = answer.report
        first = report if rank == 0 else first
        differs = _difference(report, first) if report and first else ""
        found.append(
            {
                "model": name,
                "rank": rank,
                "host": host.ssh or None,
                "address": host.address,
                "python": report and report.python,
                "versions": report.versions if report else {},
                "available_bytes": report and report.available_bytes,
                "round_trip_s": answer.round_trip_s,
                "bytes_per_s": answer.bytes_per_s,
                "problem": answer.problem or differs or None,
            }
        )
    return found


class Answer(NamedTuple):
    """The answer of a host.

    Attributes:
        problem: why it cannot take part; empty if it can.
        report: None if it has sent none.
        round_trip_s, bytes_per_s: of the link from here to its address; None if it failed.
    """

    problem: str = ""
    report: HostReport | None = None
    round_trip_s: float | None = None
    bytes_per_s: float | None = None


def ask(launch: LaunchSettings, host: GroupHost, size: int) -> Answer:
    """Ask a host whether it could take part.

    Args:
        launch: of the model.
        host: which is asked.
        size: among how many hosts it tries to divide the model; 1: it does not.
    """
    path = host.path or launch.path
    command = host_argv(
        host, INSPECTION, launch.engine, path, host.address, launch.parallel, str(size)
    )
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(os.environ),  # as a worker calls ssh: without an agent's keys
        )
    except OSError as error:
        return Answer(f"{command[0]} cannot be run: {error.strerror}")
    assert process.stdout is not None
    with process, ThreadPoolExecutor(1) as reader:
        try:
            line = reader.submit(process.stdout.readline).result(ANSWER_LIMIT_S)
            if not line:
                return Answer(_silence(process, host))
            report = read_line(HostReport, line, "its answer")
            if report.problem:
                return Answer(report.problem, report)
            return _measured(host, report)
        except TimeoutError:
            return Answer(f"no answer within {ANSWER_LIMIT_S:g} s")
        except ValueError:  # the line of a start-up file, or of a login message
            return Answer(shell_prints(line))
        finally:
            process.kill()


def _measured(host: GroupHost, report: HostReport) -> Answer:
    """Return the answer of a host with what the link to it is capable of."""
    try:
        with socket.create_connection((host.address, report.port), CONNECT_LIMIT_S) as link:
            link.settimeout(LINK_LIMIT_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            round_trip_s = min(_exchange(link, b"\n") for _ in range(ROUND_TRIPS))
            took_s = _exchange(link, bytes(LINK_BYTES) + b"\n")
    except OSError as error:
        return Answer(f"{host.address} is not reached from here: {error.strerror or error}", report)
    return Answer("", report, round_trip_s, LINK_BYTES / took_s)


def _exchange(link: socket.socket, line: bytes) -> float:
    """Return the seconds until a line has been sent and its receipt has come."""
    began = time.perf_counter()
    link.sendall(line)
    if not link.recv(1):
        raise ConnectionResetError("the connection was closed")
    return time.perf_counter() - began


def _silence(process: subprocess.Popen[bytes], host: GroupHost) -> str:
    """Return why a process has ended without an answer, and what to do."""
    assert process.stderr is not None
    said = process.stderr.read().decode(errors="replace").strip().splitlines()
    last = said[-1][:MOST_TOLD] if said else ""
    code = process.wait()
    if has_no_mlxsup(code, last):
        return f"no mlxsup at {host.python or sys.executable}; set python of this host"
    if host.ssh and code == SSH_FAILED:
        return f"{last or 'ssh fails'}; `ssh {host.ssh}` must work without a question"
    return last or f"no answer, exit code {code}"


def _difference(report: HostReport, first: HostReport) -> str:
    """Return in what a host differs from the first one; empty if they can go together."""
    said = other_version(report.versions, first.versions)
    if not said and first.fingerprint and report.fingerprint != first.fingerprint:
        said = OTHER_FILES
    return said and f"it {said}"


def _cells(one: dict[str, Any]) -> Sequence[str]:
    link = one["round_trip_s"] is not None and (
        f"{one['round_trip_s'] * 1000:.2f} ms, {format_bytes(one['bytes_per_s'])}/s"
    )
    return (
        one["model"],
        str(one["rank"]),
        one["host"] or "this machine",
        one["address"],
        format_bytes(one["available_bytes"]) if one["available_bytes"] is not None else "",
        link or "",
        str(one["versions"].get("mlxsup", "")),
        one["problem"] or "ok",
    )
