"""What a run has shown: its verdict, and the figures behind it."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from .faults import Faults
from .ledger import CUT_SHARE, FEW_STRUCK, RESUMED_SHARE, Ledger
from .setting import Setting
from support.verdict import Verdict

SHOWN_VIOLATIONS = 20
RAW_SHARE = 0.3
"""At least this share of the good ends must have come to raw clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one run.

    Attributes:
        verdict: kept, missed or not shown.
        violations: how often each check has failed.
        lines: for people.
    """

    verdict: Verdict
    violations: Counter[str]
    lines: list[str]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def report(
    ledger: Ledger, faults: Faults, setting: Setting, requests: int, took_s: float
) -> Report:
    """Judges a run that has ended.

    Args:
        ledger: of its requests.
        faults: that struck.
        setting: what was wanted.
        requests: how many were wanted.
        took_s: how long it ran.
    """
    if not ledger.condemned.is_set():
        _check_totals(ledger)
    missing = _missing(ledger, faults, setting, requests)
    violations = Counter(violation.check for violation in ledger.violations)
    verdict = Verdict.KEPT
    if violations:
        verdict = Verdict.MISSED
    elif missing:
        verdict = Verdict.NOT_SHOWN
    lines = [_summary(ledger, faults, setting, took_s)]
    for kind, times_s in sorted(faults.recovery_s.items()):
        lines.append(
            f"{kind} to READY: median {statistics.median(times_s):.2f} s,"
            f" longest {max(times_s):.2f} s of {len(times_s)}"
        )
    lines += [f"not shown: {what}" for what in missing]
    lines += [f"violated {violation}" for violation in ledger.violations[:SHOWN_VIOLATIONS]]
    checks = ", ".join(f"{n} {check}" for check, n in violations.most_common())
    outcome = "0 violations: the ledger reconciles" if not violations else f"violations: {checks}"
    lines.append(f"verdict: {verdict}; {outcome}")
    return Report(verdict=verdict, violations=violations, lines=lines)


def _check_totals(ledger: Ledger) -> None:
    """What only the sums can show."""
    ended = ledger.ends.total() + ledger.poison_ends.total()
    lost = sum(violation.check == "liveness" for violation in ledger.violations)
    if ledger.asked != ended and not lost:
        ledger.violate("liveness", f"{ledger.asked} were asked, {ended} have ended")
    if ledger.struck >= FEW_STRUCK and ledger.struck_resumed < RESUMED_SHARE * ledger.struck:
        text = f"{ledger.struck_resumed} of {ledger.struck} that ran when their process was killed"
        ledger.violate("resumed", text)
    if ledger.cut >= FEW_STRUCK and ledger.cut_short < CUT_SHARE * ledger.cut:
        ledger.violate(
            "cancel", f"{ledger.cut_short} of {ledger.cut} ended when they were cancelled"
        )


def _missing(ledger: Ledger, faults: Faults, setting: Setting, requests: int) -> list[str]:
    """What has to happen before a run can judge."""
    least = setting.least_of_each(requests)
    missing = [
        f"{kind} struck {count} times, not {least}"
        for kind, count in sorted(faults.counts.items())
        if count < least
    ]
    if ledger.asked < requests:
        missing.append(f"{ledger.asked} requests, not {requests}")
    wanted = ["finished", "cancelled", "deadline_exceeded"]
    if setting.has_kills:
        wanted.append("worker_crashed")
        if ledger.struck < FEW_STRUCK:
            missing.append(f"{ledger.struck} requests ran when their process was killed")
    missing += [f"no request ended with {end}" for end in wanted if not ledger.ends[end]]
    if ledger.by_door["raw"] < RAW_SHARE * ledger.by_door.total():
        missing.append(f"{ledger.by_door['raw']} good ends at raw clients")
    if "poison" in setting.kinds and not ledger.poison_ends["quarantined"]:
        missing.append("no poison was quarantined")
    return missing


def _summary(ledger: Ledger, faults: Faults, setting: Setting, took_s: float) -> str:
    ends = ", ".join(f"{count} {end}" for end, count in ledger.ends.most_common())
    strikes = ", ".join(f"{n} {kind}" for kind, n in sorted(faults.counts.items()))
    poisons = ", ".join(f"{n} {end}" for end, n in ledger.poison_ends.most_common())
    return (
        f"chaos ({setting.where}): {ledger.asked} requests in {took_s:.0f} s:"
        f" {ends}; {ledger.by_door['raw']} good ends at raw clients; {ledger.resumed} resumes,"
        f" {ledger.paused} returns from pauses,"
        f" {ledger.struck_resumed} of {ledger.struck} requests that ran when their process was"
        f" killed; faults: {strikes}" + (f"; the poisoned: {poisons}" if poisons else "")
    )
