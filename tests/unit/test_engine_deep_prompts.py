"""Chunks of prompts that begin behind many known tokens, where each token costs more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.pass_cost import APART
from mlxsup.worker.engines.mlx.prefill import (
    DEEP,
    HEADROOM,
    LARGEST_CHUNK,
    LARGEST_CPU_CHUNK,
    PrefillPacer,
)

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


def test_no_chunk_of_a_long_prompt_takes_longer_than_was_planned() -> None:
    """Far behind the beginning all of them are small next to the first: what they take counts."""
    machine = Machine(1e-4, 1000, LARGEST_CPU_CHUNK)
    machine.pacer.saw_chunk(prefill_rows=1, longest=1024, decode_rows=0, took_s=0.1)
    chunks = machine.read(0, 40_000)
    assert min(size for size, _ in chunks) * APART < 1024
    assert max(took_s for _, took_s in chunks) <= 1.05 * HEADROOM * TARGET_S


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
