"""An answer as a person sees it: its text as it comes, what it waits for, and remarks on it."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Self, TextIO

import click

from .keyboard import Keyboard
from .output import ESCAPE, LiveLine, Output, terminal_size
from .requests import notice_step, notice_text
from .text import cell_len, clock
from .writer import for_terminal, own

if TYPE_CHECKING:
    from mlxsup.client import Notice, Result
    from mlxsup.client.client import Stream


QUIET_S = 1.0
"""A wait that is no longer than this is not worth a line."""

TAB = 8


def column_after(column: int, text: str, columns: int) -> int:
    """Return where the next character goes after a text that a terminal of so many columns shows.

    A result of `columns` means that the line is full: the terminal is in doubt about where it
    stands.
    """
    for sign in text:
        width = TAB - column % TAB if sign == "\t" else cell_len(sign)
        column = 0 if sign == "\n" else width if column + width > columns else column + width
    return column


class AnswerScreen:
    """The place where an answer is read: its text and, while none comes, a line that says why.

    The line is written once a wait has lasted for a second. On a terminal it changes, and is taken
    back before the next text, which continues where it stood. Elsewhere there is a line for each
    quarter of a progress, and one when an answer continues.

    Attributes:
        model: which one answers.
        is_loading: whether the answer waited for a load when it was last heard of.
    """

    def __init__(self, model: str, output: Output) -> None:
        self.model = model
        self.is_loading = False
        self._output = output
        self._line = LiveLine(output)
        self._column = 0  # where the next text goes
        self._half_line: TextIO | None = None
        self._has_text = False
        # The timer's thread writes the first line of a wait, the reader's all else.
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._is_due = False
        self._is_interrupted = False
        self._notice: Notice | None = None
        self._said: dict[str, tuple[object, ...]] = {}
        self._columns: int | None = None  # of the terminal when the line was written
        self._keyboard = Keyboard()

    def notify(self, notice: Notice) -> None:
        """Take what the answer waits for now."""
        if notice.kind in ("resumed", "changed"):
            return
        with self._lock:
            self.is_loading = notice.kind == "loading"
            self._is_interrupted |= notice.kind == "interrupted"
            self._notice = notice
            if self._timer is None:
                self._timer = threading.Timer(QUIET_S, self._begin)
                self._timer.daemon = True
                self._timer.start()
            self._say()

    def write(self, text: str, stream: TextIO, style: str = "") -> None:
        """Write a piece of the answer where the one before has ended."""
        self.is_loading = False
        with self._lock:
            self._go_on()
            if self._output.can_redraw(stream):
                shown = for_terminal(text, is_answer=True)
                self._column = column_after(self._column, shown, terminal_size().columns)
            self._output.answer(text, stream, style)
            if text:
                self._half_line = stream if stream.isatty() and not text.endswith("\n") else None
            self._has_text = True

    def end_text(self) -> None:
        """Begin a new line if half a line of the answer stands on the terminal."""
        with self._lock:
            self._forget_wait()
            self._take_back()
            if self._half_line is not None:
                click.echo(file=self._half_line)
            self._half_line, self._column = None, 0

    def _begin(self) -> None:
        with self._lock:
            # Otherwise it was cancelled too late.
            self._is_due = self._timer is not None
            self._say()

    def _say(self) -> None:
        if self._notice is None or not self._is_due:
            return
        text = notice_text(
            self._notice,
            is_interrupted=self._is_interrupted,
            has_text=self._has_text,
            has_bar=self._line.is_possible,
        )
        if self._line.is_possible:
            self._draw(text)
        elif (step := notice_step(self._notice)) != self._said.get(self._notice.kind):
            self._said[self._notice.kind] = step
            self._output.note(f"{clock()} {self.model}: {text}")

    def _draw(self, text: str) -> None:
        if self._columns is None and self._half_line is not None:
            click.echo(file=self._half_line)
        self._columns = terminal_size().columns
        self._line.show(text)

    def _go_on(self) -> None:
        was_said, was_text = bool(self._said), self._has_text
        self._forget_wait()
        self._take_back()
        if was_said and was_text:
            self._output.note(f"{clock()} {self.model}: the answer continues")

    def _forget_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._notice, self._said = None, None, {}
        self._is_due = self._is_interrupted = False

    def _take_back(self) -> None:
        if self._columns is None:
            return
        self._line.clear()
        if self._half_line is not None:
            if self._columns == terminal_size().columns and self._column < self._columns:
                up = own(f"{ESCAPE}A{ESCAPE}{self._column + 1}G")
                click.echo(up, nl=False, err=True)
            else:
                self._column = 0  # where the line above has ended is not known
        self._columns = None

    def __enter__(self) -> Self:
        self._keyboard.hide_typing()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_text()
        self._keyboard.give_back()


def read_answer(stream: Stream, screen: AnswerScreen, output: Output) -> Result:
    """Print the text of a stream as it comes, and return its result.

    The model's reasoning is dimmed on a terminal, and shown nowhere else. What is no terminal gets
    a line break at the end of an answer that lacks one, as a file of answers needs it.

    Args:
        stream: read to its end.
        screen: where the answer is read.
    """
    channel, last = "content", ""
    try:
        for delta in stream:
            if output.is_json or not delta.text:
                continue
            if delta.channel == "content":
                last = delta.text
            elif delta.channel != "reasoning" or not output.can_redraw(sys.stderr):
                continue
            if delta.channel != channel:
                screen.end_text()
                channel = delta.channel
            if channel == "content":
                screen.write(delta.text, sys.stdout)
            else:
                screen.write(delta.text, sys.stderr, "dim")
    finally:
        # Otherwise a remark, an error or the shell's prompt would follow on the same line.
        screen.end_text()
    if last and not last.endswith("\n") and not sys.stdout.isatty():
        output.data("")
    for call in stream.result.tool_calls:
        called = f"{call['function']['name']}({call['function']['arguments']})"
        output.note(f"the model calls {called}", "dim")
    return stream.result


def cancelled_text(screen: AnswerScreen) -> str:
    """Return what Ctrl-C has ended, and what goes on."""
    if screen.is_loading:
        name = screen.model
        return f"Cancelled. {name} continues to load; `mlxsup unload {name}` stops it."
    return "Cancelled. The model stays loaded."


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
        return "no answer: the model reached the token limit while it was still reasoning"
    if result.reasoning:
        return "no answer: the model stopped after its reasoning"
    if result.text:
        return "the answer contains only white space"
    return "the answer is empty: the model stopped immediately"


def result_map(model: str, request_id: str, result: Result) -> dict[str, Any]:
    """Return a result as `--json` prints it."""
    from dataclasses import asdict

    value = asdict(result)
    del value["vectors"]  # of embeddings, which `mlxsup embed` prints
    if not result.usage.drafted:  # most models do not guess
        del value["usage"]["drafted"], value["usage"]["draft_accepted"]
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
