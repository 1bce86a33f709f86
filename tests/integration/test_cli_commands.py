"""The command line as a user runs it, against a scripted supervisor."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlxsup.protocol.client_messages import (
    Cancel,
    Generate,
    Restart,
    Stop,
    Unload,
)
from mlxsup.protocol.message import Message
from mlxsup.protocol.version import VERSION

from support.cli_daemon import TIME_LIMIT_S, Daemon, at, command, environment, mlxsup
from support.eventually import eventually
from support.hub_caches import write_folder
from support.scripted_supervisor import (
    OpenStreams,
    Peer,
    ScriptedSupervisor,
    scripted_supervisor,
    send_pieces,
)

PROGRESS = re.compile(r"^\d\d:\d\d:\d\dZ .+\n", re.MULTILINE)
"""What a command adds that had to wait for more than a second."""


def test_status_shows_every_model(supervisor: ScriptedSupervisor, folder: Path) -> None:
    (folder / "qwen.log").write_text("--- generation 1\nno such folder: /q\n")
    done = at(supervisor, "status")
    header, smollm2, qwen, last_line = done.stdout.splitlines()
    assert " ".join(header.split()) == (
        "MODEL STATE UPTIME PID RESTARTS RUN/WAIT TOK/S MEMORY CONTEXT NOTE"
    )
    assert " ".join(smollm2.split()) == "smollm2 READY 2m 5s 4711 0 0/0 - 3.00 GiB 8192"
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
    where = f" --endpoint {supervisor.endpoint}"
    assert said == (
        f"error: qwen: no folder /q\nhint: fix that, then `mlxsup restart qwen{where}`, or `mlxsup "
        f"reload{where}` if the fix is in the configuration; see `mlxsup logs qwen{where}`\n"
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
    assert " s, 0.25 engine seconds, prompt 3 tokens, stop" in done.stderr
    done = at(supervisor, "generate", "smollm2", "x", "--json")
    value = json.loads(done.stdout)
    assert (value["model"], value["text"], value["finish_reason"]) == (
        "smollm2",
        "Hällo wörld",
        "stop",
    )
    assert value["usage"] == {
        "prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 2, "engine_s": 0.25,
    }  # fmt: skip
    assert (value["seed"], value["token_ids"], value["schema_version"]) == (7, [0, 1], 1)


def test_generate_that_breaks_off_exits_1_and_says_how_far_it_came(
    supervisor: ScriptedSupervisor,
) -> None:
    done = at(supervisor, "generate", "qwen", "x")
    assert (done.returncode, done.stdout) == (1, "one two")
    assert done.stderr.startswith("error: its worker crashed (after 2 tokens)\nhint: ")


def test_bad_parameter_is_a_usage_error_and_names_the_option(
    supervisor: ScriptedSupervisor,
) -> None:
    done = at(supervisor, "generate", "smollm2", "x", "--temperature", "-1")
    assert done.returncode == 64
    assert "--temperature takes a number" in done.stderr
    assert supervisor.received == []
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
            "hint: --endpoint may be wrong: a daemon prints its endpoint when it starts",
        ]
    done = mlxsup("status", "--json", MLXSUP_ENDPOINT=endpoint)
    assert done.returncode == 69
    hint = "MLXSUP_ENDPOINT may be wrong: a daemon prints its endpoint when it starts"
    assert json.loads(done.stdout)["error"]["hint"] == hint
    done = mlxsup("status", "--json", HOME=str(folder))
    assert done.returncode == 69
    hint = "start one with `mlxsup start --model FOLDER`"
    assert json.loads(done.stdout)["error"]["hint"] == hint
    config = folder / "some file.toml"
    config.write_text('[supervisor]\nruntime_dir = "."\n')
    done = mlxsup("status", "--json", "--config", str(config), MLXSUP_ENDPOINT="ipc:///nowhere")
    assert done.returncode == 69
    hint = f"start one with `mlxsup start --config '{config}'`"
    assert json.loads(done.stdout)["error"]["hint"] == hint


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
        ["generate", "m", "x", "--top-q", "3"],
        ["generate", "m", "x", "--seed", "pi"],
        ["status", "--endpoint", "tcp://127.0.0.1:1"],
    ):
        done = mlxsup(*arguments)
        assert (done.returncode, done.stdout) == (64, ""), arguments
        assert "error: " in done.stderr
    assert json.loads(mlxsup("load", "--json").stdout)["error"]["code"] == "usage"


def test_help_on_every_level_has_an_example() -> None:
    names = ["start", "stop", "status", "load", "unload", "restart", "pause",
             "resume", "generate", "logs", "config"]  # fmt: skip
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
        said = f"checking {config}\n" if "check" in arguments else ""
        assert (done.returncode, done.stdout) == (78, said)
        assert "max_queue" in done.stderr
        assert "nonsense" in done.stderr
    assert mlxsup("config", "check", str(folder / "missing")).returncode == 78
    done = mlxsup("status", "--config", str(folder / "missing"))
    assert done.returncode == 78


@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_config_check_reports_a_runtime_folder_that_start_refuses(
    folder: Path, more: list[str]
) -> None:
    config = folder / "mlxsup.toml"
    long = "x" * 120
    config.write_text(
        f'[supervisor]\nlog_dir = "logs"\nruntime_dir = "{long}"\n[models.m]\nengine = "fake"\n'
    )
    done = mlxsup("config", "check", str(config))
    assert (done.returncode, done.stdout) == (78, f"checking {config}\n")
    assert f"{config}:3: supervisor.runtime_dir takes a shorter folder: " in done.stderr
    done = mlxsup("start", "--config", str(config), *more)
    assert (done.returncode, done.stdout) == (73, "")
    assert done.stderr.startswith("error: the runtime folder's path is too long: ")
    assert done.stderr.endswith("\nhint: set a shorter runtime_dir\n")


def test_config_check_of_a_good_file(folder: Path) -> None:
    config = folder / "mlxsup.toml"
    config.write_text('[models.m]\npath = "m"\n')
    write_folder(folder / "m")
    done = mlxsup("config", "check", str(config))
    assert (done.returncode, done.stdout) == (0, f"checking {config}\n{config} is valid\n")


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
