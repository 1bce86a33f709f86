"""One sampler for all rows: the same bits in any company, and what a plain computation says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.states import Batching
from mlxsup.worker.engines.mlx import sampler
from mlxsup.worker.engines.mlx.logits_processors import LEAST_ROOM
from mlxsup.worker.engines.mlx.sampler import (
    BLOCK,
    SAMPLER_VERSIONS,
    BatchSampler,
    Draw,
    Picker,
    RowDraws,
    choose_draw,
    derive_key,
    draw_by_noise,
    draw_by_share,
    make_draws,
    make_noise,
    pick_tokens,
)

from support.worker.mlx_draws import drawer, draws_of, shape, weigh
from support.worker.mlx_rows import known_as, loaded_engine, make_row, run_rows

pytestmark = pytest.mark.mlx


WAYS: tuple[Draw, ...] = (draw_by_share, draw_by_noise)

WIDTHS = (5, BLOCK, BLOCK + 1, 300, 1200)

PARAMETERS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    },
    optional={
        "top_k": st.integers(0, 1300) | st.integers(1, 12),
        "top_p": st.floats(0.05, 1.0, exclude_min=True),
        "min_p": st.floats(0.0, 0.9),
        "xtc_probability": st.sampled_from([0.0, 0.5, 1.0]),
        "xtc_threshold": st.floats(0.0, 0.2),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3]),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "penalty_window": st.sampled_from([0, 1, 3, 20]),
        "logit_bias": st.dictionaries(st.integers(0, 4), st.floats(-5.0, 5.0), max_size=3),
        "min_tokens": st.integers(0, 4),
    },
)


class Played:
    """A row that decodes from one step to another, with logits that depend on it and the step.

    Args:
        number: of the row.
        width: of the logits.
        dtype: that a model computes them in.
        parameters: of the row.
    """

    def __init__(self, number: int, width: int, dtype: mx.Dtype, parameters: dict[str, Any]):
        self.number, self.width, self.dtype = number, width, dtype
        self.parameters = parameters
        dice = np.random.default_rng(number)
        self.held: list[int] = dice.integers(0, width, 1 + number * 7 % 30).tolist()
        self.latest = int(dice.integers(0, width))
        self.steps = 0
        self.got: list[tuple[bytes, bytes, int]] = []
        row = make_row(1, [1], **parameters)
        self.draws = make_draws(row, ending=[0, 3], spared=[2])

    def logits(self) -> mx.array:
        dice = np.random.default_rng([self.number, self.steps])
        values = dice.normal(scale=3.0, size=self.width).astype(np.float32)
        return mx.array(values).astype(self.dtype)

    def take(self, shaped: mx.array, weights: bytes, token: int) -> None:
        self.got.append((np.array(shaped).tobytes(), weights, token))
        self.held.append(self.latest)
        self.latest = token
        self.steps += 1


def step(rows: list[Played], samplers: list[BatchSampler], way: Draw) -> None:
    """One step of these rows, as `DrawingBatch` makes it."""
    draws = [row.draws for row in rows]
    if samplers[-1:] == [] or samplers[-1].rows != draws:
        samplers.append(BatchSampler(draws, [row.held for row in rows], rows[0].width, way))
    latest = mx.array([row.latest for row in rows], dtype=mx.uint32)
    logits = mx.stack([row.logits() for row in rows]).astype(mx.float32)
    shaped = samplers[-1].shape(logits, latest)
    logprobs = shaped - mx.logsumexp(shaped, axis=-1, keepdims=True)
    drawn = [place for place, row in enumerate(rows) if not row.draws.is_greedy]
    weights = {}
    if drawn:
        picker = Picker([rows[place].draws for place in drawn], rows[0].width)
        each = np.array(picker.weigh(logprobs[mx.array(drawn)]))
        weights = {place: own.tobytes() for place, own in zip(drawn, each, strict=True)}
    tokens: Any = samplers[-1].draw(logprobs).tolist()
    for place, row in enumerate(rows):
        row.take(shaped[place], weights.get(place, b""), tokens[place])


@pytest.mark.bits
@settings(deadline=None, max_examples=30)
@given(
    kinds=st.lists(PARAMETERS, min_size=1, max_size=6),
    spans=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=6, max_size=6),
    width=st.sampled_from(WIDTHS),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
    way=st.sampled_from(WAYS),
)
def test_a_row_gets_equal_bits_alone_and_in_any_company_A6(
    kinds: list[dict[str, Any]],
    spans: list[tuple[int, int]],
    width: int,
    dtype: mx.Dtype,
    way: Draw,
) -> None:
    """Rows join and leave in between; logits, weights and tokens are compared bit by bit."""

    def make() -> list[Played]:
        return [Played(number, width, dtype, kind) for number, kind in enumerate(kinds)]

    alone, together = make(), make()
    samplers: list[BatchSampler] = []
    for now in range(10):
        present = [
            row
            for row, (joins, steps) in zip(together, spans, strict=False)
            if joins <= now < joins + steps
        ]
        if present:
            step(present, samplers, way)
    for row, other in zip(alone, together, strict=True):
        own: list[BatchSampler] = []
        for _ in other.got:
            step([row], own, way)
        assert [token for *_, token in row.got] == [token for *_, token in other.got]
        assert row.got == other.got
        assert len(own) <= 1, "made once for a row that stays alone"


ASKED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.0},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 1},
    "min_p": {"min_p": 0.5},
    "xtc_probability": {"xtc_probability": 1.0},
    "xtc_threshold": {"xtc_probability": 1.0, "xtc_threshold": 0.3},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "penalty_window": {"presence_penalty": 1.0, "penalty_window": 1},
}
"""A request that uses each parameter of `Sampling`, by its name."""


@pytest.mark.parametrize("name", [field.name for field in fields(Sampling)])
def test_no_sampling_parameter_is_accepted_and_ignored(name: str) -> None:
    """Those that change logits must do so without a temperature, too."""

    def logits(asked: dict[str, Any], temperature: float) -> list[float]:
        row = make_row(1, [1], **{"temperature": temperature} | asked)
        return shape(row, [0, 1], [2.0, 1.5, 1.0, 0.0])

    assert name in ASKED, "a new parameter needs a request here that uses it"
    asked = ASKED[name]
    others = {one: value for one, value in asked.items() if one != name}
    sampled = logits(asked, 1.0), logits(others, 1.0)
    weights = [
        weigh(draws_of(**one), own) for one, own in zip((asked, others), sampled, strict=True)
    ]
    assert weights[0] != weights[1]
    greedy = logits(asked, 0.0), logits(others, 0.0)
    assert (greedy[0] != greedy[1]) == (sampled[0] != sampled[1])


def reference_weights(logprobs: Any, parameters: dict[str, Any]) -> tuple[Any, float]:
    """The weights by sorting in float64, and how far the nearest border of `top_p` is."""
    scaled = np.asarray(logprobs, dtype=np.float64) / parameters["temperature"]
    weights = np.exp(scaled - scaled.max())
    by_weight = np.argsort(-weights, kind="stable")
    border = 1.0
    if top_k := parameters.get("top_k", 0):
        weights[by_weight[top_k:]] = 0.0
    if (top_p := parameters.get("top_p", 1.0)) < 1.0:
        above = (np.cumsum(weights[by_weight]) - weights[by_weight]) / weights.sum()
        border = float(np.abs(above - top_p).min())
        weights[by_weight[above >= top_p]] = 0.0
    if min_p := parameters.get("min_p", 0.0):
        border = min(border, float(np.abs(weights / weights.max() - min_p).min()))
        weights[weights < min_p * weights.max()] = 0.0
    return weights, border


@settings(deadline=None, max_examples=60)
@given(
    dice=st.integers(0, 2**32),
    width=st.sampled_from([*WIDTHS, 3000]),
    parameters=st.fixed_dictionaries(
        {"temperature": st.floats(0.2, 4.0)},
        optional={
            "top_k": st.integers(1, 2000),
            "top_p": st.floats(0.05, 0.999),
            "min_p": st.floats(0.001, 0.9),
        },
    ),
)
def test_filters_keep_what_sorting_keeps(dice: int, width: int, parameters: dict[str, Any]) -> None:
    values = np.random.default_rng(dice).normal(scale=2.0, size=width).astype(np.float32)
    expected, border = reference_weights(values, parameters)
    if border < 1e-4:
        return  # rounding decides on which side of it a token is
    got = np.array(Picker([draws_of(**parameters)], width).weigh(mx.array(values[None])))[0]
    assert ((got > 0) == (expected > 1e-38)).all()
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-30)


@pytest.mark.parametrize("way", WAYS)
def test_draws_come_as_often_as_their_probabilities_say(way: Draw) -> None:
    """64 rows with seeds of their own, 60 steps; ids in several blocks, likely and unlikely."""
    width = 5 * BLOCK + 40
    dice = np.random.default_rng(3)
    logits = dice.normal(scale=2.0, size=width)
    logits[BLOCK : 2 * BLOCK] = -np.inf
    shares = np.exp(logits) / np.exp(logits).sum()
    draw = drawer(*(draws_of(seed=seed) for seed in range(64)), way=way)
    logprobs = mx.array(np.log(shares, where=shares > 0, out=np.full(width, -np.inf)))
    counts: Counter[int] = Counter()
    for _ in range(60):
        counts.update(draw(mx.broadcast_to(logprobs.astype(mx.float32), (64, width))))
    total = sum(counts.values())
    groups = [dice.permutation(width)[: width // 4] for _ in range(20)]
    groups += [np.array([token]) for token in np.argsort(-shares)[:20]]
    groups += [np.arange(block * BLOCK, min((block + 1) * BLOCK, width)) for block in range(6)]
    for group in groups:
        share = float(shares[group].sum())
        got = sum(counts[int(token)] for token in group)
        deviation = math.sqrt(total * share * (1 - share))
        assert abs(got - total * share) <= 5 * deviation + 1e-9
    assert not any(BLOCK <= token < 2 * BLOCK for token in counts), "they have no probability"


def test_a_draw_is_the_place_of_two_numbers_in_the_blocks_and_in_the_block() -> None:
    """A kept answer is drawn anew with them after a restart: they may never change."""
    weights = [1.0] * BLOCK + [0.0] * BLOCK + [3.0] * BLOCK + [4.0]
    logprobs = mx.log(mx.array([weights]) / sum(weights))
    draw = drawer(draws_of(seed=11))
    for number in range(50):
        key = derive_key(11, number)
        first, second = (key >> 40) / 2**24, ((key >> 16) & 0xFFFFFF) / 2**24
        mass = first * (4 * BLOCK + 4)
        block = 0 if mass < BLOCK else 2 if mass < 4 * BLOCK else 3
        expected = block * BLOCK + (0 if block == 3 else int(second * BLOCK))
        assert draw(logprobs) == [expected]


TINY = 1e-42  # below the least number of float32 that has all its digits

HIGHEST = 1 - 2.0**-24


@pytest.mark.parametrize("share", [0.0, 0.5, HIGHEST])
@pytest.mark.parametrize(
    "weights",
    [
        [0.0, 1.0, 0.0], [0.0, 0.0, 1e-38, 0.0], [0.0, TINY], [0.0, TINY, 0.0, 1.0, 0.0],
        [0.0] * 200 + [1.0, TINY] + [0.0] * 200, [0.0] * 200 + [TINY, 1.0] + [0.0] * 200,
        [1.0] + [0.0] * 400 + [1.0] + [0.0] * 300,
    ],
)  # fmt: skip
def test_a_token_without_weight_is_never_picked(weights: list[float], share: float) -> None:
    number = mx.array([[share]])
    token: Any = pick_tokens(mx.array([weights]), number, number).item()
    assert weights[token] > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_gives_no_numbers_breaks_no_step(way: Draw) -> None:
    draw = drawer(draws_of(), draws_of(top_p=0.5, top_k=3, min_p=0.1), way=way)
    tokens = draw([[math.nan] * 300, [math.nan] * 300])
    assert all(0 <= token < 300 for token in tokens)


def test_a_sampler_counts_its_rows_tokens_and_those_of_no_other() -> None:
    counted, other = draws_of(min_tokens=3), draws_of(temperature=0.0, logit_bias={1: 1.0})
    draw = drawer(counted, other)
    for _ in range(3):
        draw([[0.0] * 8, [0.0] * 8])
    assert (counted.number, other.number) == (3, 3)
    resumed = make_draws(make_row(1, [1], temperature=1.0, delivered=[5] * 7))
    assert resumed.number == 7


KEYS = [derive_key(seed, number) for seed in range(9) for number in range(3)]


# ---------------------------------------------------------------- noise
def noise_of(keys: Sequence[int], width: int = 300) -> list[bytes]:
    return [row.tobytes() for row in np.array(make_noise(keys, width))]


def test_a_rows_noise_follows_from_its_key_in_any_company_and_place() -> None:
    together = noise_of(KEYS)
    assert together == [noise_of([key])[0] for key in KEYS]
    assert together == noise_of(KEYS[::-1])[::-1]
    assert len(set(together)) == len(KEYS)


def test_noise_is_spread_as_gumbel_says() -> None:
    noise = np.sort(np.array(make_noise(KEYS, 4000)).ravel())
    expected = np.exp(-np.exp(-noise))
    found = np.arange(len(noise)) / len(noise)
    assert np.abs(found - expected).max() < 1.95 / len(noise) ** 0.5, "Kolmogorov-Smirnov, 0.1 %"


def play_numbers(monkeypatch: pytest.MonkeyPatch, numbers: list[float]) -> None:
    def played(*, shape: tuple[int], key: mx.array) -> mx.array:
        assert shape == (len(numbers),)
        return mx.array(numbers) + 0.0 * key[0]

    monkeypatch.setattr(mx.random, "uniform", played)


def test_noise_is_finite_and_finest_where_it_lets_unlikely_tokens_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play_numbers(monkeypatch, [0.0, 2.0**-32, 2.0**-31, HIGHEST])
    (noise,) = np.array(make_noise(KEYS[:1], 4))
    np.testing.assert_allclose(noise, [22.8738, 22.1807, 21.4876, -2.8115], atol=1e-3)


@pytest.mark.parametrize("number", [0.0, 0.5, HIGHEST])
def test_a_token_without_weight_is_never_drawn_by_noise(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever noise the others get; a grammar may leave one token."""
    play_numbers(monkeypatch, [0.0, 0.0, number, 0.0, 0.0])
    for weight in (1.0, 1e-30):
        assert draw_by_noise(mx.array([[0.0, 0.0, weight, 0.0, 0.0]]), KEYS[:1]).item() == 2


def test_the_likeliest_sum_of_weight_and_noise_is_drawn() -> None:
    weights = np.random.default_rng(5).random((len(KEYS), 300)).astype(np.float32)
    expected = np.argmax(np.log(weights) + np.array(make_noise(KEYS, 300)), axis=-1)
    drawn: Any = draw_by_noise(mx.array(weights), KEYS).tolist()
    assert drawn == expected.tolist()


# ---------------------------------------------------------------- which way an engine draws
@pytest.mark.parametrize(
    ("backend", "way"), [("cpu", draw_by_share), ("cuda", draw_by_noise), ("metal", draw_by_noise)]
)
def test_only_the_cpu_draws_by_share(backend: str, way: Draw) -> None:
    assert choose_draw(backend) is way


@pytest.mark.parametrize("way", list(Batching))
def test_rows_are_drawn_as_the_backend_says_however_they_run(
    way: Batching, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = known_as(tiny, way)
    backends: list[str] = []
    asked: list[int] = []

    def noted(weights: mx.array, keys: Sequence[int]) -> mx.array:
        asked.extend(keys)
        return draw_by_noise(weights, keys)

    def choose(backend: str) -> Draw:
        backends.append(backend)
        monkeypatch.setitem(SAMPLER_VERSIONS, noted, SAMPLER_VERSIONS[choose_draw(backend)])
        return noted

    monkeypatch.setattr(sampler, "choose_draw", choose)
    with loaded_engine(tiny, known_batching=known) as engine:
        assert engine.facts.batching is way
        assert set(backends) == {engine.facts.backend}
        asked.clear()
        run_rows(engine, [make_row(1, [5], max_tokens=4), make_row(2, [6, 7], max_tokens=4)])
        assert asked == [], "the likeliest token needs no draw"
        kinds = [{"temperature": 1.0, "seed": seed} for seed in (3, 4)]
        run_rows(
            engine, [make_row(n, [5, n], max_tokens=4, **kind) for n, kind in enumerate(kinds)]
        )
    wanted = {derive_key(seed, number) for seed in (3, 4) for number in range(4)}
    assert wanted <= set(asked)


WIDTH = 12

SAMPLINGS = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.25]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    penalty_window=st.sampled_from([0, 1, 2, 7, 20, LEAST_ROOM + 5, 1000]),
)


def penalised(logits: Sequence[float], seen: Sequence[int], sampling: Sampling) -> list[float]:
    """The logits of one row, in float32 at each step."""
    values = np.array(logits, dtype=np.float32)
    window = list(seen[-sampling.penalty_window :] if sampling.penalty_window else seen)
    repetition = np.float32(sampling.repetition_penalty)
    for token in set(window):
        value = values[token]
        values[token] = value * repetition if value < 0 else value / repetition
        values[token] -= np.float32(sampling.presence_penalty)
    for token in window:
        values[token] -= np.float32(sampling.frequency_penalty)
    return [float(value) for value in values]


@settings(deadline=None, max_examples=30)
@given(
    samplings=st.lists(SAMPLINGS, min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 150), min_size=4, max_size=4),
    steps=st.integers(1, 80),
    dice=st.integers(0, 2**32),
)
@example(
    samplings=[Sampling(frequency_penalty=0.25, penalty_window=0), Sampling(presence_penalty=0.5)],
    lengths=[3, 100, 0, 0],
    steps=3 * LEAST_ROOM,
    dice=1,
)
def test_each_row_is_penalised_for_what_its_own_window_holds(
    samplings: list[Sampling], lengths: list[int], steps: int, dice: int
) -> None:
    """Windows that are shorter than the text, longer, and without an end."""
    numbers = np.random.default_rng(dice)
    count = len(samplings)
    seen = [numbers.integers(0, WIDTH, length).tolist() for length in lengths[:count]]
    rows = [RowDraws(sampling=sampling) for sampling in samplings]
    sampler = BatchSampler(rows, seen, WIDTH)
    for _ in range(steps):
        latest = numbers.integers(0, WIDTH, count)
        for own, token in zip(seen, latest.tolist(), strict=True):
            own.append(token)
        logits = numbers.normal(size=(count, WIDTH)).astype(np.float32)
        shaped: Any = sampler.shape(mx.array(logits), mx.array(latest.astype(np.uint32))).tolist()
        assert shaped == [
            penalised(own, tokens, sampling)
            for own, tokens, sampling in zip(logits.tolist(), seen, samplings, strict=True)
        ]


def test_rows_that_ask_for_nothing_keep_their_logits_between_those_that_do() -> None:
    asking = RowDraws(
        sampling=Sampling(presence_penalty=1.0, frequency_penalty=0.5),
        logit_bias={2: 4.0},
        ending=[3],
        min_tokens=2,
    )
    rows = [RowDraws(), asking, RowDraws(), RowDraws(processors=(lambda row, latest: row + 1,))]
    logits = [[-0.0, 1.5, 1e-40, -2.0]] * 4
    before = np.array(logits[0], dtype=np.float32).tobytes()
    sampler = BatchSampler(rows, [[]] * 4, 4)
    shaped = np.array(sampler.shape(mx.array(logits), mx.array([0, 0, 0, 0])))
    assert shaped[0].tobytes() == shaped[2].tobytes() == before
    assert shaped[1].tolist() == [-1.5, 1.5, 4.0, -np.inf]
    assert shaped[3].tolist() == [1.0, 2.5, 1.0, -1.0]


def test_each_row_has_the_bias_and_the_ends_that_are_its_own() -> None:
    rows = [
        RowDraws(logit_bias={0: 1.0, 3: 2.0}),
        RowDraws(ending=[0, 1], min_tokens=1),
        RowDraws(logit_bias={3: -1.0}, ending=[2], min_tokens=2),
    ]
    sampler = BatchSampler(rows, [[]] * 3, 4)
    none = -float("inf")

    def step() -> Any:
        shaped = sampler.shape(mx.zeros((3, 4)), mx.array([0, 0, 0]))
        sampler.draw(shaped)
        return shaped.tolist()

    assert step() == [[1, 0, 0, 2], [none, none, 0, 0], [0, 0, none, -1]]
    assert step() == [[1, 0, 0, 2], [0, 0, 0, 0], [0, 0, none, -1]]
    assert step() == [[1, 0, 0, 2], [0, 0, 0, 0], [0, 0, 0, -1]]
