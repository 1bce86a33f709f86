"""What every request was promised and what it got; nothing is allowed that was not provoked."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

from .asks import Ask, End, Kind, Open
from .provocations import Provocations

DEATHS_TO_QUARANTINE = 3
DEATHS_TO_TURNS = 2
"""After the second death with evidence suspects take turns, and whoever comes then waits, with its
first tokens, until the turns are over."""
SILENT_DEATHS_TO_GIVE_UP = 3
CLIENT_LAG_S = 1.0
"""By how much a client may see a token later than the supervisor sent it."""
RESUMED_SHARE = 0.5
"""At least this share of the requests that ran and had more to come when their process was killed
must have been resumed; the others had their ends on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken promise.

    Attributes:
        check: the name of what saw it.
        text: what it saw.
    """

    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


CUT_SHARE = 0.5
"""The share of requests, cancelled with much to come, that must have ended as cancelled."""

FEW_STRUCK = 10
"""Fewer requests that ran when their process was killed say nothing about a share."""
MOST_VIOLATIONS = 20
"""A run that has seen more is condemned, and ends at once."""


class Ledger:
    """Judges ends by what was asked, what came, and what was provoked meanwhile.

    Args:
        left_tokens: with more than that many to come, as far as its client knows, a request that
            runs when its process is killed, or when it is cancelled, cannot have ended before.

    Attributes:
        provocations: of the faults.
        asked: how many requests there were.
        ends: how they ended; of poison, `poison_ends`.
        resumed: how many times answers continued after a crash.
        paused: how many times answers continued after a pause.
        struck, struck_resumed: requests that ran when their process was killed, and those of them
            that were resumed.
        cut, cut_short: requests that were cancelled with much to come, and those of them that ended
            so.
        by_door: how many ended well, through each kind of client.
        violations: what is wrong.
        condemned: set when that is so much that the run need not continue.
    """

    def __init__(self, left_tokens: int) -> None:
        self._left_tokens = left_tokens
        self.provocations = Provocations()
        self.asked = 0
        self.ends: Counter[str] = Counter()
        self.poison_ends: Counter[str] = Counter()
        self.resumed = self.paused = self.struck = self.struck_resumed = self.cut = (
            self.cut_short
        ) = 0
        self.by_door: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.condemned = asyncio.Event()
        self._open: defaultdict[str, set[Open]] = defaultdict(set)
        self._turns_until: dict[str, float] = {}

    def ask(self, ask: Ask) -> Open:
        """A request is about to be sent."""
        self.asked += 1
        one = Open(ask=ask, id=ask.id)
        self._open[ask.model].add(one)
        return one

    def open_of(self, model: str) -> list[Open]:
        """Those of a model that have no end yet, the oldest first."""
        return sorted(self._open[model], key=lambda one: one.ask.number)

    def is_open(self, one: Open) -> bool:
        """Whether a request has no end yet."""
        return one in self._open[one.ask.model]

    def violate(self, check: str, text: str) -> None:
        """A promise is broken."""
        self.violations.append(Violation(check=check, text=text))
        if len(self.violations) >= MOST_VIOLATIONS:
            self.condemned.set()

    def kill(self, model: str) -> None:
        """The process of a model is about to be killed: marks the requests that run in it."""
        for one in self._open[model]:
            left = len(one.ask.answer.tokens) - len(one.tokens)
            is_lasting = one.ask.timeout_s is None and one.ask.cancel_after is None
            is_lasting = is_lasting and not one.pauses  # its row may be out of the batch
            if one.tokens and left > self._left_tokens and one.ask.resume and is_lasting:
                one.was_struck = True

    def may_accuse(self, model: str) -> bool:
        """Whether a death with evidence, now, can lead to no quarantine of a request that is
        innocent: that takes three deaths with evidence under one request, alone at the third."""
        if self.provocations.is_open(model, "poison", "stall"):
            return False
        now = time.monotonic()
        met = (self.provocations.evidence(model, one.sent_s, now) for one in self._open[model])
        return max(met, default=0) < DEATHS_TO_QUARANTINE - 1

    def never_ended(self, one: Open, limit_s: float) -> None:
        """A request has had no end for a long time."""
        self._open[one.ask.model].discard(one)
        self.violate("liveness", f"{one.ask.model} {one.ask.number}: no end within {limit_s:g} s")

    def lost(self, one: Open, message: str) -> None:
        """Its client took the daemon for gone, which it never was."""
        self._open[one.ask.model].discard(one)
        self.ends["connection lost"] += 1
        self.violate("connection", message)

    def ended(self, one: Open, end: End, door: str) -> None:
        """A request has ended.

        Args:
            one: which.
            end: how.
            door: through which kind of client it was asked.
        """
        now = time.monotonic()
        self._open[one.ask.model].discard(one)
        if self._may_take_turns(one, now):
            self._turns_until[one.ask.model] = now
        is_poison = one.ask.kind is Kind.POISON
        (self.poison_ends if is_poison else self.ends)[_name(end)] += 1
        self.by_door[door] += not end.is_error
        self._check_content(one, end)
        if end.is_error:
            self._check_error(one, end, now)
        else:
            self._check_done(one, end, now)
        if one.was_struck and not end.is_error:
            self.struck += 1
            self.struck_resumed += end.resumed > 0
        if one.left_at_cancel > self._left_tokens and not end.is_error:
            self.cut += 1
            self.cut_short += end.code == "cancelled"

    # ------------------------------------------------------------ inside

    def _check_content(self, one: Open, end: End) -> None:
        """What came is the answer, or a beginning of it: of this model, prompt and seed."""
        right, got = one.ask.answer, one.tokens
        is_whole = not end.is_error and end.code != "cancelled"
        where = f"{one.ask.model} {one.ask.number} ({_name(end)}, resumed {end.resumed})"
        wanted = list(right.tokens) if is_whole else list(right.tokens[: len(got)])
        if got != wanted:
            pairs = enumerate(zip(got, wanted, strict=False))
            at = next((n for n, (a, b) in pairs if a != b), min(len(got), len(wanted)))
            self.violate("tokens", f"{where}: another token at {at} of {len(wanted)}")
        elif one.text != right.text_of(got, is_whole):
            self.violate("text", f"{where}: {one.text!r} is not the text of its tokens")

    def _check_done(self, one: Open, end: End, now: float) -> None:
        ask, where = one.ask, f"{one.ask.model} {one.ask.number}"
        if ask.kind is Kind.POISON:
            self.violate("poison", f"{where}: a request that kills its engine ended: {end.code}")
        if end.code == "cancelled" and not one.is_cancelled:
            self.violate("cancel", f"{where}: cancelled by nobody")
        if end.code not in ("cancelled", ask.answer.finish):
            self.violate("finish", f"{where}: {end.code}, not {ask.answer.finish}")
        prompt = ask.answer.prompt_tokens
        is_early = end.code == "cancelled" and not one.tokens  # it may not have been accepted
        wanted = (0 if is_early and end.usage[0] == 0 else prompt, len(one.tokens))
        if end.usage != wanted:
            self.violate("usage", f"{where}: {end.usage}, not {wanted}")
        is_started = not is_early or end.seed is not None
        if is_started and (end.seed is None or ask.seed not in (None, end.seed)):
            self.violate("seed", f"{where}: {end.seed}, not {ask.seed}")
        self.resumed += end.resumed
        if end.resumed > (most := self.provocations.losses(ask.model, one.sent_s, now)):
            self.violate("resumed", f"{where}: {end.resumed} times under at most {most} deaths")
        self._check_pauses(one, end, now)

    def _check_pauses(self, one: Open, end: End, now: float) -> None:
        """It continued as many times as it was paused; turns of suspects are pauses, too."""
        self.paused += end.paused
        takes_turns = self._may_take_turns(one, now) or self._met_turns(one, now)
        least = 0 if end.code == "cancelled" else one.seen_paused
        if end.paused < least or (end.paused > one.pauses and not takes_turns):
            times = f"{end.paused} times, was seen paused {least} and told to pause {one.pauses}"
            self.violate("paused", f"{one.ask.model} {one.ask.number}: continued {times} times")

    def _check_error(self, one: Open, end: End, now: float) -> None:
        where = f"{one.ask.model} {one.ask.number}"
        sent = end.detail.get("tokens_sent")
        needs_count = end.code in ("worker_crashed", "quarantined", "deadline_exceeded")
        is_refusal = not one.tokens and end.code == "quarantined"
        if sent != len(one.tokens) and (sent is not None or (needs_count and not is_refusal)):
            self.violate("tokens_sent", f"{where}: {end.code} says {sent}, {len(one.tokens)} came")
        if not self._is_provoked(one, end.code, now):
            what = f"{where} ({one.ask.kind}, resume={one.ask.resume}, {len(one.tokens)} tokens)"
            self.violate(f"unprovoked {end.code}", what)

    def _is_provoked(self, one: Open, code: str, now: float) -> bool:
        """Whether this error may be this request's end, by what was done to its model."""
        ask, done = one.ask, self.provocations
        match code:
            case "worker_crashed" if not ask.resume:
                return done.losses(ask.model, one.sent_s, now) > 0
            case "worker_crashed":
                since_s = (one.last_token_s or one.sent_s) - CLIENT_LAG_S
                return done.silent_losses(ask.model, since_s, now) >= SILENT_DEATHS_TO_GIVE_UP
            case "deadline_exceeded":
                return ask.timeout_s is not None and now - one.sent_s >= ask.timeout_s
            case "unloaded":
                unloads = [e for e in done.during(ask.model, one.sent_s, now) if e.unloads]
                ran = one.first_token_s is not None and all(
                    one.first_token_s < entry.begun_s for entry in unloads
                )  # then it is waited for, unless its process dies or others take turns
                has_left = done.losses(ask.model, one.sent_s, now) > 0 or self._met_turns(one, now)
                return bool(unloads) and (not ran or has_left)
            case "quarantined":
                return ask.kind is Kind.POISON
            case "insufficient_memory":
                return ask.kind is Kind.OUT_OF_MEMORY
            case _:
                return False

    def _may_take_turns(self, one: Open, now: float) -> bool:
        """Whether it may be a suspect that runs alone now and then."""
        return self.provocations.evidence(one.ask.model, one.sent_s, now) >= DEATHS_TO_TURNS

    def _met_turns(self, one: Open, now: float) -> bool:
        """Whether others may have taken turns since it was sent."""
        model = one.ask.model
        is_before = self._turns_until.get(model, 0.0) >= one.sent_s
        return is_before or any(self._may_take_turns(other, now) for other in self._open[model])


def _name(end: End) -> str:
    return end.code if end.is_error or end.code == "cancelled" else "finished"
