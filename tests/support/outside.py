"""What comes from outside a campaign, and means that it has shown nothing."""

from __future__ import annotations

import signal

from support.core.verdict import NotShown
from support.daemon.daemon import Daemon

FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
LOST = ("bytes lost here", "cannot be written, lines are lost")
"""What a log or the daemon says if the disk took no more."""


def why_it_ended(daemon: Daemon) -> Exception:
    """Of a daemon that answers no more: `NotShown` if it was ended from outside, else what broke.

    Raises:
        subprocess.TimeoutExpired: it has not ended.
    """
    assert daemon.process is not None
    code = daemon.process.wait(60)
    if -code in FROM_OUTSIDE or code == 0:
        return NotShown(f"the daemon was ended from outside, exit status {code}")
    return AssertionError(f"the daemon ended with {code}: {daemon.output}")


def must_have_whole_logs(daemon: Daemon) -> None:
    """A log with holes cannot be judged.

    Raises:
        NotShown: lines of a log were lost, because its disk was full.
    """
    text = daemon.output + daemon.log_text()
    if any(words in text for words in LOST):
        raise NotShown("lines of a log were lost: its disk took no more")
