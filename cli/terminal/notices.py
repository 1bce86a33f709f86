"""What a request waits for, in a few words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .model_row import progress_text
from .quantities import format_duration

if TYPE_CHECKING:
    from mlxsup.client import Notice

QUEUED_WORDS = {
    "turn": ", another has its turn",
    "limit": ", its client runs as many as it may",
    "memory": ", the model waits for memory",
    "swap": ", the model waits for its next turn",
    "restart": ", the model restarts",
    "backoff": ", the model restarts after a crash",
    "download": ", the model's download failed and is tried again",
}
"""What a request waits for besides a row or a load, which has a notice of another kind."""

PAUSED_WORDS = {
    "user": "until `mlxsup resume`",
    "turn": "another has its turn",
    "class": "an interactive request has its row",
    "swap": "its model makes room for another one until its next turn",
    "memory": "there is too little memory for it now",
}

INTERRUPTED = "the worker ended; the answer continues when it is back"


def notice_text(notice: Notice) -> str:
    """Return `queued, position 3, about 12s`, `loading, weights 40%` and the like."""
    detail = notice.detail
    if notice.kind == "queued":
        why = QUEUED_WORDS.get(str(detail.get("reason")), "")
        return f"queued, position {detail.get('position')}{why}{_expected(detail)}"
    if notice.kind == "loading":
        progress = progress_text(detail) or str(detail.get("state", "")).lower()
        return f"loading, {progress}" if progress else "loading"
    if notice.kind == "paused":
        words = PAUSED_WORDS.get(str(detail.get("reason")), "it continues by itself")
        return f"paused, {words}{_expected(detail)}"
    if notice.kind == "prefilling":
        done, total = _tokens(detail)
        return f"reading the prompt, {done} of {total} tokens ({done * 100 // total}%)"
    return str(notice.kind)


def notice_step(notice: Notice) -> tuple[object, ...]:
    """Return what makes a notice worth a line: a tenth of a progress, but not an estimate."""
    detail = notice.detail
    if notice.kind == "prefilling":
        done, total = _tokens(detail)
        return (notice.kind, done * 10 // total)
    if notice.kind == "loading":
        fraction = detail.get("fraction")
        tenth = int(fraction * 10) if isinstance(fraction, int | float) else 0
        return (notice.kind, detail.get("state"), detail.get("phase"), tenth)
    return (notice.kind, detail.get("position"), detail.get("reason"))


def _tokens(detail: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many tokens of a prompt have been read, and of how many."""
    done, total = detail.get("done"), detail.get("total")
    return (done if type(done) is int else 0), max(total if type(total) is int else 0, 1)


def _expected(detail: Mapping[str, Any]) -> str:
    """Return `, about 12s`, if that is known and worth saying."""
    expected_s = detail.get("expected_s")
    if not isinstance(expected_s, int | float) or expected_s < 1:
        return ""
    return f", about {format_duration(expected_s)}"
