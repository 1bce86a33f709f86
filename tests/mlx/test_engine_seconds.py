"""The core charges what real engines say: all of it, and nothing twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mlxsup.protocol.states import Batching
from mlxsup.protocol.worker_messages import Step
from mlxsup.worker.engines.mlx.engine import MlxEngine

from support.core_driver import LAUNCH, Driver, entry
from support.loop_driver import LoopDriver
from support.mlx_rows import known_as, loaded_engine
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

ROWS = 4
PROMPTS = {"a": "short", "b": "a much longer prompt than the first one " * 20, "c": "x", "d": "yz "}


class Pair:
    """A real engine in its step loop, and a core that hears all it says."""

    def __init__(self, engine: MlxEngine) -> None:
        self.loop = LoopDriver(engine, engine.facts, max_concurrency=ROWS)
        self.core = Driver([entry(launch=replace(LAUNCH, max_concurrency=ROWS))])
        self.core.load()
        self.core.come_up()

    def ask(self, **prompts: str) -> list[int]:
        """Hands each request to both, under one key."""
        given: list[int] = list(self.core.serve(*prompts))
        keys = [self.loop.dispatch(prompt=p, max_tokens=12, seed=1) for p in prompts.values()]
        assert keys == given
        return keys

    def hear(self) -> list[Step]:
        """The core reads what the loop has said since the last time; the steps of it."""
        said, self.loop.messages = self.loop.messages, []
        for message in said:
            if isinstance(message, Step):
                self.core.now += message.took_s
            self.core.worker(message)
        return [message for message in said if isinstance(message, Step)]

    def paid_s(self, *ids: str) -> list[float]:
        """What each answer has cost."""
        return [self.core.result_of(id).usage.engine_s for id in ids]


@pytest.fixture(scope="module", params=list(Batching))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    known = known_as(folder, request.param)
    with loaded_engine(folder, known_batching=known, max_concurrency=ROWS) as engine:
        made = Pair(engine)
        yield made
        made.loop.close()


def test_what_all_requests_pay_is_what_the_steps_took(pair: Pair) -> None:
    pair.loop.finish(*pair.ask(**PROMPTS))
    steps = pair.hear()
    assert all(step.took_s > 0 for step in steps)
    paid_s = pair.paid_s(*PROMPTS)
    assert math.isclose(sum(paid_s), sum(step.took_s for step in steps), rel_tol=1e-6)
    assert min(paid_s) > 0
    assert pair.core.row()["repeated_s"] == 0.0


def test_a_cancelled_row_pays_until_then_and_the_others_for_what_follows(pair: Pair) -> None:
    before_s = pair.core.row()["engine_s"]
    key, *others = pair.ask(e="one", f="two", g="three " * 30)
    while not pair.loop.answers[key].tokens:
        pair.loop.turn()
    steps = pair.hear()
    pair.core.cancel("e")
    pair.loop.cancel(key)
    pair.loop.finish(key, *others)
    steps += pair.hear()
    spent_s = sum(step.took_s for step in steps)
    assert math.isclose(sum(pair.paid_s("e", "f", "g")), spent_s, rel_tol=1e-6)
    assert math.isclose(pair.core.row()["engine_s"] - before_s, spent_s, rel_tol=1e-6)
