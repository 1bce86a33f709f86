"""`top` on a real terminal, which it has to give back, and in a pipe."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import pytest

from support.cli.cli import Piped, command
from support.cli.full_screen import FullScreen, Shell
from support.daemon.daemon import Daemon, fake, wait_for_state
from support.eventually import eventually
from support.gateway.json_schemas import problems

COLOUR = re.compile(r"\x1b\[(?:\d+;)*3[0-7]")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon({"alpha": fake(), "cold": fake(preload=False)}) as daemon:
        with daemon.client() as client:
            wait_for_state(client, "alpha", "READY")
        yield daemon


def top(daemon: Daemon, **variables: str) -> FullScreen:
    return FullScreen("top", "--endpoint", daemon.endpoint, **variables)


def test_a_key_loads_a_model_and_q_gives_the_terminal_back(daemon: Daemon) -> None:
    with daemon.client() as client, top(daemon) as screen:
        screen.expect("alpha")
        screen.expect("READY")
        assert screen.mode != screen.mode_before, "keys come one by one"
        screen.type("jj")
        screen.expect("> cold")
        screen.type("l")
        wait_for_state(client, "cold", "READY")
        screen.type("q")
        assert COLOUR.search(screen.end())
        assert screen.process.returncode == 0
        screen.check_given_back()


def test_colour_is_off_if_it_is_not_wanted(daemon: Daemon) -> None:
    with top(daemon, NO_COLOR="1") as screen:
        screen.expect("READY")
        screen.type("q")
        assert not COLOUR.search(screen.end())


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_a_signal_ends_it_as_any_program_once_the_terminal_is_what_it_was(
    daemon: Daemon, number: signal.Signals, code: int
) -> None:
    with top(daemon) as screen:
        screen.expect("READY")
        screen.process.send_signal(number)
        screen.end()
        assert screen.process.returncode == code
        screen.check_given_back()


def test_a_closed_window_ends_it(daemon: Daemon) -> None:
    with top(daemon) as screen:
        screen.expect("READY")
        screen.hang_up()
        assert screen.process.wait(120) != 0


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(daemon: Daemon) -> None:
    line = " ".join(command("top", "--endpoint", daemon.endpoint))
    with Shell(PS1="$ ") as screen:
        screen.type(f"{line}\n")
        screen.expect("READY")
        for _ in range(2):
            screen.type("\x1a")
            screen.expect("\x1b[?1049l")
            screen.expect("Stopped")
            eventually(lambda: screen.mode == screen.mode_before)
            screen.type("fg\n")
            screen.expect("\x1b[?1049h")
            screen.expect("READY")
        screen.type("q")
        screen.expect("\x1b[?1049l")
        screen.expect("$ ")
        screen.type("exit\n")
        screen.end()
        screen.check_given_back()


def test_it_is_left_at_once_although_the_daemon_is_silent() -> None:
    daemon = Daemon({"alpha": fake()})
    with daemon, top(daemon, COLUMNS="200") as screen:
        screen.expect("READY")
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGSTOP)
        screen.expect("no daemon since ")
        screen.expect("it is stopped")
        screen.type("q")
        screen.end()
        daemon.process.send_signal(signal.SIGCONT)
        assert screen.process.returncode == 0
        screen.check_given_back()


def test_without_a_daemon_it_is_an_error_and_the_screen_is_never_taken() -> None:
    with FullScreen("top", "--endpoint", "ipc:///tmp/nowhere/client.sock") as screen:
        shown = screen.end()
        assert screen.process.returncode == 69
    assert "error:" in shown
    assert "\x1b[?1049h" not in shown


def test_for_programs_it_takes_no_screen_on_a_terminal_either(daemon: Daemon) -> None:
    with FullScreen("top", "--json", "--endpoint", daemon.endpoint) as screen:
        screen.expect('"schema_version"')
        screen.process.send_signal(signal.SIGINT)
        assert "\x1b[?1049h" not in screen.end()


def test_in_a_pipe_it_is_the_status_with_each_change(daemon: Daemon) -> None:
    with (
        Piped("top", "--json", "--endpoint", daemon.endpoint) as piped,
        daemon.client() as client,
    ):
        line = piped.line()
        assert problems(line, ["status"]) == []
        client.restart("alpha", now=True)
        before = json.loads(line)["models"][0]["generation"]
        while json.loads(piped.line())["models"][0]["generation"] == before:
            pass
        piped.process.send_signal(signal.SIGINT)
        assert piped.end()[0] == 0
