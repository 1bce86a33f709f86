"""`doctor` on a home with one thing wrong in it: the finding, its exit code and its fix."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.cli.cli import TIME_LIMIT_S, environment, run_cli
from support.daemon.daemon import Daemon, fake, toml_of, wait_for_state
from support.daemon.hub_caches import write_folder
from support.gateway.http_daemon import HttpDaemon
from support.gateway.json_schemas import problems


class Ground:
    """A folder that is a home and the current folder, with a sound `mlxsup.toml` in it.

    Attributes:
        folder: the home.
        config: the configuration file.
        variables: added to the environment of commands.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "mlxsup.toml"
        program = folder / "tools" / "mlxsup"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mlxsup.cli "$@"\n')
        program.chmod(0o755)
        write_folder(folder / "model")
        self.variables = {
            "HOME": str(folder),
            "HF_HOME": str(folder / "hf"),
            "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        }
        self.write(fake(preload=False))  # no model is estimated, which takes seconds

    def model(self) -> dict[str, Any]:
        """The entry of a model with complete files."""
        return {"path": str(self.folder / "model")}

    def write(self, entry: dict[str, Any], **tables: dict[str, Any]) -> None:
        """Writes the configuration, with the entry of the model m."""
        top = {"runtime_dir": str(self.folder / "run"), "log_dir": str(self.folder / "logs")}
        self.config.write_text(toml_of({"supervisor": top, **tables, "models.m": entry}))

    def shell(self, lines: str) -> subprocess.CompletedProcess[str]:
        """Runs lines of a shell."""
        return subprocess.run(
            ["/bin/sh", "-c", lines], cwd=self.folder, env=environment(**self.variables),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIME_LIMIT_S,
        )  # fmt: skip

    def doctor(self) -> tuple[int, list[dict[str, str]]]:
        """The exit code of `mlxsup doctor` and its findings; the current folder must be this."""
        done = run_cli("doctor", "--json", **self.variables)
        assert done.stdout, (done.returncode, done.stderr)
        return done.returncode, json.loads(done.stdout)["findings"]


@pytest.fixture
def ground(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    monkeypatch.chdir(folder)
    return Ground(folder)


def open_runtime_folder(ground: Ground) -> None:
    (ground.folder / "run").mkdir(mode=0o755)
    (ground.folder / "run").chmod(0o755)


def unknown_key(ground: Ground) -> None:
    ground.config.write_text(ground.config.read_text() + "preloud = true\n")


def cut_weights(ground: Ground) -> None:
    ground.write(ground.model())
    weights = ground.folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def exposed(ground: Ground) -> None:
    ground.write(fake(preload=False), gateway={"listen": "0.0.0.0:0"})


def test_each_defect_of_the_file_and_its_folders_is_a_finding(ground: Ground) -> None:
    for plant, words in ((unknown_key, "did you mean preload?"), (cut_weights, "is incomplete")):
        plant(ground)
        code, findings = ground.doctor()
        [found] = [one for one in findings if one["level"] == "problem"]
        assert (code, found["subject"], words in found["what"]) == (1, "configuration", True)


def test_a_printed_command_repairs_what_it_names(ground: Ground) -> None:
    open_runtime_folder(ground)
    _, findings = ground.doctor()
    [command] = [one["command"] for one in findings if one["command"].startswith("chmod ")]
    assert ground.shell(command).returncode == 0
    code, findings = ground.doctor()
    assert (code, [one for one in findings if one["command"].startswith("chmod ")]) == (0, [])


def test_a_sound_home_has_no_problem_and_is_left_unchanged(ground: Ground) -> None:
    ground.write(ground.model())
    before = sorted(ground.folder.rglob("*"))
    done = ground.shell("mlxsup doctor")
    assert done.returncode == 0, done.stdout
    assert "\x1b" not in done.stdout
    assert not re.search("^problem", done.stdout, re.M)
    assert done.stdout.splitlines()[-1].startswith("no problems")
    assert sorted(ground.folder.rglob("*")) == before
    done = ground.shell("mlxsup doctor --json")
    assert problems(done.stdout, ["doctor"]) == []
    value = json.loads(done.stdout)
    assert (value["config"], value["problems"]) == (str(ground.config), 0)


def test_printed_commands_repeat_the_named_configuration(ground: Ground) -> None:
    exposed(ground)
    other = ground.config.rename(ground.folder / "other.toml")
    done = ground.shell(f"mlxsup doctor --json --config {other}")
    [wrong] = [one for one in json.loads(done.stdout)["findings"] if one["level"] == "problem"]
    assert f"`mlxsup key new NAME --config {other}`" in wrong["what"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def daemon() -> Iterator[HttpDaemon]:
    daemon = HttpDaemon({"m": fake()})
    daemon.listen = f"127.0.0.1:{free_port()}"
    with daemon.config.open("a") as file:
        file.write(f'[gateway]\nlisten = "{daemon.listen}"\n')
    with daemon:
        yield daemon


def findings(daemon: Daemon) -> list[dict[str, str]]:
    done = run_cli("doctor", "--json", "--config", str(daemon.config))
    found: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    return found


def test_a_daemon_that_is_stopped_is_a_problem(daemon: HttpDaemon) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        found = findings(daemon)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    [wrong] = [one for one in found if one["level"] == "problem"]
    assert (wrong["subject"], "is stopped" in wrong["what"]) == ("daemon", True)


def test_a_daemon_whose_socket_was_removed_a_moment_ago_is_waited_for(daemon: HttpDaemon) -> None:
    Path(daemon.endpoint.removeprefix("ipc://")).unlink()
    done = daemon.run("status")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_daemon_that_works_and_lets_nobody_in_is_not_to_be_killed(daemon: HttpDaemon) -> None:
    assert daemon.process is not None
    process = psutil.Process(daemon.process.pid)
    with daemon.client() as client:
        wait_for_state(client, "m", "READY")
    limits = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds(), limits[1]))
    try:
        done = daemon.run("status")
        [problem] = [
            one
            for one in findings(daemon)
            if (one["subject"], one["level"]) == ("daemon", "problem")
        ]
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, limits)
    assert done.returncode == 69
    assert f"pid {daemon.process.pid} does not answer" in done.stderr
    for text in (done.stderr, problem["fix"]):
        assert "again in a moment" in text
        assert "kill" not in text
    assert daemon.run("status").returncode == 0
