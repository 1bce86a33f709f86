"""The table of `mlxsup requests` in terminals of any width."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.cli.terminal.requests_table import request_rows

LONG_CLIENT = "a-client-with-a-long-name"


def one(**changes: Any) -> dict[str, Any]:
    """A request as `requests` lists it."""
    value = {
        "id": "5f0c12ab-1", "model": "smollm2", "client": "alice", "state": "answering",
        "tokens_sent": 12, "tokens_per_s": 40.0, "engine_s": 0.3, "place": None, "reason": None,
        "paused": None, "prefill": None, "expected_s": None,
    }  # fmt: skip
    return value | changes


REQUESTS = [
    one(),
    one(id="5f0c12ab-2", client=LONG_CLIENT, state="waiting", place=3, reason="rows",
        expected_s=12.0),
]  # fmt: skip


def test_in_a_pipe_nothing_is_cut_and_a_wide_terminal_shows_the_same() -> None:
    piped = request_rows(REQUESTS, None)
    assert piped == request_rows(REQUESTS, 200)
    assert [line.split()[:3] for line in piped[1:]] == [
        ["5f0c12ab-1", "smollm2", "alice"], ["5f0c12ab-2", "smollm2", LONG_CLIENT],
    ]  # fmt: skip
    assert piped[2].endswith("about 12s")


@pytest.mark.parametrize("width", range(40, 121))
def test_no_line_is_wider_than_the_terminal_and_every_id_is_whole(width: int) -> None:
    lines = request_rows(REQUESTS, width)
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines] == ["ID", "5f0c12ab-1", "5f0c12ab-2"]
    assert all("place 3" in line for line in lines[2:])


def test_the_name_of_a_client_gives_way_before_a_column_does() -> None:
    full = request_rows(REQUESTS, None)
    lines = request_rows(REQUESTS, len(full[2]) - 5)
    assert f"{LONG_CLIENT[:19]}…" in lines[2]
    assert lines[0].split() == full[0].split()
