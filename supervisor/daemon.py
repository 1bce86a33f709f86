"""The daemon from start to end: the runtime folder, the logs, leftovers, then the loop."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import closing

from mlxsup.protocol.launch import worker_argv

from .announcements import Announcer, OnChange
from .app import App, OnListening
from .config.load import DaemonConfig
from .log_files import LogWriter
from .logs import DaemonLog
from .runtime_folder import RuntimeFolder, held_log_folder, raise_open_file_limit, record_log_folder
from .service_manager import ServiceManager
from .signals import held_back
from .sleep import SleepGuard
from .workers.orphans import WorkerRecord
from .workers.registry import report

_M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 256 * 1024
"""glibc kept about 1 GB after a storm of large messages; with this it keeps about 0.1 GB."""

LOG_LIMIT_S = 2.0
"""How long writing the last log lines may take when the daemon ends."""


def run_daemon(
    config: DaemonConfig,
    *,
    on_change: OnChange,
    on_listening: OnListening,
    argv: Sequence[str] | None = None,
) -> int:
    """Run a supervisor until it is asked to end; called by `mlxsup start` on the main thread.

    Args:
        config: what to run.
        on_change: called with each change of a model's state, as the map that watchers get.
        on_listening: called with the endpoint once clients can connect.
        argv: the command that starts a worker, for tests.

    Returns:
        The exit code: 0, 70 for a bug, which the daemon's log describes, or 71 if a process could
        not be ended.

    Raises:
        RuntimeFolderError: a folder cannot be used, or too few files may be open (exit 73).
        AlreadyRunningError: another supervisor holds the runtime folder (exit 75).
        ConfigError: the pinned models do not fit into the memory budget together (exit 78).
    """
    manager = ServiceManager.from_environment(os.environ)
    os.umask(0o077)
    return_large_blocks()
    open_files = raise_open_file_limit(len(config.models))
    with (
        held_back(),
        closing(RuntimeFolder.claim(config.runtime_dir)) as folder,
        held_log_folder(config.log_dir),
    ):
        writer = LogWriter(report)
        is_json = config.log_format == "json"
        log = DaemonLog(config.log_dir, config.core.log_level, writer, is_json=is_json)
        _warn_of_watchdog(manager, log)
        _record_places(config, log)
        record = WorkerRecord(config.runtime_dir)
        _end_leftovers(record, log)

        def listening(endpoint: str) -> None:
            on_listening(endpoint)
            manager.ready()

        with closing(SleepGuard(config.prevent_sleep, log)) as sleep:
            app = App(
                config,
                folder=folder,
                record=record,
                log=log,
                writer=writer,
                argv=argv or worker_argv(),
                announcer=Announcer(log, on_change, manager, sleep),
            )
            code = asyncio.run(app.run(listening, open_files=open_files))
        log.write("info", "daemon ended", code=code)
        log.flight.ended(code)
        log.close()
        if not writer.close(LOG_LIMIT_S):
            report(
                f"mlxsup: cannot write to the log folder {config.log_dir}, so log lines are lost"
            )
        return code


def _warn_of_watchdog(manager: ServiceManager, log: DaemonLog) -> None:
    trouble = manager.trouble
    if trouble is None:
        return
    if trouble.is_fed:
        log.write("warning", "watchdog fed late", cause=trouble.cause, hint=trouble.hint)
    else:
        log.write("warning", "watchdog not fed", cause=trouble.cause, hint=trouble.hint)


def _record_places(config: DaemonConfig, log: DaemonLog) -> None:
    """Write down where logs and keys are, for commands that know the runtime folder only."""
    try:
        record_log_folder(config.runtime_dir, config.log_dir)
        config.keys.record()
    except OSError as error:
        log.write("warning", "log folder not recorded", error=error.strerror)


def _end_leftovers(record: WorkerRecord, log: DaemonLog) -> None:
    """End workers that an earlier supervisor left behind (E6)."""
    try:
        leftovers = record.sweep()
    except OSError as error:
        log.write("warning", "leftover scan failed", error=error.strerror)
        return
    for leftover in leftovers:
        facts = {"model": leftover.model, "pid": leftover.pid}
        if leftover.is_gone:
            log.write("warning", "leftover worker killed", **facts)
        else:
            log.write("error", "leftover worker cannot be ended", **facts)
            report(
                f"mlxsup: SIGKILL has no effect on process {leftover.pid} of {leftover.model}, "
                "which an earlier daemon left behind"
            )


def return_large_blocks() -> None:
    """Make the allocator return freed blocks of 256 KiB or more to the system.

    glibc raises its own threshold with every large block that is freed, up to 32 MiB, and then
    keeps what request bodies leave behind. Other C libraries have no such call.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
