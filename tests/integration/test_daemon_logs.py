"""The lines that a daemon writes and prints about its models."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import RequestError
from mlxsup.protocol.states import LoadPhase
from mlxsup.protocol.text import LOG_LEVELS

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually

AT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
SLOW = fake(fake={"step_s": 0.02})
LIFE = ("daemon started", "model ready", "worker exited", "model ready", "request ended")


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def test_every_line_is_an_object_with_when_how_grave_and_what() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as kept:
        path = Path(kept) / "mlxsup.log"
        tables = {"log_format": "json", "log_level": "debug", "log_dir": kept}
        with Daemon({"m": SLOW}, tables) as daemon, daemon.client() as client:
            wait_for_state(client, "m", "READY")
            reader = Reader(client, "m", 'of "two"\nlines\x1b', max_tokens=200).started()
            with pytest.raises(RequestError):
                client.complete('no "such"\nmodel', prompt="hi")
            os.kill(row(client, "m")["pid"], signal.SIGKILL)
            assert reader.finished().resumed == 1
            daemon.config.write_text("nonsense")
            assert daemon.run("reload").returncode == 78
            assert daemon.run("stop", "--endpoint", daemon.endpoint).returncode == 0
        lines = lines_of(path)
    for line in lines:
        assert list(line)[:1] == ["at"]
        assert AT.fullmatch(line["at"])
        assert line["message"]
        if "level" in line:
            assert list(line)[1:3] == ["level", "message"]
            assert line["level"] in LOG_LEVELS
        else:
            assert (line["message"], type(line["text"])) == ("details", str)
    assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
    said = iter([line["message"] for line in lines])
    assert [one for one in LIFE if one not in said] == [], [one["message"] for one in lines]
    [died] = [one for one in lines if one["message"] == "worker exited" and one.get("signal")]
    assert (died["model"], died["generation"], died["signal"]) == ("m", 1, "SIGKILL")


WARNING = "the context length is not declared: 4096 tokens"
REASON = "an option asks for it in life 1"
TOOK = " ".join(rf"{phase}_s=\d+\.\d+" for phase in LoadPhase)
READY_LINE = rf"INFO model ready model=plain batching=together {TOOK}\n"
ONE_ROW = {"mode": "one_row", "reason": REASON}


def odd(**more: object) -> dict[str, object]:
    """A model that must be computed row by row, and warns."""
    return fake(preload=False, fake={"batching": "one_row", "warning": WARNING}, **more)


def warned(text: str) -> list[str]:
    """The warnings among the lines of a command, which shows its progress if it has to wait."""
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def test_status_load_and_log_tell_it_and_its_next_life_need_not_find_it_out() -> None:
    with Daemon({"odd": odd(), "plain": fake()}) as daemon, daemon.client() as client:
        assert (row(client, "odd")["batching"], row(client, "odd")["warnings"]) == (None, [])
        loaded = daemon.run("load", "odd")
        assert warned(loaded.stderr) == [f"warning: odd: {WARNING}"]
        assert "one row at a time, 1 warning" in loaded.stdout
        seen = row(client, "odd")
        assert (seen["batching"], seen["warnings"]) == (ONE_ROW, [WARNING])
        shown = daemon.run("status", "--debug").stdout.splitlines()
        assert f"  batching: one_row, {REASON}" in shown
        assert f"  warning: {WARNING}" in shown
        [took] = [line for line in shown if line.startswith("  seconds of its phases: spawn ")][:1]
        assert list(seen["load_phases_s"]) == [part.split()[0] for part in took[25:].split(", ")]

        psutil.Process(seen["pid"]).send_signal(signal.SIGKILL)
        eventually(lambda: row(client, "odd")["generation"] == 2)
        assert wait_for_state(client, "odd", "READY")["batching"] == ONE_ROW, "found in life 1"
        client.restart("odd")
        client.unload("odd")
        client.load("odd")
        assert (row(client, "odd")["generation"], row(client, "odd")["batching"]) == (4, ONE_ROW)

        wait_for_state(client, "plain", "READY")
        assert row(client, "plain")["batching"] == {"mode": "together", "reason": ""}
        assert warned(daemon.run("load", "plain").stderr) == []
        as_json = daemon.run("load", "odd", "--json")
        assert as_json.stderr == ""
        assert json.loads(as_json.stdout)["models"][0]["warnings"] == [WARNING]
        log = (daemon.logs / "mlxsup.log").read_text()
        assert f'INFO model ready model=odd batching=one_row reason="{REASON}" spawn_s=' in log
        assert re.search(READY_LINE, log)
        assert log.count(f'WARNING model warning model=odd warning="{WARNING}"') == 4
