"""Who pays for a crash, as docs/reliability.md words it: the oracle's own account of its rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

HOUR_S = 3600.0
TOKENS_PAST = 3
TIME_PAST_S = 0.015
PLACES = 8
BROKEN_AFTER = 3


class Says(StrEnum):
    """What a death says of the requests that the process held."""

    NOTHING = "nothing"
    ASKED = "it was asked for"
    ACCUSES = "accuses"
    NO_MEMORY = "out of memory"


@dataclass(slots=True, kw_only=True)
class Suspect:
    """A prompt that was held in accusing deaths.

    Attributes:
        since: the latest of them.
        places: tokens delivered at each, those left out that it has come past.
        takes_turns: whether it has to pass them alone.
        gains_since: the first token near one of them, in this life.
    """

    since: float
    places: list[int]
    takes_turns: bool = False
    gains_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a death leads to.

    Attributes:
        says: what it was judged by.
        culprit: the prompt that is quarantined.
        is_alone: there was too little memory for the one request that was held.
        is_broken: three quarantines in a row: the engine itself.
    """

    says: Says
    culprit: int | None = None
    is_alone: bool = False
    is_broken: bool = False


@dataclass(slots=True)
class Suspicion:
    """The account of one model; prompts by their numbers."""

    suspects: dict[int, Suspect] = field(default_factory=dict)
    quarantined: dict[int, float] = field(default_factory=dict)
    convicts: list[int] = field(default_factory=list)
    rows: int | None = None
    rows_until: float = 0.0

    def died(self, says: Says, held: Sequence[tuple[int, int]], now: float) -> Finding:
        """A process has died with these in its hands: prompt and tokens delivered of each."""
        self.forget(now)
        for suspect in self.suspects.values():
            suspect.gains_since = None
        if says is Says.NO_MEMORY and held:
            if len(held) == 1:
                return Finding(says=says, is_alone=True)
            self.rows, self.rows_until = len(held) // 2, now + HOUR_S
            return Finding(says=says)
        if says is not Says.ACCUSES or not held:
            return Finding(says=says)
        [first, *others] = held
        if not others and self.takes_turn(first[0]):
            return self._convict(first[0], now)
        is_second = any(number in self.suspects for number, _ in held)
        for number in dict(held):
            places = sorted({tokens for one, tokens in held if one == number})
            known = self.suspects.get(number)
            ahead = [p for p in known.places if p > max(places)] if known else []
            self.suspects[number] = Suspect(since=now, places=[*ahead, *places][-PLACES:])
        if is_second:
            for suspect in self.suspects.values():
                suspect.takes_turns = bool(suspect.places)
        return Finding(says=says)

    def _convict(self, number: int, now: float) -> Finding:
        del self.suspects[number]
        self.convicts.append(number)
        if len(self.convicts) < BROKEN_AFTER:
            self.quarantined[number] = now + HOUR_S
            return Finding(says=Says.ACCUSES, culprit=number)
        for one in self.convicts:
            self.quarantined.pop(one, None)
        self.convicts.clear()
        return Finding(says=Says.ACCUSES, is_broken=True)

    def gained(self, number: int, tokens: int, now: float) -> None:
        """A request has gained tokens."""
        suspect = self.suspects.get(number)
        if suspect is None or not suspect.takes_turns:
            return
        if suspect.gains_since is None:
            suspect.gains_since = now
        ahead = [place for place in suspect.places if tokens < place + TOKENS_PAST]
        if ahead != suspect.places and now - suspect.gains_since >= TIME_PAST_S:
            self.convicts.clear()
            suspect.places, suspect.gains_since = ahead, None
            suspect.takes_turns = bool(ahead)

    def completed(self, number: int) -> None:
        """It came to its own end: it is innocent, and the engine is not broken."""
        self.suspects.pop(number, None)
        self.convicts.clear()

    def forget(self, now: float) -> None:
        """What is an hour old."""
        for number in [n for n, one in self.suspects.items() if now - one.since >= HOUR_S]:
            del self.suspects[number]
        for number in [n for n, until in self.quarantined.items() if now >= until]:
            del self.quarantined[number]
        if now >= self.rows_until:
            self.rows = None

    def lift(self) -> None:
        """Somebody asked for a fresh start."""
        self.rows = None
        self.suspects.clear()
        self.quarantined.clear()
        self.convicts.clear()

    def is_there(self, number: int, tokens: int) -> bool:
        """Whether a prompt has to run alone now: its answer is as long as at a crash."""
        suspect = self.suspects.get(number)
        if suspect is None or not suspect.takes_turns:
            return False
        return any(place <= tokens for place in suspect.places)

    def takes_turn(self, number: int) -> bool:
        """Whether a prompt has to run alone."""
        suspect = self.suspects.get(number)
        return suspect is not None and suspect.takes_turns

    @property
    def turns_are_taken(self) -> bool:
        """Whether anybody has to."""
        return any(suspect.takes_turns for suspect in self.suspects.values())
