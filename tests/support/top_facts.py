"""Answers of a daemon, as `mlxsup top` gets them, without a daemon."""

from __future__ import annotations

from typing import Any

from mlxsup.cli.top.facts import Facts, Looked

GIB = 2**30
AT = 1_763_900_000.0


def model(name: str, state: str = "READY", **values: Any) -> dict[str, Any]:
    """An entry of the status's `models`."""
    return {
        "name": name,
        "state": state,
        "generation": 1,
        "pid": 4711,
        "restarts": 0,
        "last_exit": None,
        "retry_in_s": None,
        "progress": None,
        "queued": 0,
        "running": [],
        "tokens_per_s": 93.4,
        "footprint_bytes": 2 * GIB,
        "context_length": 8192,
        "loaded_for_s": 3725.0,
        **values,
    }


def request(id: str, state: str = "answering", **values: Any) -> dict[str, Any]:
    """An entry of `requests`."""
    return {
        "id": id,
        "number": f"#{id.rpartition('-')[2]}",
        "model": "alpha",
        "client": "process 4711@77",
        "state": state,
        "place": 1 if state == "waiting" else None,
        "reason": "rows" if state == "waiting" else None,
        "prefill": 0.41 if state == "reading" else None,
        "expected_s": 12.0 if state in ("waiting", "reading") else None,
        "tokens_sent": 17,
        "tokens_per_s": 31.5 if state == "answering" else None,
        "engine_s": 1.5,
        **values,
    }


def looked(
    models: list[dict[str, Any]],
    requests: list[dict[str, Any]] | None = None,
    *,
    pid: int = 100,
    more: int = 0,
    at: float = AT,
    **memory: Any,
) -> Looked:
    """What a daemon with these models and requests answers."""
    budget = {"budget_bytes": 8 * GIB, "reserved_bytes": 6 * GIB, "machine_bytes": 64 * GIB}
    status = {
        "version": "0.1.0",
        "pid": pid,
        "endpoint": "ipc:///tmp/run/client.sock",
        "uptime_s": 125.0,
        "memory": budget | memory,
        "models": models,
    }
    return Looked(at=at, status=status, requests={"requests": requests or [], "more": more})


def facts(
    models: list[dict[str, Any]], requests: list[dict[str, Any]] | None = None, **values: Any
) -> Facts:
    """What is known after the first look at such a daemon."""
    return Facts.first(looked(models, requests, **values))
