"""What every request was promised and what it got, kept where it was asked and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

ALLOWED_ERRORS = frozenset(
    {"worker_crashed", "overloaded", "load_failed", "unloaded", "quarantined"}
)
"""What a client may meet that is nobody's fault but the chaos'; everything else is a violation.
`quarantined` is the right end of a request whose engine was made to die by a SIGSEGV from outside
three times while it ran: nobody can tell that from a crash of its own."""

ENDS_OF_POISON = frozenset({"quarantined", "worker_crashed"})


class Ledger:
    """Counts ends and compares answers."""

    def __init__(self) -> None:
        self.asked = 0
        self.resumed = 0
        self.ends: Counter[str] = Counter()
        self.poison_ends: Counter[str] = Counter()
        self.violations: list[str] = []

    def ask(self) -> None:
        """A request was sent."""
        self.asked += 1

    def finished(self, got: Sequence[int], truth: Sequence[int], resumed: int) -> None:
        """It ended well: its tokens must be those of the undisturbed answer."""
        self.ends["finished"] += 1
        self.resumed += resumed
        if list(got) != list(truth):
            at = next((n for n, p in enumerate(zip(got, truth, strict=False)) if p[0] != p[1]),
                      min(len(got), len(truth)))  # fmt: skip
            self.violations.append(f"another token at {at} after {resumed} resumes")

    def cancelled(self, got: Sequence[int], truth: Sequence[int], resumed: int) -> None:
        """Its client cancelled it: what had come must be a beginning of the answer."""
        self.ends["cancelled"] += 1
        self.resumed += resumed
        if list(got) != list(truth[: len(got)]):
            self.violations.append("other tokens before the cancel")

    def failed(self, code: str, got: Sequence[int], truth: Sequence[int], sent: object) -> None:
        """It ended with an error: what had come must be a beginning of the answer."""
        self.ends[code] += 1
        if code not in ALLOWED_ERRORS:
            self.violations.append(f"ended with {code}")
        if list(got) != list(truth[: len(got)]):
            self.violations.append(f"other tokens before {code}")
        if isinstance(sent, int) and sent != len(got):
            self.violations.append(f"tokens_sent {sent}, received {len(got)}")

    def lost(self, message: str) -> None:
        """Its client took the daemon for gone, which it never was."""
        self.ends["connection lost"] += 1
        self.violations.append(f"connection lost: {message}")

    def poisoned(self, end: str) -> None:
        """A request that always kills its engine has ended; it must not have gone well."""
        self.poison_ends[end] += 1
        if end not in ENDS_OF_POISON:
            self.violations.append(f"a poisoned request ended with {end}")

    def reconcile(self) -> list[str]:
        """Everything that is wrong; empty where each request had exactly one right end."""
        problems = list(self.violations)
        if sum(self.ends.values()) != self.asked:
            problems.append(f"{self.asked} asked, {sum(self.ends.values())} ended")
        return problems
