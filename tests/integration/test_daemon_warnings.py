"""What a model's READY says of it reaches people: how its rows are batched, and what to know."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import psutil

from mlxsup.protocol.states import LoadPhase

from support.cli import Piped
from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually

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


def test_a_new_entry_of_one_row_does_not_pass_for_one_that_was_looked_at() -> None:
    with Daemon({"odd": odd(max_concurrency=1)}) as daemon, daemon.client() as client:
        client.load("odd")
        daemon.write_config({"odd": odd(max_concurrency=4)})
        assert daemon.run("reload").returncode == 0
        eventually(lambda: row(client, "odd")["generation"] == 2)
        seen = wait_for_state(client, "odd", "READY")
        assert seen["batching"]["reason"] == "an option asks for it in life 2"


def test_start_prints_warnings_and_events_carry_them() -> None:
    with Daemon({"odd": odd()}) as daemon, daemon.client() as client:
        with Piped("events", "--json", "--endpoint", daemon.endpoint) as events:
            # The daemon answers in order: once a change is seen, none is missed.
            eventually(lambda: client.ping() or True)
            client.load("odd")
            client.restart("odd")
            changes: list[dict[str, Any]] = []
            while len([c for c in changes if c["to"] == "READY"]) < 1:
                changes.append(json.loads(events.line()))
            assert (changes[-1]["batching"], changes[-1]["warnings"]) == (ONE_ROW, [WARNING])
            events.interrupt()
        eventually(lambda: daemon.output.count(f"warning: odd: {WARNING}") == 2)
