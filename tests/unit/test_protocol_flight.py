"""The entries of the flight recorder, and their form in its files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxsup.protocol import flight
from mlxsup.protocol.client_messages import Timings, Usage
from mlxsup.protocol.codec import MAX_LINE_BYTES
from mlxsup.protocol.death_causes import explain
from mlxsup.protocol.flight import (
    DaemonEnded,
    DaemonStarted,
    Entry,
    LostRow,
    ModelChanged,
    Recorded,
    RequestContinued,
    RequestEnded,
    RequestPaused,
    RequestStarted,
    WorkerDied,
    read_line,
)
from mlxsup.protocol.states import DeathCause

ENTRIES: list[Entry] = [
    DaemonStarted(pid=7, version="1", before_alive_at=5.5),
    DaemonEnded(code=70),
    ModelChanged(model="m", generation=2, before="READY", after="PENDING", note="é\x1b"),
    WorkerDied(
        model="m",
        generation=2,
        reason="crash",
        after="PENDING",
        code=70,
        rows=[LostRow(id="r", number=3, tokens=4, fate="quarantined", is_suspect=True)],
        ready_s=1.5,
    ),
    RequestStarted(id="r", number=3, model="m", queued_s=0.25),
    RequestPaused(id="r", number=3, model="m", reason="user", tokens=4),
    RequestContinued(id="r", number=3, model="m", after="crash", generation=3, tokens=4),
    RequestEnded(id="r", number=3, model="m", outcome="stop", usage=Usage(engine_s=2.5)),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.KIND)
def test_entry_is_read_as_it_was_written(entry: Entry) -> None:
    recorded = Recorded(number=9, at=17.5, entry=entry)
    line = recorded.to_line()
    assert line.count(b"\n") == 1
    assert read_line(line.decode()) == recorded


def test_every_kind_of_entry_has_an_example() -> None:
    kinds = {*flight.OF_DAEMON, *flight.OF_MODELS, *flight.OF_REQUESTS}
    assert {type(entry) for entry in ENTRIES} == kinds


def test_unknown_field_is_ignored() -> None:
    value = Recorded(number=1, at=2.0, entry=DaemonEnded(code=0)).to_map()
    assert read_line(json.dumps(value | {"mood": "good"})).entry == DaemonEnded(code=0)


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "[]", "null", '"x"', "[" * 5000,
        '{"n": 1, "at": 2, "kind": "unheard_of"}',
        '{"n": 1, "at": 2, "kind": ["daemon_ended"], "code": 0}',
        '{"n": 1, "at": 2, "kind": "daemon_ended"}',
        '{"n": 1, "at": 2, "kind": "daemon_ended", "code": "0"}',
        '{"n": true, "at": 2, "kind": "daemon_ended", "code": 0}',
        '{"n": 1, "at": "2", "kind": "daemon_ended", "code": 0}',
        '{"n": 1, "at": NaN, "kind": "daemon_ended", "code": 0}',
        '{"n": 1, "at": 1e300, "kind": "daemon_ended", "code": 0}',
        '{"n": 1, "at": 2, "kind": "worker_died", "model": "m", "generation": 1, "reason": "x",'
        ' "after": "y", "rows": [{"id": 7, "number": 1}]}',
        '{"n": 1, "at": 2, "kind": "daemon_ended", "code": 0}' + " " * MAX_LINE_BYTES,
    ],
    ids=lambda line: line[:40],
)  # fmt: skip
def test_damaged_line_is_a_value_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_line(line)


@pytest.mark.parametrize(
    ("tokens", "first_token_s", "total_s", "expected"),
    [
        (5, 1.0, 3.0, 2.0),
        (2, 1.0, 1.5, 2.0),
        (1, 1.0, 3.0, None),
        (0, 0.0, 3.0, None),
        (5, 3.0, 3.0, None),
    ],
)
def test_tokens_per_second_after_the_first(
    tokens: int, first_token_s: float, total_s: float, expected: float | None
) -> None:
    ended = RequestEnded(
        id="r",
        number=3,
        model="m",
        outcome="stop",
        usage=Usage(completion_tokens=tokens),
        timings=Timings(first_token_s=first_token_s, total_s=total_s),
    )
    assert ended.tokens_per_s == expected
    assert (ended.client, ended.resumed, ended.paused) == ("", 0, 0)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"footprint_bytes": 5, "active_bytes": 2, "cache_bytes": 2}, "used 5.00 GiB, with a"),
        ({"footprint_bytes": 1, "active_bytes": 2, "cache_bytes": 2}, "used 4.00 GiB, with a"),
        ({"limit_bytes": 3, "machine_bytes": 8}, "a limit of 3.00 GiB"),
        ({"limit_bytes": 0, "machine_bytes": 8}, "a limit of 8.00 GiB"),
    ],
)
def test_death_over_memory_says_how_much_was_used(sizes: dict[str, int], words: str) -> None:
    given: dict[str, Any] = {name: count * 2**30 for name, count in sizes.items()}
    died = WorkerDied(
        model="m", generation=1, reason="crash", cause=DeathCause.OUT_OF_MEMORY, signal="SIGKILL",
        after="BACKOFF", **given,
    )  # fmt: skip
    assert words in explain(died).what
