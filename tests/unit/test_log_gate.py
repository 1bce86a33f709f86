"""What the log gate of the integration tests lets pass, and what it does not (J1)."""

from __future__ import annotations

from support.log_gate import Provoked, violations

RAISED = """\
2026-01-01T00:00:00.000Z ERROR worker dies code=70
Traceback (most recent call last):
  File "life.py", line 1, in run
    step()
StepError: on demand
2026-01-01T00:00:01.000Z INFO started
"""
EXCUSE = Provoked(word="Traceback", model="m", pattern="StepError: on demand", at_most=1)


def test_a_log_without_an_unwanted_word_passes() -> None:
    assert violations({"mlxsup": "fine\n"}, {"m": "a property, Failed 2\n"}, []) == []


def test_a_traceback_is_reported_with_its_exception() -> None:
    (problem,) = violations({}, {"m": RAISED}, [])
    assert problem == "'Traceback' in the log of m: StepError: on demand"


def test_only_the_provoked_traceback_of_that_worker_passes() -> None:
    assert violations({}, {"m": RAISED}, [EXCUSE]) == []
    (another_model,) = violations({}, {"n": RAISED}, [EXCUSE])
    assert another_model.startswith("'Traceback' in the log of n")
    other = RAISED.replace("StepError", "KeyError")
    assert violations({}, {"m": RAISED + other}, [EXCUSE]) == [
        "'Traceback' in the log of m: KeyError: on demand"
    ]


def test_more_than_the_provoked_number_does_not_pass() -> None:
    assert violations({}, {"m": 3 * RAISED}, [EXCUSE]) == [
        "'Traceback' 3 times in the log of m, at most 1 expected"
    ]


def test_nothing_excuses_a_traceback_of_the_supervisor() -> None:
    own = {"mlxsup": "\n".join(f"  {line} m" for line in RAISED.splitlines())}
    (problem,) = violations(own, {"m": RAISED}, [EXCUSE])
    assert problem.startswith("'Traceback' in mlxsup:   StepError: on demand")


def test_the_supervisor_may_quote_the_last_words_of_the_model_that_was_provoked() -> None:
    excuse = Provoked(word="rope", model="m1", pattern=r"rope\(\): wrong", at_most=1)
    quoted = 'model state model=m1 to=FAILED note="rope(): wrong"'
    assert violations({"mlxsup": quoted}, {"m1": "rope(): wrong"}, [excuse]) == []
    for line in (quoted.replace("m1", "m12"), quoted.replace("wrong", "other")):
        assert violations({"mlxsup": line}, {}, [excuse]) == [f"'rope' in mlxsup: {line}"]
