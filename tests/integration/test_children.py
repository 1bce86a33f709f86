"""A child process that is asked in lines of JSON: answers, its end, and ends that come too soon."""

from __future__ import annotations

import subprocess

import pytest

from support.child import Child, EndedError

ECHO = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps({"asked": json.loads(line)}), flush=True)
print(json.dumps({"last": True}))
"""


def test_a_child_says_answers_and_has_a_last_word() -> None:
    with Child("-c", ECHO) as child:
        assert child.line() == {"ready": True}
        assert child.ask([1, "two"]) == {"asked": [1, "two"]}
        assert child.ask() == {"asked": None}
        assert not child.is_over
        assert child.end() == {"last": True}
        assert child.is_over


def test_a_last_word_may_be_longer_than_a_pipe() -> None:
    long = "import json, sys; sys.stdin.read(); print(json.dumps({'long': 'x' * 1_000_000}))"
    with Child("-c", long) as child:
        assert len(child.end(30.0)["long"]) == 1_000_000


def test_one_without_a_last_word_ends_as_well() -> None:
    with Child("-c", "import sys; sys.stdin.read()") as child:
        assert child.end(60.0) == {}


def test_an_end_that_was_not_expected_is_an_error_wherever_it_is_noticed() -> None:
    with Child("-c", "raise SystemExit(7)") as child:
        with pytest.raises(EndedError, match="ended with 7"):
            child.line()
        with pytest.raises(EndedError, match="ended with 7"):
            child.ask("x" * 100_000)
    with Child("-c", "raise SystemExit(7)") as child, pytest.raises(EndedError, match="with 7"):
        child.end()


def test_one_that_does_not_end_is_killed_by_its_time_limit_and_by_the_end_of_the_block() -> None:
    deaf = "import time; time.sleep(600)"
    with Child("-c", deaf) as child:
        with pytest.raises(subprocess.TimeoutExpired):
            child.end(0.5)
        assert child.is_over
    with Child("-c", deaf) as child:
        assert not child.is_over
    assert child.is_over
