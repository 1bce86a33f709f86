"""The table of state, trigger and next state in docs/architecture.md, out of the rules themselves.

`python tools/transition_table.py` writes it into the page. A cell lists the states that the rule
may enter, as its own calls and those of its helpers say; a dot stays, and an empty cell cannot
happen.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_args

from mlxsup.supervisor.core.lifecycle.states import Abandoned, Phase, Swapping
from mlxsup.supervisor.core.lifecycle.table import TABLE
from mlxsup.supervisor.core.lifecycle.triggers import Trigger

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
BEGIN, END = "<!-- transitions: tools/transition_table.py -->", "<!-- end -->"
ENTERED_BY = {"drain": "DRAINING", "stop": "STOPPING"}
"""Methods of `Life` that enter a state; `enter` and `enter_after_exit` name theirs."""

TITLES = {Abandoned: "given up", Swapping: "swapping out"}
"""Columns that share a state with another one."""


def title(phase: Any) -> str:
    """What a column is called."""
    return TITLES.get(phase, str(phase.STATE.value))


def enters(rule: FunctionType, seen: frozenset[str] = frozenset()) -> list[str]:
    """The states that a rule may enter, in the order of its text."""
    module = inspect.getmodule(rule)
    assert isinstance(module, ModuleType)
    found: list[str] = []
    for call in _calls(rule):
        if isinstance(call.func, ast.Attribute):
            if call.func.attr in ENTERED_BY:
                found.append(ENTERED_BY[call.func.attr])
            elif call.func.attr in ("enter", "enter_after_exit"):
                entered = call.args[0]
                assert isinstance(entered, ast.Call)
                assert isinstance(entered.func, ast.Name)
                found.append(title(getattr(module, entered.func.id)))
        elif isinstance(call.func, ast.Name) and call.func.id not in seen:
            helper = getattr(module, call.func.id, None)
            if isinstance(helper, FunctionType) and helper.__module__ == module.__name__:
                found += enters(helper, seen | {call.func.id})
    return list(dict.fromkeys(found))


def _calls(rule: FunctionType) -> Iterator[ast.Call]:
    tree = ast.parse(inspect.getsource(rule))
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def table() -> list[str]:
    """The lines of the table."""
    phases, triggers = get_args(Phase), get_args(Trigger)
    lines = [
        f"| | {' | '.join(map(title, phases))} |",
        f"|---|{'---|' * len(phases)}",
    ]
    for trigger in triggers:
        cells = []
        for phase in phases:
            rule = TABLE.get((phase, trigger))
            assert rule is None or isinstance(rule, FunctionType)
            cells.append("" if rule is None else ", ".join(enters(rule)) or "·")
        lines.append(f"| {trigger.__name__} | {' | '.join(cells)} |")
    return lines


def with_table(page: str) -> str:
    """The page with the table as the code has it now."""
    head, rest = page.split(BEGIN)
    tail = rest.split(END, 1)[1]
    return "\n".join([head + BEGIN, "", *table(), "", END]) + tail


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
