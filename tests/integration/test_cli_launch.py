"""`mlxsup launch`: what an agent's process gets, what it needs first, and real agents."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.cli.commands.launch import AGENTS, ENOUGH_TOKENS

from support.cli.cli import Terminal, command, environment, run_cli
from support.daemon.daemon import Daemon, fake
from support.gateway.http_daemon import HttpDaemon
from support.gateway.json_schemas import problems

LONG = {"context_length": 262_144}
NPM = Path(__file__).parents[2] / "build" / "npm" / "node_modules" / ".bin"

AGENT = """\
#!/bin/sh
for word in "$@"; do echo "word $word"; done
env | sed -n 's/^\\(ANTHROPIC\\|MLXSUP_API\\|CLAUDE\\|NO_PROXY\\)/variable \\1/p'
grep -s ^SigIgn /proc/self/status
[ "$1" = --settings ] && echo "modes" $(stat -c %a "$2" "${2%/*}") && cat "$2"
[ -t 0 ] && echo "on a terminal" && exec cat
exit 7
"""
"""An agent that says what it was given, and then waits for input or ends with 7."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    short = fake(fake={"context_length": 1000}, aliases=["brief"])
    with HttpDaemon({"short": short, "long": fake(fake=LONG, preload=False)}) as running:
        yield running


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the agents `claude` and `codex`, and a folder for temporary files."""
    for name in ("bin", "home", "tmp"):
        (tmp_path / name).mkdir()
    for name in ("claude", "codex"):
        (tmp_path / "bin" / name).write_text(AGENT)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def variables(home: Path) -> dict[str, str]:
    return {"HOME": f"{home}/home", "TMPDIR": f"{home}/tmp", "PATH": f"{home}/bin:/usr/bin:/bin"}


def launch(daemon: Daemon, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    where = ("--endpoint", daemon.endpoint)
    at = words.index("--") if "--" in words else len(words)
    return run_cli("launch", *words[:at], *where, *words[at:], **variables(home))


def test_agent_gets_its_settings_and_arguments_and_its_exit_code_is_that_of_the_command(
    daemon: HttpDaemon, home: Path
) -> None:
    done = launch(daemon, home, "claude", "--model", "short", "--", "-p", "say; hi", "--model", "x")
    assert done.returncode == 7
    words = [line[5:] for line in done.stdout.splitlines() if line.startswith("word ")]
    assert (words[0], words[2:]) == ("--settings", ["-p", "say; hi", "--model", "x"])
    file = Path(words[1])
    given = json.loads(done.stdout[done.stdout.index("{") :])["env"]
    assert (given["ANTHROPIC_BASE_URL"], given["ANTHROPIC_MODEL"]) == (daemon.url, "short")
    assert "variable ANTHROPIC_MODEL=short" in done.stdout
    assert "modes 600 700\n" in done.stdout, "it has a key in it"
    assert file.is_relative_to(home / "tmp")
    assert list((home / "tmp").iterdir()) == [], "it is gone with the agent"
    assert list((home / "home").iterdir()) == [], "no file of the user changes"
    [ignored] = re.findall(r"SigIgn:\t([0-9a-f]+)", done.stdout)
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGQUIT):
        assert not int(ignored, 16) & 1 << number - 1, "it ends the agent's commands"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_agent_that_a_signal_ends_leaves_no_file(
    daemon: HttpDaemon, home: Path, number: signal.Signals
) -> None:
    (home / "bin" / "claude").write_text("#!/bin/sh\necho it has $2\nexec cat\n")
    where = ("--model", "short", "--endpoint", daemon.endpoint)
    with Terminal("launch", "claude", *where, **variables(home)) as terminal:
        terminal.expect("it has ")
        terminal.expect("claude.json")
        assert len(list((home / "tmp").glob("*/claude.json"))) == 1
        if number is signal.SIGINT:
            terminal.type("\x03")
        else:
            terminal.process.send_signal(number)
        assert terminal.process.wait(60) == 128 + number
    assert list((home / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("model", "said", "name"),
    [
        ([], "claude uses long, the model with the longest context; --model chooses", "long"),
        (["--model", "brief"], f"warning: brief has a context of 1000 tokens; coding agents need"
                               f" {ENOUGH_TOKENS} or more", "brief"),
    ],
    ids=["the longest context", "one with a short context"],
)  # fmt: skip
def test_model_is_chosen_and_named(
    daemon: HttpDaemon, home: Path, model: list[str], said: str, name: str
) -> None:
    done = launch(daemon, home, "claude", *model)
    assert said in done.stderr
    assert f"variable ANTHROPIC_MODEL={name}\n" in done.stdout
    with daemon.client() as client:
        states = {row["name"]: row["state"] for row in client.status()["models"]}
    assert states[{"brief": "short"}.get(name, name)] == "READY", "it was loaded first"


def test_what_would_be_started_is_printed(daemon: HttpDaemon, home: Path) -> None:
    done = launch(daemon, home, "codex", "--model", "short", "--print", "--", "exec", "a b")
    *exports, command = done.stdout.splitlines()
    assert exports == ["export MLXSUP_API_KEY=mlxsup"]
    assert command.startswith("codex -c 'model=\"short\"' -c ")
    assert command.endswith(" exec 'a b'")
    shown = launch(daemon, home, "claude", "--print", "--", "hi").stdout
    run = subprocess.run(
        ["sh", "-c", shown], env=variables(home), capture_output=True, text=True, check=False
    )
    assert (run.returncode, "word hi\n" in run.stdout) == (7, True)
    assert f'"ANTHROPIC_BASE_URL": "{daemon.url}"' in run.stdout
    for words in (
        ["codex", "--print", "--json"],
        ["claude", "--print", "--json"],
        ["--json"],
        ["claude", "--model", "no", "--json"],
    ):
        line = launch(daemon, home, *words).stdout
        assert problems(line, ["launch"], is_error="error" in json.loads(line)) == []
    listed = launch(daemon, home).stdout
    assert f"codex     {home}/bin/codex" in listed
    assert "pi        no: npm install --global" in listed


def test_refusals_name_the_way(daemon: HttpDaemon, home: Path) -> None:
    missing = launch(daemon, home, "pi")
    assert (missing.returncode, "pi is not installed" in missing.stderr) == (1, True)
    assert "npm install --global @earendil-works/pi-coding-agent" in missing.stderr
    unknown = launch(daemon, home, "claude", "--model", "shrt")
    assert (unknown.returncode, "did you mean short?" in unknown.stderr) == (1, True)


def test_daemon_without_http_is_not_replaced_unasked(home: Path) -> None:
    with Daemon({"m": fake()}) as daemon:
        done = launch(daemon, home, "claude")
        where = ("--endpoint", daemon.endpoint)
        with Terminal("launch", "claude", *where, **variables(home)) as terminal:
            terminal.expect("restart it with HTTP?")
            terminal.type("n\n")
            assert "nothing was changed" in terminal.end()
    assert (done.returncode, "the daemon runs without HTTP" in done.stderr) == (1, True)
    assert "`mlxsup stop --endpoint" in done.stderr


def test_printing_starts_nothing(home: Path) -> None:
    config = home / "c.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\n[models.m]\nengine = "fake"\n')
    where = ("--config", str(config))
    with Terminal("launch", "claude", "--print", *where, **variables(home)) as terminal:
        assert "no daemon answers" in terminal.end()
    assert not (home / "run").exists()


def test_daemon_is_started_only_if_the_user_agrees(home: Path) -> None:
    daemon = HttpDaemon({"m": fake(fake=LONG, preload=False)})
    daemon.config.write_text(f'[gateway]\nlisten = "127.0.0.1:0"\n{daemon.config.read_text()}')
    target = ("--config", str(daemon.config))
    no = run_cli("launch", "claude", *target, **variables(home))
    assert (no.returncode, "launch claude --yes" in no.stderr) == (69, True)
    try:
        with Terminal("launch", "claude", *target, **variables(home)) as terminal:
            terminal.expect("start one with the models of")
            terminal.type("\n")
            terminal.expect("started a daemon (pid ")
            terminal.expect("on a terminal")
            terminal.type("to the agent\n")
            terminal.expect("to the agent")
            terminal.type("\x04")
            terminal.end()
            assert terminal.process.wait(60) == 0
        again = run_cli("launch", "claude", *target, **variables(home))
        assert (again.returncode, "daemon" in again.stderr) == (7, False)
    finally:
        run_cli("stop", "--now", *target)
        shutil.rmtree(daemon.folder)


def test_one_key_serves_every_launch_until_it_is_revoked(home: Path) -> None:
    daemon = HttpDaemon({"m": fake(fake=LONG)})
    target = ("--config", str(daemon.config))
    assert run_cli("key", "new", "laptop", *target).returncode == 0

    def key() -> str:
        done = launch(daemon, home, "codex")
        [line] = [one for one in done.stdout.splitlines() if "variable MLXSUP_API_KEY=" in one]
        assert "sk-mlxsup-" not in done.stdout.replace(line, ""), "others see arguments"
        return line.partition("=")[2]

    with daemon:
        first, second = key(), key()
        assert daemon.ask("GET", "/v1/models", key=first)[0] == 200
        assert run_cli("key", "revoke", "mlxsup-launch", *target).returncode == 0
        keys = daemon.config.parent.glob("*keys*")
        before = {file: file.read_bytes() for file in keys}
        printed = launch(daemon, home, "codex", "--print")
        assert "export MLXSUP_API_KEY=KEY\n" in printed.stdout
        assert "`mlxsup launch codex --endpoint" in printed.stderr
        assert {file: file.read_bytes() for file in before} == before, "printing makes no key"
        third = key()
        listed = json.loads(run_cli("key", "list", "--json", *target).stdout)["keys"]
        assert f"export MLXSUP_API_KEY={third}\n" in launch(daemon, home, "codex", "--print").stdout
        for name in ("laptop", "mlxsup-launch"):
            run_cli("key", "revoke", name, *target)
        for words in (["codex"], ["codex", "--print"]):
            locked = launch(daemon, home, *words)
            assert (locked.returncode, "HTTP is locked" in locked.stderr) == (1, True)
            assert "`mlxsup key new NAME" in locked.stderr
        assert json.loads(run_cli("key", "list", "--json", *target).stdout)["keys"] == []
    assert first == second != third
    assert [(one["name"], one["is_operator"]) for one in listed] == [
        ("laptop", False), ("mlxsup-launch", False),
    ]  # fmt: skip


# ---------------------------------------------------------------- real agents

WRITES = {
    "claude": ("Write", {"file_path": "{file}", "content": "hello\n"}),
    "codex": ("exec_command", {"cmd": "echo hello > '{file}'; echo '[[say done]]'"}),
    "opencode": ("bash", {"command": "echo hello > '{file}'; echo '[[say done]]'",
                          "description": "writes"}),
    "pi": ("write", {"path": "{file}", "content": "hello\n"}),
    "qwen": ("write_file", {"file_path": "{file}", "content": "hello\n"}),
    "copilot": ("create", {"path": "{file}", "file_text": "hello\n"}),
}  # fmt: skip
"""The tool of each agent that writes a file, and its arguments."""

WORDS = {
    "claude": ["--allowedTools", "Write", "-p"],
    "codex": ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    "pi": ["-p"],
    "qwen": ["-y", "-p"],
    "copilot": ["--allow-all-tools", "-p"],
}


@pytest.mark.slow
@pytest.mark.parametrize("agent", WRITES)
def test_a_real_agent_writes_a_file_with_a_tool(
    daemon: HttpDaemon, tmp_path: Path, agent: str
) -> None:
    path = f"{NPM}{os.pathsep}{os.environ['PATH']}"
    if shutil.which(agent, path=path) is None:
        pytest.skip(f"there is no {agent}: {AGENTS[agent].install} --prefix build/npm")
    # The name is in what the tool prints, so the engine's next answer is "done".
    file = tmp_path / "[[say done]].txt"
    name, arguments = WRITES[agent]
    call = json.dumps({"name": name, "arguments": arguments}).replace("{file}", str(file))
    script = f"[[say <tool_call>{call.replace(']]', ']' + chr(92) + 'u005d')}</tool_call>]]"
    words = ["run"] if agent == "opencode" else [*WORDS[agent], script]
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        command("launch", agent, "--model", "long", "--endpoint", daemon.endpoint, "--", *words),
        input=script if agent == "opencode" else "",
        cwd=tmp_path / "work", env=environment(HOME=str(tmp_path), PATH=path),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert file.read_text() == "hello\n"
    assert "done" in done.stdout
