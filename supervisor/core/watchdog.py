"""The progress of a worker, from its signs of life: the step counter, not mere liveness.

Every message of a worker is a sign of life. These faults are distinguished:

- Signs come and the work under way does not end: a step, or what the owner thread does between two
  steps, by the counter and the phase of the beats (F5).
- No sign comes though the process runs: something holds the interpreter (F6). If the process grows
  by a gigabyte meanwhile, this is found before its time is up: a template may ask for all memory.
- No sign comes because the process was stopped from outside (F7).
- Its connection has ended and the process lives: nothing that it sends arrives (P23).
- It holds fewer requests than it was given: it has lost one (P23).
- It was given requests, waits for something to do, and nothing moves (P23).
- It waits for a lease that it was given long ago, or has never asked for (P23). Only the supervisor
  knows whether a worker that waits for its turn must wait, so only then is the wait no stall.

Beats have their own socket, so one may overtake the messages of the owner thread or fall behind
them. A beat therefore says how many messages the owner thread had sent and received when it counted
its requests. Only if both numbers equal the supervisor's own was nothing under way in either
direction, so that both ends describe the same moment: then a request that is missing is lost, and
there is nothing to wait for. A message lost on the way keeps the numbers apart for good; that is
found because the worker is idle though it was given requests.

All times are the supervisor's own: a pause of the whole machine, which its clock leaves out, does
not make a step long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from mlxsup.protocol.launch import TEXT_LIMIT_STEPS
from mlxsup.protocol.states import WorkerPhase
from mlxsup.protocol.text import size_text
from mlxsup.protocol.worker_messages import Heartbeat

SILENCE_S = 2.5
"""Without a sign of life for this long, the process is inspected; beats come twice a second."""

RECHECK_S = 1.0
"""A stopped process is inspected once more before it counts as stopped."""

SLACK_S = 0.75
"""A silent worker may have begun its step as late as when its next beat was due, and that beat may
have been late."""

PREDICTIONS = 4.0
"""A step may take this many times its prediction, if that is longer than `step_timeout_s`."""

UNLINKED_S = 2.0
"""A process whose connection has ended is usually about to die, and is judged by its own exit: it
may take this long from closing its socket to exiting. The kernel may then need far longer to free
its memory, and no signal changes how such a process ended."""

GROWTH_SILENCE_S = 1.5
GROWTH_LIMIT_BYTES = 2**30
"""A worker that serves, sends nothing for so long and grows by more than that meanwhile, is stuck.
Honest work that grows lets the heartbeats go on: MLX computes without the interpreter. A load may
hold it for long while it reads files, and is not judged by this."""

WORKS = frozenset(
    {
        WorkerPhase.WAITING,
        WorkerPhase.PREFILL,
        WorkerPhase.DECODE,
        WorkerPhase.ROWS,
        WorkerPhase.CLOSING,
    }
)
"""Phases that have to end; not LOADING, because a beat from the load may come after READY."""


class Alarm(Enum):
    """The measure that the signs of life call for."""

    NONE = auto()
    LOOK = auto()
    STUCK = auto()
    STOPPED = auto()
    BROKEN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A process that has given no sign of life for a while.

    Attributes:
        looked_at: when it was last inspected.
        running_at, stopped_at: when it was last seen so, unless it was seen otherwise since.
        is_stopped: whether it was seen stopped twice.
        base_bytes: its footprint when it was first measured; 0: it was not.
        grown_bytes: how much larger it was when it was last measured.
    """

    looked_at: float | None = None
    running_at: float | None = None
    stopped_at: float | None = None
    is_stopped: bool = False
    base_bytes: int = 0
    grown_bytes: int = 0


NOTHING_KNOWN = Silence()
"""It was neither inspected nor measured since its latest sign of life."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """The signs of life of one process.

    Attributes:
        heard_at: when its latest sign of life came; before any, its start.
        beat_at: when its latest beat came; before any, its start.
        heard, told: how many messages it has sent, not counting beats, and was sent.
        moved_at: when the latest of those was sent.
        unlinked_at: when its connection ended.
        lost: how many requests it has lost, according to its latest beat.
        is_preparing: whether that beat said that prompts are being tokenised.
        step: how many steps have ended, as far as is known.
        phase: what its latest beat said it was doing.
        waits_for: the ranks of a group that are behind, according to its latest beat.
        is_working: whether that beat came after the last step's end and reported work under way.
        progress_at: the earliest time at which that work, or its wait, can have begun.
        predicted_s: how long that step was predicted to take.
        is_held_up: whether it has asked for a lease and not got it.
        freed_at: when it last got one; before any, its start.
        silence: what is known of the process since its latest sign of life.
    """

    heard_at: float
    beat_at: float
    heard: int = 0
    told: int = 0
    moved_at: float
    unlinked_at: float | None = None
    lost: int = 0
    is_preparing: bool = False
    step: int = -1
    phase: WorkerPhase = WorkerPhase.LOADING
    progress_at: float
    predicted_s: float = 0.0
    waits_for: str = ""
    is_held_up: bool = False
    freed_at: float
    is_working: bool = False
    silence: Silence = NOTHING_KNOWN

    @classmethod
    def over(cls, now: float) -> Watch:
        """Return the signs of life of a process that has just been started."""
        return cls(heard_at=now, beat_at=now, progress_at=now, freed_at=now, moved_at=now)

    # ------------------------------------------------------------ signs

    def said(self, now: float) -> None:
        """Note that the owner thread has sent a message, so it is in no step."""
        self.heard += 1
        self.moved_at = self.heard_at = now
        self.silence = NOTHING_KNOWN

    def was_told(self, now: float) -> None:
        """Note that it was sent a message."""
        self.told += 1
        self.moved_at = now

    def asked_for_lease(self) -> None:
        """Note that it has to wait until it gets a lease."""
        self.is_held_up = True

    def got_lease(self, now: float) -> None:
        """Note that it no longer has to wait."""
        self.is_held_up = False
        self.freed_at = now

    def stepped(self, step: int, now: float) -> None:
        """Note that a step has ended."""
        self.step = step
        self.progress_at = now
        self.is_working = False

    def beat(self, message: Heartbeat, given: int, now: float) -> None:
        """Take a beat; one that describes a step whose end is known says nothing about the next.

        Args:
            given: how many requests the worker was given and has not reported as over.
        """
        if message.step >= self.step:
            began_at = now - max(0.0, message.phase_s)
            if message.step > self.step or message.phase is not self.phase:
                # It began after its predecessor's last sign, even if its own clock says otherwise.
                began_at = max(began_at, self.heard_at)
            self.progress_at = max(self.progress_at, began_at)
            self.step = message.step
            self.phase = message.phase
            self.predicted_s = max(0.0, message.predicted_s)
            self.is_working = message.phase in WORKS
        is_same_moment = (message.sent, message.received) == (self.heard, self.told)
        self.lost = max(0, given - message.requests) if is_same_moment else 0
        self.is_preparing = message.preparing > 0
        self.waits_for = " and ".join(one.name for one in message.ranks if one.is_behind)
        self.beat_at = self.heard_at = now
        self.silence = NOTHING_KNOWN

    def unlinked(self, now: float) -> None:
        """Note that its connection has ended, and everything that came over it was read."""
        if self.unlinked_at is None:
            self.unlinked_at = now

    def measured(self, footprint_bytes: int) -> None:
        """Take what the process was measured at; 0 if that was not possible."""
        base_bytes = self.silence.base_bytes
        if not base_bytes:
            self.silence = replace(self.silence, base_bytes=footprint_bytes)
        elif footprint_bytes:
            self.silence = replace(self.silence, grown_bytes=footprint_bytes - base_bytes)

    def looked(self, *, is_stopped: bool, now: float) -> None:
        """Note that the process was inspected."""
        self.silence = replace(
            self.silence,
            running_at=None if is_stopped else now,
            stopped_at=now if is_stopped else None,
            is_stopped=is_stopped and self.silence.stopped_at is not None,
        )

    # ------------------------------------------------------------ what they mean

    def stuck_at(self, step_timeout_s: float) -> float | None:
        """Return when the work under way will have taken too long; None if none is known."""
        if not self.is_working:
            return None
        if self.phase is WorkerPhase.WAITING:
            # As its latest beat says: one from before the lease came says nothing.
            due_at = self._free_since + step_timeout_s
            return None if self.is_held_up or self.beat_at < due_at else due_at
        return self.progress_at + step_timeout_s + PREDICTIONS * self.predicted_s

    @property
    def _free_since(self) -> float:
        """Since when nothing has kept it from reading, if it says that it waits for a lease."""
        return max(self.progress_at, self.freed_at)

    def silent_at(self, step_timeout_s: float) -> float:
        """Return when a running process that sends nothing will have been silent for too long."""
        limit_s = step_timeout_s + PREDICTIONS * self.predicted_s + SLACK_S
        return self.heard_at + max(limit_s, SILENCE_S)

    def grows_silently(self, now: float) -> bool:
        """True if the process takes much memory and says nothing, as no honest work does."""
        is_silent = now >= self.heard_at + GROWTH_SILENCE_S
        return is_silent and self.silence.grown_bytes > GROWTH_LIMIT_BYTES

    def idle_for_s(self, now: float) -> float:
        """Return how long it has been idle without any message moving; 0 if it is not idle."""
        if self.phase is not WorkerPhase.IDLE:
            return 0.0
        return now - max(self.progress_at, self.moved_at)

    def deadline(self, step_timeout_s: float | None) -> float:
        """Return when to judge the signs again; each beat does so, too.

        Args:
            step_timeout_s: of a worker that serves; None while it loads, which has its own
                limits.
        """
        if self.unlinked_at is not None:
            return self.unlinked_at + UNLINKED_S
        looks_at = self.heard_at + SILENCE_S
        silence = self.silence
        if silence.looked_at is not None:
            looks_at = max(looks_at, silence.looked_at + RECHECK_S)
        if step_timeout_s is None:
            return looks_at
        due_at = self.stuck_at(step_timeout_s)
        if due_at is None:
            due_at = self.silent_at(step_timeout_s)
        if silence.looked_at is not None and (
            silence.running_at is None or due_at <= silence.looked_at
        ):
            return looks_at  # that look decides, or the next one
        return min(looks_at, due_at)

    def judge(self, now: float, step_timeout_s: float | None, given: int) -> Alarm:
        """Return what to do now.

        Args:
            step_timeout_s: as for `deadline`.
            given: how many requests the worker was given and has not reported as over.
        """
        is_silent = now >= self.heard_at + SILENCE_S
        if self.silence.is_stopped:
            return Alarm.STOPPED
        if self.unlinked_at is not None:
            return Alarm.BROKEN if now >= self.unlinked_at + UNLINKED_S else Alarm.NONE
        if step_timeout_s is not None:
            if given and (self.lost or self._waits_in_vain(step_timeout_s)):
                return Alarm.BROKEN
            stuck_at = self.stuck_at(step_timeout_s)
            is_stuck = stuck_at is not None and now >= stuck_at
            is_stuck = is_stuck or self.grows_silently(now)
            if is_stuck or now >= self.silent_at(step_timeout_s):
                # Its requests depend on whether it was stopped from outside since its last
                # beat.
                running_at = self.silence.running_at
                if running_at is not None and now - running_at < RECHECK_S:
                    return Alarm.STUCK
                return self._look(now)
        return self._look(now) if is_silent else Alarm.NONE

    def _waits_in_vain(self, step_timeout_s: float) -> bool:
        """True if its latest beat says so: an earlier one says nothing about later work."""
        limit_s = step_timeout_s
        if self.is_preparing:  # the worker itself ends a preparation that takes longer
            limit_s += TEXT_LIMIT_STEPS * step_timeout_s
        return self.idle_for_s(self.beat_at) >= limit_s

    def describe(self, now: float) -> str:
        """Return one phrase that says what is wrong."""
        if self.unlinked_at is not None:
            return "its connection has ended, but the process is alive"
        if self.lost:
            return f"it has lost {self.lost} of its requests"
        if self.grows_silently(now):
            return (
                f"no sign of life for {now - self.heard_at:.1f} s while the process grew by "
                f"{size_text(self.silence.grown_bytes)}; a chat template or tokenizer may allocate "
                "memory endlessly"
            )
        if now >= self.heard_at + SILENCE_S:
            return f"no sign of life for {now - self.heard_at:.1f} s, but the process is running"
        if self.phase is WorkerPhase.IDLE:
            return f"it has requests, but made no progress for {self.idle_for_s(now):.1f} s"
        if self.phase is WorkerPhase.WAITING:
            free_s = now - self._free_since
            return f"it waits for a lease, and nothing has kept it from reading for {free_s:.1f} s"
        took = f"did not end in {now - self.progress_at:.1f} s"
        took += f"; it waits for {self.waits_for}" if self.waits_for else ""
        if self.phase in (WorkerPhase.PREFILL, WorkerPhase.DECODE):
            return f"step {self.step + 1} ({self.phase}) {took}"
        return f"what follows step {self.step} ({self.phase}) {took}"

    def _look(self, now: float) -> Alarm:
        looked_at = self.silence.looked_at
        if looked_at is not None and now < looked_at + RECHECK_S:
            return Alarm.NONE
        self.silence = replace(self.silence, looked_at=now)
        return Alarm.LOOK
