"""What `mlxsup status` and `mlxsup start` say about the HTTP gateway."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.cli.terminal.change_printer import ChangePrinter
from mlxsup.cli.terminal.gateway_lines import gateway_lines
from mlxsup.cli.terminal.output import Output

URL = "http://127.0.0.1:8484"


def gateway(state: str, **values: Any) -> dict[str, Any]:
    given = {
        "state": state, "address": "127.0.0.1:8484", "url": URL, "pid": None, "since_s": 1.0,
        "restarts": 0, "ends_in_a_row": 0, "cause": None, "retry_in_s": None,
    }  # fmt: skip
    return {"gateway": {**given, **values}}


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ({}, []),
        ({"gateway": None}, []),
        (gateway("starting"), ["http: starting"]),
        (gateway("listening", pid=7), [f"http: {URL} (pid 7)"]),
        (
            gateway("listening", pid=9, restarts=2, cause="it ended with signal SIGKILL"),
            [f"http: {URL} (pid 9), started 3 times; last, it ended with signal SIGKILL"],
        ),
        (
            gateway("backoff", ends_in_a_row=1, cause="the address is taken", retry_in_s=0.5),
            ["http: backoff: the address is taken; next attempt in 0s"],
        ),
        (
            gateway("crash loop", ends_in_a_row=4, cause="exit code 1", retry_in_s=4.0),
            ["http: crash loop, 4 times in a row: exit code 1; next attempt in 4s"],
        ),
    ],
)
def test_it_has_a_line_if_there_is_one_or_should_be(
    value: dict[str, Any], lines: list[str]
) -> None:
    assert gateway_lines(value, None) == lines


def test_a_line_that_is_too_long_continues_in_the_next() -> None:
    lines = gateway_lines(gateway("listening", pid=7), 30)
    assert " ".join(lines) == f"http: {URL} (pid 7)"
    assert max(map(len, lines)) <= 30


@pytest.mark.parametrize(
    ("is_json", "shown"),
    [(False, f"HTTP at {URL} (pid 7)"), (True, f'{{"gateway": "{URL}", "pid": 7}}')],
)
def test_start_prints_where_it_listens(
    capsys: pytest.CaptureFixture[str], is_json: bool, shown: str
) -> None:
    printer = ChangePrinter(Output(is_json=is_json))
    printer.listening("ipc:///x")
    printer.changed({"gateway": URL, "pid": 7})
    assert printer.close()
    line = capsys.readouterr().out.splitlines()[-1]
    assert shown.strip("{}") in line
