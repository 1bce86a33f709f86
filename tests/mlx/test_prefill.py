"""Prompts of real models beside rows that decode: chunks, predictions, seconds that are charged."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.models import llama

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching
from mlxsup.protocol.worker_messages import Step
from mlxsup.worker.engine import StepResult
from mlxsup.worker.engines.mlx import batch_modes as mlx_passes
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.prefill import HEADROOM, IDLE_TARGET_S
from mlxsup.worker.engines.mlx.text import MlxText

from support.core.driver import LAUNCH, Driver, entry
from support.models.tiny_model import make_tiny_model
from support.worker.loop_driver import LoopDriver
from support.worker.mlx_rows import known_as, loaded_engine, make_row, make_spec, run_rows

pytestmark = pytest.mark.mlx


PASS_S = 0.001

TOKEN_S = 0.001
"""What a pass takes on the steady machine, and what each of its tokens adds."""

STALL_S = 0.02
"""What a chunk may take there while rows decode: 18 tokens."""


class SteadyMachine:
    """A clock that only the passes of a model move, so that no other process is measured."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        """The seconds that passes have taken."""
        return self.now_s


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SteadyMachine:
    machine = SteadyMachine()
    plain = llama.Model.__call__

    def timed(self: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        machine.now_s += PASS_S + TOKEN_S * inputs.size
        return plain(self, inputs, *arguments, **named)

    monkeypatch.setattr(llama.Model, "__call__", timed)
    monkeypatch.setattr(mlx_passes, "time", SimpleNamespace(perf_counter=machine.perf_counter))
    return machine


def paced_engine(
    machine: SteadyMachine, path: Path, **changes: Any
) -> AbstractContextManager[MlxEngine]:
    """An engine whose steps take what the machine's clock says."""
    return loaded_engine(make_tiny_model(path), clock=machine.perf_counter, **changes)


def test_a_long_prompt_interleaves_with_decode_C9(machine: SteadyMachine, tmp_path: Path) -> None:
    with paced_engine(machine, tmp_path, decode_stall_target_ms=20) as engine:
        engine.insert(make_row(1, [1, 2, 3], max_tokens=400))
        for _ in range(5):
            engine.step()
        engine.insert(make_row(2, list(range(300)), max_tokens=2))
        took_s: list[float] = []
        reads = 0
        while True:
            began_s = machine.now_s
            result = engine.step()
            took_s.append(machine.now_s - began_s)
            reads += bool(result.prefill)
            assert [token.key for token in result.tokens if token.key == 1] == [1]
            if any(token.key == 2 for token in result.tokens):
                break
        decode_s = PASS_S + 2 * TOKEN_S
        assert max(took_s) <= STALL_S + decode_s
        assert reads < 300 / 8, "the chunks never grew"
        engine.remove(RequestKey(1))
        run_rows(engine)


def test_a_step_is_predicted_C9(machine: SteadyMachine, tmp_path: Path) -> None:
    """What is predicted is an upper estimate, so the stall limit never meets honest work."""
    with paced_engine(machine, tmp_path) as engine:
        assert engine.predict_step_s() == 0.0, "nothing to do"
        engine.insert(make_row(1, list(range(600)), max_tokens=40))
        predicted_s: list[float] = []
        tokens: list[int] = []
        while len(tokens) < 10:
            predicted_s.append(engine.predict_step_s())
            began_s = machine.now_s
            tokens += [token.key for token in engine.step().tokens]
            took_s = machine.now_s - began_s
            assert took_s <= predicted_s[-1] + 1e-9
        assert max(predicted_s) <= HEADROOM * IDLE_TARGET_S + PASS_S + TOKEN_S
        assert 0 < predicted_s[-1] < predicted_s[0]
        run_rows(engine)


def test_a_step_says_what_part_of_it_was_decoding(machine: SteadyMachine, tmp_path: Path) -> None:
    """Requests pay by that: who decodes for one part, who reads for the other."""
    with paced_engine(machine, tmp_path) as engine:
        engine.insert(make_row(1, [1, 2, 3], max_tokens=40))
        for _ in range(6):
            engine.step()
        engine.insert(make_row(2, list(range(600)), max_tokens=2))
        both = engine.step()
        assert both.decode_s == pytest.approx(PASS_S + TOKEN_S)
        assert both.took_s > both.decode_s
        engine.remove(RequestKey(1))
        assert engine.step().decode_s == 0.0
        run_rows(engine)


LONG = "word " * 40_000


def test_a_long_prompt_that_is_tokenised_holds_up_no_step_and_no_short_prompt_G1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenising ends only when the others have: on the owner thread it would never end."""
    may_end, encoding_on = threading.Event(), set()
    encode = MlxText.encode

    def encode_when_told(self: MlxText, body: Any) -> Any:
        if body.prompt == LONG:
            encoding_on.add(threading.get_ident())
            assert may_end.wait(60), "nothing else got through meanwhile"
        return encode(self, body)

    monkeypatch.setattr(MlxText, "encode", encode_when_told)
    engine = MlxEngine(make_spec(make_tiny_model(tmp_path / "tiny"), max_concurrency=4))
    driver = LoopDriver(engine, engine.load(lambda phase, progress: None))
    try:
        runs = driver.dispatch(prompt="Once upon", max_tokens=200)
        while not driver.answers[runs].deltas:
            driver.turn()
        long = driver.dispatch(prompt=LONG, max_tokens=1)
        steps: list[int] = []
        step = engine.step

        def counted() -> StepResult:
            steps.append(1)
            return step()

        monkeypatch.setattr(engine, "step", counted)
        short = driver.dispatch(prompt="short", max_tokens=10)
        answers = driver.finish(runs, short)
        assert [len(answer.tokens) for answer in answers] == [200, 10]
        assert len(steps) < 200 + 10, "they shared the steps"
        assert not driver.answers[long].is_over
        assert encoding_on
        assert threading.get_ident() not in encoding_on
        may_end.set()
        [refused] = driver.finish(long)
        assert refused.error is not None
        assert refused.error.code == "context_length_exceeded"
    finally:
        may_end.set()
        driver.close()
        engine.close()


ROWS = 4

PROMPTS = {"a": "short", "b": "a much longer prompt than the first one " * 8, "c": "x", "d": "yz "}


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
def pair(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Pair]:
    known = known_as(tiny, request.param)
    with loaded_engine(tiny, known_batching=known, max_concurrency=ROWS) as engine:
        made = Pair(engine)
        yield made
        made.loop.close()


def test_requests_pay_for_all_seconds_of_steps(pair: Pair) -> None:
    pair.loop.finish(*pair.ask(**PROMPTS))
    steps = pair.hear()
    assert all(step.took_s > 0 for step in steps)
    paid_s = pair.paid_s(*PROMPTS)
    assert math.isclose(sum(paid_s), sum(step.took_s for step in steps), rel_tol=1e-6)
    assert min(paid_s) > 0
    assert pair.core.row()["repeated_s"] == 0.0
