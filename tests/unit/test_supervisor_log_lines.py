"""The daemon's log as JSON: an object on each line, whatever it is about."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mlxsup.supervisor.log_files import LogWriter
from mlxsup.supervisor.log_lines import json_line, text_line
from mlxsup.supervisor.logs import DaemonLog

MOMENT = 86_400.0 + 3661.0996
STAMP = "1970-01-02T01:01:01.099Z"


def test_the_same_line_as_text_and_as_json() -> None:
    facts = {"n": 3, "f": 0.25, "text": 'é "x"\n', "none": None, "path": Path("/a"), "yes": True}
    assert text_line(MOMENT, "warning", "worker exited", {"n": 3}).decode() == (
        f"{STAMP} WARNING worker exited n=3\n"
    )
    line = json_line(MOMENT, "warning", "worker exited", facts).decode()
    assert line.count("\n") == 1
    assert json.loads(line) == {
        "at": STAMP, "level": "warning", "message": "worker exited", "n": 3, "f": 0.25,
        "text": 'é "x"\n', "none": None, "path": "/a", "yes": True,
    }  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_what_json_has_not_is_text(value: object) -> None:
    line = json_line(MOMENT, "info", "m", {"value": value})
    assert isinstance(json.loads(line.decode())["value"], str)


def test_a_block_is_one_line_and_levels_apply(tmp_path: Path) -> None:
    writer = LogWriter(print)
    log = DaemonLog(tmp_path, "info", writer, is_json=True)
    log.write("debug", "left out")
    log.write("info", "reload refused", problems=2)
    log.block("one\n  two")
    log.change_level("debug")
    assert log.level == "debug"
    log.write("debug", "not left out")
    log.close()
    assert writer.close(60.0)
    lines = [json.loads(line) for line in (tmp_path / "mlxsup.log").read_text().splitlines()]
    assert [line["message"] for line in lines] == ["reload refused", "details", "not left out"]
    assert (lines[0]["problems"], lines[1]["text"]) == (2, "one\n  two")
    assert all(line["at"] <= time.strftime("%Y-%m-%dT%H:%M:%SZ~", time.gmtime()) for line in lines)


EVIL = "\x1b[2J\x9b31m\u202e\udc80"


@pytest.mark.parametrize("is_json", [False, True])
def test_the_daemon_writes_no_control_character_whatever_it_is_told(
    tmp_path: Path, is_json: bool
) -> None:
    writer = LogWriter(print)
    log = DaemonLog(tmp_path, "debug", writer, is_json=is_json)
    log.write("error", EVIL, model=EVIL, cause=EVIL)
    log.block(f"one {EVIL}\ntwo")
    log.close()
    assert writer.close(60.0)
    lines = (tmp_path / "mlxsup.log").read_text().split("\n")
    assert len(lines) == (3 if is_json else 4)
    assert all(line.isprintable() for line in lines)
