"""`doctor` on a home with one thing wrong in it: the finding, its exit code and its fix."""

from __future__ import annotations

import json
import re
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support.cli.cli import run_cli
from support.cli.doctor_ground import Ground
from support.daemon.daemon import Daemon, fake, wait_for_state
from support.gateway.http_daemon import HttpDaemon
from support.gateway.json_schemas import problems

Plant = Callable[[Ground], object]


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    with Ground() as ground:
        monkeypatch.chdir(ground.folder)
        yield ground


def open_runtime_folder(ground: Ground) -> None:
    (ground.folder / "run").mkdir(mode=0o755)
    (ground.folder / "run").chmod(0o755)


def started(ground: Ground) -> int:
    """Starts a daemon in the background; its pid."""
    done = ground.shell("mlxsup start --detach")
    assert done.returncode == 0, done.stderr
    return int((ground.folder / "run" / "lock").read_text().split()[0])


def unknown_key(ground: Ground) -> None:
    ground.config.write_text(ground.config.read_text() + "preloud = true\n")


def cut_weights(ground: Ground) -> None:
    ground.write(ground.model())
    weights = ground.folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def open_token(ground: Ground) -> None:
    token = ground.folder / "hf" / "token"
    token.parent.mkdir()
    token.write_text("hf_SECRET")
    token.chmod(0o640)


def exposed(ground: Ground) -> None:
    ground.write(fake(preload=False), gateway={"listen": "0.0.0.0:0"})


DEFECTS: dict[str, tuple[Plant, str, str, str]] = {
    "a killed daemon has left its sockets": (
        lambda ground: ground.end(started(ground)), "daemon", "note", "was killed and left"),
    "an unknown key": (
        unknown_key, "configuration", "problem", "did you mean preload?"),
    "weights are cut short": (cut_weights, "models", "problem", "is incomplete"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_one_finding_with_a_reason_and_a_fix(ground: Ground, name: str) -> None:
    plant, subject, level, words = DEFECTS[name]
    plant(ground)
    code, findings = ground.doctor()
    [found] = [one for one in findings if one["subject"] == subject and words in one["what"]]
    assert found["level"] == level
    assert found["why"]
    assert found["command"] or found["fix"]
    assert code == (1 if level == "problem" else 0)


def test_a_printed_command_repairs_what_it_names(ground: Ground) -> None:
    open_runtime_folder(ground)
    open_token(ground)
    _, findings = ground.doctor()
    commands = [one["command"] for one in findings if one["command"].startswith("chmod ")]
    assert len(commands) == 2
    assert ground.shell(" && ".join(commands)).returncode == 0
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


def test_the_hub_token_is_never_printed(ground: Ground) -> None:
    open_token(ground)
    ground.variables["HF_TOKEN"] = "hf_ANOTHER"
    for options in ("", "--json"):
        done = ground.shell(f"mlxsup doctor {options}")
        assert "hf_SECRET" not in done.stdout + done.stderr
        assert "hf_ANOTHER" not in done.stdout + done.stderr
        assert "token" in done.stdout


def test_printed_commands_repeat_the_named_configuration(ground: Ground) -> None:
    exposed(ground)
    other = ground.config.rename(ground.folder / "other.toml")
    done = ground.shell(f"mlxsup doctor --json --config {other}")
    commands = [one["command"] for one in json.loads(done.stdout)["findings"]]
    assert f"mlxsup key new laptop --config {other}" in commands


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


def test_the_gateway_of_a_daemon_that_is_stopped_is_no_stranger(daemon: HttpDaemon) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        found = findings(daemon)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    [wrong] = [one for one in found if one["level"] == "problem"]
    assert (wrong["subject"], "is stopped" in wrong["what"]) == ("daemon", True)
    [gateway] = [one for one in found if one["subject"] == "gateway"]
    assert gateway["what"] == f"listens at {daemon.listen}"


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
