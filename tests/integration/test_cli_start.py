"""`start` in its three ways, which daemon commands find, `wait`, and completion."""

from __future__ import annotations

import json
import os
import re
import shutil
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

from support.cli.cli import Piped, Terminal, environment, run_cli
from support.cli.cli import command as command_line
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, is_alive, toml_of, wait_for_state
from support.daemon.hub_caches import REPO, write_folder, write_repository
from support.eventually import eventually
from support.gateway.json_schemas import problems


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


def test_every_argument_that_names_a_model_is_completed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = home / "c.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\n[models.gamma]\npath = "m"\n')
    monkeypatch.setenv("MLXSUP_CONFIG", str(config))
    completed = []
    for name in COMMANDS:
        command = root.get_command(click.Context(root), name)
        assert command is not None
        for one in command.params:
            if isinstance(one, click.Argument) and one.name in ("model", "models"):
                found = one.shell_complete(click.Context(command), "")
                assert "gamma" in [item.value for item in found], name
                completed.append(name)
    assert {"load", "chat", "logs", "wait", "show"} < set(completed)


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


NEVER = {"load_stall": "sleep"}
SLOW = {"step_s": 0.02}
NARROW = 40


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


def test_an_interrupt_of_start_says_at_once_what_it_waits_for() -> None:
    daemon = Daemon({"m": fake(fake=SLOW)}, {"drain_timeout_s": 300.0})
    with Terminal("start", "--config", str(daemon.config), COLUMNS=str(NARROW)) as started:
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


@pytest.fixture
def newcomer(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, which is the current folder, too."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    return home


def test_without_anything_a_newcomer_is_told_what_works(newcomer: Path) -> None:
    assert run_cli("status").stderr.splitlines() == [
        f"error: no daemon answers at ipc://{newcomer}/.mlxsup/run/client.sock",
        "hint: start one with `mlxsup start --model FOLDER`",
    ]
    assert run_cli("htop").stderr.splitlines() == [
        "error: No such command 'htop'.",
        "hint: did you mean `mlxsup top`?",
    ]
    error, hint = run_cli("start").stderr.splitlines()
    assert error.startswith("error: no configuration file: there is none of mlxsup.toml, ")
    assert "`mlxsup start --model FOLDER`" in hint


def test_a_runtime_folder_that_others_use_is_left_as_it_is(newcomer: Path) -> None:
    shared = newcomer / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    (shared / "of-another").touch()
    file = newcomer / "mlxsup.toml"
    file.write_text('[supervisor]\nruntime_dir = "shared"\n[models.m]\nengine = "fake"\n')
    said = run_cli("start").stderr
    assert f"{shared} has mode 0755, so others may reach its sockets" in said
    assert "chmod" not in said
    assert "set runtime_dir to a folder that is not there yet" in said


def test_config_path_prints_the_winner_on_stdout_and_why_on_stderr(newcomer: Path) -> None:
    done = run_cli("config", "path")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("no configuration file: there is none of mlxsup.toml, ~/.config/")
    file = newcomer / "mlxsup.toml"
    file.write_text('[supervisor]\nruntime_dir = "run"\n')
    done = run_cli("config", "path")
    assert (done.returncode, done.stdout) == (0, f"{file}\n")
    assert done.stderr.splitlines() == [
        "the first that exists of the usual places: ./mlxsup.toml",
        f"commands look for the daemon at ipc://{newcomer}/run/client.sock,"
        " because of ./mlxsup.toml",
    ]
    done = run_cli("config", "path", "--json", MLXSUP_ENDPOINT="ipc:///x/y")
    value = json.loads(done.stdout)
    assert (done.returncode, done.stderr, value["path"]) == (0, "", str(file))
    assert value["daemon"] == {"endpoint": "ipc:///x/y", "source": "MLXSUP_ENDPOINT"}
    looked = {one["path"]: one["exists"] for one in value["looked_at"]}
    assert looked == {
        "mlxsup.toml": True,
        "~/.config/mlxsup/config.toml": False,
        "~/.mlxsup/config.toml": False,
    }


def test_start_without_a_file_says_which_option_commands_need(newcomer: Path) -> None:
    (newcomer / "mlxsup.toml").write_text('[supervisor]\nruntime_dir = "/r"\n')
    write_folder(newcomer / "m")
    endpoint = f"ipc://{newcomer}/.mlxsup/run/client.sock"
    done = run_cli("start", "--model", "m", "--detach")
    try:
        assert done.returncode == 0
        assert f"end it with `mlxsup stop --endpoint {endpoint}`" in done.stderr
        second = run_cli("start", "--model", "m")
        assert second.returncode == 75
        assert f"`mlxsup status --endpoint {endpoint}`" in second.stderr
    finally:
        assert run_cli("stop", "--endpoint", endpoint).returncode == 0


# ---------------------------------------------------------------- logs


def variables(home: Path) -> dict[str, str]:
    cache = {"HF_HUB_CACHE": str(home / "hub"), "HF_HOME": str(home / "hf")}
    return {"HOME": str(home), **cache, "HF_HUB_OFFLINE": "1"}


def test_a_repository_of_the_cache_is_served_from_there(home: Path) -> None:
    snapshot = write_repository(home / "hub")
    with Piped("start", "--model", f"m={REPO}", **variables(home)) as started:
        text = ""
        while not (line := started.line()).startswith("listening at "):
            text += line
        assert f'[models.m]\nrepo = "{REPO}"' in text
        while not (change := started.line()).rpartition("m: ")[2].startswith("LOADING → "):
            assert "m: " in change
        # What it was made of is no real model; the sentence names the file that was read.
        assert str(snapshot) in change
        assert started.interrupt()[0] == 0


def test_config_check_knows_that_a_missing_repository_will_be_downloaded(home: Path) -> None:
    config = home / "c.toml"
    config.write_text(f'[models.missing]\nrepo = "{REPO}"\n')
    done = run_cli("config", "check", str(config), **{**variables(home), "HF_HUB_OFFLINE": "0"})
    assert (done.returncode, done.stderr) == (0, "")


def test_config_check_lists_each_folder_with_its_line(home: Path) -> None:
    write_repository(home / "hub", "a/hub")
    write_folder(home / "sound")
    config = home / "c.toml"
    config.write_text(
        '[models.gone]\npath = "gone"\n'
        f'[models.hub]\npath = "{home}/hub/models--a--hub"\n'
        f'[models.missing]\npreload = false\nrepo = "{REPO}"\n'
        '[models.sound]\npath = "sound"\n'
        '[models.fake]\nengine = "fake"\n'
        '[models.snapshot]\nrepo = "a/hub"\n'
    )
    done = run_cli("config", "check", str(config), **variables(home))
    assert (done.returncode, done.stdout) == (78, f"checking {config}\n")
    first, *problems, hint = done.stderr.splitlines()
    assert first == f"error: {config} is not a valid configuration:"
    assert hint == f"hint: fix it, then `mlxsup config check {config}`"
    starts = [
        f"  {config}:2: models.gone.path: the model folder {home}/gone does not exist; ",
        f"  {config}:4: models.hub.path: {home}/hub/models--a--hub is the cache's folder of a/hub",
        f"  {config}:7: models.missing.repo: {REPO} is not in the Hugging Face cache {home}/hub; ",
    ]
    assert len(problems) == len(starts)
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(start)


def test_start_with_a_file_warns_of_a_folder_and_serves_the_others(home: Path) -> None:
    config = home / "c.toml"
    config.write_text(
        f'[supervisor]\nruntime_dir = "{home}/run"\nlog_dir = "logs"\n'
        '[models.gone]\npath = "gone"\npreload = false\n'
        '[models.fake]\nengine = "fake"\n'
    )
    with Piped("start", "--config", str(config), **variables(home)) as started:
        while "fake: LOADING → READY" not in started.line():
            pass
        code, _, err = started.interrupt()
    assert code == 0
    assert err.startswith(f"warning: gone: the model folder {home}/gone does not exist; ")
    assert err.splitlines()[1:] == ["stopping: ending every process"]
