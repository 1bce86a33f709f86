"""The pace of reading prompts: chunks, predictions, costs; on simulated machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.prefill import (
    DEEP,
    FIRST_CHUNK,
    FIXED_CHUNK,
    LARGEST_CHUNK,
    SMALLEST_CHUNK,
    PassCost,
    PrefillPacer,
)
from mlxsup.worker.engines.mlx.shapes import COMPILE_S, SeenShapes

STEP_TIMEOUT_S = 30.0


def make_pacer(target_s: float = 0.25, step_timeout_s: float = STEP_TIMEOUT_S) -> PrefillPacer:
    return PrefillPacer(decode_stall_target_s=target_s, step_timeout_s=step_timeout_s)


def prefill(
    pacer: PrefillPacer,
    tokens: int,
    seconds_of: Callable[[int], float],
    *,
    rows: int = 1,
    decode_rows: int = 0,
    decode_s: float = 0.0,
) -> list[tuple[int, float]]:
    """Every chunk of a prompt, with the seconds that it alone took."""
    chunks = []
    while tokens > 0:
        longest = min(pacer.chunk(prefill_rows=rows, decode_rows=decode_rows), tokens)
        took_s = seconds_of(rows * longest)
        pacer.saw_chunk(
            prefill_rows=rows,
            longest=longest,
            decode_rows=decode_rows,
            took_s=took_s + decode_s * bool(decode_rows),
        )
        chunks.append((longest, took_s))
        tokens -= longest
    return chunks


def test_the_first_chunk_is_small_and_shared_by_the_rows() -> None:
    pacer = make_pacer()
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == FIRST_CHUNK
    assert pacer.chunk(prefill_rows=4, decode_rows=0) == FIRST_CHUNK // 4
    assert pacer.chunk(prefill_rows=64, decode_rows=0) == SMALLEST_CHUNK


@pytest.mark.parametrize("unit_s", [0.1, 0.03, 0.001, 1e-5])
def test_chunks_stay_below_the_limits_on_any_machine_C9_F5(unit_s: float) -> None:
    idle = prefill(make_pacer(), 3000, lambda cost: 0.01 + unit_s * cost)
    assert all(took_s <= 2.0 for _, took_s in idle)
    busy = prefill(make_pacer(), 3000, lambda cost: 0.01 + unit_s * cost, decode_rows=2)
    assert all(took_s <= 0.25 for _, took_s in busy[1:])


def test_a_tenth_of_the_step_limit_bounds_every_chunk_F5() -> None:
    pacer = make_pacer(target_s=60.0, step_timeout_s=1.0)
    chunks = prefill(pacer, 500, lambda cost: 0.01 * cost, decode_rows=1)
    assert all(took_s <= 0.1 for _, took_s in chunks)


def test_no_chunk_is_larger_than_the_engine_wants_them() -> None:
    pacer = PrefillPacer(
        decode_stall_target_s=0.25, step_timeout_s=STEP_TIMEOUT_S, largest_chunk=256
    )
    sizes = [size for size, _ in prefill(pacer, 2000, lambda cost: 0.005 + 1e-5 * cost)]
    assert max(sizes) == 256
    assert sizes.index(256) <= 6


def test_a_machine_that_slows_down_is_followed_at_once() -> None:
    pacer = make_pacer()
    prefill(pacer, 2000, lambda cost: 0.01 * cost)
    slow = prefill(pacer, 300, lambda cost: 0.05 * cost)
    assert all(took_s <= 2.0 for _, took_s in slow[1:])


def test_short_prompts_do_not_make_long_ones_slow() -> None:
    """A chunk of two tokens is nearly all overhead; it must not count as a slow machine."""
    pacer = make_pacer()
    pacer.saw_decode(rows=1, took_s=0.015)
    prefill(pacer, 20_000, lambda cost: 0.015 + 1e-4 * cost)
    before = pacer.chunk(prefill_rows=1, decode_rows=0)
    for _ in range(20):
        prefill(pacer, 2, lambda cost: 0.015 + 1e-4 * cost)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) >= before // 2


def test_a_row_that_begins_deep_is_read_in_small_chunks_first_C9() -> None:
    """Behind 35,000 tokens of a prefix cache each token costs five times as much."""
    pacer = make_pacer()
    prefill(pacer, 2000, lambda cost: 0.001 * cost, decode_rows=2)
    pacer.begins_deep(35_000)
    deep = prefill(pacer, 2000, lambda cost: 0.005 * cost, decode_rows=2)
    assert all(took_s <= 0.25 for _, took_s in deep)
    assert max(size for size, _ in deep) > 30, "they grow again"


def test_rows_share_the_cost() -> None:
    pacer = make_pacer()
    prefill(pacer, 2000, lambda cost: 0.01 * cost)
    alone = pacer.chunk(prefill_rows=1, decode_rows=0)
    assert pacer.chunk(prefill_rows=4, decode_rows=0) == pytest.approx(alone / 4, abs=1)


def test_the_pass_of_a_prompt_can_be_shared_unless_its_tokens_take_longer() -> None:
    pacer = make_pacer()
    assert pacer.shared_pass_s(1) == 0.0, "nothing was measured"
    for cost in (8, 1024):
        pacer.saw_chunk(prefill_rows=1, longest=cost, decode_rows=0, took_s=0.018 + cost * 0.00002)
    assert pacer.shared_pass_s(850) == pytest.approx(0.018)
    assert pacer.shared_pass_s(950) == 0.0


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 8),
            st.integers(0, 8),
            st.floats(0, 100, allow_nan=False),
        ),
        max_size=60,
    )
)
def test_chunks_are_always_in_range(steps: list[tuple[int, int, float]]) -> None:
    pacer = make_pacer()
    for prefill_rows, decode_rows, took_s in steps:
        longest = pacer.chunk(prefill_rows=prefill_rows, decode_rows=decode_rows)
        assert SMALLEST_CHUNK <= longest <= LARGEST_CHUNK
        if prefill_rows:
            pacer.saw_chunk(
                prefill_rows=prefill_rows, longest=longest, decode_rows=decode_rows, took_s=took_s
            )
        elif decode_rows:
            pacer.saw_decode(rows=decode_rows, took_s=took_s)
        assert pacer.predict_chunk_s(prefill_rows=prefill_rows, longest=longest) >= 0
        assert pacer.predict_decode_s(decode_rows) >= 0


def test_a_fixed_chunk_depends_on_nothing_measured() -> None:
    pacer = PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0, is_fixed=True)
    assert pacer.chunk(prefill_rows=3, decode_rows=0) == FIXED_CHUNK
    pacer.saw_chunk(prefill_rows=1, longest=8, decode_rows=0, took_s=5.0)
    assert pacer.chunk(prefill_rows=1, decode_rows=4) == FIXED_CHUNK
    # The stall limit follows the prediction, so that a slow machine is not taken for stuck.
    assert pacer.predict_chunk_s(prefill_rows=1, longest=FIXED_CHUNK) > 30


def test_a_chunk_is_predicted_by_what_a_token_has_cost_and_a_pass_beside_it_F5() -> None:
    pacer = make_pacer()
    pacer.saw_chunk(prefill_rows=1, longest=10, decode_rows=0, took_s=1.0)
    assert pacer.predict_chunk_s(prefill_rows=2, longest=20) == pytest.approx(4.0)
    pacer.saw_chunk(prefill_rows=1, longest=0, decode_rows=0, took_s=9.0)
    assert pacer.predict_chunk_s(prefill_rows=2, longest=20) == pytest.approx(4.0)
    pacer.saw_decode(rows=1, took_s=0.5)
    assert pacer.predict_chunk_s(prefill_rows=2, longest=20) == pytest.approx(4.5)
    assert pacer.predict_decode_s(0) == 0.0


# ---------------------------------------------------------------- the arithmetic, by hand
def pass_s(pacer: PrefillPacer) -> float:
    """What a pass costs beside its tokens."""
    return pacer.predict_chunk_s(prefill_rows=1, longest=0)


def test_a_chunk_at_most_doubles_and_has_its_limits() -> None:
    pacer = make_pacer()
    pacer.saw_chunk(prefill_rows=1, longest=10, decode_rows=0, took_s=0.001)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 20
    assert pacer.chunk(prefill_rows=3, decode_rows=0) == 6
    pacer.saw_chunk(prefill_rows=1, longest=4, decode_rows=0, took_s=0.001)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 20, "twice the largest, not the latest"
    pacer.saw_chunk(prefill_rows=2, longest=2000, decode_rows=0, took_s=0.001)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 2048
    slow = make_pacer()
    slow.saw_chunk(prefill_rows=1, longest=8, decode_rows=0, took_s=80.0)
    assert slow.chunk(prefill_rows=1, decode_rows=0) == 1


@pytest.mark.parametrize(("known", "chunk"), [(2047, 140), (2048, 16)])
def test_from_2048_known_tokens_on_chunks_grow_anew(known: int, chunk: int) -> None:
    pacer = make_pacer()
    pacer.saw_chunk(prefill_rows=1, longest=100, decode_rows=0, took_s=0.999)
    pacer.begins_deep(known)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == chunk


def test_a_slower_decode_step_counts_at_once_and_a_faster_one_by_three_tenths() -> None:
    pacer, predicted = make_pacer(), []
    for rows, took_s in ((1, 0.1), (1, 0.05), (2, 0.2), (2, 0.2), (1, 0.3), (1, 0.4)):
        pacer.saw_decode(rows=rows, took_s=took_s)
        predicted.append((pacer.predict_decode_s(1), pacer.predict_decode_s(4)))
    assert predicted == [
        pytest.approx((0.1, 0.4)),
        pytest.approx((0.085, 0.34)),
        pytest.approx((0.2, 0.4)),
        pytest.approx((0.2, 0.4)),
        pytest.approx((0.23, 0.92)),  # slower with fewer rows: what that says is not clear
        pytest.approx((0.4, 1.6)),
    ]


@pytest.mark.parametrize(
    ("decode_rows", "took_s", "unit_s"),
    [
        (1, 2.4, 0.16),  # less the decode part and the pass
        (2, 2.4, 0.12),  # the decode part of two rows
        (0, 2.4, 0.20),
        (1, 0.6, 0.0075),  # half of the step, and of that a quarter, are the chunk's in any case
        (0, 0.0, 1e-10),
    ],
)
def test_tokens_cost_the_step_less_decode_and_pass(
    decode_rows: int, took_s: float, unit_s: float
) -> None:
    pacer = make_pacer()
    pacer.saw_decode(rows=1, took_s=0.4)
    pacer.saw_chunk(prefill_rows=2, longest=5, decode_rows=decode_rows, took_s=took_s)
    assert pacer.predict_chunk_s(prefill_rows=2, longest=3) == pytest.approx(
        0.4 + 6 * unit_s, abs=0, rel=1e-12
    )


def unit_after(*chunks: tuple[int, float]) -> float:
    """Seconds for each token, after chunks of these lengths and durations."""
    pacer = make_pacer()
    for longest, took_s in chunks:
        pacer.saw_chunk(prefill_rows=1, longest=longest, decode_rows=0, took_s=took_s)
    return pacer.predict_chunk_s(prefill_rows=1, longest=1) - pass_s(pacer)


@pytest.mark.parametrize(
    ("longest", "took_s", "is_believed"),
    [(24, 0.1749, False), (24, 0.1751, True), (25, 0.1749, True), (24, 0.16, False)],
)
def test_a_small_chunk_says_that_tokens_are_slow_only_if_it_was_slow_itself(
    longest: int, took_s: float, is_believed: bool
) -> None:
    """A quarter of the largest is large enough; what was planned for a target of 0.25 s is slow."""
    unit_s = unit_after((100, 0.5), (longest, took_s))
    assert unit_s == pytest.approx(took_s / longest if is_believed else 0.005)


PASS_S, TOKEN_S = 0.018, 15e-6
"""Of a large model on a GPU."""


def gpu(cost: int) -> float:
    return PASS_S + TOKEN_S * cost


def learned(costs: Iterable[int], seconds_of: Callable[[int], float] = gpu) -> PassCost:
    found = PassCost()
    for cost in costs:
        found.saw(cost, seconds_of(cost), is_slow=False)
    return found


def test_two_sizes_tell_a_pass_from_its_tokens() -> None:
    found = learned([8, 128])
    assert found.pass_s == pytest.approx(PASS_S)
    assert found.unit_s == pytest.approx(TOKEN_S)
    assert found.predict_s(2048) == pytest.approx(gpu(2048))
    assert found.worthwhile == int(PASS_S / TOKEN_S)


def test_sizes_that_are_alike_tell_nothing_of_the_pass() -> None:
    found = learned([8, 16, 31])
    assert found.pass_s == 0.0
    found.saw(64, gpu(64), is_slow=False)
    assert found.pass_s == pytest.approx(PASS_S, rel=0.02)


def test_a_step_that_reads_nothing_is_the_least_that_a_pass_takes() -> None:
    found = PassCost()
    found.saw_none(0.005)
    found.saw(8, 0.013, is_slow=False)
    assert (found.pass_s, found.unit_s) == pytest.approx((0.005, 0.001))
    found.saw(32, 0.005 + 0.001 * 32, is_slow=False)
    assert found.pass_s == pytest.approx(0.005)


def test_a_pass_takes_no_less_than_a_step_that_reads_nothing() -> None:
    found = learned([8, 64])
    found.saw_none(0.025)
    assert found.pass_s == 0.025


def test_after_large_passes_are_forgotten_one_that_is_much_larger_counts_at_once() -> None:
    found = learned([8, 1024], lambda cost: 0.001 * cost)
    found.forget_large(8)
    found.saw(32, 0.016, is_slow=False)
    assert found.unit_s == pytest.approx(0.008 / 24)


def test_one_pause_of_the_machine_is_not_the_cost_of_a_pass() -> None:
    found = learned([8, 8, 1024])
    found.saw(8, 0.2, is_slow=False)
    assert found.pass_s == pytest.approx(PASS_S)
    for _ in range(3):
        found.saw(8, 0.2, is_slow=False)
    assert found.pass_s == pytest.approx(0.2, rel=0.01), "three in a row are"


def test_a_pass_that_is_slow_itself_stays_below_the_stall_limit() -> None:
    pacer = PrefillPacer(decode_stall_target_s=0.02, step_timeout_s=10.0)
    for size in (8, 32):
        pacer.saw_chunk(prefill_rows=1, longest=size, decode_rows=0, took_s=0.9 + 0.02 * size)
    assert pacer.chunk(prefill_rows=1, decode_rows=4) in (4, 5), "a tenth of the limit, not 45"


@settings(max_examples=40)
@given(
    passes=st.lists(
        st.tuples(st.integers(1, 4096), st.floats(0, 100, allow_nan=False), st.booleans()),
        min_size=1,
    ),
    nothing=st.lists(st.floats(0, 100, allow_nan=False)),
)
def test_estimates_are_never_below_nothing(
    passes: list[tuple[int, float, bool]], nothing: list[float]
) -> None:
    found = PassCost()
    for took_s in nothing:
        found.saw_none(took_s)
    for cost, took_s, is_slow in passes:
        found.saw(cost, took_s, is_slow=is_slow)
        assert found.unit_s is not None
        assert found.unit_s > 0
        assert found.pass_s >= 0
        assert 0 < found.predict_s(1) <= found.predict_s(4096)
        assert found.worthwhile >= 0


SMALL_PASS_S, SMALL_TOKEN_S = 0.0055, 17e-6

PREPARED_S = 0.4

PROMPTS, TOKENS = 16, 91


def machine(cost: int) -> float:
    return SMALL_PASS_S + SMALL_TOKEN_S * cost


def shown() -> PrefillPacer:
    """As the warm-up leaves it, on a GPU that was prepared for nothing that it is shown."""
    pacer = PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=STEP_TIMEOUT_S)
    pacer.is_first = True
    for size in (FIRST_CHUNK, 128, 1024):
        assert size == FIRST_CHUNK or pacer.shows_chunk(size, 0.1)
        read(pacer, machine(size), prompts=1, tokens=size)
    pacer.is_first = False
    return pacer


def read(
    pacer: PrefillPacer, took_s: float, *, prompts: int = PROMPTS, tokens: int = TOKENS
) -> None:
    """A pass over that many tokens of each prompt."""
    pacer.saw_chunk(prefill_rows=prompts, longest=tokens, decode_rows=0, took_s=took_s)


def burst_s(pacer: PrefillPacer) -> float:
    """How long a burst should take."""
    return pacer.predict_chunk_s(prefill_rows=PROMPTS, longest=TOKENS)


def test_a_shown_size_counts_in_a_first_step() -> None:
    assert burst_s(shown()) == pytest.approx(machine(PROMPTS * TOKENS), rel=0.1)
    pacer = shown()
    assert pacer.shows_chunk(2048, 0.1)
    pacer.is_first = True
    read(pacer, 3 * machine(2048), prompts=1, tokens=2048)
    assert pacer.predict_chunk_s(prefill_rows=1, longest=2048) > 2 * machine(2048)


def test_a_burst_of_a_new_shape_does_not_end_the_waiting_for_others() -> None:
    """Otherwise its tokens seem to cost more than the pass, and the next burst does not gather."""
    pacer = shown()
    before = burst_s(pacer), pacer.shared_pass_s(TOKENS)
    pacer.is_first = True
    read(pacer, PREPARED_S)
    assert (burst_s(pacer), pacer.shared_pass_s(TOKENS)) == before
    assert before[1] == pytest.approx(SMALL_PASS_S, rel=0.1)


def test_the_second_step_of_a_shape_is_believed() -> None:
    pacer = shown()
    read(pacer, PREPARED_S)
    assert burst_s(pacer) == pytest.approx(PREPARED_S, rel=0.1)
    assert pacer.shared_pass_s(TOKENS) == 0.0


def test_a_first_step_that_comes_near_the_stall_limit_is_believed() -> None:
    pacer = shown()
    pacer.is_first = True
    read(pacer, 0.15 * STEP_TIMEOUT_S)
    assert burst_s(pacer) == pytest.approx(0.15 * STEP_TIMEOUT_S, rel=0.1)


PREDICTIONS = 4.0
"""How many times its prediction a step may take beyond the limit."""


def steady_machine(*, pass_s: float = PASS_S, token_s: float = TOKEN_S) -> Callable[[int], float]:
    return lambda cost: pass_s + token_s * cost


def new_pacer(*, is_fixed: bool = False) -> PrefillPacer:
    return PrefillPacer(
        decode_stall_target_s=0.25, step_timeout_s=STEP_TIMEOUT_S, is_fixed=is_fixed
    )


def read_prompt(pacer: PrefillPacer, tokens: int, takes: Callable[[int], float]) -> list[int]:
    """The chunks of a prompt."""
    chunks = []
    while tokens > 0:
        chunk = min(pacer.chunk(prefill_rows=1, decode_rows=0), tokens)
        pacer.saw_chunk(prefill_rows=1, longest=chunk, decode_rows=0, took_s=takes(chunk))
        chunks.append(chunk)
        tokens -= chunk
    return chunks


def test_a_step_that_reads_nothing_leaves_the_size_for_the_next() -> None:
    pacer = new_pacer()
    read_prompt(pacer, FIRST_CHUNK, steady_machine())
    assert pacer.shows_chunk(128, 0.1)
    pacer.saw_chunk(prefill_rows=0, longest=0, decode_rows=0, took_s=0.01)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 128


def test_a_size_is_shown_only_while_that_is_cheap() -> None:
    pacer = new_pacer()
    assert not pacer.shows_chunk(128, 0.1), "nothing was measured"
    pacer.saw_chunk(prefill_rows=1, longest=8, decode_rows=0, took_s=0.101)
    assert not pacer.shows_chunk(128, 0.1)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 16


def test_fixed_chunks_are_never_shown_another_size() -> None:
    pacer = new_pacer(is_fixed=True)
    pacer.saw_chunk(prefill_rows=1, longest=8, decode_rows=0, took_s=0.001)
    assert not pacer.shows_chunk(128, 0.1)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == FIXED_CHUNK


def test_forget_drops_times_of_compiling() -> None:
    pacer = new_pacer()
    pacer.saw_chunk(prefill_rows=1, longest=8, decode_rows=0, took_s=1.5)
    pacer.saw_decode(rows=4, took_s=20.0)
    pacer.forget()
    assert pacer.predict_chunk_s(prefill_rows=1, longest=8) == 0.0
    assert pacer.predict_decode_s(4) == 0.0
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == FIRST_CHUNK


TARGET_S = 0.25


class Machine:
    """Reads prompts; what a token costs grows with the tokens before it.

    Args:
        token_s: of a token with none before it.
        doubles_after: so many tokens before it double its cost.
        largest_chunk: of the pacer.
    """

    def __init__(
        self, token_s: float, doubles_after: int, largest_chunk: int = LARGEST_CHUNK
    ) -> None:
        self.pacer = PrefillPacer(
            decode_stall_target_s=TARGET_S, step_timeout_s=30.0, largest_chunk=largest_chunk
        )
        self._token_s = token_s
        self._doubles_after = doubles_after

    def read(self, known: int, tokens: int, decode_rows: int = 1) -> list[tuple[int, float]]:
        """The size of each chunk of a prompt, and how long it took."""
        self.pacer.begins_deep(known)
        chunks = []
        depth, end = known, known + tokens
        while depth < end:
            size = min(self.pacer.chunk(prefill_rows=1, decode_rows=decode_rows), end - depth)
            took_s = size * self._token_s * (1 + depth / self._doubles_after)
            self.pacer.saw_chunk(
                prefill_rows=1, longest=size, decode_rows=decode_rows, took_s=took_s, depth=depth
            )
            chunks.append((size, took_s))
            depth += size
        return chunks


def test_the_next_turn_of_a_long_chat_begins_where_the_last_one_ended() -> None:
    fast = Machine(token_s=1e-5, doubles_after=20_000)
    assert fast.read(0, 30_000)[-2][0] == LARGEST_CHUNK
    assert fast.read(30_100, 4000)[0][0] == LARGEST_CHUNK
    slow = Machine(token_s=1e-4, doubles_after=4000)
    first = slow.read(0, 30_000)
    second = slow.read(30_100, 2000)
    assert second[0][0] >= 0.4 * first[-2][0] > 80
    assert all(took_s <= TARGET_S for _, took_s in second)


def test_a_prompt_deeper_than_any_before_begins_with_as_much_smaller_a_chunk() -> None:
    machine = Machine(token_s=1e-4, doubles_after=4000)
    last = machine.read(0, 10_000)[-2][0]
    [begin, *_] = machine.read(40_000, 2000)
    assert 0.15 * last <= begin[0] <= 0.3 * last
    machine.read(0, 3000)
    [begin, *_] = machine.read(40_000, 2000)
    assert begin[0] < 0.15 * last, "the last chunks were measured near the beginning of a text"


@settings(max_examples=40)
@given(
    token_s=st.floats(1e-5, 2e-3),
    doubles_after=st.integers(1000, 20_000),
    prompts=st.lists(
        st.tuples(st.integers(0, 60_000), st.integers(600, 4000)), min_size=1, max_size=6
    ),
)
def test_no_first_chunk_behind_known_tokens_takes_longer_than_it_may(
    token_s: float, doubles_after: int, prompts: list[tuple[int, int]]
) -> None:
    machine = Machine(token_s, doubles_after)
    machine.read(0, 3000)
    for known, tokens in prompts:
        [(size, took_s), *_] = machine.read(known if known >= DEEP else 0, tokens)
        assert took_s <= 1.05 * TARGET_S or size <= 16


sizes = st.integers(0, 4096)


@pytest.mark.parametrize(
    ("seen", "shape", "is_new"),
    [
        ((4, 0, 0), (4, 0, 0), False),
        ((4, 0, 0), (7, 0, 0), False),
        ((4, 0, 0), (8, 0, 0), True),
        ((4, 0, 0), (3, 0, 0), True),
        ((4, 1, 32), (4, 1, 63), False),
        ((4, 1, 32), (4, 1, 64), True),
        ((4, 1, 32), (4, 2, 32), True),
        ((4, 1, 32), (4, 0, 0), True),
    ],
)
def test_a_shape_is_new_until_one_of_its_class_has_run(
    seen: tuple[int, int, int], shape: tuple[int, int, int], is_new: bool
) -> None:
    shapes = SeenShapes()
    assert shapes.extra_s(shape) == COMPILE_S
    shapes.saw(seen)
    assert shapes.extra_s(shape) == (COMPILE_S if is_new else 0.0)


@settings(max_examples=40)
@given(st.lists(st.tuples(sizes, sizes, sizes)))
def test_a_shape_that_ran_is_never_new(ran: list[tuple[int, int, int]]) -> None:
    shapes = SeenShapes()
    for shape in ran:
        shapes.saw(shape)
    assert all(shapes.extra_s(shape) == 0.0 for shape in ran)
