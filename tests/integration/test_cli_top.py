"""`top` on a terminal: what it shows, what its keys do, and what it leaves behind."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import pytest

from support.cli import Piped, command, run_cli
from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.full_screen import FullScreen, Script, Shell
from support.json_schemas import problems
from support.streams import Reader

MODELS = {
    "alpha": fake(fake={"step_s": 0.05}),
    "cold": fake(preload=False),
}
ENDLESS = 4000
"""Tokens of an answer that takes minutes."""

QUICK = ("--interval", "0.2s")
"""Tests need not wait a second for each picture."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(MODELS) as daemon, daemon.client() as client:
        wait_for_state(client, "alpha", "READY")
        yield daemon


def top(daemon: Daemon, columns: int = 80, rows: int = 24, **variables: str) -> FullScreen:
    where = ("--endpoint", daemon.endpoint)
    return FullScreen("top", *QUICK, *where, columns=columns, rows=rows, **variables)


def mark(lines: list[str]) -> str | None:
    """The first word of the row that is selected."""
    return next((line.split()[1] for line in lines if line.startswith("> ")), None)


@pytest.mark.parametrize(("columns", "rows"), [(40, 10), (200, 24)])
def test_models_requests_memory_and_events_hold_in_any_terminal(
    daemon: Daemon, columns: int, rows: int
) -> None:
    with daemon.client() as client:
        stream = Reader(client, "alpha", "hello", max_tokens=ENDLESS).started()
        with top(daemon, columns, rows) as screen:
            lines = screen.wait_for("alpha", "READY", str(stream.stream.request_id), "answering")
            assert lines[0].startswith("mlxsup ")
            assert lines[1].startswith("memory [")
            client.restart("cold")
            screen.wait_for("cold: LOADING → READY")
            screen.type("q")
            screen.end()
            assert screen.process.returncode == 0
            screen.check_nothing_left()
        stream.stream.cancel()
        stream.finished()


def test_keys_unload_and_load_a_model_after_a_question(daemon: Daemon) -> None:
    with daemon.client() as client, top(daemon) as screen:
        client.load("cold")
        screen.wait_for("cold")
        screen.type("jj")
        screen.wait_until(lambda lines: mark(lines) == "cold")
        screen.type("u")
        screen.wait_for("unload cold? running answers finish first (y/n)")
        screen.type("n")
        screen.wait_for("cold is left as it is")
        assert row(client, "cold")["state"] == "READY"
        # What is pasted is no answer.
        screen.type("uy")
        screen.wait_for("unload cold? running answers finish first (y/n)")
        screen.type("y")
        screen.wait_for("cold is unloaded", "STOPPED")
        assert row(client, "cold")["state"] == "STOPPED"
        screen.type("l")
        screen.wait_for("cold is loaded")
        generation = row(client, "cold")["generation"]
        screen.type("r")
        screen.wait_for("restart cold?")
        screen.type("y")
        screen.wait_for("cold is restarted")
        assert row(client, "cold")["generation"] == generation + 1
        screen.type("q")
        screen.end()
        screen.check_nothing_left()


def test_keys_pause_resume_and_cancel_a_request(daemon: Daemon) -> None:
    with daemon.client() as client, top(daemon) as screen:
        stream = Reader(client, "alpha", "hello", max_tokens=ENDLESS).started()
        id = str(stream.stream.request_id)
        screen.wait_for(id, "answering")
        screen.type("\x1b[F")
        screen.wait_until(lambda lines: mark(lines) == id)
        screen.type("p")
        screen.wait_for(f"{id} of alpha: paus", " paused ")
        screen.type("p")
        screen.wait_for(f"{id} of alpha: queued", "answering")
        screen.type("c")
        screen.wait_for(f"cancel {id}? its answer ends (y/n)")
        screen.type("y")
        assert stream.finished().finish_reason == "cancelled"
        screen.wait_for(f"{id} of alpha: cancelled after ", "no open requests")
        screen.type("c")
        screen.wait_for("nothing is selected")
        screen.type("?")
        screen.wait_for("cancel a request", "any key leaves this help")
        screen.type("qq")
        screen.end()
        screen.check_nothing_left()


def test_an_order_that_is_refused_says_why_and_nothing_else_is_lost() -> None:
    broken = Daemon({"alpha": fake(), "broken": {"path": "/nowhere", "preload": False}})
    with broken, broken.client() as client, top(broken, columns=200) as screen:
        wait_for_state(client, "alpha", "READY")
        screen.wait_for("broken")
        screen.type("jj")
        screen.wait_until(lambda lines: mark(lines) == "broken")
        screen.type("l")
        screen.wait_for("broken: ", "/nowhere", "FAILED")
        screen.type("j")
        screen.wait_until(lambda lines: lines[-1].startswith("r restart"))
        screen.type("l")  # it is done, so that another order can follow
        lines = screen.wait_until(lambda lines: lines[-1].startswith("broken: "))
        assert "/nowhere" in lines[-1]
        screen.type("q")
        screen.end()
        screen.check_nothing_left()


def test_a_daemon_that_is_killed_is_said_and_the_next_one_is_found() -> None:
    daemon = Daemon({"alpha": fake()})
    with daemon, top(daemon) as screen:
        screen.wait_for("alpha", "READY")
        screen.type("j")
        screen.wait_until(lambda lines: mark(lines) == "alpha")
        daemon.kill()
        lines = screen.wait_for("no daemon since ", "still trying")
        assert mark(lines) is None
        screen.type("r")
        screen.wait_for("nothing is selected")
        daemon.start()
        screen.wait_for("another daemon answers (pid ", "READY", without="no daemon since")
        screen.type("q")
        screen.end()
        screen.check_nothing_left()


def test_without_a_daemon_it_is_an_error_and_the_screen_is_never_taken() -> None:
    with FullScreen("top", "--endpoint", "ipc:///tmp/nowhere/client.sock") as screen:
        shown = screen.end()
        assert screen.process.returncode == 69
    assert "error:" in shown
    assert "\x1b[?1049h" not in shown


@pytest.mark.parametrize("interval", ["0.05s", "nan"])
def test_an_interval_that_is_too_short_or_too_long_is_refused(interval: str) -> None:
    done = run_cli("top", "--interval", interval)
    assert (done.returncode, done.stdout) == (64, "")
    assert f"'{interval}' is not " in done.stderr


def test_in_a_pipe_there_is_a_line_for_each_change_and_none_if_nothing_is_new() -> None:
    with Daemon({"alpha": fake()}) as daemon, daemon.client() as client:
        wait_for_state(client, "alpha", "READY")
        with Piped("top", *QUICK, "--endpoint", daemon.endpoint) as piped:
            assert re.match(r"\d\d:\d\d:\d\dZ 1 READY; 0 running, 0 waiting; ", piped.line())
            client.unload("alpha")
            text = ""
            while not ("→ STOPPED" in text and "1 STOPPED; 0 running" in text):
                text += piped.line()
            changes = re.findall(r"^\S+Z alpha: (\w+) → (\w+)", text, re.MULTILINE)
            assert [after for _, after in changes] == ["DRAINING", "STOPPING", "STOPPED"]
            assert run_cli("stop", "--endpoint", daemon.endpoint).returncode == 0
            code, out, err = piped.end()
        assert (text + out).count("1 STOPPED;") == 1, "what is not new is not said again"
        assert (code, "\x1b" in out, "Traceback" in err) == (69, False, False)
        assert err.startswith("error: ")


def test_as_json_each_look_has_the_changes_since_the_one_before(daemon: Daemon) -> None:
    with (
        Piped("top", "--json", *QUICK, "--endpoint", daemon.endpoint) as piped,
        daemon.client() as client,
    ):
        looks = [json.loads(piped.line())]
        assert looks[0]["changes"] == []
        client.restart("alpha", now=True)
        states: list[str] = []
        while not states or states[-1] != "READY":
            line = piped.line()
            assert problems(line, ["top"]) == []
            states += [change["to"] for change in json.loads(line)["changes"]]
        assert states == ["STOPPING", "PENDING", "LOADING", "READY"]
        piped.process.send_signal(signal.SIGINT)
        assert piped.end()[0] == 0


RAISES = """
from mlxsup.cli.terminal.full_screen import FullScreen
with FullScreen(has_colour=True) as screen:
    screen.show(["hello"])
    screen.wait()
    raise RuntimeError("boom")
"""

ENTERS_AND_RAISES = """
import rich.live
from mlxsup.cli.terminal.full_screen import FullScreen
def start(self, *_):
    raise RuntimeError("boom")
rich.live.Live.start = start
with FullScreen(has_colour=True) as screen:
    pass
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGHUP, -signal.SIGHUP),
    ],
)
def test_a_signal_ends_it_as_any_program_once_the_terminal_is_what_it_was(
    daemon: Daemon, number: signal.Signals, code: int
) -> None:
    with top(daemon) as screen:
        screen.wait_for("alpha", "READY")
        assert screen.mode != screen.mode_before, "keys come one by one"
        screen.process.send_signal(number)
        screen.end()
        assert screen.process.returncode == code
        screen.check_nothing_left()


def test_a_closed_window_ends_it(daemon: Daemon) -> None:
    with top(daemon) as screen:
        screen.wait_for("alpha", "READY")
        screen.hang_up()
        assert screen.process.wait(120) != 0


@pytest.mark.parametrize("code", [RAISES, ENTERS_AND_RAISES], ids=["shown", "entering"])
def test_after_an_exception_the_terminal_is_what_it_was_and_shows_it(code: str) -> None:
    with Script(code) as screen:
        if code is RAISES:
            screen.wait_for("hello")
            screen.type("x")
        shown = screen.end()
        assert screen.process.returncode == 1
        assert screen.mode == screen.mode_before
        assert "RuntimeError: boom" in shown.rpartition("\x1b[?1049l")[2]
        assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l")


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(daemon: Daemon) -> None:
    line = " ".join(command("top", "--interval", "0.2s", "--endpoint", daemon.endpoint))
    with Shell(PS1="$ ") as screen:
        screen.type(f"{line}\n")
        screen.wait_for("alpha", "READY")
        for _ in range(2):
            screen.type("\x1a")
            screen.expect("\x1b[?1049l")
            screen.expect("Stopped")
            eventually(lambda: screen.mode == screen.mode_before)
            screen.type("fg\n")
            screen.expect("\x1b[?1049h")
            screen.wait_for("alpha", "READY")
        screen.type("q")
        screen.expect("\x1b[?1049l")
        screen.expect("$ ")
        screen.type("exit\n")
        screen.end()
        assert screen.seen.count("\x1b[?1049h") == screen.seen.count("\x1b[?1049l") == 3
        assert screen.mode == screen.mode_before


def test_it_is_left_at_once_although_the_daemon_is_silent() -> None:
    daemon = Daemon({"alpha": fake()})
    where = ("--endpoint", daemon.endpoint)
    with daemon, FullScreen("top", "--interval", "0.2s", *where, columns=200) as screen:
        screen.wait_for("alpha", "READY")
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGSTOP)
        screen.wait_for("no daemon since ", "does not answer", "it is stopped")
        screen.type("q")
        screen.end()
        assert screen.process.returncode == 0
        screen.check_nothing_left()
        daemon.process.send_signal(signal.SIGCONT)
