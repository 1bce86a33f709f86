"""`mlxsup start` in the background and without a file, `stop`, and completion."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import psutil
import pytest

from mlxsup.cli.command_table import COMMANDS
from mlxsup.cli.main import root

from support.cli import Piped, environment, run_cli
from support.cli import command as command_line
from support.daemon import Daemon, fake, is_alive, toml_of, wait_for_state
from support.eventually import eventually
from support.hub_caches import write_folder, write_repository
from support.json_schemas import problems


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as name:
        yield Path(name)


def test_detached_daemon_answers_when_start_returns_and_outlives_it() -> None:
    daemon = Daemon({"alpha": fake()})
    try:
        done = run_cli("start", "--config", str(daemon.config), "--detach", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        assert problems(done.stdout, ["start"]) == []
        value = json.loads(done.stdout)
        assert value["endpoint"] == daemon.endpoint
        process = psutil.Process(value["pid"])
        with daemon.client() as client:
            assert client.status()["pid"] == process.pid
            wait_for_state(client, "alpha", "READY")
        assert os.getsid(process.pid) == process.pid
        output = daemon.logs / "daemon.out"
        assert value["output"] == str(output)
        assert stat.S_IMODE(output.stat().st_mode) == 0o600
        assert output.read_text().startswith(f"listening at {daemon.endpoint}")
        # The next one is one too many: its message and its status are shown here.
        second = run_cli("start", "--config", str(daemon.config), "--detach")
        assert (second.returncode, second.stdout) == (75, "")
        assert second.stderr.splitlines() == [
            f"error: a daemon with pid {process.pid} is already running in {daemon.folder}/run",
            f"hint: see it with `mlxsup status --config {daemon.config}`,"
            f" end it with `mlxsup stop --config {daemon.config}`",
        ]
        assert is_alive(process)
    finally:
        assert run_cli("stop", "--endpoint", daemon.endpoint).returncode == 0
        assert not is_alive(process)
        with daemon:
            pass  # checks the logs and removes the folder


def test_what_ends_a_daemon_is_told_with_the_file_that_was_named(home: Path) -> None:
    (home / "c d").mkdir()
    config = home / "c d" / "f.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\nlog_dir = "logs"\n[models]\n')
    config.write_text(config.read_text() + '[models.m]\nengine = "fake"\n')
    again = f"--config '{config}'"
    try:
        first = run_cli("start", "--config", str(config), "--detach")
        assert first.returncode == 0
        assert first.stderr.endswith(f"; end it with `mlxsup stop {again}`\n")
        hint = f"hint: see it with `mlxsup status {again}`, end it with `mlxsup stop {again}`"
        for more in ([], ["--detach"]):
            second = run_cli("start", "--config", str(config), *more)
            assert (second.returncode, second.stderr.splitlines()[-1]) == (75, hint)
            # What was not typed is not repeated.
            third = run_cli("start", *more, MLXSUP_CONFIG=str(config))
            assert third.returncode == 75
            assert third.stderr.endswith(
                "\nhint: see it with `mlxsup status`, end it with `mlxsup stop`\n"
            )
    finally:
        assert run_cli("stop", "--config", str(config)).returncode == 0


def test_a_detached_start_makes_a_runtime_folder_that_its_daemon_takes(home: Path) -> None:
    config = home / "c.toml"
    config.write_text('[supervisor]\nruntime_dir = "new/run"\n[models.m]\nengine = "fake"\n')
    done = run_cli("start", "--config", str(config), "--detach")
    assert done.returncode == 0, done.stderr
    assert run_cli("stop", "--config", str(config)).returncode == 0
    # Without log_dir the logs are in it, and the output of the start is there before the daemon.
    assert (home / "new/run/logs/daemon.out").exists()
    for folder in ("new", "new/run", "new/run/logs"):
        assert stat.S_IMODE((home / folder).stat().st_mode) == 0o700, folder


def test_detached_daemon_that_does_not_come_up_is_told_of(home: Path) -> None:
    config = home / "c.toml"
    config.write_text(
        '[supervisor]\nruntime_dir = "run"\nlog_dir = "logs"\n[models.m]\npath = "m"\n'
    )
    (home / "run").mkdir(mode=0o755)
    (home / "run").chmod(0o755)
    done = run_cli("start", "--config", str(config), "--detach", "--json")
    assert (done.returncode, done.stderr) == (73, "")
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "runtime_folder"
    assert error["hint"] == f"run: chmod 0700 {home}/run"
    config.write_text("[models.m]\npth = 1\n")
    done = run_cli("start", "--config", str(config), "--detach")
    assert (done.returncode, done.stdout) == (78, "")
    assert "models.m.pth" in done.stderr
    config.write_text('[supervisor]\nlog_dir = "c.toml/x"\n[models.m]\npath = "m"\n')
    done = run_cli("start", "--config", str(config), "--detach")
    assert (done.returncode, done.stdout) == (73, "")
    assert "log folder" in done.stderr


def test_start_without_a_file_prints_what_it_amounts_to(home: Path) -> None:
    write_folder(home / "tiny")
    write_folder(home / "second")
    folders = ["--model", f"{home}/tiny", "--model", f"other={home}/second"]
    with Piped("start", *folders, HOME=str(home)) as started:
        text = ""
        while not (line := started.line()).startswith("listening at "):
            text += line
        assert line.startswith(f"listening at ipc://{home}/.mlxsup/run/client.sock (pid ")
        status = json.loads(run_cli("status", "--json", HOME=str(home)).stdout)
        assert [model["name"] for model in status["models"]] == ["tiny", "other"]
        assert status["config_path"] is None
        code, _, _ = started.interrupt()
        assert code == 0
    config = home / "kept.toml"
    config.write_text(text)
    assert run_cli("config", "check", str(config)).returncode == 0
    assert f'path = "{home}/second"' in text


def test_two_models_of_one_name_are_an_error(home: Path) -> None:
    done = run_cli("start", "--model", "a/tiny", "--model", "b/tiny", HOME=str(home))
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("error: two models are called tiny\nhint: ")


# ---------------------------------------------------------------- completion


def complete(words: str, **variables: str) -> list[str]:
    """What bash would be offered for the last, empty or unfinished, word."""
    done = run_cli(
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split(" ")) - 1),
        **{
            "_MLXSUP_COMPLETE": "bash_complete",
            **variables,
        },
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def offers(words: str, names: list[str], **variables: str) -> None:
    """Soon these are offered: a daemon has half a second to answer, which it may once miss."""
    eventually(lambda: complete(words, **variables) == names, timeout_s=60.0, what=words)


def test_completion_knows_commands_options_and_live_models() -> None:
    assert complete("mlxsup sta") == ["start", "status"]
    assert "--follow" in complete("mlxsup logs --f")
    assert complete("mlxsup config ") == ["check", "path", "schema"]
    with Daemon({"alpha": fake(), "beta": fake(preload=False)}) as daemon:
        live = {"MLXSUP_ENDPOINT": daemon.endpoint}
        for command in ("load", "unload", "restart", "generate", "chat"):
            offers(f"mlxsup {command} ", ["alpha", "beta"], **live)
        offers("mlxsup load b", ["beta"], **live)
        offers("mlxsup logs ", ["alpha", "beta", "mlxsup", "mlxsup-gateway"], **live)
        offers(f"mlxsup load --config {daemon.config} a", ["alpha"])
    assert complete("mlxsup load ", **live) == []


def test_completion_takes_names_from_the_configuration_without_a_daemon(home: Path) -> None:
    config = home / "c.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\n[models.gamma]\npath = "m"\n')
    assert complete(f"mlxsup load --config {config} ") == ["gamma"]
    assert complete("mlxsup load ", MLXSUP_CONFIG=str(config), HOME=str(home)) == ["gamma"]
    config.write_text("not TOML")
    assert complete(f"mlxsup load --config {config} ") == []


def test_completion_of_models_and_repositories_knows_the_cache(home: Path) -> None:
    write_repository(home / "hub", "org/tiny")
    write_repository(home / "hub", "org/other")
    config = home / "c.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\n[models.gamma]\npath = "m"\n')
    here = {"HF_HUB_CACHE": f"{home}/hub", "MLXSUP_CONFIG": str(config), "HOME": str(home)}
    for command in ("rm", "pull"):
        assert complete(f"mlxsup {command} ", **here) == ["org/other", "org/tiny"], command
        assert complete(f"mlxsup {command} org/t", **here) == ["org/tiny"], command
    for command in ("run", "show"):
        names = ["gamma", "org/other", "org/tiny"]
        assert complete(f"mlxsup {command} ", **here) == names, command
    (home / "none").touch()
    assert complete("mlxsup rm ", **here | {"HF_HUB_CACHE": f"{home}/none"}) == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_argument_that_names_a_model_is_completed(home: Path, name: str) -> None:
    config = home / "c.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\n[models.gamma]\npath = "m"\n')
    command = root.get_command(click.Context(root), name)
    assert command is not None
    first = next((one for one in command.params if isinstance(one, click.Argument)), None)
    if first is not None and first.name in ("model", "models"):
        assert "gamma" in complete(f"mlxsup {name} ", MLXSUP_CONFIG=str(config), HOME=str(home))


def test_completion_does_not_wait_for_a_daemon_that_says_nothing(home: Path) -> None:
    import zmq

    config = home / "c.toml"
    config.write_text('[supervisor]\nruntime_dir = "."\n[models.gamma]\npath = "m"\n')
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{home}/client.sock")
        words = f"mlxsup load --config {config} "
        eventually(lambda: complete(words) == ["gamma"] and router.poll(0), timeout_s=60.0)
    context.term()


def test_completion_scripts_are_for_this_program() -> None:
    for shell, word in (
        ("bash", "bash_complete"),
        ("zsh", "zsh_complete"),
        ("fish", "fish_complete"),
    ):
        done = run_cli("completion", shell)
        assert done.returncode == 0
        assert f"_MLXSUP_COMPLETE={word}" in done.stdout


def test_a_daemon_that_can_write_nothing_is_said_to_lack_a_disk(home: Path) -> None:
    config = home / "mlxsup.toml"
    config.write_text(toml_of({"supervisor": {"runtime_dir": "run"}, "models.m": fake()}))
    limited = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh"]  # no file can become longer than 0
    start = command_line("start", "--config", str(config), "--detach")
    done = subprocess.run(
        [*limited, *start], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 73, done
    assert done.stderr.splitlines() == [
        f"error: cannot write to the log folder {home}/run/logs: File too large",
        "hint: set log_dir to a folder that you can write to",
    ]
