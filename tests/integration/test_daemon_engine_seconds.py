"""What clients of a real daemon are charged; a step of the fake engine takes what it says."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from mlxsup.client import RequestError

from support.daemon import Daemon, fake, row

STEP_S = 0.02
TOKENS = 5


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon({"m": fake(fake={"step_s": STEP_S})}) as running:
        yield running


def test_an_answer_costs_the_steps_that_were_made_for_it(daemon: Daemon) -> None:
    with daemon.client() as client:
        results = [client.complete("m", prompt="one", max_tokens=n) for n in (TOKENS, 1)]
        found = row(client, "m")
    paid_s = [result.usage.engine_s for result in results]
    assert [round(seconds / STEP_S, 3) for seconds in paid_s] == [TOKENS, 1]
    assert math.isclose(found["engine_s"], sum(paid_s))
    assert found["repeated_s"] == 0.0


def test_what_is_read_again_after_a_crash_costs_its_client_nothing(daemon: Daemon) -> None:
    """The fake engine reads the prompt in the step of the first token, which is half of it."""
    prompt = "one [[fault crash=SIGKILL at=3 generation=1]]"
    with daemon.client() as client:
        result = client.complete("m", prompt=prompt, max_tokens=TOKENS)
        found = row(client, "m")
    assert result.resumed == 1
    assert round(found["repeated_s"] / STEP_S, 3) == 0.5
    assert round(result.usage.engine_s / STEP_S, 3) == TOKENS - 0.5
    assert math.isclose(found["engine_s"], result.usage.engine_s)


def test_a_request_that_its_worker_takes_along_says_what_it_cost(daemon: Daemon) -> None:
    prompt = "one [[fault crash=SIGKILL at=3]]"
    with daemon.client() as client, pytest.raises(RequestError) as caught:
        client.complete("m", prompt=prompt, max_tokens=TOKENS, resume=False)
    detail = caught.value.detail
    assert caught.value.code == "worker_crashed"
    assert round(detail["engine_s"] / STEP_S, 3) == detail["tokens_sent"] > 0
