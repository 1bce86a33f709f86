"""`log_format = "json"`: each line of a daemon's whole life is one object, a crash included."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import RequestError
from mlxsup.protocol.text import LOG_LEVELS

from support.daemon import Daemon, fake, row, wait_for_state
from support.streams import Reader

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
