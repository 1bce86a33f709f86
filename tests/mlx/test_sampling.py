"""What each parameter does to real logits, and what ends an answer."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.states import FinishReason
from mlxsup.worker.engines.mlx.logits_processors import GrammarProcessor
from mlxsup.worker.engines.mlx.sampler import PLAIN, derive_key, derive_share, make_draws

from support.models.tiny_model import make_tiny_model
from support.worker.loop_driver import LoopDriver, check_every_resume, check_resumes
from support.worker.mlx_draws import drawer, draws_of, shape, weigh
from support.worker.mlx_rows import driven_engine, make_row

pytestmark = pytest.mark.mlx


SHARES = [0.4, 0.3, 0.2, 0.1]


def draws(count: int = 300, spared: list[int] | None = None, **parameters: Any) -> list[int]:
    """How often each of four tokens is drawn."""
    row = make_row(1, [1], **{"temperature": 1.0, "seed": 5} | parameters)
    draw = drawer(make_draws(row, spared=spared or ()))
    logprobs = mx.log(mx.array([SHARES]))
    counts = [0] * len(SHARES)
    for _ in range(count):
        counts[draw(logprobs)[0]] += 1
    return counts


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


def test_shares_of_xtc_are_spread_evenly() -> None:
    shares = [derive_share(seed, number) for seed in range(20) for number in range(50)]
    assert all(0 <= share < 1 for share in shares)
    assert 0.47 < sum(shares) / len(shares) < 0.53
    assert all(derive_share(7, n) != (derive_key(7, n) >> 11) / 2**53 for n in range(8))


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


def encoded(worker: LoopDriver, prompt: str) -> list[int]:
    return worker.engine.text.encode(RequestBody(prompt=prompt)).tokens


def test_a_bias_forces_and_forbids_tokens(worker: LoopDriver) -> None:
    free = worker.answer(prompt="hello", max_tokens=12)
    forbidden = free.tokens[3]
    other = worker.answer(prompt="hello", max_tokens=12, logit_bias={str(forbidden): -100})
    assert other.tokens[:3] == free.tokens[:3]
    assert forbidden not in other.tokens
    forced = worker.answer(prompt="hello", max_tokens=3, logit_bias={"70": 100})
    assert forced.tokens == [70, 70, 70]


@pytest.mark.bits
def test_half_an_emoji_goes_on_rightly_F10_G7(worker: LoopDriver) -> None:
    """Bytes of an emoji, whole ones and broken ones, and a stop string behind them."""
    parameters: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 9,
        "max_tokens": 36,
        # The four bytes of a fox, each a token, take turns with letters.
        "logit_bias": {str(token): 80.0 for token in encoded(worker, "🦊")},
        "presence_penalty": 0.5,
    }
    whole = worker.answer(prompt="animals", **parameters)
    assert any(not delta.text for delta in whole.deltas), "no character was split over tokens"
    assert any(ord(character) > 127 for character in whole.text)
    check_every_resume(worker, whole, at_once=8)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 5]
    stopped = worker.answer(prompt="animals", stop=[stop], **parameters)
    check_resumes(worker, stopped, range(0, len(stopped.tokens), 2), at_once=8)


@pytest.mark.parametrize("width", [5, 8, 12])
def test_a_grammars_mask_may_be_longer_or_shorter_than_the_logits(width: int) -> None:
    """A model may have more outputs than its tokenizer has ids, or fewer."""

    class Stub:
        lead = None

        def mask(self) -> bytes:
            return bytes([0b00010010])

    grammar: Any = Stub()
    masked = GrammarProcessor(grammar)(mx.zeros((1, width)), 0)
    values: Any = masked[0].tolist()
    assert [place for place, value in enumerate(values) if value == 0.0] == [1, 4]
    assert len(values) == width


def test_a_bias_does_not_undo_a_forbidden_end() -> None:
    row = make_row(1, [1], logit_bias={0: 5.0, 1: 7.0}, min_tokens=1)
    assert shape(row, [1], [0.0, 0.0, 1.0], ending=[1]) == [5.0, -math.inf, 1.0]


def test_keys_and_shares_are_those_of_seed_number_and_purpose() -> None:
    """A kept answer is drawn anew with them after a restart: they may never change."""
    digest = hashlib.blake2b(struct.pack("<QQ", 2**64 - 1, 3), digest_size=8).digest()
    assert derive_key(-1, 3) == int.from_bytes(digest, "little")
    named = hashlib.blake2b(struct.pack("<QQ", 7, 3), digest_size=8, person=b"xtc").digest()
    assert derive_share(7, 3) == (int.from_bytes(named, "little") >> 11) / 2**53


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0.0, True), (0.99e-5, True), (1e-5, False), (1.0, False)]
)
def test_below_the_coldest_temperature_nothing_is_drawn(
    temperature: float, is_greedy: bool
) -> None:
    assert (draws_of(temperature=temperature) is PLAIN) is is_greedy


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


EOS = 300

ALWAYS: dict[str, Any] = {"logit_bias": {str(EOS): 100}}
"""Makes the model draw its end-of-text token wherever it may."""


@pytest.fixture(scope="module")
def ending_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDriver]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), eos_token_id=EOS)
    with driven_engine(folder, 8) as driver:
        yield driver


@pytest.mark.bits
def test_an_end_that_is_ignored_is_a_token_like_any_other(ending_worker: LoopDriver) -> None:
    got = ending_worker.answer(prompt="x", max_tokens=8, ignore_eos=True, **ALWAYS)
    assert (got.tokens, got.finish) == ([EOS] * 8, FinishReason.LENGTH)
    assert got.text == ending_worker.engine.text.token_alone(EOS)[0] * 8
    check_every_resume(ending_worker, got)


def test_all_else_still_ends_an_answer_that_ignores_the_end(ending_worker: LoopDriver) -> None:
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 8, "ignore_eos": True}
    by_token = ending_worker.answer(stop_token_ids=[EOS], **asked, **ALWAYS)
    assert (by_token.tokens, by_token.finish) == ([], FinishReason.STOP)
    text = ending_worker.engine.text.token_alone(EOS)[0]
    by_text = ending_worker.answer(stop=[text + text], **asked, **ALWAYS)
    assert (by_text.tokens, by_text.text) == ([EOS, EOS], "")
    assert by_text.finish is FinishReason.STOP


@pytest.mark.bits
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_is_not_drawn_before_min_tokens(
    ending_worker: LoopDriver, temperature: float
) -> None:
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 20, "temperature": temperature, "seed": 2}
    got = ending_worker.answer(min_tokens=7, **asked, **ALWAYS)
    assert len(got.tokens) == 7
    assert EOS not in got.tokens
    assert got.finish is FinishReason.STOP
    check_every_resume(ending_worker, got)
    beside = [ending_worker.dispatch(prompt=f"{n}", max_tokens=20, **ALWAYS) for n in range(3)]
    together = ending_worker.dispatch(min_tokens=7, **asked, **ALWAYS)
    ending_worker.finish(*beside)
    assert ending_worker.finish(together)[0].tokens == got.tokens


def test_a_grammar_that_can_only_end_wins_over_min_tokens(ending_worker: LoopDriver) -> None:
    form = {"type": "regex", "regex": "ab"}
    got = ending_worker.answer(prompt="x", max_tokens=9, min_tokens=9, response_format=form)
    assert (got.text, got.finish) == ("ab", FinishReason.STOP)


def test_a_grammar_that_may_end_goes_on_until_min_tokens(ending_worker: LoopDriver) -> None:
    form = {"type": "regex", "regex": "[ab]+"}
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 9, "response_format": form}
    assert len(ending_worker.answer(**asked, **ALWAYS).tokens) == 1
    got = ending_worker.answer(min_tokens=6, **asked, **ALWAYS)
    assert (len(got.tokens), got.finish) == (6, FinishReason.STOP)
    assert set(got.text) <= {"a", "b"}
    for ends in ([EOS], []):
        ended = ending_worker.answer(ignore_eos=True, stop_token_ids=ends, **asked, **ALWAYS)
        assert (len(ended.tokens), ended.finish) == (1, FinishReason.STOP), "the form ends it"


def test_a_stop_token_that_a_grammar_leaves_alone_is_drawn(ending_worker: LoopDriver) -> None:
    letter = encoded(ending_worker, "q")
    form = {"type": "regex", "regex": "abqqqqqq"}
    got = ending_worker.answer(
        prompt="x", max_tokens=9, min_tokens=8, stop_token_ids=letter, response_format=form
    )
    assert (got.text, got.finish) == ("ab", FinishReason.STOP)


def test_no_id_beyond_the_logits_is_written_to() -> None:
    """A tokenizer may know ids that the model has no output for."""
    logits = [1.0, 2.0, 3.0, 4.0]
    row = make_row(1, [1], min_tokens=1)
    assert shape(row, [0], logits, ending=[3, 4, 4_000_000]) == [1.0, 2.0, 3.0, -math.inf]
    assert shape(row, [0], logits, ending=[9]) == logits
    row = make_row(1, [1], logit_bias={1: 2.0, 4: 9.0, 4_000_000: 9.0})
    assert shape(row, [0], logits) == [1.0, 4.0, 3.0, 4.0]
    row = make_row(1, [1], temperature=1.0, xtc_probability=1.0, xtc_threshold=0.0, seed=1)
    weights = weigh(make_draws(row, spared=[9]), logits)
    assert [weight > 0 for weight in weights] == [True, False, False, False]


def test_where_only_ends_are_left_they_stay() -> None:
    logits = [-math.inf, 1.0, 2.0, -math.inf]
    assert shape(make_row(1, [1], min_tokens=9), [0], logits, ending=[1, 2]) == logits


def test_xtc_never_leaves_out_a_stop_token() -> None:
    def drawn(stop_token_ids: tuple[int, ...]) -> set[int]:
        row = make_row(
            1,
            [1],
            temperature=1.0,
            xtc_probability=1.0,
            xtc_threshold=0.1,
            stop_token_ids=stop_token_ids,
        )
        draw = drawer(make_draws(row))
        logprobs = mx.log(mx.array([[0.6, 0.2, 0.2]]))
        return {draw(logprobs)[0] for _ in range(40)}

    assert 0 not in drawn(())
    assert 0 in drawn((0,))
