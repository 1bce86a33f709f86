"""Memory: the budget, what the models need of it, and who else takes some."""

from __future__ import annotations

from collections.abc import Iterator

from mlxsup.protocol.text import size_text

from ..facts import Memory
from ..finding import Finding, note, ok, problem

SUBJECT = "memory"

SHORT_SHARE = 10
"""Memory is short if less than this part of it is available."""


def check_memory(facts: Memory) -> Iterator[Finding]:
    """Judges the budget against the machine and the models, and what others hold."""
    found = [*_budget(facts), *_others(facts)]
    yield from found
    if facts.budget_bytes is not None and not found:
        budget = size_text(facts.budget_bytes)
        yield ok(SUBJECT, f"models may take {budget} together ({facts.reason})")


def _budget(facts: Memory) -> Iterator[Finding]:
    if facts.budget_bytes is None:
        yield problem(
            SUBJECT,
            facts.reason,
            why="nothing is refused and nothing is evicted when memory runs out",
            fix='set memory_budget = "…GiB" in [supervisor]',
        )
        return
    for name in facts.too_large:
        yield problem(
            SUBJECT,
            f"{name} does not fit into {size_text(facts.budget_bytes)}, whatever else is unloaded",
            why="its load is refused",
            fix=f"{facts.change or 'use a smaller model'}; `mlxsup plan` shows what it needs",
        )
    if facts.change and not facts.too_large:
        yield note(
            SUBJECT,
            f"not all models that are loaded at the start fit into {size_text(facts.budget_bytes)}",
            why="they take turns, which costs a load each time",
            fix=f"{facts.change}; `mlxsup plan` shows what each needs",
        )
    if facts.backend == "metal" and facts.budget_bytes > facts.automatic_bytes:
        yield problem(
            SUBJECT,
            f"memory_budget is {size_text(facts.budget_bytes)}, and macOS recommends at most "
            f"{size_text(facts.automatic_bytes)} for the GPU",
            why="beyond that the system compresses and swaps, and everything becomes slow",
            command=f"sudo sysctl iogpu.wired_limit_mb={-(-facts.budget_bytes // 2**20)}",
        )


def _others(facts: Memory) -> Iterator[Finding]:
    for server in facts.servers:
        yield note(
            SUBJECT,
            f"{server.name} (pid {server.pid}) holds {size_text(server.size_bytes)}",
            why="mlxsup plans as if nobody else served models; together they may need more than"
            " there is",
            fix="end it while mlxsup runs, or set memory_budget to what is left",
        )
    if facts.available_bytes * SHORT_SHARE < facts.total_bytes:
        yield note(
            SUBJECT,
            f"only {size_text(facts.available_bytes)} of {size_text(facts.total_bytes)} are"
            f" available, and {size_text(facts.swap_used_bytes)} are swapped out",
            why="mlxsup unloads idle models while other programs need memory",
            fix="end programs that you do not need; `mlxsup status` shows what models take",
        )
