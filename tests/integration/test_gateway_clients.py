"""Every case of `python -m bench clients` passes with the gateway, over a real daemon and model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

from bench.clients.case import Case, Outcome, Place, Verdict, outcome
from bench.clients.places import gateway
from bench.clients.run import CASES
from support.known_model import make_known_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with gateway(make_known_model(tmp_path_factory.mktemp("known"))) as running:
        yield running


def _name(case: Case) -> str:
    return f"{case.package}: {case.name}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_it_passes(place: Place, case: Case) -> None:
    assert outcome(case, place) == Outcome(verdict=Verdict.PASSED)
