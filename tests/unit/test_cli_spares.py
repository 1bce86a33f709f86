"""What `mlxsup status` says about spare workers."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.cli.terminal.spare_lines import spare_lines

GIB = 2**30


def spares(wanted: int, *states: str, retry_in_s: float | None = None) -> dict[str, Any]:
    workers = [{"state": state, "pid": 7, "reserved_bytes": GIB // 4} for state in states]
    return {"spares": {"wanted": wanted, "retry_in_s": retry_in_s, "workers": workers}}


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ({}, []),
        (spares(0), []),
        (spares(1), ["spare workers: none (1 wanted), 0.0 MiB"]),
        (spares(1, "waiting"), ["spare workers: 1 waiting (1 wanted), 256.0 MiB"]),
        (
            spares(2, "waiting", "waiting", "starting"),
            ["spare workers: 2 waiting, 1 starting (2 wanted), 768.0 MiB"],
        ),
        (spares(0, "ending"), ["spare workers: 1 ending (0 wanted), 256.0 MiB"]),
        (
            spares(1, retry_in_s=125.0),
            ["spare workers: none (1 wanted), 0.0 MiB; one died, the next starts in 2m 5s"],
        ),
    ],
)
def test_they_have_a_line_if_there_are_any_or_should_be(
    value: dict[str, Any], lines: list[str]
) -> None:
    assert spare_lines(value, None) == lines


def test_a_line_that_is_too_long_continues_in_the_next() -> None:
    value = spares(3, "waiting", "starting", retry_in_s=60.0)
    lines = spare_lines(value, 30)
    assert " ".join(lines) == spare_lines(value, None)[0]
    assert max(map(len, lines)) <= 30
