"""Whether a worker makes progress, from its signs of life: the step counter, not mere liveness.

Three faults are told apart (F5, F6, F7): beats flow and the counter stands still; no beat comes
and the process runs, so that something holds the interpreter; no beat comes because the process was
stopped from outside. All times are the supervisor's own: a pause of the whole machine, which its
clock leaves out, makes no step long.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mlxsup.protocol.messages import Heartbeat
from mlxsup.protocol.states import WorkerPhase

SILENCE_S = 3.0
"""Without a beat for so long, the process is looked at; beats come each second."""

RECHECK_S = 1.0
"""A stopped process is looked at once more before it is taken for stopped."""

SLACK_S = 1.0
"""A silent worker may have begun its step as late as its next beat was due."""

PREDICTIONS = 4.0
"""A step may take so many times its prediction, beside `step_timeout_s`."""

IN_STEP = frozenset({WorkerPhase.PREFILL, WorkerPhase.DECODE})


class Alarm(StrEnum):
    """What the signs of life call for."""

    NONE = "none"
    LOOK = "look at the process"
    STUCK = "stuck"
    STOPPED = "stopped"


@dataclass(slots=True, kw_only=True)
class Watch:
    """The signs of life of one process.

    Attributes:
        heard_at: when it was last heard of; its start, before.
        step: how many steps have ended, as far as is known.
        phase: what its latest beat said it was doing.
        is_in_step: whether that beat came since the last step has ended and told of a new one.
        progress_at: when the step under way can have begun at the earliest.
        predicted_s: for that step.
        looked_at: when the process was last asked about.
        seen_running_at, seen_stopped_at: what was seen then; forgotten with the next beat.
        is_stopped: it was seen stopped twice.
    """

    heard_at: float
    step: int = -1
    phase: WorkerPhase = WorkerPhase.LOADING
    progress_at: float
    predicted_s: float = 0.0
    looked_at: float | None = None
    seen_running_at: float | None = None
    seen_stopped_at: float | None = None
    is_stopped: bool = False
    is_in_step: bool = False

    @classmethod
    def over(cls, now: float) -> Watch:
        """Of a process that has just been started."""
        return cls(heard_at=now, progress_at=now)

    # ------------------------------------------------------------ signs

    def stepped(self, step: int, now: float) -> None:
        """A step has ended."""
        self.step = step
        self.progress_at = now
        self.is_in_step = False

    def beat(self, message: Heartbeat, now: float) -> None:
        """A sign of life; one that describes a step whose end is known says nothing of the next."""
        if message.step >= self.step:
            if message.step > self.step or message.phase is not self.phase:
                # It began after the last sign of its predecessor, whatever its own clock says.
                self.progress_at = max(self.progress_at, self.heard_at, now - message.phase_s)
            self.step = message.step
            self.phase = message.phase
            self.predicted_s = message.predicted_s
            self.is_in_step = message.phase in IN_STEP
        self.heard_at = now
        self.looked_at = self.seen_running_at = self.seen_stopped_at = None
        self.is_stopped = False

    def looked(self, *, is_stopped: bool, now: float) -> None:
        """The process was looked at."""
        if is_stopped:
            self.seen_running_at = None
            self.is_stopped = self.seen_stopped_at is not None
            self.seen_stopped_at = now
        else:
            self.seen_stopped_at, self.is_stopped = None, False
            self.seen_running_at = now

    # ------------------------------------------------------------ what they mean

    def stuck_at(self, step_timeout_s: float) -> float | None:
        """When the step under way will have taken too long; None where none is known of."""
        if not self.is_in_step:
            return None
        return self.progress_at + step_timeout_s + PREDICTIONS * self.predicted_s

    def silent_at(self, step_timeout_s: float) -> float:
        """When a process that runs and says nothing will have been silent for too long."""
        limit_s = step_timeout_s + PREDICTIONS * self.predicted_s + SLACK_S
        return self.heard_at + max(limit_s, SILENCE_S)

    def deadline(self, step_timeout_s: float | None) -> float:
        """When it should be asked again what the signs mean.

        Args:
            step_timeout_s: of a worker that serves; None while it loads, which has limits of its
                own.
        """
        looks_at = self.heard_at + SILENCE_S
        if self.looked_at is not None:
            looks_at = max(looks_at, self.looked_at + RECHECK_S)
        if step_timeout_s is None:
            return looks_at
        stuck_at = self.stuck_at(step_timeout_s)
        if stuck_at is None or (self.looked_at is not None and stuck_at < looks_at):
            return looks_at
        return min(looks_at, stuck_at)

    def judge(self, now: float, step_timeout_s: float | None) -> Alarm:
        """What is to be done now."""
        is_silent = now >= self.heard_at + SILENCE_S
        if self.is_stopped:
            return Alarm.STOPPED
        if step_timeout_s is not None:
            stuck_at = self.stuck_at(step_timeout_s)
            is_stuck = stuck_at is not None and now >= stuck_at
            if is_stuck or now >= self.silent_at(step_timeout_s):
                # Whether it was stopped from outside, since its last beat, decides about its
                # requests.
                is_known = self.seen_running_at is not None and (
                    now - self.seen_running_at < RECHECK_S
                )
                if is_known:
                    return Alarm.STUCK
                return self._look(now)
        return self._look(now) if is_silent else Alarm.NONE

    def describe(self, now: float) -> str:
        """One phrase that says what the matter is."""
        if now >= self.heard_at + SILENCE_S:
            return f"no sign of life for {now - self.heard_at:.1f} s, though the process runs"
        return f"step {self.step + 1} ({self.phase}) did not end in {now - self.progress_at:.1f} s"

    def _look(self, now: float) -> Alarm:
        if self.looked_at is not None and now < self.looked_at + RECHECK_S:
            return Alarm.NONE
        self.looked_at = now
        return Alarm.LOOK
