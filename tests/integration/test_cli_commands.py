"""Commands against a scripted supervisor, and followers of a daemon with a fake engine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

from mlxsup.cli.commands import logs as commands_logs
from mlxsup.cli.main import root
from mlxsup.protocol.client_messages import (
    Cancel,
    Generate,
    Load,
    Reload,
    Restart,
    StatusQuery,
    Stop,
    Unload,
)
from mlxsup.protocol.codec import decode_body
from mlxsup.protocol.log_files import FollowedFile
from mlxsup.protocol.message import Message
from mlxsup.protocol.version import VERSION

from support.cli.cli import (
    COLUMNS,
    ESCAPE,
    TIME_LIMIT_S,
    Piped,
    Terminal,
    command,
    environment,
    on_terminal,
    run_cli,
)
from support.cli.full_screen import FullScreen
from support.client.scripted_supervisor import (
    OpenStreams,
    Peer,
    ScriptedSupervisor,
    answer,
    fail,
    finish,
    scripted_supervisor,
    send_pieces,
)
from support.daemon.daemon import Daemon, fake, wait_for_state
from support.eventually import eventually

PROGRESS = re.compile(r"^\d\d:\d\d:\d\dZ .+\n", re.MULTILINE)
"""What a command adds that had to wait for more than a second."""

NO_FOLDER = {"reason": "load_error", "code": 66, "signal": None, "detail": "no /q", "at": None}
ROW = {
    "state": "READY", "generation": 1, "pid": 4711, "restarts": 0, "last_exit": None,
    "retry_in_s": None, "progress": None, "queued": 0, "running": [], "tokens_per_s": 0.0,
    "footprint_bytes": 3 * 2**30, "context_length": 8192, "loaded_for_s": 125.0,
}  # fmt: skip


RELOADED: dict[str, Any] = {
    "added": [], "changed": [], "removed": [], "settings": [], "foreseen": [],
    "later": ["log_format"],
    "over_budget_bytes": 2**30, "evicts": ["qwen"], "still_over_bytes": 1,
    "refuses": [{"model": "big", "reason": "needs 9.00 GiB"}],
    "unread": {"silent": "its disk does not answer"},
}  # fmt: skip


class Script:
    """What the scripted supervisor answers; `stopping` are the processes that its `stop` ends."""

    def __init__(self, log_dir: Path) -> None:
        failed = {"name": "qwen", "state": "FAILED", "pid": None, "last_exit": NO_FOLDER}
        self.models = [{**ROW, "name": "smollm2"}, {**ROW, **failed}]
        self.log_dir = log_dir
        self.stopping: list[subprocess.Popen[bytes]] = []

    def __call__(self, peer: Peer, message: Message) -> None:
        match message:
            case StatusQuery():
                values = {"version": VERSION, "models": self.models, "log_dir": str(self.log_dir)}
                answer(peer, message, **values)
            case Load(model="qwen"):
                fail(peer, message.id, "load_failed", "qwen: no folder /q", model="qwen")
            case Generate(model="qwen"):
                send_pieces(peer, message.id, ["one", " two"])
                fail(peer, message.id, "worker_crashed", "its worker crashed", tokens_sent=2)
            case Generate():
                send_pieces(peer, message.id, ["Hällo", " wörld"])
                finish(peer, message.id, 2)
            case Stop():
                for process in self.stopping:
                    process.terminate()
                pids = [process.pid for process in self.stopping]
                limits = {"drain_timeout_s": 30.0, "end_limit_s": 15.0}
                answer(peer, message, pids=pids[1:], supervisor_pid=pids[0], **limits)
            case Reload():
                answer(peer, message, **RELOADED)
            case Restart(now=False) | Cancel():
                pass
            case _:
                answer(peer, message)


@pytest.fixture
def script(folder: Path) -> Script:
    return Script(folder)


@pytest.fixture
def supervisor(path: Path, script: Script) -> Iterator[ScriptedSupervisor]:
    with scripted_supervisor(path, script) as running:
        yield running


def at(
    supervisor: ScriptedSupervisor, *arguments: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return run_cli(*arguments, "--endpoint", supervisor.endpoint, stdin=stdin)


# ---------------------------------------------------------------- one answer


def test_commands_show_the_changed_row(supervisor: ScriptedSupervisor) -> None:
    for arguments in (["load"], ["unload"], ["restart", "--now"], ["restart", "--no-wait"]):
        done = at(supervisor, *arguments, "smollm2")
        assert done.returncode == 0
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["MODEL", "smollm2"]
    done = at(supervisor, "load", "smollm2", "--json")
    assert [row["name"] for row in json.loads(done.stdout)["models"]] == ["smollm2"]
    assert [m.model for m in supervisor.got(Unload)] == ["smollm2"]
    assert [m.now for m in supervisor.got(Restart)] == [True, False]


@pytest.mark.parametrize("is_dry", [False, True])
def test_reload_says_what_does_not_fit_any_more(
    supervisor: ScriptedSupervisor, is_dry: bool
) -> None:
    later = "after their turn or once they are idle"
    freed = f"idle models are unloaded now, busy ones {later}"
    if is_dry:
        freed = f"qwen would be unloaded; busy models would be unloaded {later}"
    done = at(supervisor, "reload", *(["--dry-run"] if is_dry else []))
    assert (done.returncode, done.stderr.splitlines()) == (0, [
        "takes effect at the next start: log_format",
        f"models may grow to 1.00 GiB more than the new memory budget: {freed}",
        "big could not be loaded: it needs 9.00 GiB",
        "silent: its disk does not answer",
    ])  # fmt: skip


def test_failed_request_exits_1_with_a_sentence_and_a_hint(supervisor: ScriptedSupervisor) -> None:
    done = at(supervisor, "load", "qwen")
    where = f" --endpoint {supervisor.endpoint}"
    assert (done.returncode, PROGRESS.sub("", done.stderr)) == (
        1,
        f"error: qwen: no folder /q\nhint: see `mlxsup logs qwen{where}`, fix the cause, then run "
        f"`mlxsup restart qwen{where}`; after a change of the configuration, run `mlxsup "
        f"reload{where}`\n",
    )
    done = at(supervisor, "load", "qwen", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"], error["message"]) == (
        1, "load_failed", "qwen: no folder /q",
    )  # fmt: skip


def test_generate_prints_the_text_and_nothing_else(supervisor: ScriptedSupervisor) -> None:
    done = at(supervisor, "generate", "smollm2", "-", stdin="é\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hällo wörld\n", "")
    done = at(supervisor, "generate", "smollm2", "x", "-v", "--max-tokens", "2", "--seed", "7")
    assert done.stdout == "Hällo wörld\n"
    assert done.stderr.startswith("2 tokens in ")
    assert " s, 0.25 engine seconds, prompt 3 tokens, stop" in done.stderr
    value = json.loads(at(supervisor, "generate", "smollm2", "x", "--json").stdout)
    shown = [value[key] for key in ("model", "text", "finish_reason", "seed", "token_ids")]
    assert shown == ["smollm2", "Hällo wörld", "stop", 7, [0, 1]]
    assert value["usage"] == {
        "prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 2, "engine_s": 0.25,
    }  # fmt: skip
    where = ("--endpoint", supervisor.endpoint)
    assert on_terminal(["generate", "smollm2", "x", *where]) == "Hällo wörld\n"
    done = at(supervisor, "generate", "smollm2", "-", stdin="\udcff")
    assert (done.returncode, done.stdout, "not UTF-8" in done.stderr) == (64, "", True)


def test_a_preset_is_below_the_options_and_raw_text_has_no_template(
    supervisor: ScriptedSupervisor, script: Script
) -> None:
    kwargs = {"chat_template_kwargs": {"mood": "good"}}
    script.models[0]["presets"] = {"warm": {"temperature": 0.5, **kwargs}}
    expected = [
        ([], {"temperature": 0.5, **kwargs}),
        (["--temperature", "1"], {"temperature": 1.0, **kwargs}),
        (["--raw"], {"temperature": 0.5, "prompt": "x"}),
    ]
    for options, _ in expected:
        assert at(supervisor, "generate", "smollm2:warm", "x", *options).returncode == 0
    asked = [decode_body(message.body).to_wire() for message in supervisor.got(Generate)]
    for body in asked[:2]:
        assert [one["content"] for one in body.pop("messages")] == ["x"]
        body.pop("messages_as_text")
    assert asked == [body for _, body in expected]


def test_generate_that_breaks_off_exits_1_and_says_how_far_it_came(
    supervisor: ScriptedSupervisor,
) -> None:
    done = at(supervisor, "generate", "qwen", "x")
    assert (done.returncode, done.stdout) == (1, "one two")
    assert done.stderr.startswith("error: its worker crashed (after 2 tokens)\nhint: ")
    where = ("--endpoint", supervisor.endpoint)
    assert on_terminal(["generate", "qwen", "x", *where]).startswith("one two\n")


def test_interrupt_cancels_the_request_and_exits_130_D12(path: Path) -> None:
    script = OpenStreams()
    with (
        scripted_supervisor(path, script) as supervisor,
        Piped("generate", "m", "x", "--endpoint", supervisor.endpoint) as asked,
    ):
        assert asked.stdout.read(3) == "one"
        assert asked.interrupt() == (130, "", "Cancelled. The model stays loaded.\n")
        eventually(lambda: supervisor.got(Cancel) and not script.open)


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_keys_are_hidden_while_an_answer_comes_and_the_terminal_is_given_back(
    path: Path, number: str
) -> None:
    with (
        scripted_supervisor(path, OpenStreams()) as supervisor,
        FullScreen("generate", "m", "x", "--endpoint", supervisor.endpoint) as terminal,
    ):
        terminal.expect("one")
        assert not terminal.mode[3] & termios.ECHO
        terminal.process.send_signal(getattr(signal, number))
        seen = terminal.end()
        assert terminal.mode == terminal.mode_before
    assert (seen.endswith("\n"), "Traceback" in seen) == (True, False)


def test_stop_returns_when_every_process_is_gone_E5(
    supervisor: ScriptedSupervisor, script: Script
) -> None:
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    script.stopping = [subprocess.Popen(sleep) for _ in range(3)]
    try:
        done = at(supervisor, "stop", "--timeout", "5")
        assert done.returncode == 0
        # Nothing has reaped them yet: a zombie counts as gone.
        assert all(process.wait(0) is not None for process in script.stopping)
        pid = script.stopping[0].pid
        assert done.stdout == f"stopped the daemon (pid {pid}) and 2 workers\n"
        assert [(m.now, m.timeout_s) for m in supervisor.got(Stop)] == [(False, 5.0)]
    finally:
        for process in script.stopping:
            process.kill()
            process.wait()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
def test_output_that_cannot_be_written_is_an_error_in_a_sentence(
    supervisor: ScriptedSupervisor,
) -> None:
    for arguments in (["--version"], ["status", "--endpoint", supervisor.endpoint]):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                command(*arguments), stdout=full, stderr=subprocess.PIPE, env=environment()
            )
        assert done.returncode == 1
        assert done.stderr.startswith(b"error: cannot write the output: ")
        assert done.stderr.count(b"\n") == 1


# ---------------------------------------------------------------- configurations


def test_config_check_reports_a_runtime_folder_that_start_refuses(folder: Path) -> None:
    config = folder / "mlxsup.toml"
    long = "x" * 120
    folders = f'[supervisor]\nlog_dir = "logs"\nruntime_dir = "{long}"\n'
    config.write_text(f'{folders}[models.m]\nengine = "fake"\n')
    done = run_cli("config", "check", str(config))
    assert (done.returncode, done.stdout) == (78, f"checking {config}\n")
    assert f"{config}:3: supervisor.runtime_dir cannot hold a socket: " in done.stderr
    for more in ([], ["--detach"]):
        done = run_cli("start", "--config", str(config), *more)
        assert (done.returncode, done.stdout) == (73, "")
        assert done.stderr.startswith("error: the runtime folder cannot hold a socket: ")
        assert done.stderr.endswith("\nhint: set another runtime_dir\n")


# ---------------------------------------------------------------- logs


def test_logs_of_one_and_of_all(supervisor: ScriptedSupervisor, folder: Path) -> None:
    for name, text in {
        "smollm2.log.1": "--- generation 1\nold\n",
        "smollm2.log": "\x1b[31mnew\x1b[0m\n",
        "qwen.log": "other\n",
        "mlxsup.log": "daemon\n",
    }.items():
        (folder / name).write_text(text)
    for arguments, shown in (
        (["smollm2"], "--- generation 1\nold\nnew\n"),
        (["smollm2", "-n", "1"], "new\n"),
        (["-n", "1"], "smollm2 | new\nqwen    | other\n"),
        (["mlxsup"], "daemon\n"),
    ):
        assert at(supervisor, "logs", *arguments).stdout == shown
    [line] = at(supervisor, "logs", "qwen", "--json").stdout.splitlines()
    assert json.loads(line) == {"schema_version": 1, "model": "qwen", "line": "other"}


def test_logs_without_a_daemon_are_those_that_the_last_one_left(folder: Path) -> None:
    config = folder / "c.toml"
    config.write_text(
        '[supervisor]\nruntime_dir = "run"\nlog_dir = "logs"\n[models.m]\npath = "m"\n'
        'aliases = ["em"]\n'
    )
    assert run_cli("logs", "m", "--config", str(config)).returncode == 69
    (folder / "logs").mkdir()
    (folder / "logs/m.log").write_text("--- generation 1 pid 7\n")
    (folder / "logs/removed.log").write_text("old\n")
    (folder / "logs/mlxsup.log").write_text("own\n")
    done = run_cli("logs", "--config", str(config))
    shown = "m       | --- generation 1 pid 7\nremoved | old\n"
    assert (done.returncode, done.stdout) == (0, shown)
    endpoint = f"ipc://{folder}/run/client.sock"
    said = f"no daemon answers at {endpoint}; these are the logs in {folder}/logs\n"
    assert done.stderr == said
    named = run_cli("logs", "em", "--config", str(config))
    assert (named.returncode, named.stdout) == (0, "--- generation 1 pid 7\n")


def test_a_line_that_comes_as_logs_begin_to_follow_is_shown_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = folder / "c.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\nlog_dir = "."\n[models.m]\npath = "m"\n')
    log = folder / "m.log"
    log.write_text("old\n")

    class Late(FollowedFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            with path.open("a") as file:
                file.write("new\n")

    def leave() -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands_logs, "FollowedFile", Late)
    monkeypatch.setattr(commands_logs, "check_reader", leave)
    done = CliRunner().invoke(root, ["logs", "m", "-f", "--config", str(config)])
    assert done.stdout.split()[:3] == ["old", "new"]


def test_logs_follow_across_rotation_until_interrupted(
    supervisor: ScriptedSupervisor, folder: Path
) -> None:
    log = folder / "smollm2.log"
    log.write_text("a\n")
    with Piped("logs", "smollm2", "-f", "--endpoint", supervisor.endpoint) as following:
        assert following.line() == "a\n"
        log.rename(folder / "smollm2.log.1")
        log.write_text("--- generation 2\n")
        assert following.line() == "--- generation 2\n"
        assert following.interrupt() == (130, "", "")


# ---------------------------------------------------------------- a daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    slow = {"load_s": 3.5, "load_steps": 10}
    models = {"alpha": fake(), "cold": fake(preload=False, fake=slow)}
    with Daemon(models) as daemon, daemon.client() as client:
        wait_for_state(client, "alpha", "READY")
        yield daemon


def test_events_are_the_changes_of_state_in_their_order(daemon: Daemon) -> None:
    with (
        Piped("events", "--endpoint", daemon.endpoint) as events,
        daemon.client() as client,
    ):
        assert events.note() == f"following {daemon.endpoint}; press Ctrl-C to stop\n"
        client.restart("alpha")
        states: list[str] = []
        while not states or states[-1] != "READY":
            states.append(events.line().split(" → ")[1].split()[0])
        assert states == ["DRAINING", "STOPPING", "PENDING", "LOADING", "READY"]
        assert events.interrupt() == (0, "", "")


@pytest.mark.parametrize(
    "arguments",
    [["events"], ["status", "--watch"], ["top"], ["logs", "-f"]],
    ids=" ".join,
)
def test_what_follows_ends_quietly_with_its_reader_although_nothing_happens(
    daemon: Daemon, arguments: list[str]
) -> None:
    with Piped(*arguments, "--endpoint", daemon.endpoint) as follower:
        _ = follower.note() if arguments == ["events"] else follower.line()
        follower.stdout.close()
        assert follower.process.wait(TIME_LIMIT_S) == 141
        assert follower.note() == ""


def test_events_and_watch_exit_69_when_the_daemon_goes() -> None:
    with Daemon({"alpha": fake()}) as daemon:
        where = ("--endpoint", daemon.endpoint)
        with (
            Piped("events", *where) as events,
            Piped("status", "--watch", "--json", *where) as watch,
        ):
            events.note()
            assert json.loads(watch.line())["models"][0]["name"] == "alpha"
            assert run_cli("stop", *where).returncode == 0
            for follower in (events, watch):
                code, _, err = follower.end()
                assert (code, "Traceback" in err) == (69, False)


def test_watch_draws_in_place_on_a_terminal_and_ends_with_0(daemon: Daemon) -> None:
    with Terminal("status", "--watch", "--endpoint", daemon.endpoint) as terminal:
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


def test_debug_shows_what_loads_found_out_and_gives_programs_the_latest_events(
    daemon: Daemon,
) -> None:
    where = ("--endpoint", daemon.endpoint)
    text = run_cli("status", "--debug", *where).stdout
    assert "load times: " in text.partition("found while loading alpha:\n")[2]
    assert text.endswith("\n`mlxsup why MODEL` shows what happened before\n")
    debug = json.loads(run_cli("status", "--debug", "--json", *where).stdout)
    assert "alpha" in {one["model"] for one in debug["flight"]}
    assert "flight" not in json.loads(run_cli("status", "--json", *where).stdout)


def test_load_that_takes_longer_tells_of_it_in_lines_in_a_pipe(daemon: Daemon) -> None:
    where = ("--endpoint", daemon.endpoint)
    done = run_cli("load", "cold", *where)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["MODEL", "cold"]
    phases = re.findall("starting|reading weights|warming up", done.stderr)
    assert phases == list(dict.fromkeys(phases)), "one line for each change"
    assert "warming up" in phases
    began_at = time.monotonic()
    again = run_cli("load", "cold", *where)
    is_quick = time.monotonic() - began_at < 1.0
    assert (again.returncode, again.stderr == "" or not is_quick) == (0, True)
    assert run_cli("unload", "cold", *where).returncode == 0
    assert run_cli("load", "cold", "--json", *where).stderr == ""
