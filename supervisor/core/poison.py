"""The blame for the death of an engine, and its consequences for the requests that it held (F10).

Not every death accuses: a kill from outside says nothing about the requests. One that does makes
suspects of all requests that the engine held, and they resume together, because many faults are
transient. After a second such crash of some of the same suspects, all suspects are on probation:
each runs alone in the engine in turn (`preemption.py`), until it has got a few tokens past the
place where the engine died. The suspect that runs alone when the engine dies again is the culprit.
So a request that always kills its engine costs three crashes and no other answer, and a fault that
has passed costs each suspect a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import NewType

from mlxsup.protocol.ids import ModelName

Digest = NewType("Digest", bytes)
"""Digest of a request as its client sent it: the same request sent again has the same one."""

SUSPICION_S = 3600.0
QUARANTINE_S = 3600.0
LOWERED_ROWS_S = 3600.0
"""How long a worker that ran out of memory is limited to fewer rows."""

PROBATION_TOKENS = 3
PROBATION_S = 0.015
"""How many tokens past its crash a suspect must get, and how long it must keep gaining tokens. A
deterministic fault strikes at the first of these tokens or a little later, because what a dying
process had computed but not delivered is lost with it: some milliseconds of steps."""

APPROACH_TOKENS = 64
"""A suspect that is sent again may run with others until it is this close to the place of a crash:
what it computes until its row has left the batch must not reach that place."""

MAX_QUARANTINES_IN_A_ROW = 3
MAX_SUSPECTS = 4096
MAX_PLACES = 8
"""How many crashes one suspect has to get past; the earliest are forgotten first."""
MAX_QUARANTINED = 4096


def digest_of(model: ModelName, body: bytes, adapter: str = "") -> Digest:
    """Return the digest of a request: model, adapter, prompt and parameters."""
    name = f"{model}:{adapter}".encode()
    return Digest(blake2b(len(name).to_bytes(4) + name + body, digest_size=16).digest())


class Evidence(StrEnum):
    """The evidence that the end of a process is against the requests that it held."""

    NONE = "none"
    ASKED = "asked"
    ACCUSES = "accuses"
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on the requests of a process that has ended.

    Attributes:
        evidence: what it was judged by.
        culprit: the request that is quarantined.
        is_too_large: the one request that ran needs more memory than there is.
        is_tried_again: the one request that ran may run once more, after the other models have
            been asked to give back memory.
        failure: why the engine counts as broken; empty if it does not.
        story: one sentence for people; empty if nothing was decided.
    """

    evidence: Evidence = Evidence.NONE
    culprit: Digest | None = None
    is_too_large: bool = False
    is_tried_again: bool = False
    failure: str = ""
    story: str = ""

    @property
    def is_counted(self) -> bool:
        """True if the restart window counts this death: not if it revealed the culprit."""
        return self.culprit is None


NO_VERDICT = Verdict()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A request that a worker holds.

    Attributes:
        tokens: how many tokens of its answer have been delivered.
        shortages: how many workers have run out of memory with it alone.
    """

    digest: Digest
    tokens: int = 0
    shortages: int = 0


@dataclass(slots=True, kw_only=True)
class _Suspect:
    """A request that some crash accuses.

    Attributes:
        since: the latest such crash, monotonic seconds.
        places: how many tokens had been delivered when such crashes came, the latest last,
            without those that it has got past.
        is_on_probation: whether it has to get past those places alone.
        gains_since: when it gained its first token near one of them, in this life of the worker.
    """

    since: float
    places: list[int] = field(default_factory=list)
    is_on_probation: bool = False
    gains_since: float | None = None


@dataclass(slots=True, kw_only=True)
class Blame:
    """The memory of one model's crashes.

    Attributes:
        rows: how many requests may run at once since the worker ran out of memory; None for as
            many as the entry says.
        suspects: the requests that some crash accuses.
    """

    rows: int | None = None
    _rows_until: float = math.inf
    # Bounded by MAX_SUSPECTS and MAX_QUARANTINED; the oldest are forgotten first.
    suspects: dict[Digest, _Suspect] = field(default_factory=dict)
    _quarantined: dict[Digest, float] = field(default_factory=dict)
    _in_a_row: list[Digest] = field(default_factory=list)
    """Those quarantined since one last completed or got past a crash; MAX_QUARANTINES_IN_A_ROW."""

    # ------------------------------------------------------------ what happens

    def judge(self, evidence: Evidence, held: Sequence[Held], now: float) -> Verdict:
        """Judge the end of a process.

        Args:
            held: the requests that it held, dispatched and not ended.
        """
        self.expire(now)
        for suspect in self.suspects.values():
            suspect.gains_since = None
        if evidence is Evidence.OUT_OF_MEMORY and held:
            return self._make_room(held, now)
        if evidence is not Evidence.ACCUSES or not held:
            return Verdict(evidence=evidence)
        if len(held) == 1 and self.is_due(held[0]):
            return self._convict(held[0].digest, now)
        return self._suspect(held, now)

    def completed(self, digest: Digest) -> None:
        """Note that a request ended by itself: it is innocent, and the engine is not broken."""
        self.suspects.pop(digest, None)
        self._in_a_row.clear()

    def gained(self, one: Held, now: float) -> bool:
        """Note that a request has gained a token; return whether it has got past a
        crash with it."""
        suspect = self.suspects.get(one.digest)
        if suspect is None or not self.is_due(one):
            return False
        if suspect.gains_since is None:
            suspect.gains_since = now
        left = [place for place in suspect.places if one.tokens < place + PROBATION_TOKENS]
        if left == suspect.places or now - suspect.gains_since < PROBATION_S:
            return False
        self._in_a_row.clear()  # with a broken engine no request gets past
        suspect.places, suspect.gains_since = left, None
        suspect.is_on_probation = bool(left)
        return True

    def expire(self, now: float) -> None:
        """Forget what is old."""
        for digest in [d for d, s in self.suspects.items() if now >= s.since + SUSPICION_S]:
            del self.suspects[digest]
        for digest in [d for d, until in self._quarantined.items() if now >= until]:
            del self._quarantined[digest]
        if now >= self._rows_until:
            self.rows, self._rows_until = None, math.inf

    def lift(self) -> None:
        """Let all requests start clean: a person has restarted the model or changed its entry."""
        self.rows, self._rows_until = None, math.inf
        self.suspects.clear()
        self._quarantined.clear()
        self._in_a_row.clear()

    # ------------------------------------------------------------ what follows

    def is_suspect(self, digest: Digest) -> bool:
        """True if some crash accuses a request."""
        return digest in self.suspects

    def is_due(self, one: Held) -> bool:
        """True if a request is near the place of a crash, and has to get past it alone.

        One that was sent again has to get there first, and may do so together with others.
        """
        suspect = self.suspects.get(one.digest)
        if suspect is None or not suspect.is_on_probation:
            return False
        return any(place <= one.tokens + APPROACH_TOKENS for place in suspect.places)

    def quarantined_for_s(self, digest: Digest, now: float) -> float | None:
        """Return for how much longer a request is refused; None if it is not."""
        until = self._quarantined.get(digest)
        return until - now if until is not None and until > now else None

    @property
    def expires_at(self) -> float | None:
        """Return when something is forgotten that may keep requests waiting; None: nothing does."""
        times = [one.since + SUSPICION_S for one in self.suspects.values()]
        when = min([self._rows_until, *times])
        return when if when < math.inf else None

    @property
    def is_anyone_on_probation(self) -> bool:
        """True if anyone has to take turns at all; checked at every step."""
        return any(suspect.is_on_probation for suspect in self.suspects.values())

    @property
    def on_probation(self) -> int:
        """Return how many of the suspects have yet to prove themselves."""
        return sum(suspect.is_on_probation for suspect in self.suspects.values())

    @property
    def quarantined(self) -> int:
        """Return how many requests are refused."""
        return len(self._quarantined)

    # ------------------------------------------------------------ inside

    def _suspect(self, held: Sequence[Held], now: float) -> Verdict:
        is_second = any(h.digest in self.suspects for h in held)
        count = self._accuse(held, now)
        story = f"{_requests(count)} under suspicion"
        if is_second:
            for suspect in self.suspects.values():
                suspect.is_on_probation = bool(suspect.places)
            story = (
                f"{_requests(len(self.suspects))} under suspicion for the second time: each runs"
            )
            story += " alone until it has come past the crash"
        return Verdict(evidence=Evidence.ACCUSES, story=story)

    def _accuse(self, held: Sequence[Held], now: float) -> int:
        """Make suspects of the requests that a crash has hit; return how many different ones."""
        accused: dict[Digest, list[int]] = {}
        for one in held:
            accused.setdefault(one.digest, []).append(one.tokens)
        for digest, places in accused.items():
            known = self.suspects.pop(digest, None)  # the latest are forgotten last
            ahead = [p for p in known.places if p > max(places)] if known else []
            places = [*ahead, *sorted(places)]
            places = list(dict.fromkeys(reversed(places)))[:MAX_PLACES][::-1]
            self.suspects[digest] = _Suspect(since=now, places=places)
        while len(self.suspects) > MAX_SUSPECTS:
            del self.suspects[next(iter(self.suspects))]
        return len(accused)

    def _convict(self, culprit: Digest, now: float) -> Verdict:
        self.suspects.pop(culprit, None)
        self._in_a_row.append(culprit)
        if len(self._in_a_row) >= MAX_QUARANTINES_IN_A_ROW:
            for digest in self._in_a_row:
                self._quarantined.pop(digest, None)
            self._in_a_row.clear()
            failure = (
                f"the engine is broken: {MAX_QUARANTINES_IN_A_ROW} requests in a row crashed "
                "it and none completed"
            )
            return Verdict(evidence=Evidence.ACCUSES, failure=failure, story=failure)
        self._quarantined[culprit] = now + QUARANTINE_S
        while len(self._quarantined) > MAX_QUARANTINED:
            del self._quarantined[next(iter(self._quarantined))]
        story = "the suspected request crashed the model again and is quarantined"
        return Verdict(evidence=Evidence.ACCUSES, culprit=culprit, story=story)

    def _make_room(self, held: Sequence[Held], now: float) -> Verdict:
        """Allow half of what ran: with half the configured limit the same few might run again.

        One alone may have met what other processes held: only the second time it is too large.
        """
        if len(held) == 1 and held[0].shortages:
            story = "a single request needed more memory than available for the second time"
            return Verdict(evidence=Evidence.OUT_OF_MEMORY, is_too_large=True, story=story)
        if len(held) == 1:
            story = "out of memory with 1 request alone: other models have to give back memory"
            story += " before it may run once more"
            return Verdict(evidence=Evidence.OUT_OF_MEMORY, is_tried_again=True, story=story)
        self.rows = len(held) // 2
        self._rows_until = now + LOWERED_ROWS_S
        count = _requests(len(held))
        story = f"out of memory with {count}; at most {self.rows} run at once now"
        return Verdict(evidence=Evidence.OUT_OF_MEMORY, story=story)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
