"""What the tests of the fault list share: patient restarts, and what an undisturbed answer is."""

from __future__ import annotations

from typing import Any

from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

PATIENT: dict[str, Any] = {
    "max_restarts": 10_000,
    "backoff_initial_s": 0.01,
    "backoff_max_s": 0.05,
}
"""A `restart` table for models that die again and again without being given up."""


def undisturbed(prompt: str, count: int) -> list[int]:
    """The fake engine's greedy answer to a prompt: that many tokens, with no process asked."""
    return answer_tokens(encode_text(prompt), count)
