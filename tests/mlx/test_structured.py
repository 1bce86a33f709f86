"""Answers that keep to a JSON schema or a regular expression, in the batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.states import Batching, FinishReason
from mlxsup.worker.engines.mlx.engine import MlxEngine

from support.demo_model import demo_model_folder
from support.forms import SCHEMAS, check, of_schema
from support.loop_driver import LoopDriver, check_every_resume
from support.mlx_rows import known_as, make_spec
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

pytestmark = pytest.mark.mlx
pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDriver]:
    engine = MlxEngine(make_spec(make_tiny_model(tmp_path_factory.mktemp("tiny"))))
    driver = LoopDriver(engine, engine.load(lambda phase, at: None), 8)
    yield driver
    driver.close()
    engine.close()


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_keep_to_the_schema(worker: LoopDriver, name: str) -> None:
    keys = [
        worker.dispatch(
            prompt="data",
            temperature=1.5,
            seed=seed,
            max_tokens=200,
            response_format=of_schema(SCHEMAS[name]),
        )
        for seed in range(12)
    ]
    answers = worker.finish(*keys)
    for answer in answers:
        assert answer.finish is FinishReason.STOP
        check(name, answer.text)
    assert name == "choice" or len({answer.text for answer in answers}) > 1
    assert not worker.engine.has_rows()


@pytest.mark.bits
def test_free_neighbours_do_not_change_C8(worker: LoopDriver) -> None:
    free: list[dict[str, Any]] = [
        {"prompt": f"tell {n}", "max_tokens": 40, "temperature": n % 2, "seed": n} for n in range(4)
    ]
    alone = [worker.answer(**one).tokens for one in free]
    keys = [worker.dispatch(**one) for one in free]
    bound = [
        worker.dispatch(prompt="d", seed=n, response_format=of_schema(SCHEMAS["flat"]))
        for n in range(3)
    ]
    assert [answer.tokens for answer in worker.finish(*keys)] == alone
    for answer in worker.finish(*bound):
        check("flat", answer.text)


@pytest.mark.bits
def test_half_a_json_value_goes_on_rightly_F10(worker: LoopDriver) -> None:
    for name in ("flat", "nested"):
        whole = worker.answer(
            prompt="data",
            temperature=1.0,
            seed=8,
            max_tokens=200,
            presence_penalty=0.5,
            response_format=of_schema(SCHEMAS[name]),
        )
        check(name, whole.text)
        check_every_resume(worker, whole, at_once=8)


def test_a_regex_is_matched_as_a_whole(worker: LoopDriver) -> None:
    pattern = r"[a-f]{3}-(tide|moor) 🦊?[0-9]{2}"
    for seed in range(6):
        got = worker.answer(
            prompt="x",
            temperature=1.0,
            seed=seed,
            response_format={"type": "regex", "regex": pattern},
        )
        assert re.fullmatch(pattern, got.text), got.text


def test_any_object_and_any_text(worker: LoopDriver) -> None:
    got = worker.answer(prompt="x", max_tokens=30, response_format={"type": "json_object"})
    assert got.text.startswith("{")
    free = worker.answer(prompt="x", max_tokens=9)
    same = worker.answer(prompt="x", max_tokens=9, response_format={"type": "text"})
    assert same.tokens == free.tokens


def test_the_budget_ends_an_answer_that_is_not_complete(worker: LoopDriver) -> None:
    got = worker.answer(prompt="x", max_tokens=5, response_format=of_schema(SCHEMAS["flat"]))
    assert got.finish is FinishReason.LENGTH
    assert len(got.tokens) == 5


IMPOSSIBLE: list[dict[str, Any]] = [
    of_schema({"type": "nonsense"}),
    of_schema({"type": "string", "minLength": 5, "maxLength": 2}),
    of_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    of_schema({"enum": []}),
    of_schema({"$ref": "#/missing"}),
    {"type": "regex", "regex": "(("},
    {"type": "regex", "regex": "()"},
]


@pytest.mark.parametrize("response_format", IMPOSSIBLE, ids=str)
def test_an_impossible_form_is_the_requests_own_error_C7(
    worker: LoopDriver, response_format: dict[str, Any]
) -> None:
    good = worker.dispatch(prompt="fine", max_tokens=4)
    bad = worker.dispatch(prompt="x", response_format=response_format)
    answers = worker.finish(good, bad)
    assert len(answers[0].tokens) == 4
    assert answers[1].error is not None
    assert answers[1].error["code"] == "invalid_request"
    assert answers[1].error["detail"]["parameter"] == "response_format"


@pytest.mark.parametrize(
    "response_format",
    [
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": 5}},
        {"type": "regex"},
        {"type": "json_object", "more": 1},
    ],
)
def test_a_form_of_another_form_is_refused_before_it_travels_C7(
    response_format: dict[str, Any],
) -> None:
    with pytest.raises(RemoteError, match="response_format takes a map of type"):
        RequestBody(prompt="x", response_format=response_format)


def test_with_penalties_bias_filters_and_logprobs_at_once(worker: LoopDriver) -> None:
    got = worker.answer(
        prompt="x",
        temperature=2.0,
        top_k=3,
        min_p=0.2,
        xtc_probability=1.0,
        xtc_threshold=0.0,
        repetition_penalty=1.5,
        frequency_penalty=2.0,
        logit_bias={str(token): -100 for token in range(0, VOCABULARY_SIZE, 3)[:1000]},
        seed=3,
        logprobs=True,
        top_logprobs=20,
        response_format=of_schema(SCHEMAS["nested"]),
    )
    check("nested", got.text)
    entries = [entry for delta in got.deltas for entry in delta.logprobs or ()]
    assert len(entries) == len(got.tokens)
    assert min(other.logprob for entry in entries for other in entry.top) == -9999.0


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCHEMAS)
def test_100_of_100_on_the_demo_model(name: str) -> None:
    """At temperature 1, beside free neighbours whose answers stay what they are alone."""
    engine = MlxEngine(make_spec(demo_model_folder(), prefix_cache_bytes=2**28))
    driver = LoopDriver(engine, engine.load(lambda phase, at: None), 8)
    try:
        free: dict[str, Any] = {
            "prompt": "The sea is",
            "max_tokens": 30,
            "seed": 5,
            "temperature": 1.0,
        }
        alone = driver.answer(**free).tokens
        beside = driver.dispatch(**free)
        keys = [
            driver.dispatch(
                messages=[{"role": "user", "content": "Tell me of a person, as JSON."}],
                temperature=1.0,
                seed=seed,
                max_tokens=200,
                response_format=of_schema(SCHEMAS[name]),
            )
            for seed in range(100)
        ]
        for answer in driver.finish(*keys):
            check(name, answer.text)
        assert driver.finish(beside)[0].tokens == alone
    finally:
        driver.close()
        engine.close()


class Reads:
    """Counts how often the thread waits for a computed array."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("item", "tolist"):
            monkeypatch.setattr(mx.array, name, self._counted(getattr(mx.array, name)))

    def _counted(self, read: Any) -> Any:
        def counted(array: mx.array) -> Any:
            self.count += 1
            return read(array)

        return counted


@pytest.fixture(params=list(Batching))
def any_way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopDriver]:
    folder = make_tiny_model(tmp_path / "m")
    engine = MlxEngine(make_spec(folder, known_batching=known_as(folder, request.param)))
    driver = LoopDriver(engine, engine.load(lambda phase, at: None), 8)
    yield driver
    driver.close()
    engine.close()


def test_the_grammars_of_a_step_read_their_tokens_at_once(
    any_way: LoopDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reads for the grammars of a step are as many with one such row as with eight."""
    worker = any_way
    counts = []
    for rows in (1, 8):
        keys = [
            worker.dispatch(
                prompt=f"data {n}",
                max_tokens=24,
                temperature=1.0,
                seed=n,
                response_format={"type": "regex", "regex": "[a-z]{40}"},
            )
            for n in range(rows)
        ]
        while not all(len(worker.answers[key].tokens) >= 2 for key in keys):
            worker.turn()
        with monkeypatch.context() as patched:
            reads = Reads(patched)
            for _ in range(4):
                worker.turn()
            counts.append(reads.count)
        for answer in worker.finish(*keys):
            assert re.fullmatch("[a-z]{1,40}", answer.text)
    # mlx-lm's own: the tokens that a pass returns. Each lone row is a pass.
    own = 4 * 7 if worker.facts.batching is Batching.ONE_ROW else 0
    assert counts == [8, 8 + own]
