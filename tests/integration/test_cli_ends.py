"""The end of a command: Ctrl-C, a closed stream, a reader that leaves, a daemon of another user."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import Client

from support.cli.cli import TIME_LIMIT_S, Piped, Terminal, command, environment
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually

ENDLESS = fake(fake={"step_s": 0.02, "answer_tokens": 100_000})
NEVER_LOADED = fake(fake={"load_s": 3600.0, "load_steps": 36_000})
LONG = 4000


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon({"m": ENDLESS, "never": NEVER_LOADED}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        yield daemon


def interrupted(terminal: Terminal) -> str:
    """Signals the group of the command, as a terminal does; gives all that it wrote."""
    assert os.getpgid(terminal.process.pid) == terminal.process.pid
    os.killpg(terminal.process.pid, signal.SIGINT)
    text = terminal.end()
    assert terminal.process.returncode == 130
    assert "Traceback" not in text
    cleared, says = text.rsplit("\r\x1b[K", 1)
    assert (cleared != "", says[-2:]) == (True, ".\n"), "the ^C of the terminal is cleared"
    return text


def test_attach_leaves_the_request_alone(daemon: Daemon) -> None:
    with daemon.client() as client:
        reader = Reader(client, "m", "hi", max_tokens=LONG).started()
        id = str(reader.stream.request_id)
        with Terminal("attach", id, "--endpoint", daemon.endpoint) as terminal:
            terminal.read_more()
            interrupted(terminal)
        before = len(reader.tokens)
        eventually(lambda: len(reader.tokens) > before)
        assert row(client, "m")["running"] == [id]
        reader.stream.cancel()


def test_wait_leaves_the_load_alone(daemon: Daemon) -> None:
    with daemon.client() as client:
        wait_for_state(client, "never", "LOADING")
        pid = row(client, "never")["pid"]
        with Terminal("wait", "never", "--endpoint", daemon.endpoint) as terminal:
            terminal.expect("waiting for never (LOADING)")
            interrupted(terminal)
        seen = row(client, "never")
        assert (seen["state"], seen["pid"]) == ("LOADING", pid)


LIMIT_S = 60.0


def in_shell(line: str, closed: str) -> subprocess.CompletedProcess[str]:
    words = " ".join(command(*line.split()))
    return subprocess.run(
        f"{words} {closed}",
        shell=True,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


CLOSED = (
    "error: standard output is closed, so nothing was done\n"
    "hint: to discard the output, use `>/dev/null`\n"
)


def test_a_closed_standard_output_is_an_error_and_nothing_is_done(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for line in ("--version", f"init {tmp_path}/c.toml"):
        done = in_shell(line, ">&-")
        assert (done.returncode, done.stderr) == (1, CLOSED)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("closed", "status"), [(">&- 2>&-", 1), ("<&- >/dev/null", 0), ("2>&- >/dev/null", 0)]
)
def test_other_closed_streams_say_nothing(closed: str, status: int) -> None:
    done = in_shell("--version", closed)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_an_error_that_cannot_be_written_keeps_its_exit_code() -> None:
    assert in_shell("no-such-command", "2>/dev/full").returncode == 64


BROKEN_PIPE = 141
READER_ENDLESS = 4000
LONG_PROMPT = "word " * 400

MODELS = {
    "loads": fake(preload=False, load_stall_timeout_s=3600, fake={"load_stall": "sleep"}),
    "reads": fake(fake={"prefill_tokens_per_step": 1, "step_s": 0.05}),
    "queues": fake(max_concurrency=1, fake={"step_s": 0.05}),
}
"""Each keeps a request waiting for its first token, for another reason."""

ASKING: list[list[str]] = [
    *(["generate", model, LONG_PROMPT] for model in MODELS),
    ["generate", "queues", LONG_PROMPT, "--json"],
    ["chat", "queues"],
]


@pytest.fixture(scope="module")
def reader_daemon() -> Iterator[Daemon]:
    with Daemon(MODELS) as reader_daemon, reader_daemon.client() as client:
        for name in ("reads", "queues"):
            wait_for_state(client, name, "READY")
        with client.generate("queues", prompt="first", max_tokens=READER_ENDLESS) as first:
            next(first)  # whoever comes next waits in the queue
            yield reader_daemon


def requests_of(client: Client, model: str) -> list[dict[str, Any]]:
    """Those that have no token yet."""
    listed = client.requests()["requests"]
    return [one for one in listed if one["model"] == model and one["tokens_sent"] == 0]


@contextmanager
def asking(reader_daemon: Daemon, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command in pipes that has been asked to answer a long prompt."""
    process = subprocess.Popen(
        command(*arguments, "--endpoint", reader_daemon.endpoint),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    assert process.stdin is not None
    process.stdin.write(f"{LONG_PROMPT}\n")
    process.stdin.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("arguments", ASKING, ids=["loads", "reads", "queues", "json", "chat"])
def test_a_request_ends_with_its_reader_before_its_first_token(
    reader_daemon: Daemon, arguments: list[str]
) -> None:
    model = arguments[1]
    with reader_daemon.client() as client, asking(reader_daemon, *arguments) as process:
        eventually(lambda: requests_of(client, model))
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(TIME_LIMIT_S) == BROKEN_PIPE
        eventually(lambda: not requests_of(client, model))


def test_who_has_joined_leaves_with_its_reader_and_the_request_stays(reader_daemon: Daemon) -> None:
    with reader_daemon.client() as client:
        own = client.generate("queues", prompt="second", max_tokens=READER_ENDLESS)
        eventually(lambda: requests_of(client, "queues"))
        with Piped("attach", own.request_id, "--endpoint", reader_daemon.endpoint) as piped:
            assert "waiting, place 1" in piped.note()
            piped.stdout.close()
            assert piped.process.wait(TIME_LIMIT_S) == BROKEN_PIPE
        assert [one["id"] for one in requests_of(client, "queues")] == [own.request_id]
        own.cancel()
        eventually(lambda: not requests_of(client, "queues"))


AS_NOBODY = """
import os, sys
import mlxsup.cli.lock_holder, mlxsup.client, psutil
from mlxsup.cli.command_table import load
from mlxsup.cli.main import main
load(sys.argv[1])
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)  # once everything is imported: only root may read this environment
main(sys.argv[1:])
"""


@pytest.fixture(params=["folder", "socket"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """A socket's path in a folder that only its owner may look into, or a socket that all may see
    and only its owner may use."""
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
    run = folder / "run"
    run.mkdir(mode=0o755)
    path = run / "client.sock"
    is_root = os.geteuid() == 0
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        path.chmod(0o744 if is_root else 0o444)
        if request.param == "folder":
            run.chmod(0o700 if is_root else 0o000)
        folder.chmod(0o755)
        yield f"ipc://{path}"
    run.chmod(0o700)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "arguments", [["status"], ["stop"], ["generate", "m", "hello"]], ids=" ".join
)
def test_a_daemon_of_another_user_is_named_as_that(endpoint: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *arguments, "--endpoint", endpoint, "--json"],
        env=environment(HOME="/nonexistent"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (77, "")
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "no_permission"
    assert error["message"] == f"the daemon at {endpoint} belongs to another user"
    assert "mlxsup config path" in error["hint"]
