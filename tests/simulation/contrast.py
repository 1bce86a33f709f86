"""Runs in which rows of the lowest class fill the memory that requests of the highest one need."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxsup.protocol.states import Priority

from . import sizes

if TYPE_CHECKING:
    from .asks import Ask
    from .plan import Plan

KINDS = ("calm", "kills", "people")
"""Runs whose rows take memory, if they are of these kinds: crashes do not take up most of them."""

ROWS = 5
LONGER = 3
"""Answers are so many times as long as in other runs: rows leave only after a while."""

LEAST_TOKENS = 300
"""Of a prompt: a short one would be read again for so long, as it seems, that its row stays."""

HIGHEST_EACH = 4
"""One of this many prompts is asked for in the highest class, and the others in the lowest."""


def sharpen(plan: Plan) -> None:
    """There are many rows and little memory, nobody is pinned, and batch rows leave soon."""
    dice = random.Random(f"contrast in {plan.seed}")
    if plan.kind not in KINDS:
        return
    plan.has_contrast = True
    plan.budget_bytes = max(plan.needs.values()) + plan.row_bytes * dice.choice((1, 2, 3))
    plan.settings = replace(
        plan.settings,
        budget=sizes.budget(plan.budget_bytes),
        min_run_s=dice.choice((0.0, 0.11)),
        aging_s=dice.choice((0.0, 0.37, 60.0)),
    )
    for place, entry in enumerate(plan.models):
        launch = replace(entry.launch, max_concurrency=ROWS)
        plan.models[place] = replace(entry, launch=launch)


def ask_for(plan: Plan, ask: Ask) -> None:
    """How urgently a client asks in such a run."""
    if plan.has_contrast:
        is_highest = ask.prompt.number % HIGHEST_EACH == 0
        ask.priority = Priority.INTERACTIVE if is_highest else Priority.BATCH


def prompt_tokens(plan: Plan, number: int) -> int:
    """How many tokens a prompt has, beside those that tell it from others."""
    if not plan.layers:
        return 0
    return max(sizes.prompt_tokens(number), LEAST_TOKENS if plan.has_contrast else 0)
