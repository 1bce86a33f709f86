"""Names for processes of a daemon, because a pid alone tells nobody what is being waited for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def process_names(status: Mapping[str, Any]) -> dict[int, str]:
    """What each process of a daemon is, by its pid, as far as its status says."""
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


def listed(pids: Iterable[int], names: Mapping[int, str]) -> str:
    """`smollm2 (pid 849), the daemon (pid 797)`; `process 4711` for one that nobody knows."""
    return ", ".join(
        f"{names[pid]} (pid {pid})" if pid in names else f"process {pid}" for pid in pids
    )
