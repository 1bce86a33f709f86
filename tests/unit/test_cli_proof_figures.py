"""What the figures of `mlxsup doctor --prove` must be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.cli.proof.figures import (
    Answer,
    Kill,
    Reading,
    Unload,
    Verdict,
    judge_kills,
    judge_reading,
    judge_seed,
    judge_unload,
)
from mlxsup.cli.proof.measuring import longest_gap

ALONE = Answer(text="abcdef", token_ids=[1, 2, 3, 4, 5, 6])
RESUMED = replace(ALONE, resumed=2)
KILLS = (Kill(tokens=2, pause_s=0.5), Kill(tokens=4, pause_s=1.25))
CHANGED = replace(RESUMED, text="abcdxf", token_ids=[1, 2, 3, 4, 9, 6])


@pytest.mark.parametrize(
    ("second", "is_exact", "verdict", "words"),
    [
        (ALONE, True, Verdict.PASSED, "6 tokens, twice the same text"),
        (CHANGED, True, Verdict.FAILED, "differ from character 5 on"),
        (CHANGED, False, Verdict.SKIPPED, "rounding may do that"),
        (replace(ALONE, token_ids=[1, 2, 3, 4, 5, 7]), True, Verdict.FAILED, "the tokens differ"),
        (replace(ALONE, failure="it broke"), False, Verdict.FAILED, "it broke"),
    ],
)
def test_the_same_seed(second: Answer, is_exact: bool, verdict: Verdict, words: str) -> None:
    figure = judge_seed(ALONE, second, is_exact=is_exact)
    assert figure.verdict is verdict
    assert words in figure.text


@pytest.mark.parametrize(
    ("killed", "kills", "is_exact", "verdict", "words"),
    [
        (RESUMED, KILLS, True, Verdict.PASSED, "the same, every byte; pauses of 0.5 s and 1.2 s"),
        (CHANGED, KILLS, True, Verdict.FAILED, "differ from character 5 on"),
        (CHANGED, KILLS, False, Verdict.SKIPPED, "rounding may do that"),
        (replace(CHANGED, token_ids=[1, 7, 3, 4, 9, 6]), KILLS, False, Verdict.FAILED, "differ"),
        (replace(CHANGED, token_ids=[1, 2, 3]), KILLS, False, Verdict.FAILED, "3 tokens instead"),
        (replace(RESUMED, resumed=1), KILLS, True, Verdict.FAILED, "resumed 1 times, not 2"),
        (RESUMED, KILLS[:1], True, Verdict.SKIPPED, "complete before kill number 2"),
        (replace(RESUMED, text="ab", failure="gone"), KILLS, True, Verdict.FAILED, "gone"),
    ],
)
def test_two_kills(
    killed: Answer, kills: tuple[Kill, ...], is_exact: bool, verdict: Verdict, words: str
) -> None:
    figure = judge_kills(ALONE, killed, kills, is_exact=is_exact)
    assert figure.verdict is verdict
    assert words in figure.text


@pytest.mark.parametrize(
    ("read_s", "gap_s", "verdict"),
    [
        (10.0, 4.9, Verdict.PASSED),
        (10.0, 5.1, Verdict.FAILED),
        (0.2, 0.2, Verdict.PASSED),
        (1.1, 1.05, Verdict.FAILED),
    ],
)
def test_the_other_model_does_not_wait_for_the_prompt(
    read_s: float, gap_s: float, verdict: Verdict
) -> None:
    reading = Reading(prompt_tokens=9, read_s=read_s, pieces=3, gap_s=gap_s, alone_gap_s=0.01)
    assert judge_reading(reading).verdict is verdict


@pytest.mark.parametrize(
    ("alive", "reserved", "verdict"),
    [([], 0, Verdict.PASSED), ([7], 0, Verdict.FAILED), ([], 1, Verdict.FAILED)],
)
def test_nothing_is_left_of_an_unload(alive: list[int], reserved: int, verdict: Verdict) -> None:
    unload = Unload(held_bytes=2**30, alive=alive, reserved_bytes=reserved, gained_bytes=0)
    assert judge_unload(unload).verdict is verdict


def test_a_gap_counts_with_its_part_of_the_time() -> None:
    arrivals = [0.0, 1.0, 1.5, 4.0, 4.5]
    assert longest_gap(arrivals) == 2.5
    assert longest_gap(arrivals, 2.0, 3.0) == 1.0
    assert longest_gap(arrivals, 0.25, 1.25) == 0.75
    assert longest_gap(arrivals, 4.1) == pytest.approx(0.4)
    assert longest_gap([1.0]) == 0.0
