"""`mlxsup stop`: returns when every process is gone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from ..arguments import optional_model_argument
from ..connection import Target, connect, daemon_options, status_of_daemon
from ..exit_status import CliError, ExitStatus, misuse
from ..options import duration
from ..terminal.output import LiveLine, Output
from ..terminal.status import STOP_NOW, stopping_words
from ..terminal.text import counted, format_duration

if TYPE_CHECKING:
    import psutil

    from mlxsup.client import Client

NAME = "mlxsup stop"

EXTRA_S = 10.0
"""The daemon may take so long after its processes, for its clients' streams and last log lines."""

REST_S = 2.0
"""A worker that outlives the daemon by this much cannot be ended."""

TELL_INTERVAL_S = 1.0
"""Between two looks at what the daemon still waits for."""

LOOK_INTERVAL_S = 0.05
"""Seconds between two looks: not every system has an event for the end of another's process."""


@click.command()
@optional_model_argument
@click.option("--now", is_flag=True, help="Do not wait for running requests.")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="S",
    type=duration,
    help="How long to wait for running requests.",
)
@daemon_options
@click.pass_context
def stop(
    context: click.Context,
    model: str | None,
    now: bool,
    timeout_s: float | None,
    target: Target,
    output: Output,
) -> int:
    """Example: mlxsup stop

    Waits for running requests, ends the daemon and its workers, and returns once all processes are
    gone. After Ctrl-C, the daemon still ends. With MODEL, it is `mlxsup unload MODEL`; the daemon
    continues.
    """
    if model is not None:
        if now or timeout_s is not None:
            raise misuse("--now and --timeout are for the whole daemon, not for MODEL", NAME)
        from .lifecycle import unload_model  # help would wait for it

        with connect(target) as client:
            unload_model(client, model, output)
        return ExitStatus.OK
    status = status_of_daemon(target)
    if status is None:
        output.result({"stopped": False}, f"no daemon runs at {target.find_endpoint()}")
        return ExitStatus.OK
    names = _process_names(status)
    with connect(target) as client:
        value = client.stop(now=now, timeout_s=timeout_s)
        daemon = value["supervisor_pid"]
        processes = find_processes([*value["pids"], daemon])
        limit_s = value["end_limit_s"] + EXTRA_S
        if not now:
            limit_s += value["drain_timeout_s"] if timeout_s is None else timeout_s
        start_s = time.monotonic()
        try:
            left = _wait(processes, limit_s, daemon, names, client, target, output)
        except KeyboardInterrupt:
            output.end_line()
            output.note(target.repeat_in("the daemon goes on ending; see `mlxsup status`"))
            return ExitStatus.INTERRUPTED
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
    return ExitStatus.OK


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
    client: Client,
    target: Target,
    output: Output,
) -> list[int]:
    """Wait until all are gone, and say for whom; return the pids of those that are left at the
    limit, or a moment after the daemon, which ends the others."""
    begin_s = time.monotonic()
    told_s, rest_until_s, is_draining = 0.0, REST_S, True
    with LiveLine(output) as line:
        while left := alive(processes):
            waited_s = time.monotonic() - begin_s
            if daemon in left:
                rest_until_s = waited_s + REST_S
            if waited_s >= min(limit_s, rest_until_s):
                break
            if waited_s >= told_s + TELL_INTERVAL_S:
                told_s = waited_s
                stopping = _stopping(client) if is_draining else None
                is_draining = stopping is not None and bool(stopping["running"])
                if stopping is not None and is_draining:
                    running, limit_s = stopping["running"], stopping["limit_s"]
                    words = stopping_words(running, limit_s, STOP_NOW)
                    text = target.repeat_in(f"{words}; Ctrl-C leaves")
                    line.tell(text, stopping["running"])
                else:
                    so_far = format_duration(waited_s)
                    text = f"waiting for {_listed(left, names)} to end ({so_far})"
                    line.tell(text, tuple(left))
            time.sleep(LOOK_INTERVAL_S)
    return left


def _stopping(client: Client) -> Mapping[str, Any] | None:
    """Return what a daemon that ends says it waits for; None if it does not answer any more."""
    from mlxsup.client import ConnectionLost

    try:
        stopping: Mapping[str, Any] | None = client.status().get("stopping")
    except ConnectionLost:
        return None
    return stopping


def _process_names(status: Mapping[str, Any]) -> dict[int, str]:
    """Return what each process of a daemon is, because a pid alone says little."""
    names = {row["pid"]: str(row["name"]) for row in status["models"] if row.get("pid")}
    for worker in (status.get("warm_pool") or {}).get("workers", ()):
        if worker["pid"]:
            names[worker["pid"]] = "a prewarmed worker"
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
