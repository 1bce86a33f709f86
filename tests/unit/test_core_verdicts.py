"""What each end of a process means for the requests that it held: who is accused, and how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.core.health.blame import (
    APPROACH_TOKENS,
    LOWERED_ROWS_S,
    MAX_QUARANTINES_IN_A_ROW,
    PROBATION_S,
    PROBATION_TOKENS,
    QUARANTINE_S,
    SUSPICION_S,
    Blame,
    Digest,
    Evidence,
    Held,
    Verdict,
    digest_of,
)

ONE, TWO, THREE = (Held(digest=Digest(name)) for name in (b"1", b"2", b"3"))


def test_the_limits_of_suspicion_are_those_that_are_promised() -> None:
    assert (SUSPICION_S, QUARANTINE_S, LOWERED_ROWS_S) == (3600.0, 3600.0, 3600.0)
    assert (PROBATION_TOKENS, PROBATION_S, APPROACH_TOKENS) == (3, 0.015, 64)
    assert MAX_QUARANTINES_IN_A_ROW == 3


def test_verdicts_from_the_first_crash_to_the_quarantine() -> None:
    blame = Blame()
    assert blame.judge(Evidence.ACCUSES, [], 0.0) == Verdict(evidence=Evidence.ACCUSES)
    assert blame.judge(Evidence.NONE, [ONE], 0.0) == Verdict(evidence=Evidence.NONE)
    assert blame.judge(Evidence.ASKED, [ONE], 0.0) == Verdict(evidence=Evidence.ASKED)
    assert (blame.suspects, blame.is_anyone_on_probation) == (0, False)
    assert blame.judge(Evidence.ACCUSES, [ONE], 0.0) == Verdict(
        evidence=Evidence.ACCUSES, story="1 request under suspicion"
    )
    assert (blame.suspects, blame.on_probation, blame.is_suspect(ONE.digest)) == (
        1, 0, True,
    )  # fmt: skip
    assert blame.judge(Evidence.ACCUSES, [TWO, TWO, THREE], 1.0).story == (
        "2 requests under suspicion"
    ), "equal ones are one"
    assert blame.judge(Evidence.ACCUSES, [ONE, TWO], 2.0) == Verdict(
        evidence=Evidence.ACCUSES,
        story="3 requests under suspicion for the second time: each runs alone until it has"
        " come past the crash",
    )
    assert (blame.on_probation, blame.is_anyone_on_probation) == (3, True)
    verdict = blame.judge(Evidence.ACCUSES, [ONE], 3.0)
    assert verdict == Verdict(
        evidence=Evidence.ACCUSES,
        culprit=ONE.digest,
        story="the suspect whose turn it was killed its engine again: it is quarantined",
    )
    assert not verdict.is_counted
    assert (blame.suspects, blame.quarantined) == (2, 1)
    assert blame.quarantined_for_s(ONE.digest, 3.0) == 3600.0
    assert blame.quarantined_for_s(ONE.digest, 3602.0) == 1.0
    assert blame.quarantined_for_s(ONE.digest, 3603.0) is None
    assert blame.quarantined_for_s(TWO.digest, 3.0) is None


def test_the_third_culprit_in_a_row_means_that_the_engine_is_broken() -> None:
    blame = Blame()
    for number, one in enumerate((ONE, TWO, THREE)):
        for _ in range(2):
            assert blame.judge(Evidence.ACCUSES, [one], 0.0).culprit is None
        verdict = blame.judge(Evidence.ACCUSES, [one], 0.0)
        assert (verdict.culprit is None) is (number == 2)
    failure = (
        "the engine is broken: 3 requests in a row killed it when it was their turn, and none"
        " completed"
    )
    assert verdict == Verdict(evidence=Evidence.ACCUSES, failure=failure, story=failure)
    assert verdict.is_counted
    assert (blame.suspects, blame.quarantined) == (0, 0)
    for _ in range(3):
        verdict = blame.judge(Evidence.ACCUSES, [ONE], 0.0)
    assert verdict.culprit == ONE.digest, "it is counted from the beginning again"


def test_suspicion_and_fewer_rows_last_for_an_hour() -> None:
    blame = Blame()
    blame.judge(Evidence.ACCUSES, [ONE], 0.0)
    blame.judge(Evidence.OUT_OF_MEMORY, [TWO, THREE, ONE], 10.0)
    blame.expire(3599.0)
    assert (blame.suspects, blame.rows) == (1, 1)
    blame.expire(3600.0)
    assert (blame.suspects, blame.rows) == (0, 1)
    blame.expire(3609.9)
    assert blame.rows == 1
    blame.expire(3610.0)
    assert blame.rows is None


@pytest.mark.parametrize(("held", "rows"), [(2, 1), (3, 1), (4, 2), (9, 4)])
def test_half_of_what_ran_out_of_memory_may_run_from_then_on(held: int, rows: int) -> None:
    blame = Blame()
    verdict = blame.judge(Evidence.OUT_OF_MEMORY, [ONE] * held, 0.0)
    story = f"out of memory with {held} requests: from now on at most {rows} at once"
    assert verdict == Verdict(evidence=Evidence.OUT_OF_MEMORY, story=story)
    assert (blame.rows, blame.suspects) == (rows, 0)
    blame.lift()
    assert blame.rows is None


def test_what_runs_out_of_memory_alone_for_the_second_time_is_too_large() -> None:
    blame = Blame()
    assert blame.judge(Evidence.OUT_OF_MEMORY, [ONE], 0.0) == Verdict(
        evidence=Evidence.OUT_OF_MEMORY,
        is_tried_again=True,
        story="out of memory with 1 request alone: other models have to give back memory before it"
        " may run once more",
    )
    again = replace(ONE, shortages=1)
    assert blame.judge(Evidence.OUT_OF_MEMORY, [again], 0.0) == Verdict(
        evidence=Evidence.OUT_OF_MEMORY,
        is_too_large=True,
        story="a request alone needs more memory than there is, for the second time",
    )
    assert blame.rows is None
    nothing = blame.judge(Evidence.OUT_OF_MEMORY, [], 0.0)
    assert nothing == Verdict(evidence=Evidence.OUT_OF_MEMORY)


def test_a_crash_is_come_past_by_the_third_token_and_some_time_after_the_first() -> None:
    blame = Blame()
    at_ten = replace(ONE, tokens=10)
    for _ in range(2):
        blame.judge(Evidence.ACCUSES, [at_ten, TWO], 0.0)

    def gained(tokens: int, now: float) -> bool:
        return blame.gained(replace(ONE, tokens=tokens), now)

    assert not gained(11, 0.0)
    assert not gained(12, 0.02)
    assert not gained(13, 0.0149)
    assert blame.on_probation == 2
    assert gained(13, 0.015)
    assert blame.on_probation == 1
    assert not gained(14, 9.0), "once"
    assert blame.is_suspect(ONE.digest), "until it completes"
    blame.completed(ONE.digest)
    assert blame.suspects == 1


def test_a_digest_is_that_of_the_model_and_the_body() -> None:
    assert len(digest_of(ModelName("m"), b"x")) == 16
    assert digest_of(ModelName("ab"), b"c") != digest_of(ModelName("a"), b"bc")
