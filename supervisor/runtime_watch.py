"""Makes the runtime folder, and the clients' socket in it, again if they were removed."""

from __future__ import annotations

from pathlib import Path

from .logs import DaemonLog
from .runtime_folder import (
    AlreadyRunningError,
    RuntimeFolder,
    RuntimeFolderError,
    record_log_folder,
)
from .sockets.listener import Listener
from .workers.orphans import WorkerRecord
from .workers.registry import report


class FolderWatch:
    """Keeps a daemon within reach of commands and of its next workers.

    Args:
        folder: the runtime folder.
        listener: the socket in it.
        record: of the live workers, in the folder too.
        log: the daemon's log.
        log_dir: its folder, which may lie in the runtime folder.
    """

    def __init__(
        self,
        folder: RuntimeFolder,
        listener: Listener,
        record: WorkerRecord,
        log: DaemonLog,
        log_dir: Path,
    ) -> None:
        self._folder = folder
        self._listener = listener
        self._record = record
        self._log = log
        self._log_dir = log_dir
        self._trouble = ""

    def look(self) -> None:
        """Make again what is missing, and show that the daemon lives; called every second."""
        try:
            if not self._folder.is_held:
                self._record.is_held = False
                self._folder.hold_again()
                self._record.is_held = True
                self._log_dir.mkdir(parents=True, exist_ok=True)
                record_log_folder(self._folder.path, self._log_dir)
                self._log.write("warning", "runtime folder made again", folder=self._folder.path)
            if not self._listener.is_reachable:
                self._listener.bind_again()
                self._log.write("warning", "client socket made again")
            self._folder.beat()
        except AlreadyRunningError as error:
            self._tell(
                f"{error}; this daemon keeps serving its connected clients, but cannot start "
                "workers"
            )
        except RuntimeFolderError as error:
            self._tell(str(error))
        except OSError as error:
            self._tell(f"the runtime folder cannot be created again: {error}")
        else:
            self._trouble = ""

    def _tell(self, trouble: str) -> None:
        """Say what is wrong, once."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._log.write("error", "runtime folder lost", cause=trouble)
            report(f"mlxsup: {trouble}")
