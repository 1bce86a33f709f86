"""Which distances the probe allows, on which ids it looks, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlxsup.protocol.states import Batching
from mlxsup.worker.engines.mlx import batching as mlx_way
from mlxsup.worker.engines.mlx.batching import PROBE_VERSION, Finding, WayFinder
from mlxsup.worker.engines.mlx.logits import FloatLogits
from mlxsup.worker.engines.mlx.probe import (
    STARTS,
    distance,
    largest_distance,
    make_sequence,
    run_side_by_side,
)
from mlxsup.worker.engines.mlx.sampling import PLAIN, RowDraws

from support.mlx_draws import drawer

pytestmark = pytest.mark.mlx

TOGETHER, SERIAL, ONE_ROW = Batching.TOGETHER, Batching.SERIAL_PREFILL, Batching.ONE_ROW
VOCABULARY = 1000


class Model:
    """Gives logits of one type of number for ids below the vocabulary."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._dtype = dtype

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        return mx.zeros((*tokens.shape, VOCABULARY), dtype=self._dtype)

    def make_cache(self) -> list[Any]:
        return [KVCache()]


class Probe:
    """The decision alone: no row runs, and the distances are given.

    Attributes:
        scripts: of all runs, with what ran them, in order.

    Args:
        together: the distance of rows that are read together, for each start in turn.
        apart: the same of rows that only decode together.
        noise: of rows of equal length.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        together: Sequence[float],
        apart: Sequence[float] = (0.0, 0.0, 0.0),
        noise: float = 0.0,
    ) -> None:
        self.scripts: list[tuple[Batching, str, Any]] = []
        self._found = {TOGETHER: together, SERIAL: apart}
        self._noise = noise
        firsts = [make_sequence(VOCABULARY, start)[0] for start in STARTS]

        def run(finder: WayFinder, way: Batching, scenario: Any, script: Any) -> Any:
            self.scripts.append((way, scenario.__name__, script))
            return way, scenario, firsts.index(script.prompts[0][0])

        def measure(company: Any, alone: Any) -> float:
            way, scenario, start = company
            assert (alone[0], alone[2]) == (ONE_ROW, start)
            return self._noise if scenario is run_side_by_side else self._found[way][start]

        monkeypatch.setattr(WayFinder, "run", run)
        monkeypatch.setattr(mlx_way, "largest_distance", measure)


def find(*, model_type: str = "tiny", is_exact: bool = True, **changes: Any) -> Finding:
    """What a finder finds for a model of these numbers."""
    model = FloatLogits(Model(changes.pop("dtype", mx.float32)))
    values: dict[str, Any] = {
        "max_concurrency": 2, "context_length": 99, "vocabulary_size": 5000, "report": lambda: None,
        "stream": mx.new_stream(mx.default_device()),
    }  # fmt: skip
    return WayFinder(model, model_type=model_type, is_exact=is_exact, **(values | changes)).find()


READ = "rows of different length change each other when read together (tiny)"
DECODED = "rows of different length change each other when decoded together (tiny)"


@pytest.mark.parametrize(
    ("found", "noise", "is_allowed"),
    [
        (0.001, 0.0, True),
        (0.00101, 0.0, False),
        (0.004, 0.001, True),
        (0.00401, 0.001, False),
        (0.01, 9.0, True),
        (0.0101, 9.0, False),
    ],
)
def test_what_exact_numbers_may_differ_by(
    monkeypatch: pytest.MonkeyPatch, found: float, noise: float, is_allowed: bool
) -> None:
    """A thousandth, or four times the noise up to a hundredth; one sequence of ids is enough."""
    Probe(monkeypatch, [found, 0.0, 0.0], noise=noise)
    expected = Finding(way=TOGETHER) if is_allowed else Finding(way=SERIAL, reason=READ)
    assert find() == expected


@pytest.mark.parametrize(
    ("found", "noise", "is_allowed"),
    [
        (0.02, 0.0, True),
        (0.0201, 0.0, False),
        (0.15, 9.0, True),
        (0.151, 9.0, False),
    ],
)
@pytest.mark.parametrize("is_exact", [True, False], ids=["bfloat16", "gpu"])
def test_what_rounded_numbers_may_differ_by(
    monkeypatch: pytest.MonkeyPatch, found: float, noise: float, is_allowed: bool, is_exact: bool
) -> None:
    Probe(monkeypatch, [found] * 3, noise=noise)
    dtype = mx.bfloat16 if is_exact else mx.float32
    expected = Finding(way=TOGETHER) if is_allowed else Finding(way=SERIAL, reason=READ)
    assert find(is_exact=is_exact, dtype=dtype) == expected


@pytest.mark.parametrize("right", [0, 1, 2])
def test_rounded_numbers_must_differ_in_three_sequences_of_ids(
    monkeypatch: pytest.MonkeyPatch, right: int
) -> None:
    distances = [0.0 if place == right else 1.0 for place in range(3)]
    Probe(monkeypatch, distances)
    assert find(is_exact=False) == Finding(way=TOGETHER)


def test_the_last_way_is_taken_with_the_reason_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Probe(monkeypatch, [1.0] * 3, apart=[1.0] * 3)
    assert find() == Finding(way=ONE_ROW, reason=DECODED)


def test_rows_that_pad_differ_in_length_and_the_control_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = Probe(monkeypatch, [0.005, 0.0, 0.0], noise=0.01)
    assert find().way is TOGETHER

    def lengths(script: Any) -> list[tuple[int, int]]:
        pairs = zip(script.prompts, script.answers, strict=True)
        return [(len(prompt), len(answer)) for prompt, answer in pairs]

    padded, control = [(2, 5), (4, 3), (3, 4)], [(3, 3), (3, 3)]
    assert [(way, name, lengths(script)) for way, name, script in probe.scripts] == [
        (ONE_ROW, "run_alone", padded),
        (TOGETHER, "run_in_company", padded),
        (ONE_ROW, "run_alone", control),
        (TOGETHER, "run_side_by_side", control),
    ]
    ids = make_sequence(VOCABULARY)
    for _, _, script in probe.scripts:
        for prompt, answer in zip(script.prompts, script.answers, strict=True):
            assert prompt + answer == ids[: len(prompt) + len(answer)]


def test_the_ids_of_the_probe_change_only_with_its_version() -> None:
    """A model's answers depend on what the probe finds, and its fingerprint on the version."""
    assert PROBE_VERSION == "3"
    assert [make_sequence(1000, start) for start in STARTS] == [
        [118, 736, 354, 972, 590, 208, 826],
        [418, 36, 654, 272, 890, 508, 126],
        [818, 436, 54, 672, 290, 908, 526],
    ]
    assert make_sequence(1000) == make_sequence(1000, 0.5)
    assert set(make_sequence(2)) == {0, 1}


def test_why_rows_run_alone_is_said_in_words() -> None:
    assert find(max_concurrency=1).reason == "max_concurrency is 1"
    too_short = "context_length is too short to try another way"
    assert find(context_length=6).reason == too_short


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("minimax_m3_vl", "its attention picks blocks of tokens and counts the padding in"),
        (
            "recurrent_gemma",
            "its first token is computed otherwise if the batch has a state already",
        ),
    ],
)
def test_what_the_probe_cannot_see_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, model_type: str, why: str
) -> None:
    probe = Probe(monkeypatch, [0.0] * 3)
    expected = Finding(way=ONE_ROW, reason=f"{why} ({model_type})")
    assert find(model_type=model_type) == expected
    assert [name for _, name, _ in probe.scripts] == ["run_alone"]


def test_a_way_that_raises_is_named_with_what_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that is tried last is the one whose reason counts."""
    Probe(monkeypatch, [0.0] * 3)
    run = WayFinder.run

    def fail(finder: WayFinder, way: Batching, scenario: Any, script: Any) -> Any:
        if way is not ONE_ROW:
            raise IndexError(f"no row\nfor {way.value}")
        return run(finder, way, scenario, script)

    monkeypatch.setattr(WayFinder, "run", fail)
    assert find() == Finding(
        way=ONE_ROW,
        reason=f"rows cannot be decoded together (tiny): no row for {SERIAL.value}",
    )


def test_a_script_draws_its_ids_and_then_the_last_one_again() -> None:
    draw = drawer(RowDraws(forced=[4, 9]), PLAIN)
    assert [draw([[0.0] * 12, [0.0, -1.0] * 6]) for _ in range(3)] == [[4, 0], [9, 0], [9, 0]]


def test_a_distance_is_relative_to_what_was_expected() -> None:
    """Around the mean: (-1, 1) became (-3, 3), which is twice its size away."""
    assert distance(mx.array([0.0, 6.0]), mx.array([7.0, 9.0])) == pytest.approx(2.0)
    assert distance(mx.array([5.0, 5.0]), mx.array([7.0, 9.0])) == pytest.approx(1.0)
    assert distance(mx.array([1.0, 3.0]), mx.array([-mx.inf, 5.0])) == 0.0
    assert distance(mx.array([1.0, 1.5]), mx.array([2.0, 2.0])) > 1e15
    nothing = mx.array([mx.nan, mx.nan])
    assert distance(mx.array([1.0, 2.0]), nothing) == 0.0
    assert distance(nothing, nothing) == 0.0


def test_a_row_differs_by_the_smaller_one_of_two_steps_in_a_row() -> None:
    alone = [mx.array([-1.0, 1.0])] * 4

    def of(*sizes: float) -> list[mx.array]:
        return [mx.array([-1.0 - size, 1.0 + size]) for size in sizes]

    def largest(*rows: list[mx.array]) -> float:
        return largest_distance(dict(enumerate(rows)), dict.fromkeys(range(len(rows)), alone))

    assert largest(of(0, 3, 0, 0)) == 0.0
    assert largest(of(0, 3, 2, 0)) == pytest.approx(2.0)
    assert largest(of(1, 0, 2, 3)) == pytest.approx(2.0)
    assert largest(of(1, 1), of(0, 0), of(0.5, 0.5, 0.5)) == pytest.approx(1.0)
    assert largest(of(3)) == 0.0, "one step alone may be a router's choice"
