"""Commands against a scripted supervisor, `logs`, and commands that follow something."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxsup.client import Client
from mlxsup.protocol.client_messages import (
    Cancel,
    Generate,
    Restart,
    Stop,
    Unload,
)
from mlxsup.protocol.message import Message

from support.cli.cli import COLUMNS, ESCAPE, Piped, Terminal, on_terminal, run_cli
from support.cli.cli_daemon import TIME_LIMIT_S, Daemon, at, command, environment, mlxsup
from support.client.scripted_supervisor import (
    OpenStreams,
    Peer,
    ScriptedSupervisor,
    scripted_supervisor,
    send_pieces,
)
from support.daemon.daemon import Daemon as FollowDaemon
from support.daemon.daemon import fake, wait_for_state
from support.eventually import eventually

PROGRESS = re.compile(r"^\d\d:\d\d:\d\dZ .+\n", re.MULTILINE)
"""What a command adds that had to wait for more than a second."""


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


def test_without_a_daemon_the_hint_is_about_what_named_it(folder: Path) -> None:
    endpoint = f"ipc://{folder}/client.sock"
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


def test_generate_ends_its_line_on_a_terminal_only(supervisor: ScriptedSupervisor) -> None:
    arguments = ["generate", "smollm2", "x", "--endpoint", supervisor.endpoint]
    assert on_terminal(arguments) == "Hällo wörld\n"
    done = on_terminal(["generate", "qwen", "x", "--endpoint", supervisor.endpoint])
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


SLOW_LOAD = {"load_s": 3.5, "load_steps": 10}


@pytest.fixture(scope="module")
def follow_daemon() -> Iterator[FollowDaemon]:
    models = {"alpha": fake(), "cold": fake(preload=False, fake=SLOW_LOAD)}
    with FollowDaemon(models) as follow_daemon, follow_daemon.client() as client:
        wait_for_state(client, "alpha", "READY")
        yield follow_daemon


@contextmanager
def something_to_show(arguments: list[str], client: Client) -> Iterator[None]:
    """A request that runs, for `requests -f`, which has nothing to say without one."""
    if arguments[0] != "requests":
        yield
        return
    with client.generate("alpha", prompt="[[fault slow=0.02]]", max_tokens=4000) as stream:
        next(stream)
        yield


def test_events_are_the_changes_of_state_in_their_order(follow_daemon: FollowDaemon) -> None:
    where = ("--endpoint", follow_daemon.endpoint)
    with Piped("events", *where) as events, follow_daemon.client() as client:
        assert events.note() == f"following {follow_daemon.endpoint}; Ctrl-C ends\n"
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
        ["status", "--watch"],
        ["status", "--watch", "--json"],
        ["top"],
        ["logs", "-f"],
        ["requests", "-f"],
    ],
    ids=" ".join,
)
def test_what_follows_ends_quietly_when_nobody_reads_although_nothing_happens(
    follow_daemon: FollowDaemon, arguments: list[str]
) -> None:
    with (
        follow_daemon.client() as client,
        something_to_show(arguments, client),
        Piped(*arguments, "--endpoint", follow_daemon.endpoint) as follower,
    ):
        if arguments == ["events"]:
            follower.note()
        elif arguments[0] != "events":
            follower.line()
        assert follower.process.stdout is not None
        follower.process.stdout.close()
        assert follower.process.wait(60) == 141
        assert follower.note() == ""


def test_events_and_watch_exit_69_when_the_daemon_goes() -> None:
    follow_daemon = FollowDaemon({"alpha": fake()})
    with follow_daemon:
        where = ("--endpoint", follow_daemon.endpoint)
        with (
            Piped("events", *where) as events,
            Piped("status", "--watch", "--json", *where) as watch,
        ):
            events.note()
            assert json.loads(watch.line())["models"][0]["name"] == "alpha"
            assert follow_daemon.process is not None
            assert run_cli("stop", *where).returncode == 0
            for follower in (events, watch):
                code, _, err = follower.end()
                assert code == 69
                assert "Traceback" not in err


def test_watch_draws_in_place_on_a_terminal_and_ends_with_0(follow_daemon: FollowDaemon) -> None:
    with Terminal("status", "--watch", "--endpoint", follow_daemon.endpoint) as terminal:
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


def test_debug_tells_each_model_s_latest_events(follow_daemon: FollowDaemon) -> None:
    where = ("--endpoint", follow_daemon.endpoint)
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


def test_load_that_takes_longer_tells_of_it_in_lines_in_a_pipe(follow_daemon: FollowDaemon) -> None:
    where = ("--endpoint", follow_daemon.endpoint)
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


def test_logs_of_the_generation_before_and_since(follow_daemon: FollowDaemon) -> None:
    where = ("--endpoint", follow_daemon.endpoint)
    with follow_daemon.client() as client:
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
