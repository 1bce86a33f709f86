"""`python -m mlxsup.downloader`, started by the supervisor or by a command: the process of a
download, or of a search, reads its spec, reports, and dies with its parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback

from mlxsup.protocol.codec import read_line
from mlxsup.protocol.download import (
    DownloadProblem,
    DownloadReport,
    DownloadSpec,
    Repository,
    Search,
    report_line,
)

BAD_SPEC_EXIT = 64
ORPHANED_EXIT = 1


def run() -> int:
    """Carry out the spec on standard input, whose end is reported, and return the exit code."""
    # A Ctrl-C in the terminal is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        spec = read_line(DownloadSpec, sys.stdin.buffer.readline(), "a download spec")
    except ValueError as error:
        print(f"mlxsup downloader: {error}; `mlxsup pull` starts one", file=sys.stderr)
        return BAD_SPEC_EXIT
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    _say(_carry_out(spec.repository or Search(spec.words)))
    return 0


def _carry_out(work: Repository | Search) -> DownloadReport:
    # No bars: progress is reported. Plain HTTP: its failures have sentences, those of Xet do not.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    from .failures import explain

    try:
        if isinstance(work, Search):
            from .search import search

            return search(work.words)
        from .snapshot import fetch

        return fetch(work, _say)
    except Exception as error:  # noqa: BLE001  the end of the process, which must say why
        report = explain(error, work)
        if report.problem is DownloadProblem.INTERNAL:
            traceback.print_exc()
        return report


def _say(report: DownloadReport) -> None:
    print(report_line(report), flush=True)


def _die_with_parent() -> None:
    """End the process at once when standard input ends."""
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED_EXIT)


if __name__ == "__main__":
    sys.exit(run())
