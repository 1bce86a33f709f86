"""What each sampling parameter does to real logits."""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.worker.engines.mlx import picking
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.grammar import GrammarProcessor
from mlxsup.worker.engines.mlx.places import entries_at
from mlxsup.worker.engines.mlx.sampling import PLAIN, derive_key, derive_share, make_draws
from mlxsup.worker.engines.mlx.shaping import make_shapers

from support.loop_driver import LoopDriver, check_every_resume
from support.mlx_draws import drawer, draws_of, shape, weigh
from support.mlx_rows import make_row, make_spec
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

pytestmark = pytest.mark.mlx

SHARES = [0.4, 0.3, 0.2, 0.1]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDriver]:
    engine = MlxEngine(make_spec(make_tiny_model(tmp_path_factory.mktemp("tiny"))))
    driver = LoopDriver(engine, engine.load(lambda phase, at: None), 8)
    yield driver
    driver.close()
    engine.close()


def draws(count: int = 300, spared: list[int] | None = None, **parameters: Any) -> list[int]:
    """How often each of four tokens is drawn."""
    row = make_row(1, [1], **{"temperature": 1.0, "seed": 5} | parameters)
    draw = drawer(make_draws(row, spared=spared or ()))
    logprobs = mx.log(mx.array([SHARES]))
    counts = [0] * len(SHARES)
    for _ in range(count):
        counts[draw(logprobs)[0]] += 1
    return counts


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 0])
def test_top_k_keeps_so_many(top_k: int) -> None:
    counts = draws(top_k=top_k)
    assert sum(count > 0 for count in counts) == (top_k or 4) - (top_k == 5)
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.3, 3), (0.6, 2), (1.0, 1)])
def test_min_p_is_a_share_of_the_likeliest(min_p: float, kept: int) -> None:
    assert sum(count > 0 for count in draws(min_p=min_p)) == kept


@pytest.mark.parametrize("top_p", [0.01, 1e-30, 1e-46, 5e-324])
def test_a_tiny_top_p_keeps_the_likeliest(top_p: float) -> None:
    assert draws(top_p=top_p)[1:] == [0, 0, 0]


def test_xtc_leaves_out_the_top_choices_so_often() -> None:
    always = draws(xtc_probability=1.0, xtc_threshold=0.15)
    assert always[:2] == [0, 0], "0.2 is the least likely of those above the threshold"
    assert always[2] > 0
    assert always[3] > 0
    sometimes = draws(xtc_probability=0.5, xtc_threshold=0.15)
    assert 60 <= sometimes[0] + sometimes[1] <= 150  # 105 of 300 expected
    assert draws(xtc_probability=1.0, xtc_threshold=0.45) == draws(), "none is as likely as that"


def test_xtc_spares_what_ends_an_answer() -> None:
    counts = draws(spared=[0], xtc_probability=1.0, xtc_threshold=0.15)
    assert counts[0] > 0
    assert counts[1] == 0


def test_filters_come_one_after_the_other() -> None:
    """0.4 and 0.3 remain of top_k; of these two, 0.4 is 0.57, which is enough for top_p 0.5."""
    assert draws(top_k=2, top_p=0.5)[1:] == [0, 0, 0]
    assert draws(top_p=0.5)[2:] == [0, 0]


def test_shares_of_xtc_are_spread_evenly() -> None:
    shares = [derive_share(seed, number) for seed in range(20) for number in range(50)]
    assert all(0 <= share < 1 for share in shares)
    assert 0.47 < sum(shares) / len(shares) < 0.53


def processed(tokens: list[int], **parameters: Any) -> list[float]:
    return shape(make_row(1, [1], **parameters), tokens, [2.0, -2.0, 1.0, 0.5])


def test_penalties_count_the_window_of_prompt_and_answer() -> None:
    """Of the tokens 0 1 1 3, which may be the prompt's or the answer's."""
    tokens = [0, 1, 1, 3]
    assert processed(tokens, repetition_penalty=2.0) == [1.0, -4.0, 1.0, 0.25]
    assert processed(tokens, presence_penalty=0.5) == [1.5, -2.5, 1.0, 0.0]
    assert processed(tokens, frequency_penalty=0.5) == [1.5, -3.0, 1.0, 0.0]
    assert processed(tokens, presence_penalty=0.5, penalty_window=2) == [2.0, -2.5, 1.0, 0.0]
    assert processed([0] + [3] * 30, presence_penalty=1.0) == [2.0, -2.0, 1.0, -0.5]
    everything = processed([0] + [3] * 30, presence_penalty=1.0, penalty_window=0)
    assert everything == [1.0, -2.0, 1.0, -0.5]


def test_a_bias_is_added_before_the_penalties() -> None:
    assert processed([0], logit_bias={0: 2.0, 3: -1.0}) == [4.0, -2.0, 1.0, -0.5]
    assert processed([0], logit_bias={0: 2.0}, repetition_penalty=2.0)[0] == 2.0


FOX = "🦊"


def test_a_bias_forces_and_forbids_tokens(worker: LoopDriver) -> None:
    free = worker.answer(prompt="hello", max_tokens=12)
    forbidden = free.tokens[3]
    other = worker.answer(prompt="hello", max_tokens=12, logit_bias={str(forbidden): -100})
    assert other.tokens[:3] == free.tokens[:3]
    assert forbidden not in other.tokens
    forced = worker.answer(prompt="hello", max_tokens=3, logit_bias={"70": 100})
    assert forced.tokens == [70, 70, 70]


def test_every_draw_is_made_on_the_owner_thread_with_a_key_of_its_own_A6(
    worker: LoopDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    derived: list[tuple[int, int]] = []
    threads: set[int] = set()

    def derive(seed: int, number: int) -> int:
        derived.append((seed, number))
        threads.add(threading.get_ident())
        return derive_key(seed, number)

    def keyed(plain: Any) -> Any:
        def call(*args: Any, key: mx.array | None = None, **named: Any) -> mx.array:
            assert key is not None, "a draw that is not ours"
            drawn: mx.array = plain(*args, key=key, **named)
            return drawn

        return call

    monkeypatch.setattr(picking, "derive_key", derive)
    for name in ("categorical", "uniform", "gumbel", "randint"):
        monkeypatch.setattr(mx.random, name, keyed(getattr(mx.random, name)))
    keys = [
        worker.dispatch(prompt=f"row {n}", temperature=1.0, seed=n, max_tokens=8) for n in range(4)
    ]
    worker.finish(*keys)
    assert threads == {threading.get_ident()}
    for seed in range(4):
        numbers = [number for other, number in derived if other == seed]
        assert numbers == list(range(len(numbers))), "each once, in order"
        assert len(numbers) >= 8


def emoji_bias(worker: LoopDriver) -> dict[str, float]:
    """Makes the four bytes of a fox, each a token, take turns with letters."""
    ids = worker.engine.text.encode(body_of(FOX)).tokens
    assert len(ids) == 4
    return {str(token): 80.0 for token in ids}


def body_of(prompt: str) -> Any:
    from mlxsup.protocol.body import RequestBody

    return RequestBody(prompt=prompt)


@pytest.mark.bits
def test_half_an_emoji_goes_on_rightly_F10_G7(worker: LoopDriver) -> None:
    """Bytes of an emoji, whole ones and broken ones, and a stop string behind them."""
    parameters: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 9,
        "max_tokens": 48,
        "logit_bias": emoji_bias(worker),
        "presence_penalty": 0.5,
    }
    whole = worker.answer(prompt="animals", **parameters)
    assert any(not delta.text for delta in whole.deltas), "no character was split over tokens"
    assert any(ord(character) > 127 for character in whole.text)
    check_every_resume(worker, whole, at_once=8)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 5]
    stopped = worker.answer(prompt="animals", stop=[stop], **parameters)
    check_every_resume(worker, stopped, at_once=8)


def test_logprobs_are_those_of_the_model(worker: LoopDriver) -> None:
    got = worker.answer(prompt="hello", max_tokens=6, logprobs=True, top_logprobs=20)
    entries = [entry for delta in got.deltas for entry in delta.logprobs or ()]
    everything = worker.answer(
        prompt="hello", max_tokens=6, temperature=1.0, seed=1, logprobs=True, top_logprobs=20
    )
    first = next(entry for delta in everything.deltas for entry in delta.logprobs or ())
    assert first.top == entries[0].top, "before the temperature"
    for entry in entries:
        assert sum(math.exp(other.logprob) for other in entry.top) <= 1.0001
        assert len({other.token for other in entry.top}) == 20
    prompt = worker.engine.text.encode(body_of("hello")).tokens
    assert isinstance(worker.engine, MlxEngine)
    with mx.stream(worker.engine.stream):
        logits = worker.engine.model(mx.array([prompt]))[0, -1]
        logprobs = logits - mx.logsumexp(logits)
        expected: Any = logprobs[mx.argmax(logprobs)].item()
    assert entries[0].chosen.logprob == pytest.approx(expected, abs=1e-5)


def test_a_probability_of_nothing_is_a_number_still(worker: LoopDriver) -> None:
    """-inf does not travel."""
    got = worker.answer(
        prompt="x", max_tokens=1, logit_bias={"7": 100}, logprobs=True, top_logprobs=20
    )
    entries = [entry for delta in got.deltas for entry in delta.logprobs or ()]
    assert all(-9999.0 <= other.logprob <= 0 for entry in entries for other in entry.top)


def test_asking_for_logprobs_changes_no_token(worker: LoopDriver) -> None:
    plain = [worker.dispatch(prompt=f"p{n}", max_tokens=20, seed=n) for n in range(4)]
    expected = [answer.tokens for answer in worker.finish(*plain)]
    asked = [
        worker.dispatch(prompt=f"p{n}", max_tokens=20, seed=n, logprobs=n % 2 == 0)
        for n in range(4)
    ]
    assert [answer.tokens for answer in worker.finish(*asked)] == expected


def test_every_id_of_the_vocabulary_can_be_biased(worker: LoopDriver) -> None:
    got = worker.answer(prompt="x", max_tokens=2, logit_bias={str(VOCABULARY_SIZE - 1): 100})
    assert got.tokens == [VOCABULARY_SIZE - 1] * 2


def test_a_temperature_that_cannot_be_divided_by_takes_the_likeliest() -> None:
    for temperature in (0.0, 1e-320, 1e-40, 9e-6):
        assert draws_of(temperature=temperature) is PLAIN
    assert draws_of(temperature=1e-5) is not PLAIN


def test_the_dice_of_xtc_are_not_the_key_of_the_draw() -> None:
    assert all(derive_share(7, n) != (derive_key(7, n) >> 11) / 2**53 for n in range(8))


@pytest.mark.parametrize("width", [5, 8, 12])
def test_a_grammars_mask_may_be_longer_or_shorter_than_the_logits(width: int) -> None:
    """A model may have more outputs than its tokenizer has ids, or fewer."""

    class Stub:
        def mask(self) -> bytes:
            return bytes([0b00010010])

    grammar: Any = Stub()
    masked = GrammarProcessor(grammar)(mx.zeros((1, width)))
    values: Any = masked[0].tolist()
    assert [place for place, value in enumerate(values) if value == 0.0] == [1, 4]
    assert len(values) == width


def test_an_answer_cannot_end_before_its_least_length_unless_nothing_else_is_left() -> None:
    row = make_row(1, [1], min_tokens=4, delivered=[7, 7])
    minus = -math.inf
    logits, only_ends = [0.5, 2.0, -1.0, 3.0], [minus, 2.0, minus, 3.0]
    assert shape(row, [0], logits, ending=[1, 3, 9]) == [0.5, minus, -1.0, minus]
    assert shape(row, [0], only_ends, ending=[1, 3, 9]) == only_ends


@pytest.mark.parametrize(
    ("changes", "ending", "count"),
    [
        ({}, [1], 0),
        ({"min_tokens": 2}, [1], 1),
        ({"min_tokens": 2}, [], 0),
        ({"min_tokens": 2, "delivered": [5]}, [1], 1),
        ({"min_tokens": 2, "delivered": [5, 5]}, [1], 0),
        ({"repetition_penalty": 1.1}, [], 1),
        ({"presence_penalty": -0.1, "frequency_penalty": 0.1}, [], 1),
        ({"logit_bias": {1: 1.0}, "repetition_penalty": 0.9, "min_tokens": 1}, [1], 3),
    ],
)
def test_nothing_is_computed_that_no_row_asks_for(
    changes: dict[str, Any], ending: list[int], count: int
) -> None:
    draws = make_draws(make_row(1, [1], **changes), ending=ending)
    assert len(make_shapers([draws], [[]], 8)) == count


def test_what_forbids_the_end_sees_what_the_bias_left() -> None:
    row = make_row(1, [1], logit_bias={0: 5.0, 1: 7.0}, min_tokens=1)
    assert shape(row, [1], [0.0, 0.0, 1.0], ending=[1]) == [5.0, -math.inf, 1.0]


def test_keys_and_shares_are_those_of_seed_number_and_purpose() -> None:
    """A kept answer is drawn anew with them after a restart: they may never change."""
    digest = hashlib.blake2b(struct.pack("<QQ", 2**64 - 1, 3), digest_size=8).digest()
    assert derive_key(-1, 3) == int.from_bytes(digest, "little")
    named = hashlib.blake2b(struct.pack("<QQ", 7, 3), digest_size=8, person=b"xtc").digest()
    assert derive_share(7, 3) == (int.from_bytes(named, "little") >> 11) / 2**53


@pytest.mark.parametrize(
    ("tokens", "inside"), [([0, 3, 4, -1, 9], [0, 3]), ([], None), ([4], None), ([2], [2])]
)
def test_ids_without_a_place_in_the_logits_are_left_out(
    tokens: list[int], inside: list[int] | None
) -> None:
    found = entries_at([[], tokens], 4)
    assert (found and found[1].tolist()) == inside
    assert found is None or mx.all(found[0] == 1).item()


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0.0, True), (0.99e-5, True), (1e-5, False), (1.0, False)]
)
def test_below_the_coldest_temperature_nothing_is_drawn(
    temperature: float, is_greedy: bool
) -> None:
    assert (draws_of(temperature=temperature) is PLAIN) is is_greedy


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"top_k": 1}, 1), ({"top_k": 3}, 3), ({"top_k": 4}, 4), ({"top_k": 0}, 4),
        ({"top_p": 0.39}, 1), ({"top_p": 0.41}, 2), ({"top_p": 0.69}, 2), ({"top_p": 0.71}, 3),
        ({"top_p": 0.95}, 4), ({"min_p": 0.24}, 4), ({"min_p": 0.26}, 3), ({"min_p": 0.8}, 1),
        ({"top_k": 3, "top_p": 0.8}, 3), ({"top_k": 2, "top_p": 0.55}, 1),
    ],
)  # fmt: skip
def test_exactly_the_likeliest_tokens_stay(parameters: dict[str, Any], kept: int) -> None:
    counts = draws(**{"top_p": 1.0, **parameters})
    assert [bool(count) for count in counts] == [True] * kept + [False] * (4 - kept)


@pytest.mark.parametrize(
    ("parameters", "is_left"),
    [({}, True), ({"top_p": 1.0, "min_p": 0.0, "top_k": 2}, True), ({"top_p": 0.9}, False)],
)
def test_a_filter_that_is_off_leaves_even_what_no_rounding_shows(
    parameters: dict[str, Any], is_left: bool
) -> None:
    """Of two tokens the second has a share of 4e-18: the first alone adds up to 1."""
    likely, other = weigh(draws_of(**parameters), [0.0, -40.0])
    assert (likely, other) == (1.0, pytest.approx(math.exp(-40.0)) if is_left else 0.0)


def test_a_low_temperature_favours_the_likeliest_and_a_high_one_levels() -> None:
    """Expected of 300: 217 of the first and 1 of the last; 86 of the first and 61 of the last."""
    cold, hot = draws(temperature=0.25), draws(temperature=4.0)
    assert (cold[0] > 190, cold[3] < 10) == (True, True)
    assert (hot[0] < 110, hot[3] > 40) == (True, True)


@pytest.mark.parametrize(
    "parameters",
    [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}, {"xtc_probability": 1.0, "xtc_threshold": 0.1}],
)
def test_each_row_of_the_logits_is_filtered_by_itself(parameters: dict[str, Any]) -> None:
    """The likeliest of each is drawn; under XTC anything else, because all below 0.1 stay."""
    draw = drawer(draws_of(**parameters), draws_of(**parameters, seed=6))
    shares = mx.array([[0.7, 0.2, 0.05, 0.05], [0.05, 0.05, 0.3, 0.6]])
    drawn: list[set[int]] = [set(), set()]
    for _ in range(60):
        for seen, token in zip(drawn, draw(mx.log(shares)), strict=True):
            seen.add(token)
    assert drawn == ([{1, 2, 3}, {0, 1, 2}] if "xtc_probability" in parameters else [{0}, {3}])
