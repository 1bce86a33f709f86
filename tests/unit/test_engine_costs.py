"""The pace of reading prompts: chunks, predictions, costs; on simulated machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.prefill import (
    DEEP,
    FIRST_CHUNK,
    FIXED_CHUNK,
    LARGEST_CHUNK,
    SMALLEST_CHUNK,
    CostModel,
    PassCost,
)
from mlxsup.worker.engines.mlx.shapes import COMPILE_S, SeenShapes, pass_shape, pass_size

STEP_TIMEOUT_S = 30.0
TARGET_S = 0.25

Takes = Callable[[int], float]
"""Seconds of a pass by its cost: rows × tokens."""


def make_costs(
    target_s: float = TARGET_S, step_timeout_s: float = STEP_TIMEOUT_S, **options: int
) -> CostModel:
    return CostModel(
        decode_stall_target_s=target_s,
        step_timeout_s=step_timeout_s,
        largest_chunk=options.get("largest_chunk", LARGEST_CHUNK),
        is_fixed=bool(options.get("is_fixed")),
    )


def saw(costs: CostModel, longest: int, took_s: float, *, rows: int = 1, decode: int = 0) -> None:
    costs.saw_chunk(prefill_rows=rows, longest=longest, decode_rows=decode, took_s=took_s)


def chunk(costs: CostModel, rows: int = 1, decode: int = 0) -> int:
    return costs.chunk(prefill_rows=rows, decode_rows=decode)


def predict(costs: CostModel, longest: int, rows: int = 1) -> float:
    return costs.predict_chunk_s(prefill_rows=rows, longest=longest)


def prefill(
    costs: CostModel, tokens: int, takes: Takes, decode: int = 0
) -> list[tuple[int, float]]:
    """Read a prompt; return its chunks, with the seconds that each took."""
    chunks = []
    while tokens > 0:
        size = min(chunk(costs, decode=decode), tokens)
        saw(costs, size, takes(size), decode=decode)
        chunks.append((size, takes(size)))
        tokens -= size
    return chunks


# ---------------------------------------------------------------- the size of a chunk
def test_the_first_chunk_is_small_and_shared_by_the_rows() -> None:
    costs = make_costs()
    assert [chunk(costs, rows) for rows in (1, 4, 64)] == [
        FIRST_CHUNK, FIRST_CHUNK // 4, SMALLEST_CHUNK,
    ]  # fmt: skip


@pytest.mark.parametrize("unit_s", [0.1, 0.03, 0.001, 1e-5])
def test_chunks_stay_below_the_limits_on_any_machine_C9_F5(unit_s: float) -> None:
    def takes(cost: int) -> float:
        return 0.01 + unit_s * cost

    assert all(took_s <= 2.0 for _, took_s in prefill(make_costs(), 3000, takes))
    busy = prefill(make_costs(), 3000, takes, decode=2)
    assert all(took_s <= TARGET_S for _, took_s in busy[1:])
    tight = prefill(make_costs(60.0, step_timeout_s=1.0), 500, lambda cost: 0.01 * cost, decode=1)
    assert all(took_s <= 0.1 for _, took_s in tight), "a tenth of the limit of a step"


def test_a_chunk_at_most_doubles_and_has_its_limits() -> None:
    costs = make_costs()
    saw(costs, 10, 0.001)
    assert (chunk(costs), chunk(costs, rows=3)) == (20, 6)
    saw(costs, 4, 0.001)
    assert chunk(costs) == 20, "twice the largest, not the latest"
    saw(costs, 2000, 0.001, rows=2)
    assert chunk(costs) == LARGEST_CHUNK
    slow = make_costs()
    saw(slow, 8, 80.0)
    assert chunk(slow) == SMALLEST_CHUNK
    bounded = make_costs(largest_chunk=256)
    sizes = [size for size, _ in prefill(bounded, 2000, lambda cost: 0.005 + 1e-5 * cost)]
    assert max(sizes) == 256
    assert sizes.index(256) <= 6


def test_a_fixed_chunk_depends_on_nothing_measured() -> None:
    costs = make_costs(is_fixed=True)
    assert chunk(costs, rows=3) == FIXED_CHUNK
    saw(costs, 8, 5.0)
    assert chunk(costs, decode=4) == FIXED_CHUNK
    # The stall limit follows the prediction, so that a slow machine is not taken for stuck.
    assert predict(costs, FIXED_CHUNK) > 30
    quick = make_costs(is_fixed=True)
    saw(quick, 8, 0.001)
    assert not quick.shows_chunk(128, 0.1)
    assert chunk(quick) == FIXED_CHUNK


def test_a_machine_that_slows_down_is_followed_at_once_and_rows_share_the_cost() -> None:
    costs = make_costs()
    prefill(costs, 2000, lambda cost: 0.01 * cost)
    assert chunk(costs, rows=4) == pytest.approx(chunk(costs) / 4, abs=1)
    slow = prefill(costs, 300, lambda cost: 0.05 * cost)
    assert all(took_s <= 2.0 for _, took_s in slow[1:])


def test_short_prompts_do_not_make_long_ones_slow() -> None:
    """A chunk of two tokens is nearly all overhead; it must not count as a slow machine."""
    costs = make_costs()
    costs.saw_decode(rows=1, took_s=0.015)
    prefill(costs, 20_000, lambda cost: 0.015 + 1e-4 * cost)
    before = chunk(costs)
    for _ in range(20):
        prefill(costs, 2, lambda cost: 0.015 + 1e-4 * cost)
    assert chunk(costs) >= before // 2


def test_a_pass_that_is_slow_itself_stays_below_the_stall_limit() -> None:
    costs = make_costs(0.02, step_timeout_s=10.0)
    for size in (8, 32):
        saw(costs, size, 0.9 + 0.02 * size)
    assert chunk(costs, decode=4) in (4, 5), "a tenth of the limit, not 45"


# ---------------------------------------------------------------- behind many known tokens
@pytest.mark.parametrize(("known", "size"), [(DEEP - 1, 140), (DEEP, 16)])
def test_behind_many_known_tokens_chunks_grow_anew(known: int, size: int) -> None:
    costs = make_costs()
    saw(costs, 100, 0.999)
    costs.begins_deep(known)
    assert chunk(costs) == size


class Machine:
    """Reads prompts; what a token costs grows with the tokens before it.

    Args:
        token_s: of a token with none before it.
        doubles_after: so many tokens before it double its cost.
    """

    def __init__(self, token_s: float, doubles_after: int) -> None:
        self.costs = make_costs()
        self._token_s = token_s
        self._doubles_after = doubles_after

    def read(self, known: int, tokens: int) -> list[tuple[int, float]]:
        """Return the size of each chunk of a prompt, and how long it took."""
        self.costs.begins_deep(known)
        chunks = []
        depth, end = known, known + tokens
        while depth < end:
            size = min(chunk(self.costs, decode=1), end - depth)
            took_s = size * self._token_s * (1 + depth / self._doubles_after)
            self.costs.saw_chunk(
                prefill_rows=1, longest=size, decode_rows=1, took_s=took_s, depth=depth
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


# ---------------------------------------------------------------- predictions
def test_a_chunk_is_predicted_by_what_a_token_has_cost_and_a_pass_beside_it_F5() -> None:
    costs = make_costs()
    saw(costs, 10, 1.0)
    assert predict(costs, 20, rows=2) == pytest.approx(4.0)
    saw(costs, 0, 9.0)
    assert predict(costs, 20, rows=2) == pytest.approx(4.0)
    costs.saw_decode(rows=1, took_s=0.5)
    assert predict(costs, 20, rows=2) == pytest.approx(4.5)
    assert costs.predict_decode_s(0) == 0.0


def test_a_slower_decode_step_counts_at_once_and_a_faster_one_by_three_tenths() -> None:
    costs, predicted = make_costs(), []
    for rows, took_s in ((1, 0.1), (1, 0.05), (2, 0.2), (2, 0.2), (1, 0.3), (1, 0.4)):
        costs.saw_decode(rows=rows, took_s=took_s)
        predicted.append((costs.predict_decode_s(1), costs.predict_decode_s(4)))
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
    costs = make_costs()
    costs.saw_decode(rows=1, took_s=0.4)
    saw(costs, 5, took_s, rows=2, decode=decode_rows)
    assert predict(costs, 3, rows=2) == pytest.approx(0.4 + 6 * unit_s, abs=0, rel=1e-12)


@pytest.mark.parametrize(
    ("longest", "took_s", "is_believed"),
    [(24, 0.1749, False), (24, 0.1751, True), (25, 0.1749, True), (24, 0.16, False)],
)
def test_a_small_chunk_says_that_tokens_are_slow_only_if_it_was_slow_itself(
    longest: int, took_s: float, is_believed: bool
) -> None:
    """A quarter of the largest is large enough; what was planned for a target of 0.25 s is slow."""
    costs = make_costs()
    saw(costs, 100, 0.5)
    saw(costs, longest, took_s)
    unit_s = predict(costs, 1) - predict(costs, 0)
    assert unit_s == pytest.approx(took_s / longest if is_believed else 0.005)


@given(
    steps=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.floats(0, 100)), max_size=60)
)
def test_chunks_are_always_in_range(steps: list[tuple[int, int, float]]) -> None:
    costs = make_costs()
    for prefill_rows, decode_rows, took_s in steps:
        longest = chunk(costs, prefill_rows, decode_rows)
        assert SMALLEST_CHUNK <= longest <= LARGEST_CHUNK
        if prefill_rows:
            saw(costs, longest, took_s, rows=prefill_rows, decode=decode_rows)
        elif decode_rows:
            costs.saw_decode(rows=decode_rows, took_s=took_s)
        assert predict(costs, longest, prefill_rows) >= 0
        assert costs.predict_decode_s(decode_rows) >= 0


# ---------------------------------------------------------------- a pass beside its tokens
PASS_S, TOKEN_S = 0.018, 15e-6
"""Of a large model on a GPU."""


def gpu(cost: int) -> float:
    return PASS_S + TOKEN_S * cost


def learned(costs: Iterable[int], takes: Takes = gpu) -> PassCost:
    found = PassCost()
    for cost in costs:
        found.saw(cost, takes(cost), is_slow=False)
    return found


def test_two_sizes_tell_a_pass_from_its_tokens() -> None:
    found = learned([8, 128])
    assert (found.pass_s, found.unit_s) == pytest.approx((PASS_S, TOKEN_S))
    assert found.predict_s(2048) == pytest.approx(gpu(2048))
    assert found.worthwhile == int(PASS_S / TOKEN_S)
    alike = learned([8, 16, 31])
    assert alike.pass_s == 0.0, "they are too much alike"
    alike.saw(64, gpu(64), is_slow=False)
    assert alike.pass_s == pytest.approx(PASS_S, rel=0.02)


def test_a_pass_takes_no_less_than_a_step_that_reads_nothing() -> None:
    found = PassCost()
    found.saw_none(0.005)
    for cost in (8, 32):
        found.saw(cost, 0.005 + 0.001 * cost, is_slow=False)
        assert (found.pass_s, found.unit_s) == pytest.approx((0.005, 0.001))
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


def test_the_pass_of_a_prompt_can_be_shared_unless_its_tokens_take_longer() -> None:
    costs = make_costs()
    assert costs.shared_pass_s(1) == 0.0, "nothing was measured"
    for cost in (8, 1024):
        saw(costs, cost, 0.018 + cost * 0.00002)
    assert costs.shared_pass_s(850) == pytest.approx(0.018)
    assert costs.shared_pass_s(950) == 0.0


@given(
    passes=st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 100), st.booleans()), min_size=1),
    nothing=st.lists(st.floats(0, 100)),
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


# ---------------------------------------------------------------- sizes that are shown, new shapes
PREPARED_S = 0.4
PROMPTS, TOKENS = 16, 91
"""Of a burst."""


def small_gpu(cost: int) -> float:
    return 0.0055 + 17e-6 * cost


def shown(prepared_s: float = 0.0) -> CostModel:
    """As the warm-up leaves it, on a GPU that takes so many seconds for the first pass of each
    shape."""
    costs = make_costs()
    saw(costs, FIRST_CHUNK, small_gpu(FIRST_CHUNK))
    for size in (128, 1024):
        for costs.is_first in (True, False):
            assert costs.shows_chunk(size, 0.1)
            saw(costs, size, small_gpu(size) + costs.is_first * prepared_s)
    return costs


@pytest.mark.parametrize("prepared_s", [0.0, 0.09, PREPARED_S])
def test_a_shown_size_says_nothing_in_the_first_step_of_its_shape(prepared_s: float) -> None:
    """A pass over 128 tokens that prepares the GPU for 0.09 s would make them seem dear: bursts
    would not gather, and be read in pieces of some tokens, each of a shape of its own."""
    costs = shown(prepared_s)
    expected = pytest.approx(small_gpu(PROMPTS * TOKENS), rel=0.1)
    assert predict(costs, TOKENS, rows=PROMPTS) == expected
    assert costs.shared_pass_s(TOKENS) == pytest.approx(0.0055, rel=0.1)
    assert chunk(costs, PROMPTS, 1) >= TOKENS


@pytest.mark.parametrize(
    ("is_first", "took_s", "is_believed"),
    [(True, PREPARED_S, False), (False, PREPARED_S, True), (True, 0.15 * STEP_TIMEOUT_S, True)],
    ids=["first", "second", "first, near the stall limit"],
)
def test_the_first_step_of_a_shape_says_nothing_of_its_tokens(
    is_first: bool, took_s: float, is_believed: bool
) -> None:
    """Otherwise they seem to cost more than the pass, and the next burst does not gather."""
    costs = shown()
    before = predict(costs, TOKENS, rows=PROMPTS)
    assert costs.shared_pass_s(TOKENS) == pytest.approx(0.0055, rel=0.1)
    costs.is_first = is_first
    saw(costs, TOKENS, took_s, rows=PROMPTS)
    after = predict(costs, TOKENS, rows=PROMPTS)
    assert after == (pytest.approx(took_s, rel=0.1) if is_believed else before)
    assert (costs.shared_pass_s(TOKENS) == 0.0) is is_believed


def test_a_size_is_shown_once_and_only_while_that_is_cheap() -> None:
    costs = make_costs()
    assert not costs.shows_chunk(128, 0.1), "nothing was measured"
    saw(costs, FIRST_CHUNK, gpu(FIRST_CHUNK))
    assert costs.shows_chunk(128, 0.1)
    saw(costs, 0, 0.01, rows=0)
    assert chunk(costs) == 128, "a step that reads nothing leaves it for the next"
    slow = make_costs()
    saw(slow, 8, 0.101)
    assert not slow.shows_chunk(128, 0.1)
    assert chunk(slow) == 16


def test_forget_drops_times_of_compiling() -> None:
    costs = make_costs()
    saw(costs, 8, 1.5)
    costs.saw_decode(rows=4, took_s=20.0)
    costs.forget()
    assert (predict(costs, 8), costs.predict_decode_s(4), chunk(costs)) == (0.0, 0.0, FIRST_CHUNK)


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
    assert shapes.saw(seen, [])
    assert shapes.extra_s(shape) == (COMPILE_S if is_new else 0.0)
    assert shapes.saw(shape, []) is is_new
    assert shapes.saw(shape, [(1, 8, 256, True)]), "a padded pass of a shape of its own"
    assert not shapes.saw(shape, [(1, 8, 256, True)])
    assert shapes.has_pass((1, 8, 256, True))
    assert not shapes.has_pass((1, 8, 256, False)), "the same with a mask"


@pytest.mark.parametrize(
    ("ran", "rows", "tokens", "held", "width"),
    [
        ([], 1, 100, 0, 128),
        ([(1, 128, 256)], 1, 100, 0, 128),
        ([(1, 192, 256)], 1, 100, 0, 192),
        ([(1, 512, 512)], 1, 100, 0, 512),
        ([(1, 640, 640)], 1, 100, 0, 128),  # 512 tokens more are dearer than a new shape
        ([(1, 192, 256), (1, 512, 512)], 1, 100, 0, 192),
        ([(4, 192, 256)], 1, 100, 0, 128),
        ([(4, 192, 256)], 4, 100, 0, 192),
        ([(4, 256, 256)], 4, 100, 0, 128),
        ([(1, 192, 256)], 1, 100, 300, 128),
        ([(1, 192, 512)], 1, 100, 300, 192),
        ([(1, 4096, 4096)], 1, 3000, 0, 3072),
    ],
)
def test_pass_is_padded_to_a_shape_that_has_run_if_that_is_cheaper_than_a_new_one(
    ran: list[tuple[int, int, int]], rows: int, tokens: int, held: int, width: int
) -> None:
    shapes = SeenShapes()
    shapes.saw((1, 1, 1), [(*one, one[1] == one[2]) for one in ran])  # from the beginning
    found = shapes.width_for(rows, tokens, held, is_even=True, plan_s=0.4, token_s=0.001)
    assert found == width


@pytest.mark.parametrize(
    ("most", "held", "size"),
    [
        (2048, 0, 2048),
        (2000, 0, 1792),
        (2048, 30_720, 2048),
        (1280, 896, 896),  # 1,152 is no size of a pass
        (1280, 3072, 1024),
        (1536, 32_000, 768),
        (1536, 31_744, 1024),
        (1000, 8192, 896),  # the next size of keys is too far
        (2048, 1234, 1838),  # ends at 3,072
        (2048, 31_000, 1768),
        (100, 0, 96),
        (7, 5000, 7),
    ],
)
def test_long_prompt_is_read_up_to_sizes_of_keys(most: int, held: int, size: int) -> None:
    assert pass_size(most, held) == size


@given(st.integers(1, 2048), st.integers(0, 60_000))
def test_no_pass_of_a_long_prompt_is_less_than_half_of_what_it_may_be(most: int, held: int) -> None:
    assert most / 2 <= pass_size(most, held) <= most


@pytest.mark.parametrize(
    ("tokens", "held", "is_even", "keys", "is_causal"),
    [
        (2048, 0, True, 2048, True),
        (2048, 30_720, True, 32_768, True),
        (2048, 43_008, True, 45_056, True),
        (512, 8192, True, 9216, False),  # further keys are masked
        (2048, 30_720, False, 32_768, False),
    ],
)
def test_pass_has_no_mask_if_no_row_is_padded_and_its_keys_are_as_many_as_a_size(
    tokens: int, held: int, is_even: bool, keys: int, is_causal: bool
) -> None:
    assert pass_shape(1, tokens, held, is_even=is_even) == (1, tokens, keys, is_causal)
