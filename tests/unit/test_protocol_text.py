"""Texts that several processes write: durations, sizes, times, log lines, close names."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.log_format import LineFormatter
from mlxsup.protocol.suggestions import close_names
from mlxsup.protocol.text import log_line, parse_duration, size_text, timestamp


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("90s", 90.0), (" 1.5h ", 5400.0), ("5m", 300.0), ("2d", 172_800.0)],
)
def test_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert parse_duration(text, default_unit="d") == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1w", "1 s s", "1,5h", "1e3s", "90", "٣s"])
def test_other_text_is_no_duration(text: str) -> None:
    if text == "90":
        assert parse_duration(text, default_unit="m") == 5400.0
    else:
        with pytest.raises(ValueError, match=rf"^{text!r} is not a duration$"):
            parse_duration(text, default_unit="s")
    with pytest.raises(ValueError, match=rf"^{text!r} is not a duration$"):
        parse_duration(text)


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
def test_size_is_rounded_up(count: int, text: str) -> None:
    assert size_text(count) == text


def test_time_is_written_in_utc() -> None:
    assert timestamp(1_000_000_000.9876) == "2001-09-09T01:46:40Z"
    assert timestamp(1_000_000_000.9876, has_milliseconds=True) == "2001-09-09T01:46:40.987Z"
    assert timestamp(0.004, has_milliseconds=True) == "1970-01-01T00:00:00.004Z"


def test_log_line_quotes_spaces() -> None:
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
def test_log_line_escapes_control_characters(evil: str) -> None:
    line = log_line(f"said {evil}", model=evil, **{f"{evil}_s": 1.5})
    assert line.isprintable()
    assert json.loads(re.findall(r'model=("[^"]*")', line)[0]) == evil


@given(st.text())
def test_value_of_a_log_line_can_be_read_back(text: str) -> None:
    line = log_line("x", value=text)
    assert line.isprintable()
    shown = line.removeprefix("x value=")
    assert (json.loads(shown) if shown.startswith('"') else shown) == text


def test_formatter_escapes_tracebacks() -> None:
    evil = "\x1b]0;x\x07\x9b2J\u202e"
    try:
        raise ValueError(evil)
    except ValueError:
        record = logging.LogRecord("x", 40, "f", 1, "at %s", (evil,), sys.exc_info())
    record.created = 1_700_000_000.1239
    lines = LineFormatter().format(record).split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("2023-11-14T22:13:20.123Z ERROR ")
    assert lines[0].partition(" ERROR ")[2] == r"at \u001b]0;x\u0007\u009b2J\u202e"
    assert lines[-1] == r"ValueError: \u001b]0;x\u0007\u009b2J\u202e"


def test_close_names_ignore_case_likest_first() -> None:
    known = ["Qwen3-8B", "smollm2", "smol", "gemma"]
    assert close_names("SMOLLM", known) == ["smollm2", "smol"]
    assert close_names("qwen3-8b", known) == ["Qwen3-8B"]
    assert close_names("SMOLLM", known, most=1) == ["smollm2"]
    assert close_names("nothing like it", known) == []
    assert close_names("", known) == []
