"""Which lines `logs --since` and `logs --previous` mean."""

from __future__ import annotations

import calendar
import time

import click
import pytest

from mlxsup.cli.duration import duration
from mlxsup.cli.log_selection import previous_generation, since

NOON = calendar.timegm(time.strptime("2026-11-21 12:00", "%Y-%m-%d %H:%M"))
RULE_1 = "--- generation 1 pid 7 2026-11-21T11:00:00Z"
OLD = "2026-11-21T11:30:00.500Z INFO old"
DUMP = "Fatal Python error: Segmentation fault"
RULE_2 = "--- generation 2 pid 8 2026-11-21T12:00:01Z"
AS_JSON = '{"at": "2026-11-21T%s.000Z", "level": "info", "message": "m"}'
NEW = "2026-11-21T12:00:02.000Z INFO new"


@pytest.mark.parametrize(
    ("lines", "written", "expected"),
    [
        ([RULE_1, OLD, DUMP, RULE_2, NEW], NOON + 2, [DUMP, RULE_2, NEW]),
        ([RULE_1, OLD], NOON + 2, []),
        ([AS_JSON % "11:30:00", AS_JSON % "12:00:02"], NOON + 2, [AS_JSON % "12:00:02"]),
        ([RULE_1, OLD, DUMP], NOON + 2, [DUMP]),
        ([RULE_1, OLD, DUMP], NOON - 2, []),
        ([DUMP], NOON + 2, [DUMP]),
        ([DUMP], NOON - 2, []),
        ([RULE_2, NEW], NOON + 2, [RULE_2, NEW]),
        ([], NOON + 2, []),
        (["2026-99-99T99:99:99Z x"], NOON + 2, ["2026-99-99T99:99:99Z x"]),
    ],
)
def test_since_shows_a_line_without_a_time_in_doubt(
    lines: list[str], written: float, expected: list[str]
) -> None:
    assert since(lines, NOON, written) == expected


def test_previous_generation_is_what_stands_before_the_last_rule() -> None:
    assert previous_generation([RULE_1, OLD, DUMP, RULE_2, NEW]) == [RULE_1, OLD, DUMP]
    assert previous_generation([OLD, DUMP, RULE_2, NEW]) == [OLD, DUMP]
    assert previous_generation([RULE_2, NEW]) is None
    assert previous_generation([NEW]) is None
    assert previous_generation([]) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5", 1.5), ("250ms", 0.25), ("2000000000", 2e9)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "5 weeks", "m"])
def test_what_is_no_duration_is_a_usage_error(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration"):
        duration(text)
