"""Texts that both sides read and write: durations, times, log lines."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.log_format import PrintableFormatter
from mlxsup.protocol.text import log_line, parse_duration, size_text, timestamp

ROOT = Path(__file__).parents[2]
PARTS = ("protocol", "store", "supervisor", "worker", "client", "gateway", "downloader", "cli")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("90s", 90.0), (" 1.5h ", 5400.0), ("5m", 300.0), ("2d", 172_800.0)],
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert parse_duration(text, default_unit="d") == seconds


def test_a_number_alone_needs_a_default_unit() -> None:
    assert parse_duration("90", default_unit="m") == 5400.0
    with pytest.raises(ValueError, match=r"^'90' is not a duration$"):
        parse_duration("90")


@pytest.mark.parametrize("text", ["", "s", "-1s", "1w", "1 s s", "1,5h", "1e3s"])
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^{text!r} is not a duration$"):
        parse_duration(text, default_unit="s")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 MiB"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1025, "1.1 KiB"),
        (2**20, "1.0 MiB"),
        (2**30 + 1, "1.01 GiB"),
        (9313225 * 2**30, "9094.95 TiB"),
    ],
)
def test_a_size_is_rounded_up_and_in_a_unit_that_shows_it(count: int, text: str) -> None:
    assert size_text(count) == text


def test_no_other_place_rounds_a_size_for_people() -> None:
    modules = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    assert len(modules) > 300
    rounds = re.compile(r"\.\df\} ?[KMGT]iB")
    own = {path.name for path in modules if rounds.search(path.read_text())}
    assert own == {"text.py"}, "protocol/text.py alone"


def test_a_time_is_written_in_utc_to_the_second_or_the_millisecond() -> None:
    assert timestamp(1_000_000_000.9876) == "2001-09-09T01:46:40Z"
    assert timestamp(1_000_000_000.9876, has_milliseconds=True) == "2001-09-09T01:46:40.987Z"
    assert timestamp(0.004, has_milliseconds=True) == "1970-01-01T00:00:00.004Z"


def test_a_log_line_quotes_what_has_spaces() -> None:
    assert log_line("worker exited") == "worker exited"
    line = log_line("worker exited", model="a", detail="out of memory", code=75, quote='a "b"')
    assert line == 'worker exited model=a detail="out of memory" code=75 quote="a \\"b\\""'
    assert (
        log_line("x", took_s=1.23456, empty="", pair="a=b") == 'x took_s=1.235 empty="" pair="a=b"'
    )
    assert log_line("x", name="XeX", where="in Köln") == 'x name=XeX where="in Köln"'


@pytest.mark.parametrize(
    "evil", ["\x1b[31mX", "a\x9b2J", "\u202e", "\U000e0041", "\udc80", "x\x85y"]
)
def test_no_log_line_holds_a_raw_control_character(evil: str) -> None:
    line = log_line(f"said {evil}", model=evil, **{f"{evil}_s": 1.5})
    assert line.isprintable()
    assert json.loads(re.findall(r'model=("[^"]*")', line)[0]) == evil


@given(st.text())
def test_a_value_of_a_log_line_can_be_read_back(text: str) -> None:
    line = log_line("x", value=text)
    assert line.isprintable()
    shown = line.removeprefix("x value=")
    assert (json.loads(shown) if shown.startswith('"') else shown) == text


def test_what_the_worker_and_the_gateway_log_is_printable_tracebacks_included() -> None:
    evil = "\x1b]0;x\x07\x9b2J\u202e"
    try:
        raise ValueError(evil)
    except ValueError:
        record = logging.LogRecord("x", 40, "f", 1, "at %s", (evil,), sys.exc_info())
    lines = PrintableFormatter("%(message)s").format(record).split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines[0] == r"at \u001b]0;x\u0007\u009b2J\u202e"
    assert lines[-1] == r"ValueError: \u001b]0;x\u0007\u009b2J\u202e"
