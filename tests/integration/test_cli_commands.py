"""The command line as a user runs it, against a scripted supervisor."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlxsup.protocol.client_messages import (
    Cancel,
    Generate,
    Load,
    Restart,
    StatusQuery,
    Stop,
    Unload,
)
from mlxsup.protocol.message import Message
from mlxsup.protocol.version import VERSION
from support import warm
from support.eventually import eventually
from support.scripted_supervisor import (
    OpenStreams,
    Peer,
    ScriptedSupervisor,
    answer,
    fail,
    finish,
    scripted_supervisor,
    send_pieces,
)

TIME_LIMIT_S = 120
PROGRESS = re.compile(r"^\d\d:\d\d:\d\d .+\n", re.MULTILINE)
"""What a command adds that had to wait for more than a second."""


def model(name: str, **values: Any) -> dict[str, Any]:
    return {
        "name": name,
        "state": "READY",
        "generation": 1,
        "pid": 4711,
        "restarts": 0,
        "last_exit": None,
        "retry_in_s": None,
        "progress": None,
        "queued": 0,
        "running": [],
        "tokens_per_s": 0.0,
        "footprint_bytes": 3 * 2**30,
        "context_length": 8192,
        "loaded_for_s": 125.0,
        **values,
    }


class Daemon:
    """A script that answers every command of the command line."""

    def __init__(self, log_dir: Path) -> None:
        self.models = [
            model("smollm2"),
            model(
                "qwen",
                state="FAILED",
                pid=None,
                last_exit={"reason": "load_error", "code": 66, "signal": None, "detail": "no /q"},
            ),
        ]
        self.log_dir = log_dir
        self.stopping: list[subprocess.Popen[bytes]] = []

    def __call__(self, peer: Peer, message: Message) -> None:
        match message:
            case StatusQuery():
                answer(
                    peer, message, version=VERSION, models=self.models, log_dir=str(self.log_dir)
                )
            case Load(model="smolm2") | Generate(model="smolm2"):
                known = [entry["name"] for entry in self.models]
                sentence = "no model is called 'smolm2'; configured: qwen, smollm2"
                values = {"known": known, "close": ["smollm2"]}
                fail(peer, message.id, "unknown_model", sentence, **values)
            case Load(model="qwen"):
                fail(peer, message.id, "load_failed", "qwen: no folder /q", model="qwen")
            case Generate(model="qwen"):
                send_pieces(peer, message.id, ["one", " two"])
                fail(peer, message.id, "worker_crashed", "its worker crashed", tokens_sent=2)
            case Generate():
                send_pieces(peer, message.id, ["Hällo", " wörld"])
                finish(peer, message.id, 2)
            case Restart(now=False):
                pass
            case Stop():
                for process in self.stopping:
                    process.terminate()
                pids = [process.pid for process in self.stopping]
                answer(peer, message, pids=pids[1:], supervisor_pid=pids[0])
            case Cancel():
                pass
            case _:
                answer(peer, message)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mlxsup-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def daemon(folder: Path) -> Daemon:
    return Daemon(folder)


@pytest.fixture
def supervisor(folder: Path, daemon: Daemon) -> Iterator[ScriptedSupervisor]:
    with scripted_supervisor(folder / "client.sock", daemon) as running:
        yield running


def environment(**values: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLXSUP") and k != "NO_COLOR"}
    return kept | {"PYTHONUNBUFFERED": ""} | values


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mlxsup.cli", *arguments]


def mlxsup(
    *arguments: str, stdin: bytes = b"", **variables: str
) -> subprocess.CompletedProcess[str]:
    done = warm.run(
        command(*arguments),
        stdin=stdin,
        environment=environment(**variables),
        timeout_s=TIME_LIMIT_S,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err
    assert "\x1b" not in out + err
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def at(supervisor: ScriptedSupervisor, *arguments: str, **keywords: Any) -> Any:
    return mlxsup(*arguments, "--endpoint", supervisor.endpoint, **keywords)


def test_status_shows_every_model(supervisor: ScriptedSupervisor, folder: Path) -> None:
    (folder / "qwen.log").write_text("--- generation 1\nno such folder: /q\n")
    done = at(supervisor, "status")
    header, smollm2, qwen, last_line = done.stdout.splitlines()
    assert " ".join(header.split()) == (
        "MODEL STATE UPTIME PID RESTARTS RUN/WAIT TOK/S MEMORY CONTEXT NOTE"
    )
    assert " ".join(smollm2.split()) == "smollm2 READY 2m 5s 4711 0 0/0 - 3.0 GiB 8192"
    assert "load failed, no /q" in qwen
    assert last_line == "  no such folder: /q"
    assert (done.returncode, done.stderr) == (0, "")


def test_status_json_is_one_object(supervisor: ScriptedSupervisor) -> None:
    done = at(supervisor, "status", "--json")
    value = json.loads(done.stdout)
    assert value["schema_version"] == 1
    assert [entry["name"] for entry in value["models"]] == ["smollm2", "qwen"]


def test_commands_show_the_changed_row(supervisor: ScriptedSupervisor) -> None:
    for name in ("load", "unload"):
        done = at(supervisor, name, "smollm2")
        assert done.returncode == 0
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["MODEL", "smollm2"]
    assert at(supervisor, "restart", "smollm2", "--now").returncode == 0
    assert at(supervisor, "restart", "smollm2", "--no-wait").returncode == 0
    done = at(supervisor, "load", "smollm2", "--json")
    assert [row["name"] for row in json.loads(done.stdout)["models"]] == ["smollm2"]
    assert [m.model for m in supervisor.got(Unload)] == ["smollm2"]
    assert [m.now for m in supervisor.got(Restart)] == [True, False]


def test_unknown_model_is_answered_with_close_names(supervisor: ScriptedSupervisor) -> None:
    for arguments in (["load", "smolm2"], ["generate", "smolm2", "x"], ["logs", "smolm2"]):
        done = at(supervisor, *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines() == [
            "error: no model is called 'smolm2'; configured: qwen, smollm2",
            "hint: did you mean smollm2?",
        ]


def test_failed_request_exits_1_with_a_sentence_and_a_hint(supervisor: ScriptedSupervisor) -> None:
    done = at(supervisor, "load", "qwen")
    assert done.returncode == 1
    said = PROGRESS.sub("", done.stderr)
    assert said == (
        "error: qwen: no folder /q\nhint: fix that, then `mlxsup restart qwen`, or `mlxsup "
        "reload` if the fix is in the configuration; see `mlxsup logs qwen`\n"
    )
    done = at(supervisor, "load", "qwen", "--json")
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["message"]) == ("load_failed", "qwen: no folder /q")


def test_generate_prints_the_text_and_nothing_else(supervisor: ScriptedSupervisor) -> None:
    done = at(supervisor, "generate", "smollm2", "-", stdin="é\n".encode())
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hällo wörld", "")
    done = at(supervisor, "generate", "smollm2", "x", "-v", "--max-tokens", "2", "--seed", "7")
    assert done.stdout == "Hällo wörld"
    assert done.stderr.startswith("2 tokens in ")
    done = at(supervisor, "generate", "smollm2", "x", "--json")
    value = json.loads(done.stdout)
    assert (value["model"], value["text"], value["finish_reason"]) == (
        "smollm2",
        "Hällo wörld",
        "stop",
    )
    assert value["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 2}
    assert (value["seed"], value["token_ids"], value["schema_version"]) == (7, [0, 1], 1)


def test_generate_that_breaks_off_exits_1_and_says_how_far_it_came(
    supervisor: ScriptedSupervisor,
) -> None:
    done = at(supervisor, "generate", "qwen", "x")
    assert (done.returncode, done.stdout) == (1, "one two")
    assert done.stderr.startswith("error: its worker crashed (after 2 tokens)\nhint: ")


def test_bad_parameter_exits_1_and_names_it(supervisor: ScriptedSupervisor) -> None:
    done = at(supervisor, "generate", "smollm2", "x", "--temperature", "-1")
    assert done.returncode == 1
    assert "temperature takes a number" in done.stderr
    done = at(supervisor, "generate", "smollm2", "-", stdin=b"\xff")
    assert (done.returncode, "not UTF-8" in done.stderr) == (64, True)


def test_interrupt_cancels_the_request_and_exits_130_D12(folder: Path) -> None:
    script = OpenStreams()
    with scripted_supervisor(folder / "client.sock", script) as supervisor:
        process = subprocess.Popen(
            command("generate", "m", "x", "--endpoint", supervisor.endpoint),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        assert process.stdout is not None
        assert process.stdout.read(3) == b"one"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIME_LIMIT_S)
        assert (process.returncode, out, err) == (130, b"", b"")
        eventually(lambda: supervisor.got(Cancel) and not script.open)


def test_reader_that_leaves_cancels_quietly_D12(folder: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            send_pieces(peer, message.id, ["x" * 1000] * 500)

    with scripted_supervisor(folder / "client.sock", script) as supervisor:
        process = subprocess.Popen(
            command("generate", "m", "x", "--endpoint", supervisor.endpoint),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(TIME_LIMIT_S) == 141
        assert process.stderr.read() == b""
        process.stderr.close()
        eventually(lambda: supervisor.got(Cancel))


def test_no_daemon_exits_69_with_a_hint(folder: Path) -> None:
    endpoint = f"ipc://{folder}/client.sock"
    for arguments in (["status"], ["stop"], ["load", "m"], ["generate", "m", "x"], ["logs"]):
        done = mlxsup(*arguments, "--endpoint", endpoint)
        assert (done.returncode, done.stdout) == (69, "")
        assert done.stderr.splitlines() == [
            f"error: no daemon answers at {endpoint}",
            "hint: start one with `mlxsup start`",
        ]
    done = mlxsup("status", "--json", "--endpoint", endpoint)
    assert done.returncode == 69
    assert json.loads(done.stdout)["error"]["hint"] == "start one with `mlxsup start`"


def test_daemon_is_found_by_file_and_by_environment(
    supervisor: ScriptedSupervisor, folder: Path
) -> None:
    config = folder / "mlxsup.toml"
    config.write_text('[supervisor]\nruntime_dir = "."\n')
    assert mlxsup("status", "--config", str(config)).returncode == 0
    assert mlxsup("status", MLXSUP_ENDPOINT=supervisor.endpoint).returncode == 0
    # The named file goes before the environment.
    done = mlxsup("status", "--config", str(config), MLXSUP_ENDPOINT="ipc:///nowhere")
    assert done.returncode == 0


def test_usage_errors_exit_64() -> None:
    for arguments in (
        [],
        ["nonsense"],
        ["status", "--nonsense"],
        ["load"],
        ["generate", "m", "x", "--top-k", "3"],
        ["generate", "m", "x", "--seed", "pi"],
        ["status", "--endpoint", "tcp://127.0.0.1:1"],
    ):
        done = mlxsup(*arguments)
        assert (done.returncode, done.stdout) == (64, ""), arguments
        assert "error: " in done.stderr
    assert json.loads(mlxsup("load", "--json").stdout)["error"]["code"] == "usage"


def test_help_on_every_level_has_an_example() -> None:
    names = ["start", "stop", "status", "load", "unload", "restart", "generate", "logs", "config"]
    for arguments in ([], ["config", "check"], *([name] for name in names)):
        for flag in ("-h", "--help"):
            done = mlxsup(*arguments, flag)
            assert (done.returncode, "Example: mlxsup " in done.stdout) == (0, True)


def test_start_without_a_file_and_bad_files_exit_78(folder: Path) -> None:
    done = mlxsup("start", HOME=str(folder))
    assert done.returncode == 78
    assert "hint: " in done.stderr
    config = folder / "mlxsup.toml"
    config.write_text('[supervisor]\nmax_queue = "many"\nnonsense = 1\n')
    for arguments in (["start", "--config", str(config)], ["config", "check", str(config)]):
        done = mlxsup(*arguments)
        assert (done.returncode, done.stdout) == (78, "")
        assert "max_queue" in done.stderr
        assert "nonsense" in done.stderr
    assert mlxsup("config", "check", str(folder / "missing")).returncode == 78
    done = mlxsup("status", "--config", str(folder / "missing"))
    assert done.returncode == 78


def test_config_check_of_a_good_file(folder: Path) -> None:
    config = folder / "mlxsup.toml"
    config.write_text('[models.m]\npath = "m"\n')
    done = mlxsup("config", "check", str(config))
    assert (done.returncode, done.stdout) == (0, f"{config} is valid\n")


def test_stop_returns_when_every_process_is_gone_E5(
    supervisor: ScriptedSupervisor, daemon: Daemon
) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    daemon.stopping = [subprocess.Popen(sleep) for _ in range(3)]
    try:
        done = at(supervisor, "stop", "--timeout", "5")
        assert done.returncode == 0
        # Nobody has reaped them yet: a zombie counts as gone.
        assert all(process.wait(0) is not None for process in daemon.stopping)
        pid = daemon.stopping[0].pid
        assert done.stdout == f"stopped the daemon (pid {pid}) and 2 workers\n"
        assert [(m.now, m.timeout_s) for m in supervisor.got(Stop)] == [(False, 5.0)]
    finally:
        for process in daemon.stopping:
            process.kill()
            process.wait()


def test_logs_of_one_and_of_all(supervisor: ScriptedSupervisor, folder: Path) -> None:
    (folder / "smollm2.log.1").write_text("--- generation 1\nold\n")
    (folder / "smollm2.log").write_text("\x1b[31mnew\x1b[0m\n")
    (folder / "qwen.log").write_text("other\n")
    (folder / "mlxsup.log").write_text("daemon\n")
    assert at(supervisor, "logs", "smollm2").stdout == "--- generation 1\nold\nnew\n"
    assert at(supervisor, "logs", "smollm2", "-n", "1").stdout == "new\n"
    assert at(supervisor, "logs", "-n", "1").stdout == "smollm2 | new\nqwen    | other\n"
    assert at(supervisor, "logs", "mlxsup").stdout == "daemon\n"
    lines = at(supervisor, "logs", "qwen", "--json").stdout.splitlines()
    assert json.loads(lines[0]) == {"schema_version": 1, "model": "qwen", "line": "other"}


def test_logs_without_a_daemon_come_from_the_configuration(folder: Path) -> None:
    config = folder / "mlxsup.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\nlog_dir = "logs"\n[models.m]\npath="m"\n')
    (folder / "logs").mkdir()
    (folder / "logs" / "m.log").write_text("last words\n")
    done = mlxsup("logs", "m", "--config", str(config))
    assert (done.returncode, done.stdout) == (0, "last words\n")


def test_logs_follow_across_rotation_until_interrupted(
    supervisor: ScriptedSupervisor, folder: Path
) -> None:
    log = folder / "smollm2.log"
    log.write_text("a\n")
    process = subprocess.Popen(
        command("logs", "smollm2", "-f", "--endpoint", supervisor.endpoint),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"a\n"
    log.rename(folder / "smollm2.log.1")
    log.write_text("--- generation 2\n")
    assert process.stdout.readline() == b"--- generation 2\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIME_LIMIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_version_and_status_import_nothing_heavy(supervisor: ScriptedSupervisor) -> None:
    code = (
        "import sys\n"
        "from mlxsup.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'mlx', 'mlx_lm', 'pydantic', 'rich', 'asyncio', 'psutil', 'numpy'}\n"
        "    print(sorted(heavy & set(sys.modules)), 'zmq' in sys.modules)\n"
    )
    for arguments, has_zmq in ((["--version"], False), (["status"], True)):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            env=environment(MLXSUP_ENDPOINT=supervisor.endpoint),
            timeout=TIME_LIMIT_S,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == f"[] {has_zmq}"
    assert mlxsup("--version").stdout == f"mlxsup {VERSION}\n"


def run_in_terminal(arguments: list[str], **variables: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command(*arguments),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(**({"COLUMNS": "80", "TERM": "xterm"} | variables)),
    )
    os.close(follower)
    output = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:
            # Linux says so when the last process has closed the terminal.
            break
        if not block:
            break
        output += block
    os.close(leader)
    process.wait(TIME_LIMIT_S)
    return output.decode().replace("\r\n", "\n")


def test_terminal_has_colour_unless_it_is_not_wanted(supervisor: ScriptedSupervisor) -> None:
    arguments = ["status", "--endpoint", supervisor.endpoint]
    assert "\x1b[32mREADY" in run_in_terminal(arguments)
    for plain in (
        run_in_terminal(arguments, NO_COLOR="1"),
        run_in_terminal(arguments, TERM="dumb"),
        run_in_terminal([*arguments, "--no-color"]),
    ):
        assert "\x1b" not in plain
        assert max(map(len, plain.splitlines())) <= 80


def test_generate_ends_its_line_on_a_terminal_only(supervisor: ScriptedSupervisor) -> None:
    arguments = ["generate", "smollm2", "x", "--endpoint", supervisor.endpoint]
    assert run_in_terminal(arguments) == "Hällo wörld\n"
    done = run_in_terminal(["generate", "qwen", "x", "--endpoint", supervisor.endpoint])
    assert done.startswith("one two\n")


def test_output_that_cannot_be_written_is_an_error_in_a_sentence(
    supervisor: ScriptedSupervisor,
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    for arguments in (["--version"], ["status", "--endpoint", supervisor.endpoint]):
        with full.open("wb") as output:
            done = subprocess.run(
                command(*arguments),
                stdout=output,
                stderr=subprocess.PIPE,
                env=environment(),
                timeout=TIME_LIMIT_S,
                check=False,
            )
        assert done.returncode == 1
        assert done.stderr.startswith(b"error: cannot write the output: ")
        assert done.stderr.count(b"\n") == 1
    closed = " ".join(command("--version")) + " >&- 2>&-"
    assert subprocess.run(closed, shell=True, env=environment(), check=False).returncode == 0
