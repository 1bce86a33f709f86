"""What an answer waits for: on a terminal one line, elsewhere a line for each change."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from .live_line import LiveLine
from .notices import INTERRUPTED, notice_step, notice_text
from .output import Output

if TYPE_CHECKING:
    from mlxsup.client import Notice

QUIET_S = 1.0
"""What takes no longer than this needs no explanation where it cannot be erased again."""


class AnswerLine(LiveLine):
    """Shows each notice of a request until its next text. Where lines stay, only what is still true
    after a second is said, each with its time in UTC, and a progress once for each tenth of it.

    Args:
        model: which one answers.
        output: how to write output.
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

    def tell(self, notice: Notice) -> None:
        """Shows a notice; that of an interruption stays on a terminal, too."""
        if notice.kind == "interrupted":
            self.remark(INTERRUPTED)
        elif notice.kind == "resumed":
            return
        elif self.is_possible:
            self.show(notice_text(notice))
        else:
            self._tell_in_lines(notice)

    def clear(self) -> None:
        """Clears the line; nothing more is said of what was waited for."""
        super().clear()
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            self._timer, self._notice, self._is_due, self._said = None, None, False, {}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def _tell_in_lines(self, notice: Notice) -> None:
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
            at = time.strftime("%H:%M:%SZ", time.gmtime())
            self._output.note(f"{at} {self._model}: {notice_text(self._notice)}")
