"""Waiting for models, asking whether all is well, and what the end of a daemon says."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli import ESCAPE, Piped, Terminal, run_cli
from support.daemon import Daemon, fake, wait_for_state
from support.hub_caches import write_folder
from support.streams import Reader

NEVER = {"load_stall": "sleep"}
SLOW = {"step_s": 0.02}
WIDTHS = (40, 80, 200)


@pytest.fixture
def home() -> Iterator[Path]:
    """A home folder with a short path, because sockets go there."""
    with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    models = {
        "ready": fake(aliases=["r"]),
        "loading": fake(fake=NEVER, load_stall_timeout_s=3600),
        "cold": fake(preload=False),
    }
    with Daemon(models) as daemon, daemon.client() as client:
        wait_for_state(client, "ready", "READY")
        wait_for_state(client, "loading", "LOADING")
        yield daemon


def run(daemon: Daemon, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    done = run_cli(*arguments, "--endpoint", daemon.endpoint)
    return done.returncode, done.stdout, done.stderr


# ---------------------------------------------------------------- wait


def test_wait_returns_at_once_for_what_is_ready_and_shows_it(daemon: Daemon) -> None:
    code, out, err = run(daemon, "wait", "r")
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["MODEL", "STATE"],
        ["ready", "READY"],
    ]
    code, out, err = run(daemon, "wait", "ready", "--json")
    assert (code, err) == (0, "")
    assert [row["name"] for row in json.loads(out)["models"]] == ["ready"]


def test_wait_says_each_change_and_returns_when_all_are_ready() -> None:
    models = {name: fake(preload=False, fake={"load_s": 1.0}) for name in "ab"}
    with Daemon(models) as daemon, daemon.client() as client:
        client.load("a", dry_run=True)
        with Piped("load", "a", "--endpoint", daemon.endpoint):
            wait_for_state(client, "a", "LOADING")
            with Piped("wait", "--endpoint", daemon.endpoint) as waiting:
                code, out, err = waiting.end()
        assert code == 0
        assert [line.split()[:2] for line in out.splitlines()[1:]] == [
            ["a", "READY"],
            ["b", "STOPPED"],
        ]
        assert [line.split(" ", 1)[1].split(" (")[0] for line in err.splitlines()] in (
            ["a: LOADING → READY"],
            [],  # it was READY before the command had asked
        )


def test_a_wait_that_takes_too_long_exits_124_with_what_is_missing(daemon: Daemon) -> None:
    for limit in ("0", "0.2"):
        code, out, err = run(daemon, "wait", "--timeout", limit)
        assert (code, out) == (124, "")
        after = "" if limit == "0" else " after 0s"
        assert re.search(rf"error: not READY{after}: loading is LOADING \(", err), err
    code, out, err = run(daemon, "wait", "loading", "--timeout", "0", "--json")
    assert (code, err) == (124, "")
    assert json.loads(out)["error"]["code"] == "timeout"


def test_wait_does_not_wait_for_what_nobody_loads(daemon: Daemon) -> None:
    code, out, err = run(daemon, "wait", "cold", "--timeout", "60")
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "error: cold is STOPPED, and nothing loads it",
        f"hint: load it with `mlxsup load cold --endpoint {daemon.endpoint}`",
    ]
    code, out, err = run(daemon, "wait", "cald")
    assert (code, out) == (1, "")
    assert "hint: did you mean cold?" in err


def test_wait_and_check_say_what_is_broken(daemon: Daemon) -> None:
    assert run(daemon, "status", "--check")[0] == 0, "what loads is not broken"
    assert run(daemon, "status", "--check", "--watch")[0] == 64
    with Daemon({"good": fake(preload=False), "bad": {"path": "/nowhere"}}) as other:
        with other.client() as client:
            wait_for_state(client, "bad", "FAILED")
        code, out, err = run(other, "wait", "bad", "--timeout", "0")
        assert (code, out) == (1, "")
        assert err.startswith("error: bad has FAILED: ")
        code, out, err = run(other, "status", "--check")
        assert (code, err) == (1, "broken: bad has FAILED\n")
        assert "bad    FAILED" in out
        code, out, err = run(other, "status", "--check", "--json")
        assert (code, err, len(json.loads(out)["models"])) == (1, "", 2)


# ---------------------------------------------------------------- start


def test_a_detached_start_that_waits_returns_when_its_models_are_ready() -> None:
    daemon = Daemon({"m": fake(fake={"load_s": 0.5}), "cold": fake(preload=False)})
    done = run_cli("start", "--config", str(daemon.config), "--detach", "--wait")
    try:
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"listening at {daemon.endpoint} (pid ")
        with daemon.client() as client:
            states = {row["name"]: row["state"] for row in client.status()["models"]}
        assert states == {"m": "READY", "cold": "STOPPED"}
    finally:
        run_cli("stop", "--config", str(daemon.config))
        shutil.rmtree(daemon.folder)


@pytest.mark.parametrize("preload", [False, True])
def test_a_detached_start_that_loads_nothing_says_so(preload: bool) -> None:
    daemon = Daemon({"m": fake(preload=preload)})
    done = run_cli("start", "--config", str(daemon.config), "--detach", "--wait")
    try:
        assert done.returncode == 0
        assert ("nothing is loaded yet" in done.stderr) != preload
    finally:
        run_cli("stop", "--config", str(daemon.config))
        shutil.rmtree(daemon.folder)


def test_a_detached_start_whose_model_fails_says_so_and_how_to_continue() -> None:
    daemon = Daemon({"m": {"path": "/nowhere", "preload": True}})
    done = run_cli("start", "--config", str(daemon.config), "--detach", "--wait", "--json")
    try:
        assert (done.returncode, done.stderr) == (1, "")
        [line] = done.stdout.splitlines()
        error = json.loads(line)["error"]
        assert error["code"] == "model_failed"
        assert f"`mlxsup logs m --config {daemon.config}`" in error["hint"]
    finally:
        assert run_cli("stop", "--config", str(daemon.config)).returncode == 0
        shutil.rmtree(daemon.folder)


@pytest.mark.parametrize(
    "arguments", [["--wait"], ["--save", "x.toml"], ["--config", "c", "--save", "x.toml"]]
)
def test_options_of_start_that_need_another_one_are_refused(arguments: list[str]) -> None:
    done = run_cli("start", *arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert not Path("x.toml").exists()


def test_what_start_saves_is_what_it_runs_with(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    write_folder(home / "m")
    file = home / "saved.toml"
    arguments = ["start", "--model", "m", "--save", "saved.toml", "--http", "no address"]
    assert run_cli(*arguments).returncode == 64
    assert not file.exists()
    with Piped("start", "--model", "m", "--save", "saved.toml", HOME=str(home)) as started:
        assert started.note() == "the configuration is saved in saved.toml\n"
        assert started.line().startswith("listening at ")
        status = json.loads(run_cli("status", "--json", "--config", "saved.toml").stdout)
        assert status["config_path"] == str(file)
        assert [row["name"] for row in status["models"]] == ["m"]
        other = run_cli("start", "--model", "m", "--save", "other.toml")
        assert other.returncode == 75
        assert "is already running in" in other.stderr
        assert other.stderr.endswith(
            "nothing is saved\nhint: see it with `mlxsup status`, end it with `mlxsup stop`\n"
        )
        assert not Path("other.toml").exists()
        again = run_cli("start", "--model", "m", "--save", "saved.toml")
        assert again.returncode == 64
        assert "error: there is a file at saved.toml already" in again.stderr
        assert run_cli("stop", "--config", "saved.toml").returncode == 0
        assert started.end()[0] == 0
    assert run_cli("config", "check", "saved.toml").returncode == 0
    first = file.read_text().splitlines()[0]
    assert json.loads((home / first.removeprefix("#:schema ")).read_text())["title"] == "mlxsup"
    (home / "none").touch()
    failed = run_cli("start", "--model", "m", "--save", "none/c.toml")
    assert failed.returncode == 1
    assert "cannot write none/c.toml: Not a directory" in failed.stderr


# ---------------------------------------------------------------- the end


def test_stop_names_what_it_waits_for() -> None:
    with Daemon({"m": fake(fake=SLOW)}) as daemon, daemon.client() as client:
        pid = wait_for_state(client, "m", "READY")["pid"]
        assert daemon.process is not None
        running = Reader(client, "m", "runs", max_tokens=4000).started()
        with Piped("stop", "--endpoint", daemon.endpoint) as stopping:
            said = stopping.note()
            running.stream.cancel()
            assert stopping.end()[0] == 0
        whom = f"m (pid {pid}), the daemon (pid {daemon.process.pid})"
        assert said.startswith(f"waiting for {whom} (")


@pytest.mark.parametrize("columns", WIDTHS)
def test_an_interrupt_of_start_says_at_once_what_it_waits_for(columns: int) -> None:
    daemon = Daemon({"m": fake(fake=SLOW)}, {"drain_timeout_s": 300.0})
    with Terminal("start", "--config", str(daemon.config), COLUMNS=str(columns)) as started:
        started.expect("→ READY")
        with daemon.client() as client:
            running = Reader(client, "m", "runs", max_tokens=4000).started()
            started.type("\x03")
            started.expect(
                "stopping: 1 running request may take up to 5m 0s to finish;"
                " Ctrl-C again cuts them off"
            )
            started.type("\x03")
            started.expect("stopping: cutting off 1 running request")
            assert running.failed().code == "shutting_down"
        started.end()
        assert started.process.returncode == 0
    shutil.rmtree(daemon.folder)


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_latest_events_of_a_model_are_told_in_words(daemon: Daemon, columns: int) -> None:
    with Terminal(
        "status", "--debug", "--endpoint", daemon.endpoint, COLUMNS=str(columns)
    ) as terminal:
        shown = ESCAPE.sub("", terminal.end())
    assert "PENDING → LOADING (preload)" in " ".join(shown.split())
    assert not re.search(r"[A-Za-z]\(\w+=|<\w+\.\w+:", shown), "no repr of Python"
