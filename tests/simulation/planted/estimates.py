"""Planted bugs: what a model needs, and what running out of memory raises it to."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("estimates: nothing is raised", "appraising",
        "if exit_code != ExitCode.OUT_OF_MEMORY or", "if True or"),
    bug("estimates: every exit raises them", "appraising",
        "if exit_code != ExitCode.OUT_OF_MEMORY or", "if"),
    bug("estimates: raised by no fixed share", "memory.raising",
        "besides_bytes // LEAST_SHARE", "0"),
    bug("estimates: raised beyond the budget", "memory.raising",
        "most_bytes=max(0, left_bytes)", "most_bytes=None"),
    bug("estimates: raised into the part of pinned models", "memory.raising",
        "left_bytes = budget_bytes - fixed_bytes", "left_bytes = budget_bytes"),
    bug("estimates: a raise is not remembered", "appraising",
        "self._outbox.add(remember)", "pass"),
    bug("estimates: a load reserves what it would without the raise", "memory.need",
        "return self._unraised_for(stream_tokens) + self.raise_for(stream_tokens)",
        "return self._unraised_for(stream_tokens)"),
)  # fmt: skip
