"""What a run through the sockets found, its bounds, and how it is reported."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .frames import KINDS
from support.verdict import NotShown

MAX_PEAK_BYTES = 32 * 2**20
"""Growth of the supervisor's RSS, sampled after each window: a connection has at most two frames of
16 MiB read ahead."""

TARGET_CALL_S = 0.1
"""CPU time of the longest callback of the loop."""

MAX_PING_S = 10.0
"""A loop that waits uses no CPU time: this is for the one that never came back. How long a ping
takes depends on what else the machine does, so its figure has no target."""


@dataclass(slots=True, kw_only=True)
class SocketFigures:
    """What came of it.

    Attributes:
        sent, arrived: messages of hostile connections; arrived as the supervisor's socket counts.
        kinds: sent, by kind.
        answered: by the code of the error, `reply`, or `done` and the reason.
        dropped: by reason.
        strangers, beats, early: what arrived at the workers' sockets: at that of a serving worker,
            at that of its heartbeats, and before a worker's HELLO.
        tokens: of the streams that continued meanwhile, each compared.
        peak_bytes, grown_bytes: growth of the supervisor's RSS: at most, and at the end.
        longest_call_s: CPU time of the longest callback of the supervisor's loop.
        longest_ping_s, calm_ping_s: round trips of another client, during it and before it.
        problems: what was wrong, one sentence each.
    """

    sent: int = 0
    arrived: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    strangers: int = 0
    beats: int = 0
    early: int = 0
    tokens: int = 0
    peak_bytes: int = 0
    grown_bytes: int = 0
    longest_call_s: float = 0.0
    longest_ping_s: float = 0.0
    calm_ping_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def judge(self, wanted: int, max_call_s: float) -> None:
        """Adds a problem for each bound that does not hold.

        Args:
            wanted: messages that had to arrive.
            max_call_s: bound of `longest_call_s`.

        Raises:
            NotShown: what was to strike never did, and nothing else explains it.
        """
        ended = self.kinds["oversized frame"]
        if self.arrived != self.sent - ended:
            self.problems.append(f"{self.sent - ended} were sent, and {self.arrived} arrived")
        if self.peak_bytes > MAX_PEAK_BYTES:
            self.problems.append(f"RSS grew by {self.peak_bytes / 2**20:.1f} MiB at most")
        if self.longest_call_s > max_call_s:
            self.problems.append(f"a callback of the loop took {self.longest_call_s:.2f} s")
        if self.longest_ping_s > MAX_PING_S:
            self.problems.append(f"a ping took {self.longest_ping_s:.2f} s")
        missing = [kind for kind in KINDS if not self.kinds[kind]]
        if self.problems:
            return
        if missing or self.arrived < wanted:
            raise NotShown(f"{self.arrived} of {wanted} arrived; never drawn: {missing}")
        if not (self.strangers and self.beats and self.early):
            raise NotShown("nothing hostile arrived at a worker's socket")

    def text(self) -> str:
        """For people."""

        def counts(counter: Counter[str]) -> str:
            return ", ".join(f"{n} {what}" for what, n in counter.most_common())

        return "\n".join(
            [
                f"client socket (fake engine): {self.sent} messages sent, {self.arrived} arrived,"
                f" {sum(self.answered.values())} answered: {counts(self.answered)};"
                f" not answered: {counts(self.dropped)}",
                f"sent, by kind: {counts(self.kinds)}",
                f"workers' sockets: {self.strangers} messages and {self.beats} beats of strangers"
                f" arrived, {self.early} before a HELLO",
                f"meanwhile: {self.tokens} tokens of 2 streams, each the right one, no number"
                f" missing; supervisor RSS {self.peak_bytes / 2**20:+.1f} MiB at most (target"
                f" ≤{MAX_PEAK_BYTES / 2**20:.0f}), {self.grown_bytes / 2**20:+.1f} MiB at the end"
                f"; longest callback of the loop {1000 * self.longest_call_s:.1f} ms of CPU (target"
                f" ≤{1000 * TARGET_CALL_S:.0f}), longest ping {1000 * self.longest_ping_s:.0f} ms"
                f" (before: {1000 * self.calm_ping_s:.0f} ms)",
            ]
        )
