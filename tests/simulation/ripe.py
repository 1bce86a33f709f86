"""Rows of the lowest class that have run for long enough to be freed for a higher one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .asks import Ask
from .books import Life

if TYPE_CHECKING:
    from .record import Record

TICK_S = 0.05
"""So late a tick may come."""

LOWEST = 2


def ripe(record: Record, life: Life, late_s: float, *, keeps: bool | None = None) -> list[Ask]:
    """Who has run for long enough, give or take a moment; `keeps`: whether its state will be kept,
    if that is known."""
    given = [ask for ask in life.given.values() if ask.is_open and ask.rank == LOWEST]
    staying = [ask for ask in given if not (ask.is_yielding or ask.is_pausing)]
    may_leave = [ask for ask in staying if ask.may_resume]
    return [a for a in may_leave if run_s(record, life, a, keeps=keeps) + late_s >= 0]


def run_s(record: Record, life: Life, ask: Ask, *, keeps: bool | None = None) -> float:
    """For how long it has gained tokens, beyond what it must."""
    if ask.gains_since is None:
        return float("-inf")
    least_s = record.plan.settings.min_run_s
    if not (life.keeps if keeps is None else keeps):
        assert ask.acceptance is not None
        prompt = len(ask.acceptance.prompt_tokens) // 4
        repeat_s = ask.prefill_s * (prompt + ask.tokens) / max(prompt - ask.cached, 1)
        least_s = max(least_s, repeat_s)
    return record.now - ask.gains_since - least_s
