"""Whether the bursts of short prompts are gathered in every life of a model, on a GPU."""

from __future__ import annotations

import pytest

from mlxsup.worker.engines.mlx.pace import Pace
from mlxsup.worker.engines.mlx.prefill import FIRST_CHUNK, PrefillPacer
from mlxsup.worker.engines.mlx.shapes import SeenShapes

PASS_S, TOKEN_S = 0.0067, 2e-5
PREPARED_S = 0.1
"""What the first pass of each number of prompts takes besides."""

PROMPTS, TOKENS = 16, 91
FRESH = Pace(unit_s=TOKEN_S, pass_s=PASS_S, largest_cost=1024, decode_s=0.003, decode_rows=1)
"""As the warm-up of the first life has measured it."""


class Life:
    """A worker on a machine of that speed.

    Attributes:
        pacer: of its batch.

    Args:
        pace: of the life before.
        slower: how many times as long its first pass takes.
    """

    def __init__(self, pace: Pace, *, slower: float) -> None:
        self.pacer = PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0)
        self._shapes = SeenShapes()
        self._prepared: set[int] = set()
        self._pass(1, FIRST_CHUNK, slower * (PASS_S + TOKEN_S * FIRST_CHUNK))
        self.pacer.resume(pace)

    def burst(self) -> int:
        """Reads a burst in one pass, or as it arrives; gives the number of passes."""
        is_gathered = self.pacer.shared_pass_s(TOKENS) > 0.0
        for prompts in [PROMPTS] if is_gathered else [1, 3, PROMPTS - 4]:
            took_s = PASS_S + TOKEN_S * prompts * TOKENS
            if prompts not in self._prepared:
                self._prepared.add(prompts)
                took_s += PREPARED_S
            self._pass(prompts, TOKENS, took_s)
        return 1 if is_gathered else 3

    def _pass(self, prompts: int, tokens: int, took_s: float) -> None:
        shape = (0, prompts, tokens)
        self.pacer.is_first = self._shapes.is_new(shape)
        self._shapes.saw(shape)
        self.pacer.saw_chunk(prefill_rows=prompts, longest=tokens, decode_rows=0, took_s=took_s)


@pytest.mark.parametrize("slower", [1.0, 1.5, 3.0])
def test_each_life_gathers_its_bursts_from_the_first_one_on(slower: float) -> None:
    pace = FRESH
    for _ in range(5):
        life = Life(pace, slower=slower)
        assert [life.burst() for _ in range(3)] == [1, 1, 1]
        learned = life.pacer.learned()
        assert learned is not None
        pace = learned


def test_what_this_life_has_measured_counts_more_than_what_the_one_before_has() -> None:
    life = Life(FRESH, slower=1.0)
    life.pacer.is_first = False
    life.pacer.saw_chunk(prefill_rows=1, longest=TOKENS, decode_rows=0, took_s=0.5)
    assert life.pacer.shared_pass_s(TOKENS) == 0.0


def test_caution_still_sizes_the_first_chunk() -> None:
    life = Life(FRESH, slower=1.0)
    predicted_s = life.pacer.predict_chunk_s(prefill_rows=1, longest=1024)
    assert predicted_s > 2 * (PASS_S + TOKEN_S * 1024)


def test_a_pace_whose_tokens_take_longer_than_the_pass_gathers_nothing() -> None:
    pace = Pace(unit_s=1e-3, pass_s=PASS_S, largest_cost=1024, decode_s=0.003, decode_rows=1)
    assert Life(pace, slower=1.0).pacer.shared_pass_s(TOKENS) == 0.0
