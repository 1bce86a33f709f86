"""What a trigger is called in the story of a model and in the logs: its name and its facts."""

from __future__ import annotations

import pytest

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Why
from mlxsup.supervisor.core.lifecycle.triggers import (
    Broke,
    HasMemory,
    LacksMemory,
    Removed,
    RowsGiveWay,
    Trigger,
    Turn,
    WantDown,
    WantRestart,
)
from mlxsup.supervisor.core.lifecycle.words import words_of


@pytest.mark.parametrize(
    ("trigger", "words"),
    [
        (HasMemory(), "has memory"),
        (WantDown(why=Why.SHUTDOWN, drain_s=30.0), "want down (shutdown, drain 30 s)"),
        (WantRestart(is_immediate=True, drain_s=0.5), "want restart (immediate, drain 0.5 s)"),
        (WantRestart(is_immediate=False, drain_s=2.0), "want restart (drain 2 s)"),
        (Turn(spare=7), "turn (spare 7)"),
        (Turn(), "turn"),
        (Broke(detail="garbage"), "broke (garbage)"),
        (
            LacksMemory(reason="a is busy", looks_again_at=None, takes_spare=True),
            "lacks memory (a is busy, takes spare)",
        ),
        (
            RowsGiveWay(keys=(RequestKey(1), RequestKey(2)), reason="2 batch rows leave"),
            "rows give way (2 keys, 2 batch rows leave)",
        ),
        (
            Removed(error=RemoteError(ErrorCode.UNKNOWN_MODEL, "m is gone"), drain_s=1.0),
            "removed (drain 1 s, m is gone)",
        ),
    ],
)
def test_a_trigger_is_its_name_with_what_it_says(trigger: Trigger, words: str) -> None:
    assert words_of(trigger) == words
