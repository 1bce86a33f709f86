"""An answer as a person sees it: its text as it comes, what it waits for, and remarks on it."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from .output import LiveLine, Output
from .requests import INTERRUPTED, notice_step, notice_text
from .text import clock

if TYPE_CHECKING:
    from mlxsup.client import Notice, Result
    from mlxsup.client.client import Stream


QUIET_S = 1.0
"""A wait that is no longer than this needs no line that stays."""


class AnswerLine(LiveLine):
    """The line that shows the latest notice of a request until its next text.

    Where lines stay, a notice is written only if it is still true after a second, with its time in
    UTC, and a progress once for each tenth of it.

    Args:
        model: which one answers.
    """

    def __init__(self, model: str, output: Output) -> None:
        super().__init__(output)
        self._model = model
        # The timer's thread says what is true after the first second, the reader's all later.
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._is_due = False
        self._notice: Notice | None = None
        self._said: dict[str, tuple[object, ...]] = {}

    def notify(self, notice: Notice) -> None:
        """Show a notice; that of an interruption stays on a terminal, too."""
        if notice.kind == "interrupted":
            self.remark(INTERRUPTED)
        elif notice.kind in ("resumed", "changed"):
            return
        elif self.is_possible:
            self.show(notice_text(notice))
        else:
            self._notify_in_lines(notice)

    def clear(self) -> None:
        """Clear the line, and forget the notice."""
        super().clear()
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            self._timer, self._notice, self._is_due, self._said = None, None, False, {}

    def _notify_in_lines(self, notice: Notice) -> None:
        with self._lock:
            self._notice = notice
            if self._timer is None:
                self._timer = threading.Timer(QUIET_S, self._begin)
                self._timer.daemon = True
                self._timer.start()
            self._say()

    def _begin(self) -> None:
        with self._lock:
            # Otherwise it was cancelled too late.
            self._is_due = self._timer is not None
            self._say()

    def _say(self) -> None:
        if self._notice is None or not self._is_due:
            return
        step = notice_step(self._notice)
        if step != self._said.get(self._notice.kind):
            self._said[self._notice.kind] = step
            self._output.note(f"{clock()} {self._model}: {notice_text(self._notice)}")


def read_answer(stream: Stream, line: LiveLine, output: Output) -> Result:
    """Print the text of a stream as it comes, and return its result.

    The model's reasoning is dimmed on a terminal, and shown nowhere else.

    Args:
        stream: read to its end.
        line: cleared before the first text.
    """
    channel = "content"
    try:
        for delta in stream:
            if output.is_json or not delta.text:
                continue
            line.clear()
            if delta.channel == "content" or (delta.channel == "reasoning" and line.is_possible):
                if delta.channel != channel:
                    line.end_text()
                    channel = delta.channel
                if channel == "content":
                    line.answer(delta.text, sys.stdout)
                else:
                    line.answer(delta.text, sys.stderr, "dim")
    finally:
        # Otherwise a remark, an error or the shell's prompt would follow on the same line.
        line.end_text()
    for call in stream.result.tool_calls:
        called = f"{call['function']['name']}({call['function']['arguments']})"
        output.note(f"the model calls {called}", "dim")
    return stream.result


def show_remarks(result: Result, output: Output, *, is_verbose: bool) -> None:
    """Print warnings about an answer, that it is empty, and how fast it was."""
    for warning in result.warnings:
        output.note(f"warning: {warning}")
    if remark := empty_remark(result):
        output.note(remark, "dim")
    if is_verbose:
        output.note(speed_line(result), "dim")


def empty_remark(result: Result) -> str:
    """Return why there is nothing to read; empty if there is something, or if it was cancelled."""
    if result.text.strip() or result.tool_calls or result.finish_reason == "cancelled":
        return ""
    if result.finish_reason == "length" and result.reasoning:
        return "no answer: the limit of tokens came while the model was still reasoning"
    if result.reasoning:
        return "no answer: the model reasoned, and then ended without one"
    if result.text:
        return "the answer is nothing but white space"
    return "the answer is empty: the model ended it at once"


def result_map(model: str, request_id: str, result: Result) -> dict[str, Any]:
    """Return a result as `--json` prints it."""
    from dataclasses import asdict

    value = asdict(result)
    for one in value["logprobs"] or ():
        for token in (one["chosen"], *one["top"]):
            token["raw_bytes"] = list(token["raw_bytes"])  # JSON has no bytes
    return {"model": model, "request_id": request_id, **value}


def speed_line(result: Result) -> str:
    """Return how many tokens there were, how the time was spent, and what it cost."""
    usage, timings = result.usage, result.timings
    decode_s = timings.total_s - timings.first_token_s
    rate = (usage.completion_tokens - 1) / decode_s if decode_s > 0 else 0.0
    speed = f" ({rate:.1f} tokens/s)" if rate > 0 else ""
    return (
        f"{usage.completion_tokens} tokens in {timings.total_s:.2f} s{speed}, "
        f"first after {timings.first_token_s:.2f} s, {usage.engine_s:.2f} engine seconds, "
        f"prompt {usage.prompt_tokens} tokens, {result.finish_reason}"
    )
