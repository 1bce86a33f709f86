"""Commands that follow or wait: `events`, `status --watch`, `load`, `logs -f`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlxsup.client import Client

from support.cli import COLUMNS, ESCAPE, Piped, Terminal, run_cli
from support.daemon import Daemon, fake, wait_for_state

SLOW_LOAD = {"load_s": 3.5, "load_steps": 10}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    models = {"alpha": fake(), "cold": fake(preload=False, fake=SLOW_LOAD)}
    with Daemon(models) as daemon, daemon.client() as client:
        wait_for_state(client, "alpha", "READY")
        yield daemon


@contextmanager
def something_to_show(arguments: list[str], client: Client) -> Iterator[None]:
    """A request that runs, for `requests -f`, which has nothing to say without one."""
    if arguments[0] != "requests":
        yield
        return
    with client.generate("alpha", prompt="[[fault slow=0.02]]", max_tokens=4000) as stream:
        next(stream)
        yield


def test_events_are_the_changes_of_state_in_their_order(daemon: Daemon) -> None:
    where = ("--endpoint", daemon.endpoint)
    with Piped("events", *where) as events, daemon.client() as client:
        assert events.note() == f"following {daemon.endpoint}; Ctrl-C ends\n"
        client.restart("alpha")
        states: list[str] = []
        while not states or states[-1] != "READY":
            states.append(events.line().split(" → ")[1].split()[0])
        assert states == ["DRAINING", "STOPPING", "PENDING", "LOADING", "READY"]
        assert events.interrupt() == (0, "", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["events"],
        ["events", "--json"],
        ["status", "--watch"],
        ["status", "--watch", "--json"],
        ["top"],
        ["top", "--json"],
        ["logs", "-f"],
        ["requests", "-f"],
        ["requests", "-f", "--json"],
    ],
    ids=" ".join,
)
def test_what_follows_ends_quietly_when_nobody_reads_although_nothing_happens(
    daemon: Daemon, arguments: list[str]
) -> None:
    with (
        daemon.client() as client,
        something_to_show(arguments, client),
        Piped(*arguments, "--endpoint", daemon.endpoint) as follower,
    ):
        if arguments == ["events"]:
            follower.note()
        elif arguments[0] != "events":
            follower.line()
        assert follower.process.stdout is not None
        follower.process.stdout.close()
        assert follower.process.wait(60) == 141
        assert follower.note() == ""


def test_events_end_quietly_when_nobody_reads_the_next_change(daemon: Daemon) -> None:
    with Piped("events", "--endpoint", daemon.endpoint) as events, daemon.client() as client:
        events.note()
        assert events.process.stdout is not None
        events.process.stdout.close()
        client.restart("alpha", now=True)
        assert events.process.wait(60) == 141
        assert events.note() == ""


def test_events_and_watch_exit_69_when_the_daemon_goes() -> None:
    daemon = Daemon({"alpha": fake()})
    with daemon:
        where = ("--endpoint", daemon.endpoint)
        with (
            Piped("events", *where) as events,
            Piped("status", "--watch", "--json", *where) as watch,
        ):
            events.note()
            assert json.loads(watch.line())["models"][0]["name"] == "alpha"
            assert daemon.process is not None
            assert run_cli("stop", *where).returncode == 0
            for follower in (events, watch):
                code, _, err = follower.end()
                assert code == 69
                assert "Traceback" not in err


def test_watch_draws_in_place_on_a_terminal_and_ends_with_0(daemon: Daemon) -> None:
    with Terminal("status", "--watch", "--endpoint", daemon.endpoint) as terminal:
        for _ in range(3):
            terminal.expect("alpha")
        terminal.type("\x03")
        shown = terminal.end()
        assert terminal.process.returncode == 0
    frames = re.split(r"\x1b\[(\d+)A\r", shown)
    assert len(frames) >= 5, "three pictures, and the two ways up between them"
    for before, up in zip(frames[::2], frames[1::2], strict=False):
        assert int(up) == before.count("\n"), "each begins where the one before it began"
    assert max(map(len, ESCAPE.sub("", shown).splitlines())) <= COLUMNS
    assert "Traceback" not in shown


def test_watch_on_a_dumb_terminal_writes_nothing_over(daemon: Daemon) -> None:
    where = ("--endpoint", daemon.endpoint)
    with Terminal("status", "--watch", *where, TERM="dumb") as terminal:
        terminal.expect("alpha")
        terminal.expect("cold")
        terminal.type("\x03")
        assert "\x1b" not in terminal.end()


def test_debug_tells_each_model_s_latest_events(daemon: Daemon) -> None:
    where = ("--endpoint", daemon.endpoint)
    text = run_cli("status", "--debug", *where).stdout
    assert "latest events of alpha:\n" in text
    assert "READY" in text.partition("latest events of alpha:")[2]
    debug = json.loads(run_cli("status", "--debug", "--json", *where).stdout)
    assert "alpha" in {one["model"] for one in debug["flight"]}
    assert "flight" not in json.loads(run_cli("status", "--json", *where).stdout)


def assert_quiet_for_a_second(*arguments: str) -> None:
    """Runs a command that has nothing to tell of; one that has waited for a second may."""
    began_at = time.monotonic()
    done = run_cli(*arguments)
    took_s = time.monotonic() - began_at
    assert done.returncode == 0
    assert done.stderr == "" or took_s > 1.0


def test_load_that_takes_longer_tells_of_it_in_lines_in_a_pipe(daemon: Daemon) -> None:
    where = ("--endpoint", daemon.endpoint)
    assert_quiet_for_a_second("unload", "cold", *where)
    done = run_cli("load", "cold", *where)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["MODEL", "cold"]
    lines = done.stderr.splitlines()
    phases = [
        phase for line in lines for phase in ("weights", "materialise", "warmup") if phase in line
    ]
    assert phases == list(dict.fromkeys(phases)), "one line for each change"
    assert "warmup" in phases
    assert run_cli("unload", "cold", *where).returncode == 0
    assert run_cli("load", "cold", "--json", *where).stderr == ""
    # What is there already needs no explanation.
    assert_quiet_for_a_second("load", "cold", *where)


def test_load_that_takes_longer_has_a_line_on_a_terminal_that_is_gone_afterwards(
    daemon: Daemon,
) -> None:
    where = ("--endpoint", daemon.endpoint)
    with Terminal("restart", "cold", *where) as terminal:
        terminal.expect("\r\x1b[K")
        terminal.expect("cold: LOADING")
        terminal.expect("\r\x1b[K")
        shown = terminal.end()
        assert terminal.process.returncode == 0
    # The table stands where the line stood.
    assert "\r\x1b[K\x1b[1mMODEL" in shown or "\r\x1b[KMODEL" in shown


def test_logs_of_the_generation_before_and_since(daemon: Daemon) -> None:
    where = ("--endpoint", daemon.endpoint)
    with daemon.client() as client:
        client.restart("alpha", now=True)
        generation = client.status()["models"][0]["generation"]
    lines = run_cli("logs", "alpha", "--previous", *where).stdout.splitlines()
    assert lines[0].startswith(f"--- generation {generation - 1} pid ")
    assert len([line for line in lines if line.startswith("--- generation")]) == 1
    lines = run_cli("logs", "alpha", "--since", "1h", "-n", "1000", *where).stdout.splitlines()
    rules = [line for line in lines if line.startswith("--- generation")]
    assert len(rules) == generation
    assert run_cli("logs", "alpha", "--since", "0s", *where).stdout == ""
    assert (
        len(run_cli("logs", "alpha", "--since", "1h", "-n", "2", *where).stdout.splitlines()) == 2
    )


def test_followed_log_goes_on_with_a_rule_at_each_generation(daemon: Daemon) -> None:
    where = ("--endpoint", daemon.endpoint)
    with Piped("logs", "-f", "-n", "1", *where) as logs, daemon.client() as client:
        logs.line()
        for _ in range(2):
            client.restart("alpha", now=True)
            while not (line := logs.line()).startswith("alpha | --- generation "):
                assert line.startswith(("alpha | ", "cold  | "))
        assert logs.interrupt()[0] == 130
