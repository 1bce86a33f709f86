"""Loads, restarts and ends of real processes, while streams run."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import Client, RequestError
from mlxsup.protocol.states import LoadPhase
from mlxsup.protocol.text import LOG_LEVELS

from support.cli.notify_socket import NotifySocket
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, is_alive, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

SLOW = {"step_s": 0.02}
ENDLESS = {"step_s": 0.02, "context_length": 100_000}
ENDLESS_PROMPT = "x" * 50_000
"""Read token by token, it takes a quarter of an hour."""

WARNING = "the context length is not declared: 4096 tokens"
REASON = "an option asks for it in life 1"
MODELS = {
    "one": fake(fake=SLOW, max_concurrency=2),
    "two": fake(fake=SLOW),
    "stuck": fake(fake=ENDLESS, step_timeout_s=3600.0, preload=False),
    "prefills": fake(
        fake=ENDLESS | {"prefill_tokens_per_step": 1}, step_timeout_s=3600.0, preload=False
    ),
    "loads": fake(fake={"load_stall": "gil"}, load_stall_timeout_s=3600.0, preload=False),
    "odd": fake(fake={"batching": "one_row", "warning": WARNING}, preload=False),
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon whose first two models are READY."""
    with Daemon(MODELS) as daemon:
        with daemon.client() as client:
            for name in ("one", "two"):
                wait_for_state(client, name, "READY")
        yield daemon


def test_restart_drains_while_the_other_model_streams_E8_F14(daemon: Daemon) -> None:
    with daemon.client() as client:
        other = Reader(client, "two", "other", max_tokens=150).started()
        running = Reader(client, "one", "runs", max_tokens=40).started()
        before, others = row(client, "one"), row(client, "two")
        finished = daemon.run("restart", "one")
        assert finished.returncode == 0, finished.stderr
        assert len(running.finished().token_ids) == 40, "it was allowed to finish"
        after = row(client, "one")
        assert (after["state"], after["generation"]) == ("READY", before["generation"] + 1)
        assert not psutil.pid_exists(before["pid"]) or not is_alive(psutil.Process(before["pid"]))
        assert other.finished().token_ids == undisturbed("other", 150)
        assert row(client, "two")["pid"] == others["pid"]


BUSY: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "stuck": ("[[fault stall=gil at=3]]", lambda r: (r["steps"], len(r["running"])) == (2, 1)),
    "prefills": (ENDLESS_PROMPT, lambda r: r["phase"] == "prefill" and r["steps"] > 2),
    "loads": ("waits", lambda r: r["state"] == "LOADING" and r["pid"] is not None),
}
"""Models with a prompt that keeps their worker busy, and whether a row shows that it is."""


def is_busy_now(client: Client, name: str) -> bool:
    return BUSY[name][1](row(client, name))


def test_a_busy_worker_holds_up_no_command_and_no_other_model_B7_E8_H1_H8(daemon: Daemon) -> None:
    with daemon.client() as client:
        other = Reader(client, "two", "streams", max_tokens=400)
        streams = {}
        for name, (prompt, _) in BUSY.items():
            length = 90_000 - len(prompt)
            streams[name] = client.generate(name, prompt=prompt, max_tokens=length)
            eventually(partial(is_busy_now, client, name), what=name)
        before = {name: row(client, name) for name in BUSY}
        for number in range(3):
            answer = client.complete("one", prompt=f"small {number}", max_tokens=20)
            assert answer.token_ids == undisturbed(f"small {number}", 20)
        for _ in range(50):
            client.ping()
        eventually(lambda: row(client, "prefills")["steps"] > before["prefills"]["steps"])
        for name, (_, is_busy) in BUSY.items():
            after = row(client, name)
            assert is_busy(after), "it still is"
            assert (after["pid"], after["generation"]) == (before[name]["pid"], 1)
            streams[name].cancel()
            list(streams[name])
            assert streams[name].result.finish_reason == "cancelled"
        states = [row(client, name)["state"] for name in BUSY]
        assert states == ["READY", "READY", "LOADING"], "a cancel does not wait for the worker"
        for name in ("stuck", "loads"):
            client.unload(name)
        assert other.finished().token_ids == undisturbed("streams", 400)
        assert row(client, "two")["restarts"] == 0


def test_processes_come_and_go_without_leaving_anything_P14(daemon: Daemon) -> None:
    assert daemon.process is not None
    supervisor = psutil.Process(daemon.process.pid)

    def counts() -> tuple[int, int, int]:
        children = supervisor.children(recursive=True)
        return supervisor.num_fds(), supervisor.num_threads(), len(children)

    seen: list[tuple[int, int, int]] = []

    def is_settled() -> bool:
        seen.append(counts())
        return seen[-2:-1] == seen[-1:]

    with daemon.client() as client:
        client.restart("two", now=True)  # the first one may open what stays
        eventually(lambda: row(client, "two")["phase"] == "idle")
        eventually(is_settled)
        before = seen[-1]
        for _ in range(4):
            client.restart("two", now=True)
        eventually(lambda: counts() == before)


TOOK = " ".join(rf"{phase}_s=\d+\.\d+" for phase in LoadPhase)


def warned(text: str) -> list[str]:
    """The warnings among the lines of a command, which shows its progress if it has to wait."""
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def test_what_a_load_finds_out_is_shown_logged_and_known_to_the_next_life(daemon: Daemon) -> None:
    one_row = {"mode": "one_row", "reason": REASON}
    with daemon.client() as client:
        assert (row(client, "odd")["batching"], row(client, "odd")["warnings"]) == (None, [])
        loaded = daemon.run("load", "odd")
        assert warned(loaded.stderr) == [f"warning: odd: {WARNING}"]
        assert "runs one request at a time, 1 warning" in loaded.stdout
        seen = row(client, "odd")
        assert (seen["batching"], seen["warnings"]) == (one_row, [WARNING])
        shown = daemon.run("status", "--debug").stdout.splitlines()
        assert f"  batching: one_row, {REASON}" in shown
        assert f"  warning: {WARNING}" in shown
        phases = r" \S+, ".join(seen["load_phases_s"])
        assert re.search(f"  load times: {phases}", "\n".join(shown))

        os.kill(seen["pid"], signal.SIGKILL)
        eventually(lambda: row(client, "odd")["generation"] == 2)
        assert wait_for_state(client, "odd", "READY")["batching"] == one_row, "found in life 1"
        client.unload("odd")
        as_json = daemon.run("load", "odd", "--json")
        assert json.loads(as_json.stdout)["models"][0]["warnings"] == [WARNING]
        assert (row(client, "odd")["generation"], row(client, "odd")["batching"]) == (3, one_row)
        assert row(client, "two")["batching"] == {"mode": "together", "reason": ""}
    log = (daemon.logs / "mlxsup.log").read_text()
    assert f'INFO model ready model=odd batching=one_row reason="{REASON}" spawn_s=' in log
    assert re.search(rf"INFO model ready model=two batching=together {TOOK}\n", log)
    assert log.count(f'WARNING model warning model=odd warning="{WARNING}"') == 3


# ---------------------------------------------------------------- one whole life

STRICT = {"PYTHONWARNINGS": "error", "PYTHONASYNCIODEBUG": "1", "PYTHONDEVMODE": "1"}
AT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
LOGGED = ("daemon started", "model ready", "worker exited", "model ready", "request ended")


def check_lines(path: Path) -> None:
    """Fails unless each line of a log is an object with its time, level and message, in order."""
    text = path.read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    for line in lines:
        assert AT.fullmatch(line["at"])
        assert line["message"]
        if "level" in line:
            assert list(line)[:3] == ["at", "level", "message"]
            assert line["level"] in LOG_LEVELS
        else:
            assert (line["message"], type(line["text"])) == ("details", str)
    assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
    said = iter([line["message"] for line in lines])
    assert [one for one in LOGGED if one not in said] == [], [one["message"] for one in lines]
    [died] = [one for one in lines if one["message"] == "worker exited" and one.get("signal")]
    assert (died["model"], died["generation"], died["signal"]) == ("m", 1, "SIGKILL")


def test_a_service_manager_sees_the_whole_life_which_warns_of_nothing_B11_E1_E3_E5(
    tmp_path: Path,
) -> None:
    """It is started, reloaded, refused a reload, loses a worker, and stops while a stream runs."""
    tables = {"drain_timeout_s": 300.0, "log_format": "json", "log_level": "debug"}
    models = {"m": fake(fake=SLOW, max_concurrency=1), "cold": fake(preload=False)}
    daemon = Daemon(models, tables)
    with NotifySocket(tmp_path) as played, ThreadPoolExecutor() as pool:
        try:
            daemon.start(environment=STRICT | played.variables(watchdog_s=2.0))
            live(daemon, played, pool)
        except BaseException as error:
            daemon.__exit__(type(error), error, None)
            raise
        assert "Warning" not in daemon.output + daemon.log_text()
        check_lines(daemon.logs / "mlxsup.log")
        daemon.__exit__(None, None, None)
        played.take_all()
        assert sum("STOPPING=1" in message for message in played.heard) == 1


def live(daemon: Daemon, played: NotifySocket, pool: ThreadPoolExecutor) -> None:
    assert daemon.process is not None
    with daemon.client() as client:
        assert played.until_line("READY=1")
        played.until_line("STATUS=1 STOPPED, 1 READY")
        played.until_line("WATCHDOG=1")
        assert not any("RELOADING=1" in message for message in played.heard)
        client.reload()
        began_at_us = int(played.until_line("MONOTONIC_USEC=").partition("=")[2])
        assert "RELOADING=1" in played.heard[-1]
        assert 0 < began_at_us <= time.monotonic() * 1e6
        played.until_line("READY=1")

        sound = daemon.config.read_text()
        daemon.config.write_text("nonsense = 1\n")
        assert daemon.run("reload").returncode == 78
        played.until_line("RELOADING=1")
        played.until_line("READY=1")
        assert played.heard[-1][1].startswith("STATUS=reload refused: ")
        daemon.config.write_text(sound)

        reader = Reader(client, "m", 'of "two"\nlines\x1b', max_tokens=100).started()
        with pytest.raises(RequestError):
            client.complete('no "such"\nmodel', prompt="hi")
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        assert reader.finished().resumed == 1
        client.complete("cold", prompt="x", max_tokens=2)
        client.restart("cold")
        client.unload("cold")

        running = Reader(client, "m", "runs", max_tokens=300).started()
        queued = Reader(client, "m", "waits", max_tokens=5)
        eventually(lambda: row(client, "m")["queued"] == 1)
        processes = daemon.processes()
        stop = pool.submit(daemon.run, "stop")
        played.until_line("STOPPING=1")
        for _ in range(3):
            played.until_line("EXTEND_TIMEOUT_USEC=")
        assert stop.result().returncode == 0
        assert [process for process in processes if is_alive(process)] == []
        assert running.finished().finish_reason == "length"
        assert queued.failed().code == "shutting_down"
    assert daemon.process.wait(60) == 0
    assert not (daemon.folder / "run" / "client.sock").exists()
    assert daemon.run("stop").returncode == 0
