"""The two ways of drawing a token, and which of them a backend gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxsup.protocol.states import Batching
from mlxsup.worker.engines.mlx import draws
from mlxsup.worker.engines.mlx import load as mlx_load
from mlxsup.worker.engines.mlx.draws import (
    SAMPLER_VERSIONS,
    Draw,
    choose_draw,
    draw_by_noise,
    draw_by_share,
    make_noise,
)
from mlxsup.worker.engines.mlx.sampling import derive_key

from support.mlx_draws import drawer, draws_of
from support.mlx_rows import known_as, loaded_engine, make_row, run_rows
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

WAYS: tuple[Draw, ...] = (draw_by_share, draw_by_noise)
KEYS = [derive_key(seed, number) for seed in range(9) for number in range(3)]
HIGHEST = 1 - 2.0**-24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


# ---------------------------------------------------------------- noise


def noise_of(keys: Sequence[int], width: int = 300) -> list[bytes]:
    return [row.tobytes() for row in np.array(make_noise(keys, width))]


def test_a_rows_noise_follows_from_its_key_in_any_company_and_place() -> None:
    together = noise_of(KEYS)
    assert together == [noise_of([key])[0] for key in KEYS]
    assert together == noise_of(KEYS[::-1])[::-1]
    assert len(set(together)) == len(KEYS)


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_every_bit_of_a_key_changes_its_noise(bit: int) -> None:
    assert noise_of([KEYS[0]]) != noise_of([KEYS[0] ^ 1 << bit])


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


@pytest.mark.parametrize("way", WAYS)
def test_a_draw_is_repeated_by_its_key_alone(way: Draw) -> None:
    weights = mx.array(np.random.default_rng(6).random((1, 700)).astype(np.float32))
    drawn: list[Any] = [way(weights, [key]).item() for key in KEYS]
    mx.random.seed(7)
    together: Any = way(mx.broadcast_to(weights, (len(KEYS), 700)), KEYS).tolist()
    assert drawn == together
    assert len(set(drawn)) > len(KEYS) // 2


# ---------------------------------------------------------------- what rounding changes

ROWS, ANSWERS, TOKENS, WIDTH = 64, 3, 8, 8000


def kept_answers(way: Draw) -> tuple[int, int]:
    """How many answers, and how many draws, are equal if bf16 rounds the logits otherwise.

    Each logit is the nearest number of eight bits, or one next to it.
    """
    rows = [draws_of(seed=seed, temperature=0.8) for seed in range(ROWS)]
    again = [draws_of(seed=seed, temperature=0.8) for seed in range(ROWS)]
    plain, other = drawer(*rows, way=way), drawer(*again, way=way)
    dice = np.random.default_rng(1)
    is_equal = []
    for _ in range(ANSWERS * TOKENS):
        logits = dice.normal(loc=12.0, scale=2.0, size=WIDTH)
        step = 2.0 ** (np.floor(np.log2(np.abs(logits))) - 7)
        moved = logits + step * dice.uniform(-0.5, 0.5, size=WIDTH)
        drawn = []
        for draw, values in ((plain, logits), (other, moved)):
            rounded = mx.array(values.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32)
            logprobs = rounded - mx.logsumexp(rounded)
            drawn.append(np.array(draw(mx.broadcast_to(logprobs, (ROWS, WIDTH)))))
        is_equal.append(drawn[0] == drawn[1])
    equal = np.array(is_equal).reshape(ANSWERS, TOKENS, ROWS)
    return int(equal.all(axis=1).sum()), int(equal.sum())


def test_rounding_leaves_twice_as_many_answers_as_they_are_by_noise() -> None:
    by_share, by_noise = kept_answers(draw_by_share), kept_answers(draw_by_noise)
    draws_made = ROWS * ANSWERS * TOKENS
    assert by_noise[0] >= 2 * by_share[0] > 0
    assert draws_made - by_share[1] >= 2 * (draws_made - by_noise[1]) > 0
    assert by_share[1] > draws_made / 2, "most draws are equal in both ways"


# ---------------------------------------------------------------- which way an engine draws


@pytest.mark.parametrize(
    ("backend", "way"), [("cpu", draw_by_share), ("cuda", draw_by_noise), ("metal", draw_by_noise)]
)
def test_only_the_cpu_draws_by_share(backend: str, way: Draw) -> None:
    assert choose_draw(backend) is way


def test_a_gpu_continues_nothing_that_was_drawn_by_share(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprints = []
    for backend in ("cpu", "cuda", "cuda"):
        monkeypatch.setattr(
            mlx_load, "open_stream", lambda backend=backend: (backend, mx.new_stream(mx.cpu))
        )
        with loaded_engine(folder, max_concurrency=1) as engine:
            fingerprints.append(engine.facts.fingerprint)
    assert fingerprints[0] != fingerprints[1] == fingerprints[2]


@pytest.mark.parametrize("way", list(Batching))
def test_rows_are_drawn_as_the_backend_says_however_they_run(
    way: Batching, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = known_as(folder, way)
    backends: list[str] = []
    asked: list[int] = []

    def noted(weights: mx.array, keys: Sequence[int]) -> mx.array:
        asked.extend(keys)
        return draw_by_noise(weights, keys)

    def choose(backend: str) -> Draw:
        backends.append(backend)
        monkeypatch.setitem(SAMPLER_VERSIONS, noted, SAMPLER_VERSIONS[choose_draw(backend)])
        return noted

    monkeypatch.setattr(draws, "choose_draw", choose)
    with loaded_engine(folder, known_batching=known) as engine:
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
