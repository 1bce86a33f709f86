"""Which prompts are long, and what a step reads that may read nothing; on no machine at all."""

from __future__ import annotations

import pytest

from mlxsup.worker.engines.mlx.prefill import FIXED_CHUNK, PrefillPacer
from mlxsup.worker.engines.mlx.prompt_turns import (
    PromptRead,
    PromptTurns,
    SerialTurns,
    TogetherTurns,
)

WAYS = [SerialTurns, TogetherTurns]


def turns_of(way: type[PromptTurns]) -> PromptTurns:
    """Turns with chunks of a fixed size."""
    return way(PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0, is_fixed=True))


def read(turns: PromptTurns, uid: int, done: int, *, is_over: bool = False) -> None:
    turns.take([PromptRead(uid=uid, done=done, is_over=is_over)], decode_rows=0, took_s=0.1)


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_that_one_chunk_reads_is_short(way: type[PromptTurns]) -> None:
    turns = turns_of(way)
    assert not turns.has_long(decode_rows=0)
    turns.add(1, total=FIXED_CHUNK + 1, known=0)  # its last token is not read
    assert not turns.has_long(decode_rows=0)
    turns.add(2, total=FIXED_CHUNK + 2, known=0)
    assert turns.has_long(decode_rows=0)
    turns.drop(2)
    assert not turns.has_long(decode_rows=0)


@pytest.mark.parametrize("way", WAYS)
def test_what_the_cache_knows_makes_no_prompt_long(way: type[PromptTurns]) -> None:
    turns = turns_of(way)
    turns.add(1, total=2000, known=1900)
    assert not turns.has_long(decode_rows=0)


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_that_took_one_chunk_is_long_up_to_its_last(way: type[PromptTurns]) -> None:
    turns = turns_of(way)
    turns.add(1, total=FIXED_CHUNK + 50, known=0)
    read(turns, 1, FIXED_CHUNK)
    assert turns.has_long(decode_rows=0)
    assert not turns.has_read
    read(turns, 1, FIXED_CHUNK + 49)
    assert not turns.has_long(decode_rows=0)
    assert turns.has_read
    read(turns, 1, FIXED_CHUNK + 50, is_over=True)
    assert not turns.has_read


def test_serial_passes_that_are_held_only_take_prompts_that_need_no_reading() -> None:
    turns = turns_of(SerialTurns)
    turns.add(1, total=600, known=0)
    turns.add(2, total=600, known=599)
    turns.add(3, total=1, known=0)
    assert turns.hold() == {2: 0, 3: 0}


def test_a_pass_over_all_prompts_that_is_held_reads_none_of_them() -> None:
    turns = turns_of(TogetherTurns)
    turns.add(1, total=600, known=0)
    turns.add(2, total=600, known=599)
    assert turns.hold() == {1: 0, 2: 0}


def test_only_what_was_read_is_progress() -> None:
    turns = turns_of(TogetherTurns)
    turns.add(1, total=600, known=0)
    turns.add(2, total=10, known=9)
    reads = [PromptRead(uid=1, done=0, is_over=False), PromptRead(uid=2, done=1, is_over=True)]
    assert turns.take(reads, decode_rows=0, took_s=0.1) == [(2, 10, 10, 1)]
    assert turns.take([reads[0]], decode_rows=0, took_s=0.1) == []
    again = PromptRead(uid=1, done=256, is_over=False)
    assert turns.take([again], decode_rows=0, took_s=0.1) == [(1, 256, 600, 256)]
