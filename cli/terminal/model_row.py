"""Notes about a model of `status --json`: how far its load is, and why its process ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from .columns import in_a_line
from .quantities import format_bytes, format_duration

EXIT_WORDS = {
    "asked": "",
    "crash": "crashed",
    "stall": "stalled",
    "load_error": "load failed",
    "spawn_error": "could not be started",
    "version": "another version",
    "internal": "internal error",
}

BATCHING_WORDS = {"serial_prefill": "prompts one by one", "one_row": "one row at a time"}


def note_of(model: Mapping[str, Any], now: float) -> str:
    """Return load progress, retry time or the last cause, as one phrase.

    If there is none of them, it says who waits in which class, how rows are batched and how many
    warnings there are. How far a long prompt has been read comes first; what a pinned model keeps
    though it is STOPPED, how many requests are paused and how many gave way to others come last.
    """
    parts = []
    progress = progress_text(model.get("progress"))
    if progress and model["state"] in ("LOADING", "PENDING"):
        parts.append(progress)
    retry_in_s = model.get("retry_in_s")
    if model["state"] == "BACKOFF" and retry_in_s is not None:
        parts.append(f"retry in {format_duration(retry_in_s)}")
    cause, given = cause_of(model.get("last_exit"), now), str(model.get("cause") or "")
    is_waiting = model["state"] in ("PENDING", "BACKOFF") and bool(given)
    if is_waiting or (model["state"] == "FAILED" and not cause):
        cause = given
    if cause and (not parts or is_waiting or model["state"] == "BACKOFF"):
        parts.append(cause)
    parts = [*_reading_words(model), *(parts or _remarks(model))]
    if model.get("pinned") and model["state"] == "STOPPED" and model.get("reserved_bytes"):
        parts.append(f"pinned: {format_bytes(model['reserved_bytes'])} stay reserved")
    if model.get("paused"):
        parts.append(f"{len(model['paused'])} paused")
    if model.get("yielded"):
        parts.append(f"{len(model['yielded'])} gave way")
    return ", ".join(parts)


def _remarks(model: Mapping[str, Any]) -> list[str]:
    """Return who waits, if classes differ, and what its load found out."""
    batching, warnings = model.get("batching"), model.get("warnings")
    waiting = _waiting_words(model.get("queued_per_class"))
    mode = BATCHING_WORDS.get(batching["mode"]) if isinstance(batching, Mapping) else None
    count = len(warnings) if isinstance(warnings, Sequence) else 0
    counted = f"{count} warning{'s' if count > 1 else ''}" if count else None
    return [remark for remark in (waiting, mode, counted) if remark]


def _reading_words(model: Mapping[str, Any]) -> list[str]:
    """Return `prefill 41%` of the prompt with most left to read, if one has been read in part."""
    parts = [
        row["read_tokens"] / row["prompt_tokens"]
        for row in model.get("rows") or []
        if 0 < row["read_tokens"] < (row["prompt_tokens"] or 0) and not row["tokens_sent"]
    ]
    if not parts:
        return []
    count = f" of {len(parts)} prompts" if len(parts) > 1 else ""
    return [f"prefill {int(min(parts) * 100)}%{count}"]


def _waiting_words(per_class: object) -> str | None:
    """Return `waiting: 1 interactive, 3 batch`; None if all are normal."""
    if not isinstance(per_class, Mapping) or not any(
        count for name, count in per_class.items() if name != "normal"
    ):
        return None
    counted = [f"{count} {name}" for name, count in per_class.items() if count]
    return f"waiting: {', '.join(counted)}"


def warning_lines(name: object, warnings: object) -> list[str]:
    """Return the warnings of a model, one line each."""
    texts = warnings if isinstance(warnings, list) else []
    return [in_a_line(f"warning: {name}: {text}") for text in texts]


def cause_of(last_exit: object, now: float) -> str:
    """Return `SIGKILL, out of memory, 2m ago`; empty if its last process was asked to end."""
    if not isinstance(last_exit, Mapping) or last_exit.get("reason") == "asked":
        return ""
    reason = str(last_exit.get("reason", ""))
    parts = [] if last_exit.get("signal") and reason == "crash" else [_words(reason)]
    if last_exit.get("signal"):
        parts.append(_signal_name(last_exit["signal"]))
    elif last_exit.get("code") is not None and reason == "crash":
        parts.append(f"exit {last_exit['code']}")
    if last_exit.get("detail"):
        parts.append(str(last_exit["detail"]))
    at = last_exit.get("at")
    if isinstance(at, int | float) and at:
        parts.append(f"{format_duration(now - at)} ago")
    return ", ".join(part for part in parts if part)


def _words(reason: str) -> str:
    return EXIT_WORDS.get(reason, reason)


def _signal_name(value: object) -> str:
    if isinstance(value, int):
        try:
            return signal.Signals(value).name
        except ValueError:
            return f"signal {value}"
    return str(value)


def progress_text(progress: object) -> str:
    """Return `weights 40%` or `download 40% of 4.20 GiB` of a load, or what a model waits for."""
    if not isinstance(progress, Mapping):
        return ""
    fraction = progress.get("fraction")
    share = f" {fraction:.0%}" if isinstance(fraction, int | float) and fraction else ""
    whole = f" of {format_bytes(total)}" if (total := progress.get("total_bytes")) else ""
    return f"{progress.get('phase', '')}{share}{whole}".strip()
