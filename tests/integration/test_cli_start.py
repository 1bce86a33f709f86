"""`start` in its three ways, `wait`, `config`, and completion, with real daemons."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import psutil
import pytest
import zmq

from mlxsup.cli.command_table import COMMANDS
from mlxsup.cli.exit_status import ExitStatus
from mlxsup.cli.main import root
from mlxsup.protocol.folders import DEFAULT_LISTEN

from support.cli.cli import Piped, Terminal, environment, run_cli
from support.cli.cli import command as command_line
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, is_alive, wait_for_state
from support.daemon.hub_caches import REPO, write_folder, write_repository
from support.eventually import eventually
from support.gateway.json_schemas import problems

FAKE = '[models.m]\nengine = "fake"\n'
HERE = '[supervisor]\nruntime_dir = "run"\nlog_dir = "logs"\n'


@pytest.fixture
def home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, which is the current folder, too."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    return folder


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


# ---------------------------------------------------------------- start --detach


def test_a_detached_daemon_answers_when_start_returns_and_a_second_one_is_refused(
    home: Path,
) -> None:
    config = written(home / "c d/f.toml", f'[supervisor]\nruntime_dir = "new/run"\n{FAKE}')
    again = f"--config '{config}'"
    run, output = config.parent / "new/run", config.parent / "new/run/logs/daemon.out"
    hint = "hint: see it with `mlxsup status{0}`, end it with `mlxsup stop{0}`"
    try:
        done = run_cli("start", "--config", str(config), "--detach")
        assert done.returncode == 0, done.stderr
        said = output.read_text().splitlines()[0]
        assert re.fullmatch(
            rf"listening at ipc://{re.escape(str(run))}/client.sock \(pid \d+\)", said
        )
        assert done.stdout == f"{said}\n"
        assert done.stderr.splitlines() == [
            f"its output is in {output}",
            f"next: `mlxsup chat m {again}`, `mlxsup status {again}`;"
            f" `mlxsup stop {again}` ends it",
        ]
        process = psutil.Process(int(said.split()[-1].rstrip(")")))
        assert os.getsid(process.pid) == process.pid
        assert stat.S_IMODE(output.stat().st_mode) == 0o600
        for folder in (run.parent, run, output.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
        for more in ([], ["--detach"]):
            second = run_cli("start", "--config", str(config), *more)
            assert (second.returncode, second.stdout) == (75, "")
            error = f"error: a daemon with pid {process.pid} is already running in {run}"
            assert second.stderr.splitlines() == [error, hint.format(f" {again}")]
            # What was not typed is not repeated.
            third = run_cli("start", *more, MLXSUP_CONFIG=str(config))
            assert third.stderr.splitlines() == [error, hint.format("")]
        assert is_alive(process)
    finally:
        assert run_cli("stop", "--config", str(config)).returncode == 0
    assert not is_alive(process)


def test_commands_that_need_a_daemon_at_once_use_the_one_that_was_first(home: Path) -> None:
    written(home / "mlxsup.toml", HERE + FAKE)
    try:
        with ExitStack() as stack:
            command = ("run", "m", "hi", "--max-tokens", "2")
            running = [stack.enter_context(Piped(*command)) for _ in range(3)]
            ended = [one.end() for one in running]
        assert [code for code, _, _ in ended] == [0, 0, 0], ended
        said = "".join(err for _, _, err in ended)
        assert said.count("started a daemon (pid ") == 1
        pids = set(re.findall(r"daemon \(pid (\d+)\)", said))
        assert len(pids) == 1, said
    finally:
        run_cli("stop", "--now")


def test_a_detached_daemon_that_does_not_come_up_says_why_here(home: Path) -> None:
    config = written(home / "c.toml", f"{HERE}{FAKE}")
    (home / "run").mkdir()
    (home / "run").chmod(0o755)
    detach = ("start", "--config", str(config), "--detach")
    done = run_cli(*detach, "--json")
    assert (done.returncode, done.stderr) == (73, "")
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["hint"]) == ("runtime_folder", f"run: chmod 0700 {home}/run")
    written(home / "run/of-another", "")
    shared = run_cli(*detach).stderr
    assert f"{home}/run has mode 0755, so other users may access its sockets" in shared
    assert "set runtime_dir to a new folder" in shared
    for text, status, words in (
        ("[models.m]\npth = 1\n", 78, "models.m.pth"),
        (f'[supervisor]\nlog_dir = "c.toml/x"\n{FAKE}', 73, "log folder"),
    ):
        config.write_text(text)
        done = run_cli(*detach)
        assert (done.returncode, done.stdout, words in done.stderr) == (status, "", True)
    config.write_text(f'[supervisor]\nruntime_dir = "full"\n{FAKE}')
    limited = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh"]  # no file can become longer than 0
    full = subprocess.run(
        [*limited, *command_line(*detach)], env=environment(), capture_output=True, text=True
    )
    assert full.stderr.splitlines() == [
        f"error: cannot write to the log folder {home}/full/logs: File too large",
        "hint: free some space, or set log_dir to a writable folder",
    ]


def test_start_says_where_http_is_served_or_who_has_the_port(home: Path) -> None:
    first = written(home / "a.toml", f'[supervisor]\nruntime_dir = "a"\n{FAKE}')
    other = written(home / "b.toml", f'[supervisor]\nruntime_dir = "b"\n{FAKE}')
    try:
        done = run_cli("start", "--config", str(first), "--detach", "--http", "0")
        assert done.returncode == 0, done.stderr
        lines = "\n".join(done.stdout.splitlines()[1:])
        said = re.fullmatch(r"HTTP at (\S+)/v1 \(pid (\d+)\)\npage with a chat at (\S+)", lines)
        assert said is not None, lines
        url, pid, page = said.groups()
        assert (page, url.startswith("http://127.0.0.1:")) == (url, True)
        port = url.rpartition(":")[2]
        taken = run_cli("start", "--config", str(other), "--http", port)
        assert (taken.returncode, taken.stdout) == (75, "")
        error, hint = taken.stderr.splitlines()
        assert error == (
            f"error: HTTP cannot be served at 127.0.0.1:{port}: the port is taken by the gateway"
            f" of another mlxsup daemon (pid {pid})"
        )
        assert re.fullmatch(
            r"hint: use another port: `mlxsup start --http 127.0.0.1:\d+`, or .+", hint
        )
        assert run_cli("stop", "--config", str(other)).stdout.startswith("no daemon runs at ")
        # A port of the file may become free, so the daemon runs, and says what is wrong.
        written(other, f'{other.read_text()}[gateway]\nlisten = "127.0.0.1:{port}"\n')
        runs = run_cli("start", "--config", str(other), "--detach")
        assert (runs.returncode, runs.stdout.count("\n")) == (0, 1)
        assert "warning: HTTP is not served, and is tried again: 127.0.0.1:" in runs.stderr
        assert f"is taken by the gateway of another mlxsup daemon (pid {pid})" in runs.stderr
        again = run_cli("start", "--config", str(first), "--http", port)
        assert "is already running in" in again.stderr, "its own port is no matter then"
        loaded = run_cli("start", "m", "--config", str(first))
        assert (loaded.returncode, "READY" in loaded.stdout) == (0, True)
    finally:
        for config in (first, other):
            assert run_cli("stop", "--config", str(config)).returncode == 0
    assert run_cli("start", "m", "--config", str(first)).returncode == 69


def test_a_detached_start_as_json_is_as_published(home: Path) -> None:
    written(home / "mlxsup.toml", HERE + FAKE)
    try:
        done = run_cli("start", "--detach", "--json")
        assert (done.returncode, done.stderr, problems(done.stdout, ["start"])) == (0, "", [])
        found = json.loads(run_cli("status", "--json").stdout)
        started = json.loads(done.stdout)
        assert (started["endpoint"], started["pid"]) == (found["endpoint"], found["pid"])
    finally:
        assert run_cli("stop").returncode == 0


# ---------------------------------------------------------------- start without a file


def test_start_without_a_file_prints_what_it_amounts_to_and_how_to_reach_it(home: Path) -> None:
    written(home / "mlxsup.toml", '[supervisor]\nruntime_dir = "/r"\n')
    write_folder(home / "tiny")
    snapshot = write_repository(home / "hub")
    endpoint = f"ipc://{home}/.mlxsup/run/client.sock"
    models = ("--model", "tiny", "--model", f"other={REPO}")
    cache = {"HF_HUB_CACHE": f"{home}/hub", "HF_HUB_OFFLINE": "1"}
    with Piped("start", *models, **cache) as started:
        assert (
            f"need an option to find this daemon: `mlxsup status --endpoint {endpoint}`"
            in started.note()
        )
        text = ""
        while not (line := started.line()).startswith("listening at "):
            text += line
        assert line.startswith(f"listening at {endpoint} (pid ")
        assert f'[models.other]\nrepo = "{REPO}"' in text
        status = json.loads(run_cli("status", "--json", "--endpoint", endpoint).stdout)
        assert [model["name"] for model in status["models"]] == ["tiny", "other"]
        assert status["config_path"] is None
        second = run_cli("start", "--model", "tiny")
        assert second.returncode == 75
        assert f"`mlxsup status --endpoint {endpoint}`" in second.stderr
        while not (change := started.line()).partition("other: ")[2].startswith("LOADING → "):
            pass
        assert str(snapshot) in change, "it is no real model; the file that was read is named"
        assert started.interrupt()[0] == 0
    kept = written(home / "kept.toml", text)
    assert run_cli("config", "check", str(kept), **cache).returncode == 0


def test_a_wrong_address_is_refused_before_a_first_configuration_is_written(home: Path) -> None:
    done = run_cli("start", "--http", "99999", HOME=str(home))
    assert (done.returncode, "--http '99999' is not" in done.stderr) == (64, True)
    assert not (home / ".mlxsup").exists()


# ---------------------------------------------------------------- start with a file


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("qwen3:4b", "`mlxsup run qwen3:4b` starts one and chats with it"),
        ("./m", "`mlxsup start --model ./m` starts one that serves it"),
        ("my.toml", "`mlxsup start --config my.toml` starts one with this configuration"),
    ],
)
def test_start_of_a_name_without_a_daemon_says_how_to_start_one(
    home: Path, name: str, hint: str
) -> None:
    done = run_cli("start", name)
    assert done.returncode == ExitStatus.NO_DAEMON
    assert f"hint: {hint}" in done.stderr


def test_start_warns_of_a_wrong_folder_and_serves_the_other_models(home: Path) -> None:
    gone = '[models.gone]\npath = "gone"\npreload = false\n'
    config = written(home / "c.toml", f"{HERE}{gone}{FAKE}")
    with Piped("start", "--config", str(config)) as started:
        while "m: LOADING → READY" not in started.line():
            pass
        code, _, err = started.interrupt()
    assert code == 0
    assert err.startswith(f"warning: gone: the model folder {home}/gone does not exist; ")
    assert err.splitlines()[1:] == ["stopping: ending every process"]


def test_an_interrupt_of_start_says_at_once_what_it_waits_for() -> None:
    daemon = Daemon({"m": fake(fake={"step_s": 0.02})}, {"drain_timeout_s": 300.0})
    with Terminal("start", "--config", str(daemon.config), COLUMNS="40") as started:
        started.expect("→ READY")
        with daemon.client() as client:
            running = Reader(client, "m", "runs", max_tokens=4000).started()
            started.type("\x03")
            started.expect(
                "stopping: 1 running request may take up to 5m 0s to finish;"
                " press Ctrl-C again to cut it off"
            )
            started.type("\x03")
            started.expect("stopping: cutting off 1 running request")
            assert running.failed().code == "shutting_down"
        started.end()
        assert started.process.returncode == 0
    shutil.rmtree(daemon.folder)


def test_a_newcomer_reads_what_works(home: Path) -> None:
    default = f"error: no daemon answers at ipc://{home}/.mlxsup/run/client.sock"
    hint = "hint: `mlxsup run MODEL` starts one that serves MODEL, and chats with it"
    assert run_cli("status").stderr.splitlines() == [default, hint]
    started = run_cli("start", "--detach")
    assert (started.returncode, "no models yet: `mlxsup add MODEL`" in started.stderr) == (0, True)
    assert json.loads(run_cli("status", "--json").stdout)["models"] == []
    unknown = run_cli("generate", "x", "hi").stderr
    assert "there is no model 'x'; configured: none\nhint: `mlxsup add MODEL`" in unknown
    assert run_cli("stop").returncode == 0
    file = home / ".mlxsup/config.toml"
    assert tomllib.loads(file.read_text()) == {
        "gateway": {"listen": DEFAULT_LISTEN}, "defaults": {"preload": False}
    }  # fmt: skip
    hint = "hint: start one with `mlxsup start`"
    assert run_cli("status").stderr.splitlines() == [default, hint]


# ---------------------------------------------------------------- config


def test_config_path_prints_the_winner_on_stdout_and_why_on_stderr(home: Path) -> None:
    done = run_cli("config", "path")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(
        "there is no configuration file; looked for mlxsup.toml, ~/.config/"
    )
    file = written(home / "mlxsup.toml", '[supervisor]\nruntime_dir = "run"\n')
    done = run_cli("config", "path")
    assert (done.returncode, done.stdout) == (0, f"{file}\n")
    assert done.stderr.splitlines() == [
        "the first file found in the usual places: ./mlxsup.toml",
        f"commands look for the daemon at ipc://{home}/run/client.sock, because of ./mlxsup.toml",
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


def test_config_check_without_a_file_checks_the_one_that_counts(home: Path) -> None:
    assert run_cli("config", "check").returncode == 78
    written(home / ".mlxsup/config.toml", FAKE)
    done = run_cli("config", "check")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "~/.mlxsup/config.toml is valid")
    written(home / "mlxsup.toml", "[models.m]\npth = 1\n")
    assert "models.m.pth" in run_cli("config", "check").stderr


def test_config_check_lists_each_folder_with_its_line(home: Path) -> None:
    write_repository(home / "hub", "a/hub")
    write_folder(home / "sound")
    config = written(
        home / "c.toml",
        '[models.gone]\npath = "gone"\n'
        '[models.hub]\npath = "hub/models--a--hub"\n'
        f'[models.missing]\npreload = false\nrepo = "{REPO}"\n'
        '[models.sound]\npath = "sound"\n'
        '[models.fake]\nengine = "fake"\n'
        '[models.snapshot]\nrepo = "a/hub"\n',
    )
    cache = {"HF_HUB_CACHE": f"{home}/hub"}
    done = run_cli("config", "check", str(config), **cache, HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (78, f"checking {config}\n")
    first, *found, hint = done.stderr.splitlines()
    assert first == f"error: {config} is not a valid configuration:"
    assert hint == f"hint: fix it, then run `mlxsup config check {config}`"
    starts = [
        f"  {config}:2: models.gone.path: the model folder {home}/gone does not exist; ",
        f"  {config}:4: models.hub.path: {home}/hub/models--a--hub is the cache folder of a/hub",
        f"  {config}:7: models.missing.repo: {REPO} is not in the Hugging Face cache {home}/hub; ",
    ]
    assert [line[: len(start)] for line, start in zip(found, starts, strict=True)] == starts
    config.write_text(f'[models.missing]\nrepo = "{REPO}"\n')
    done = run_cli("config", "check", str(config), **cache)
    assert (done.returncode, done.stderr) == (0, ""), "it will be downloaded"


# ---------------------------------------------------------------- wait


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    models = {
        "ready": fake(aliases=["r"]),
        "bad": {"path": "/nowhere", "preload": True},
        "loading": fake(fake={"load_stall": "sleep"}, load_stall_timeout_s=3600),
        "cold": fake(preload=False),
    }
    with Daemon(models) as daemon, daemon.client() as client:
        for name, state in (("ready", "READY"), ("bad", "FAILED"), ("loading", "LOADING")):
            wait_for_state(client, name, state)
        yield daemon


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (["loading", "--timeout", "0"], 124, r"not READY: loading is LOADING \("),
        (["loading", "--timeout", "0.2"], 124, r"not READY after 0s: loading is LOADING \("),
        (["cold", "--timeout", "60"], 1, "cold is STOPPED and is not being loaded\nhint: load it"
         " with `mlxsup load cold --endpoint "),
        (["cald"], 1, r"there is no model 'cald'.*\nhint: did you mean cold\?"),
        (["bad", "--timeout", "0"], 1, "bad has FAILED: "),
        (["--timeout", "0"], 1, "bad has FAILED: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_wait_that_fails_says_what_is_missing(
    daemon: Daemon, arguments: list[str], status: int, error: str
) -> None:
    done = run_cli("wait", *arguments, "--endpoint", daemon.endpoint)
    assert (done.returncode, done.stdout) == (status, "")
    assert re.match(f"error: {error}", done.stderr), done.stderr


def test_wait_shows_what_is_ready_and_check_what_is_broken(daemon: Daemon) -> None:
    where = ("--endpoint", daemon.endpoint)
    done = run_cli("wait", "r", *where)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split()[:2] for line in done.stdout.splitlines()]
    assert lines == [["MODEL", "STATE"], ["ready", "READY"]]
    done = run_cli("status", "--check", *where)
    assert (done.returncode, done.stderr) == (1, "broken: bad has FAILED\n")
    assert "bad      FAILED" in done.stdout
    done = run_cli("status", "--check", "--json", *where)
    assert (done.returncode, done.stderr, len(json.loads(done.stdout)["models"])) == (1, "", 4)


def test_wait_says_each_change_and_returns_when_all_are_ready() -> None:
    models = {name: fake(preload=False, fake={"load_s": 1.0}) for name in "ab"}
    with Daemon(models) as daemon, daemon.client() as client:
        where = ("--endpoint", daemon.endpoint)
        with Piped("load", "a", *where):
            wait_for_state(client, "a", "LOADING")
            with Piped("wait", *where) as waiting:
                code, out, err = waiting.end()
        assert code == 0
        lines = [line.split()[:2] for line in out.splitlines()[1:]]
        assert lines == [["a", "READY"], ["b", "STOPPED"]]
        assert [line.split(" ", 1)[1].split(" (")[0] for line in err.splitlines()] in (
            ["a: LOADING → READY"],
            [],  # it was READY before the command had asked
        )
        assert run_cli("status", "--check", *where).returncode == 0


# ---------------------------------------------------------------- completion


def complete(words: str, **variables: str) -> list[str]:
    """Return what bash would be offered for the last, empty or unfinished, word."""
    here = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    done = run_cli(**here, **{"_MLXSUP_COMPLETE": "bash_complete", **variables})
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_completion_knows_commands_options_and_live_models(daemon: Daemon) -> None:
    assert complete("mlxsup sta") == ["start", "status"]
    assert "--follow" in complete("mlxsup logs --f")
    assert complete("mlxsup config ") == ["check", "get", "path", "schema", "set", "unset"]
    live, names = {"MLXSUP_ENDPOINT": daemon.endpoint}, ["ready", "bad", "loading", "cold"]
    for words, expected in (
        ("mlxsup load ", names),
        ("mlxsup load b", ["bad"]),
        ("mlxsup logs ", [*names, "mlxsup", "mlxsup-gateway"]),
    ):
        # A daemon has half a second to answer, which it may once miss.
        eventually(lambda: complete(words, **live) == expected, what=words)  # noqa: B023


def test_completion_without_a_daemon_reads_the_configuration_and_the_cache(home: Path) -> None:
    for name in ("org/tiny", "org/other"):
        write_repository(home / "hub", name)
    config = written(home / "c.toml", f"{HERE}{FAKE}")
    here = {"HF_HUB_CACHE": f"{home}/hub", "MLXSUP_CONFIG": str(config)}
    assert complete(f"mlxsup load --config {config} ") == ["m"]
    for command, offered in (
        ("load ", ["m"]),
        ("rm ", ["m", "org/other", "org/tiny"]),
        ("pull org/t", ["org/tiny"]),
        ("run ", ["m", "org/other", "org/tiny"]),
        ("show ", ["m", "org/other", "org/tiny"]),
    ):
        assert complete(f"mlxsup {command}", **here) == offered, command
    assert complete("mlxsup pull ", **here | {"HF_HUB_CACHE": str(config)}) == []
    config.write_text("not TOML")
    assert complete("mlxsup load ", **here) == []


def test_every_argument_that_names_a_model_is_completed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(home / "c.toml", f"{HERE}{FAKE}")
    monkeypatch.setenv("MLXSUP_CONFIG", str(config))
    completed = set()
    for name in COMMANDS:
        command = root.get_command(click.Context(root), name)
        assert command is not None
        for one in command.params:
            if isinstance(one, click.Argument) and one.name in ("model", "models"):
                found = one.shell_complete(click.Context(command), "")
                assert "m" in [item.value for item in found], name
                completed.add(name)
    assert {"load", "unload", "restart", "generate", "chat", "logs", "wait", "show"} < completed


def test_completion_does_not_wait_for_a_daemon_that_says_nothing(home: Path) -> None:
    config = written(home / "c.toml", f'[supervisor]\nruntime_dir = "."\n{FAKE}')
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{home}/client.sock")
        words = f"mlxsup load --config {config} "
        eventually(lambda: complete(words) == ["m"] and router.poll(0))
    context.term()
