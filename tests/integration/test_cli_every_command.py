"""Commands that need other surroundings than a daemon, held against the conventions: plain in a
pipe, and with --json as published."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.protocol.message import Message
from mlxsup.protocol.request_messages import Attach, RequestsQuery

from support.cli import Piped, check_plain, run_cli
from support.daemon import Daemon, fake
from support.downloads import FILES, REPO, hub_environment
from support.json_schemas import problems
from support.local_hub import local_hub
from support.played_service_managers import PlayedServiceManagers
from support.scripted_supervisor import Peer, answer, finish, scripted_supervisor, send_pieces


@pytest.fixture
def home() -> Iterator[Path]:
    """A home folder with a short path, because sockets go there."""
    with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as name:
        yield Path(name)


def test_start_in_the_foreground_writes_lines_as_published() -> None:
    daemon = Daemon({"alpha": fake()})
    with Piped("start", "--config", str(daemon.config), "--json") as started:
        lines = [started.line()]
        while '"READY"' not in lines[-1]:
            lines.append(started.line())
        code, out, err = started.interrupt()
    assert (code, err) == (0, "")
    lines += out.splitlines()
    check_plain("".join(lines))
    assert [found for line in lines for found in problems(line, ["start"])] == []
    assert any('"stopping"' in line for line in lines), "the end is shown, too"
    with daemon:
        pass  # checks the logs and removes the folder


def joined(peer: Peer, message: Message) -> None:
    """A script: nothing is listed, and whoever joins gets an answer of two pieces."""
    if isinstance(message, RequestsQuery):
        answer(peer, message, requests=[], more=0)
    elif isinstance(message, Attach):
        send_pieces(peer, message.id, ["Par", "is"])
        finish(peer, message.id, 2)


def test_attach_prints_the_answer_plain_and_as_published(path: Path) -> None:
    with scripted_supervisor(path, joined) as supervisor:
        where = ("--endpoint", supervisor.endpoint)
        done = run_cli("attach", "r-1", *where)
        assert (done.returncode, done.stdout) == (0, "Paris"), done.stderr
        check_plain(done.stdout + done.stderr)
        done = run_cli("attach", "r-1", "--json", *where)
        assert (done.returncode, done.stderr) == (0, "")
        assert problems(done.stdout, ["attach"]) == []


@pytest.mark.parametrize("is_json", [False, True])
def test_pull_and_rm_are_plain_and_as_published(home: Path, is_json: bool) -> None:
    more = ["--json"] if is_json else []
    with local_hub() as hub:
        hub.add(REPO, FILES)
        variables = hub_environment(hub, home, HOME=str(home))
        for arguments in (["pull", REPO], ["rm", REPO, "--yes"]):
            done = run_cli(*arguments, *more, **variables)
            assert done.returncode == 0, done.stderr
            check_plain(done.stdout + done.stderr)
            if is_json:
                assert (problems(done.stdout, arguments[:1]), done.stderr) == ([], "")


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is played")
@pytest.mark.parametrize("is_json", [False, True])
def test_a_service_is_told_of_plain_and_as_published(tmp_path: Path, is_json: bool) -> None:
    played = PlayedServiceManagers(tmp_path)
    played.answer("journalctl.--user-unit", "echo one; echo two")
    install = ["install", "--config", str(played.config)]
    more = ["--json"] if is_json else []
    for arguments in (
        [*install, "--dry-run"],
        install,
        ["status"],
        ["logs"],
        ["uninstall", "--dry-run"],
        ["uninstall"],
    ):
        done = played.run(*arguments, *more)
        assert done.returncode == 0, done.stderr
        check_plain(done.stdout + done.stderr)
        if is_json:
            lines = done.stdout.splitlines()
            assert (bool(lines), done.stderr) == (True, "")
            leaf = ["service", arguments[0]]
            assert [found for line in lines for found in problems(line, leaf)] == []
