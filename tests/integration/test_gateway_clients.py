"""What users of the OpenAI and Anthropic packages do, over a real daemon and model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

from clients import anthropic_cases, openai_cases
from clients.case import Case, Outcome, Place, Verdict, outcome
from clients.crowd import ROWS, WAITING
from support.daemon.daemon import row
from support.gateway.http_daemon import HttpDaemon
from support.models.known_model import make_known_model

pytestmark = pytest.mark.mlx

MODEL = "known"
CASES = (*openai_cases.CASES, *anthropic_cases.CASES)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = make_known_model(tmp_path_factory.mktemp("known"))
    entry = {"path": str(folder), "preload": True, "max_concurrency": ROWS}
    with HttpDaemon({MODEL: entry}, {"max_queue": WAITING}) as daemon, daemon.client() as client:
        client.load(MODEL)

        def is_idle() -> bool:
            return not row(client, MODEL)["running"]

        yield Place(name="mlxsup", url=daemon.url, model=MODEL, is_idle=is_idle)


def _name(case: Case) -> str:
    return f"{case.package}: {case.name}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_client_case_passes(place: Place, case: Case) -> None:
    assert outcome(case, place) == Outcome(verdict=Verdict.PASSED)
