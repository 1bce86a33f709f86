"""What a request waits for, in a line that is gone once the answer begins or continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .live_line import LiveLine
from .model_row import progress_text

if TYPE_CHECKING:
    from mlxsup.client import Notice


def notice_teller(line: LiveLine) -> Callable[[Notice], object]:
    """Shows each notice in the line; the one about an interruption stays on the screen."""

    def tell(notice: Notice) -> None:
        if notice.kind == "interrupted":
            line.remark("the worker ended; the answer continues when it is back")
        elif notice.kind != "resumed":
            line.show(notice_text(notice))

    return tell


def notice_text(notice: Notice) -> str:
    """`queued, position 3` · `loading, weights 40%` · `reading the prompt, 1024 of 8192 tokens`."""
    detail = notice.detail
    if notice.kind == "queued":
        return f"queued, position {detail.get('position')}"
    if notice.kind == "loading":
        progress = progress_text(detail) or str(detail.get("state", "")).lower()
        return f"loading, {progress}" if progress else "loading"
    if notice.kind == "paused":
        is_by_person = detail.get("reason") == "user"
        return "paused, until `mlxsup resume`" if is_by_person else "paused, another has its turn"
    if notice.kind == "prefilling":
        return f"reading the prompt, {detail.get('done')} of {detail.get('total')} tokens"
    return str(notice.kind)
