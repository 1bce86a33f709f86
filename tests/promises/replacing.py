"""A worker that a signal ends, or stops for good, beside a load that nothing preceded."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil

from .daemons import Daemon, ready
from .measure import Values
from .watching import Changes, TimedReader
from support.daemon import row


def replaced_after(entry: dict[str, Any], number: signal.Signals, *, tokens: int) -> Values:
    """From a signal in the middle of an answer to READY in a new process, and a cold load.

    Args:
        entry: of the model.
        number: what strikes its worker.
        tokens: of the answer, which resumes and is whole.
    """
    with Daemon({"m": entry}) as daemon, daemon.client() as client:
        ready(client, "m")
        client.unload("m")
        start_s = time.monotonic()
        client.load("m")
        cold_s = time.monotonic() - start_s
        changes = Changes(client)
        stream = TimedReader(client, "m", "continues", max_tokens=tokens).started()
        before = row(client, "m")
        start_s = time.monotonic()
        os.kill(before["pid"], number)
        ready_s = changes.ready_at("m", before["generation"] + 1) - start_s
        assert not psutil.pid_exists(before["pid"]), "the process is still there"
        assert len(stream.finished().token_ids) == tokens
        assert row(client, "m")["suspects"] == 0
    return {"cold": cold_s, "ready": ready_s}
