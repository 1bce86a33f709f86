"""Runs every case against both servers, prints the table, and keeps it in docs/clients.*."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import openai

from ..report import print_table
from . import anthropic_cases, openai_cases
from .case import Case, Outcome, Place, Verdict, outcome
from .document import PACKAGES, keep, package_results, package_table, read_results
from .openai_cases import ask
from .places import gateway, mlx_lm_server
from promises.results import clean_commit
from support.known_model import make_known_model

CASES: Sequence[Case] = (*openai_cases.CASES, *anthropic_cases.CASES)


def run(folder: Path) -> None:
    """The whole comparison.

    Args:
        folder: a new one, for the model.

    Raises:
        UncleanTreeError: the tree is that of no commit.
        AssertionError: a case does not pass with the gateway; the table is printed and kept anyway.
    """
    commit = clean_commit()
    model = make_known_model(folder)
    outcomes: dict[str, list[Outcome]] = {}
    for name, open_place in (("mlxsup", gateway), ("mlx_lm.server", mlx_lm_server)):
        outcomes[name] = _all(open_place, model)
    measured = package_results(CASES, outcomes, commit)
    rows = package_table(measured)
    print_table(rows[0], rows[1:])
    keep({**read_results(), PACKAGES: measured})
    ours = next(iter(outcomes.values()))
    failed = [
        case.name
        for case, one in zip(CASES, ours, strict=True)
        if one.verdict is not Verdict.PASSED
    ]
    assert not failed, f"the gateway does not pass: {', '.join(failed)}"


def _all(open_place: Callable[[Path], AbstractContextManager[Place]], model: Path) -> list[Outcome]:
    """How each case went. A server that answers nothing after one begins anew for the next."""
    found: list[Outcome] = []
    while len(found) < len(CASES):
        with open_place(model) as place:
            for case in CASES[len(found) :]:
                found.append(_shown(case, place))
                if found[-1].verdict is not Verdict.PASSED and not _answers(place):
                    reason = f"{found[-1].reason} (and answers nothing from then on)"
                    found[-1] = Outcome(verdict=Verdict.FAILED, reason=reason)
                    break
    return found


def _answers(place: Place) -> bool:
    """Whether a server answers the simplest request."""
    with place.openai(max_retries=0) as sdk:
        try:
            sdk.chat.completions.create(**ask(place, max_tokens=1))
        except openai.OpenAIError:
            return False
    return True


def _shown(case: Case, place: Place) -> Outcome:
    """Runs a case and says how it went; a path of this machine is of no interest to a reader."""
    one = outcome(case, place)
    one = replace(one, reason=one.reason.replace(place.model, "MODEL"))
    print(f"{place.name}: {case.package}: {case.name}: {one.verdict} {one.reason}", flush=True)
    return one
