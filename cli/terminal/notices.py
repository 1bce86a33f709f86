"""What a request waits for, in a line that is gone once the answer begins or continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .live_line import LiveLine
from .model_row import progress_text
from .quantities import format_duration

if TYPE_CHECKING:
    from mlxsup.client import Notice

QUEUED_WORDS = {
    "turn": ", another has its turn",
    "limit": ", its client runs as many as it may",
    "memory": ", the model waits for memory",
    "restart": ", the model restarts",
    "backoff": ", the model restarts after a crash",
}
"""What a request waits for besides a row or a load, which has a notice of another kind."""

PAUSED_WORDS = {
    "user": "until `mlxsup resume`",
    "turn": "another has its turn",
    "class": "an interactive request has its row",
    "memory": "there is too little memory for it now",
}


def notice_teller(line: LiveLine) -> Callable[[Notice], object]:
    """Shows each notice in the line; the one about an interruption stays on the screen."""

    def tell(notice: Notice) -> None:
        if notice.kind == "interrupted":
            line.remark("the worker ended; the answer continues when it is back")
        elif notice.kind != "resumed":
            line.show(notice_text(notice))

    return tell


def notice_text(notice: Notice) -> str:
    """`queued, position 3, about 12s` · `loading, weights 40%` ·
    `reading the prompt, 1024 of 8192 tokens`."""
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
        return f"reading the prompt, {detail.get('done')} of {detail.get('total')} tokens"
    return str(notice.kind)


def _expected(detail: Mapping[str, Any]) -> str:
    """`, about 12s`, if that is known and worth saying."""
    expected_s = detail.get("expected_s")
    if not isinstance(expected_s, int | float) or expected_s < 1:
        return ""
    return f", about {format_duration(expected_s)}"
