"""`mlxsup stop`: returns when every process is gone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from ..connection import Target, connect, daemon_options
from ..exit_status import CliError, ExitStatus
from ..options import duration
from ..terminal.output import Output
from ..terminal.text import counted, format_duration

if TYPE_CHECKING:
    import psutil

DEFAULT_DRAIN_S = 30.0
DEFAULT_END_S = 15.0
"""How long ending the processes may take after the drain: asking, SIGTERM, SIGKILL, giving up."""

EXTRA_S = 10.0
"""How long the daemon itself may take after that: ending its clients' streams, last log lines."""

REST_S = 2.0
"""A worker that outlives the daemon by this much cannot be ended."""

LOOK_INTERVAL_S = 0.05
"""Seconds between two looks: not every system has an event for the end of another's process."""


@click.command()
@click.option("--now", is_flag=True, help="Do not wait for running requests.")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="S",
    type=duration,
    help="How long to wait for running requests.",
)
@daemon_options
def stop(now: bool, timeout_s: float | None, target: Target, output: Output) -> None:
    """Example: mlxsup stop

    Waits for running requests, ends the daemon and its workers, and returns once all processes are
    gone.
    """
    with connect(target) as client:
        names = _process_names(client.status())
        value = client.stop(now=now, timeout_s=timeout_s)
    daemon = value["supervisor_pid"]
    processes = find_processes([*value["pids"], daemon])
    limit_s = _number(value, "end_limit_s", DEFAULT_END_S) + EXTRA_S
    if not now:
        drain_s = _number(value, "drain_timeout_s", DEFAULT_DRAIN_S)
        limit_s += drain_s if timeout_s is None else timeout_s
    start_s = time.monotonic()
    left = _wait(processes, limit_s, daemon, names, output)
    took_s = time.monotonic() - start_s
    if left and daemon not in left:
        raise CliError(
            f"the daemon has ended, but SIGKILL has no effect on {_listed(left, names)}",
            hint="the process hangs in the kernel; the next `mlxsup start` tries again",
            status=ExitStatus.LEFT_BEHIND,
        )
    if left:
        raise CliError(
            f"{_listed(left, names)} did not end within {format_duration(took_s)}",
            code="still_running",
            hint="end them with `mlxsup stop --now`",
        )
    workers = counted(len(value["pids"]), "worker")
    output.result(
        {"stopped": True, **value, "took_s": round(took_s, 3)},
        f"stopped the daemon (pid {daemon}) and {workers}",
    )


def _number(value: Mapping[str, Any], name: str, default: float) -> float:
    found = value.get(name)
    return found if isinstance(found, int | float) else default


def find_processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Return those that are there, known by start time, so that a later one is not mistaken."""
    import psutil  # other commands need not wait for it

    processes = []
    for pid in dict.fromkeys(pids):
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return processes


def alive(processes: Iterable[psutil.Process]) -> list[int]:
    """Return the pids of those that have not ended; one that only waits to be reaped has ended."""
    import psutil

    pids = []
    for process in processes:
        try:
            # Not `psutil.wait_procs`, to which a process that waits to be reaped is alive.
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return pids


def _wait(
    processes: list[psutil.Process],
    limit_s: float,
    daemon: int,
    names: Mapping[int, str],
    output: Output,
) -> list[int]:
    """Wait until all are gone, and say for whom; return the pids of those that are left at the
    limit, or a moment after the daemon, which ends the others."""
    begin_s = time.monotonic()
    told: list[int] | None = None
    rest_until_s = REST_S
    while left := alive(processes):
        waited_s = time.monotonic() - begin_s
        if daemon in left:
            rest_until_s = waited_s + REST_S
        if waited_s >= min(limit_s, rest_until_s):
            break
        if waited_s >= 1 and left != told:
            told = left
            so_far = format_duration(waited_s)
            output.note(f"waiting for {_listed(left, names)} to end ({so_far})")
        time.sleep(LOOK_INTERVAL_S)
    return left


def _process_names(status: Mapping[str, Any]) -> dict[int, str]:
    """Return what each process of a daemon is, because a pid alone says little."""
    names = {row["pid"]: str(row["name"]) for row in status["models"] if row.get("pid")}
    for spare in (status.get("spares") or {}).get("workers", ()):
        if spare["pid"]:
            names[spare["pid"]] = "a spare worker"
    gateway = status.get("gateway") or {}
    if gateway.get("pid"):
        names[gateway["pid"]] = "the HTTP gateway"
    if status.get("pid"):
        names[status["pid"]] = "the daemon"
    return names


def _listed(pids: Iterable[int], names: Mapping[int, str]) -> str:
    """Return `smollm2 (pid 849), the daemon (pid 797)`; `process 4711` for an unknown one."""
    return ", ".join(
        f"{names[pid]} (pid {pid})" if pid in names else f"process {pid}" for pid in pids
    )
