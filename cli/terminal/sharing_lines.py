"""Who shares the machine, below the table of models: clients that wait, and the models' shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .columns import wrapped


def sharing_lines(value: Mapping[str, Any], width: int | None) -> list[str]:
    """`waiting: ann 3 (2 running), process 77@8 1`, and `engine time: a 70%, b 30%`.

    Args:
        value: the daemon's status; who waits is named only if anybody does, and shares only if
            several models have computed anything.
        width: columns of the terminal; None: lines are never wrapped.
    """
    lines = []
    clients = (value.get("queue") or {}).get("clients") or {}
    waiting = [_words(name, one) for name, one in clients.items() if one["waiting"]]
    if waiting:
        lines.append(f"waiting: {', '.join(waiting)}")
    shares = {model["name"]: model.get("share") for model in value["models"]}
    parts = [f"{name} {share:.0%}" for name, share in shares.items() if share]
    if len(parts) > 1:
        lines.append(f"engine time: {', '.join(parts)}")
    return [part for line in lines for part in wrapped(line, width)]


def _words(name: str, client: Mapping[str, Any]) -> str:
    running = f" ({client['running']} running)" if client["running"] else ""
    return f"{name} {client['waiting']}{running}"
