"""The conventions of all commands: exit codes, the two streams, --json, help, and mistakes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from syrupy.assertion import SnapshotAssertion

from mlxsup.cli.main import main, root
from mlxsup.client import Client
from mlxsup.client.client import Stream
from mlxsup.protocol.client_messages import Attach, RequestsQuery
from mlxsup.protocol.key_file import KeyPlace, add_key
from mlxsup.protocol.message import Message

from support.cli.cli import (
    COLUMNS,
    ESCAPE,
    Piped,
    check_plain,
    environment,
    on_terminal,
    run_cli,
)
from support.cli.command_tree import Leaf, leaf_of, leaves
from support.client.scripted_supervisor import (
    Peer,
    answer,
    finish,
    scripted_supervisor,
    send_pieces,
)
from support.daemon.daemon import Daemon, fake, wait_for_state
from support.daemon.hub_caches import write_folder
from support.gateway.json_schemas import problems

LONG = "a-model-with-a-very-long-name-that-no-column-of-a-table-can-hold"
MODELS = {
    "alpha": fake(),
    "beta": fake(preload=False),
    "brief": fake(preload=False, fake={"answer_tokens": 3}),
    LONG: fake(preload=False),
    "vectors": fake(preload=False, fake={"task": "embed"}),
    "broken": {"path": "/nowhere/" + "a-long-path/" * 8, "preload": True},
}


ONCE: list[list[str]] = [
    ["status"],
    ["status", "--debug"],
    ["reload"],
    ["reload", "--dry-run"],
    ["load", "alpha"],
    ["unload", "beta"],
    ["restart", "alpha", "--now"],
    ["restart", "alpha"],
    ["generate", "alpha", "hello", "--max-tokens", "3", "-v"],
    ["chat", "alpha", "--max-tokens", "3", "-v"],
    ["embed", "vectors", "hello"],
    ["run", "brief"],
    ["requests"],
    ["requests", "--client", "nobody"],
    ["why"],
    ["why", "alpha"],
    ["why", "broken"],
    ["logs"],
    ["logs", "alpha", "-n", "3"],
    ["logs", "alpha", "--since", "10m"],
    ["logs", "alpha", "--previous"],
    ["key", "new", "laptop"],
    ["key", "list"],
    ["key", "revoke", "old"],
    ["key", "off", "--yes"],
    ["wait", "alpha"],
    ["bench", "alpha", "--prompt-tokens", "4", "--output-tokens", "4", "--concurrency", "2"],
    ["config", "check", "SOUND"],
    ["config", "path", "--config", "CONFIG"],
    ["config", "schema"],
    ["plan", "--config", "CONFIG"],
    ["models", "--config", "CONFIG"],
    ["ls", "--config", "CONFIG"],
    ["show", "MODEL"],
    ["init", "NEW"],
    ["search"],
    ["completion", "bash"],
    ["completion", "zsh"],
    ["completion", "fish"],
]
"""Commands that end by themselves, in this order; each is run in a pipe, and with --json."""

FOLLOWING: list[list[str]] = [
    ["status", "--watch"],
    ["events"],
    ["logs", "alpha", "-f"],
    ["top"],
]
"""Every command that runs until it is interrupted, except `start`; run in the same two ways."""

IN_OTHER_SURROUNDINGS = {
    ("start",), ("stop",), ("attach",), ("cancel",), ("pause",), ("resume",), ("prioritize",),
    ("config", "get"), ("config", "set"), ("config", "unset"), ("hosts", "check"),
    ("doctor",), ("connect",), ("launch",), ("demo",), ("pull",), ("add",), ("rm",), ("convert",),
    ("service", "install"), ("service", "uninstall"), ("service", "status"),
}  # fmt: skip
"""Commands that tests of their own run in a pipe and with --json."""

LOCAL = {"config", "completion", "plan", "models", "ls", "show", "init", "search"}
"""These ask no daemon."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(MODELS) as daemon, daemon.client() as client:
        wait_for_state(client, "alpha", "READY")
        client.restart("alpha", now=True)  # or no test could read the log of a life before
        wait_for_state(client, "broken", "FAILED")
        yield daemon


def filled(arguments: list[str], daemon: Daemon) -> list[str]:
    """With the daemon's configuration, one without a broken model, a model, and a new file."""
    sound = daemon.folder / "sound.toml"
    sound.write_text('[models.m]\nengine = "fake"\n')
    model = write_folder(daemon.folder / "model")
    new = daemon.folder / "new.toml"
    new.unlink(missing_ok=True)
    files = {"CONFIG": daemon.config, "SOUND": sound, "MODEL": model, "NEW": new}
    return [str(files.get(argument, argument)) for argument in arguments]


def run(daemon: Daemon, arguments: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    """Runs a command; there is one API key, whatever the tests before have made or revoked."""
    if arguments[0] == "key":
        place = KeyPlace.beside(daemon.config, daemon.folder / "run")
        place.file.unlink(missing_ok=True)
        add_key(place, name="old", account="old", is_operator=False, created="now")
    where = [] if arguments[0] in LOCAL else ["--endpoint", daemon.endpoint]
    home = {}
    if arguments[0] in ("models", "ls", "show", "init"):
        write_folder(daemon.folder / ".mlxsup/models/found")
        home = {"HOME": str(daemon.folder), "HF_HUB_CACHE": str(daemon.folder / "hub")}
    return run_cli(*filled(arguments, daemon), *more, *where, stdin="one\ntwo\n", **home)


@contextmanager
def changes(arguments: list[str], client: Client) -> Iterator[Callable[[], object]]:
    """Makes something happen that the command has a line for: a restart, or another request."""
    if arguments[0] != "requests":
        yield lambda: client.restart("alpha", now=True)
        return
    streams: list[Stream] = []

    def another() -> None:
        for stream in streams:
            stream.cancel()
        streams[:] = [client.generate("alpha", prompt="[[fault slow=0.02]]", max_tokens=4000)]
        next(streams[0])

    another()
    yield another
    streams[0].cancel()


# ---------------------------------------------------------------- in a pipe


def test_every_command_is_run_in_a_pipe_and_with_json() -> None:
    in_tables = {leaf_of(arguments) for arguments in (*ONCE, *FOLLOWING)}
    assert in_tables | IN_OTHER_SURROUNDINGS == set(leaves())


@pytest.mark.parametrize("arguments", ONCE, ids=" ".join)
def test_in_a_pipe_data_goes_to_stdout_plain_and_whole_and_as_json(
    daemon: Daemon, arguments: list[str]
) -> None:
    done = run(daemon, arguments)
    assert done.returncode == 0, done.stderr
    check_plain(re.sub(r"\\e|\\x1b", "", done.stdout))
    check_plain(done.stderr)
    assert done.stdout
    if arguments[0] in ("status",):
        assert f"{LONG}  STOPPED" in done.stdout
        assert ("a-long-path/" * 8).rstrip("/") in done.stdout
        assert "…" not in done.stdout
    # What is only for people is on the other stream.
    assert ("tokens/s" in done.stderr) == ("-v" in arguments)
    assert "tokens/s" not in done.stdout
    done = run(daemon, arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    if arguments[0] != "logs":
        assert len(lines) == (2 if arguments[0] == "chat" else 1)
    assert_published(lines, arguments)


def assert_published(lines: Iterable[str], arguments: Sequence[str]) -> None:
    """Fail unless each line is an object as its command's schema says."""
    assert all(json.loads(line)["schema_version"] == 1 for line in lines)
    assert [found for line in lines for found in problems(line, leaf_of(arguments))] == []


@pytest.mark.parametrize("arguments", FOLLOWING, ids=" ".join)
@pytest.mark.parametrize("is_json", [False, True])
def test_following_writes_a_line_for_each_change_and_nothing_over_it(
    daemon: Daemon, arguments: list[str], is_json: bool
) -> None:
    more = ["--json"] if is_json else []
    with (
        Piped(*arguments, *more, "--endpoint", daemon.endpoint) as piped,
        daemon.client() as client,
        changes(arguments, client) as change,
    ):
        if arguments[0] == "events" and not is_json:
            assert "press Ctrl-C to stop" in piped.note()
        lines = [piped.line()] if arguments[0] != "events" else []
        change()
        while not piped.has_output():
            # It subscribed too late for that change, and says nothing before its first.
            change()
        # It follows by now, so it is notified of all of these.
        change()
        lines += [piped.line() for _ in range(3)]
        code, out, err = piped.interrupt()
    assert code == (130 if arguments[0] == "logs" else 0)
    assert err == ""
    check_plain("".join(lines) + out)
    if is_json:
        assert_published(lines, arguments)


@pytest.mark.parametrize("is_json", [False, True])
def test_start_and_stop_in_a_pipe_speak_in_plain_lines(is_json: bool) -> None:
    more = ["--json"] if is_json else []
    daemon = Daemon({"alpha": fake()})
    with Piped("start", "--config", str(daemon.config), *more) as started:
        lines = [started.line()]
        while "READY" not in lines[-1]:
            lines.append(started.line())
        code, out, err = started.interrupt()
    with daemon:
        stopped = run_cli("stop", "--config", str(daemon.config), *more)
    lines += out.splitlines()
    check_plain("".join(lines) + stopped.stdout)
    assert (code, stopped.returncode) == (0, 0)
    if is_json:
        assert (err, stopped.stderr) == ("", "")
        assert json.loads(stopped.stdout)["stopped"] is True
        assert_published([stopped.stdout], ["stop"])
        assert_published(lines, ["start"])
        assert any('"stopping"' in line for line in lines), "the end is shown, too"
    else:
        assert err == "stopping: ending every process\n"
        assert lines[0].startswith(f"listening at {daemon.endpoint} (pid ")
        assert stopped.stdout.startswith("stopped the daemon (pid ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["load", "alpa"],
        ["unload", "alpa"],
        ["restart", "alpa"],
        ["generate", "alpa", "x"],
        ["chat", "alpa"],
        ["logs", "alpa"],
    ],
    ids=" ".join,
)
def test_unknown_model_is_answered_with_close_and_configured_names_on_every_door_H10(
    daemon: Daemon, arguments: list[str]
) -> None:
    known = ", ".join(sorted(MODELS))
    message = f"there is no model 'alpa'; configured: {known}"
    done = run(daemon, arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [f"error: {message}", "hint: did you mean alpha?"]
    done = run(daemon, arguments, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    assert problems(done.stdout, [], is_error=True) == []
    error = json.loads(done.stdout)["error"]
    assert error == {"code": "unknown_model", "message": message, "hint": "did you mean alpha?"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["load", "broken"], "load_failed"),
        (["generate", "broken", "x"], "model_failed"),
        (["chat", "broken"], "model_failed"),
        (["generate", "alpha", "x", "--max-tokens", "1000000"], "context_length_exceeded"),
        (["logs", LONG, "--previous"], "no_previous_generation"),
    ],
)
def test_what_failed_exits_1_with_a_sentence_and_a_code(
    daemon: Daemon, arguments: list[str], code: str
) -> None:
    done = run(daemon, arguments)
    assert (done.returncode, done.stdout) == (1, "")
    # If a load took long, its changes were printed before.
    told, begin, _ = done.stderr.partition("error: ")
    assert begin
    assert all(re.match(r"\d\d:\d\d:\d\dZ broken: ", line) for line in told.splitlines())
    check_plain(done.stderr)
    done = run(daemon, arguments, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["error"]["code"] == code


@pytest.mark.parametrize("is_json", [False, True])
def test_what_is_done_to_a_request_is_one_line(daemon: Daemon, is_json: bool) -> None:
    more = ["--json"] if is_json else []
    with daemon.client() as client:
        stream = client.generate("alpha", prompt="[[fault slow=0.02]]", max_tokens=4000)
        next(stream)
        for words, said in (
            (["prioritize", "ID", "batch"], "as batch (was normal)"),
            (["pause", "ID"], "paus"),
            (["resume", "ID"], "queued"),
            (["cancel", "ID"], "cancelled"),
        ):
            given = [stream.request_id if word == "ID" else word for word in words]
            done = run(daemon, given, *more)
            assert (done.returncode, done.stderr) == (0, "")
            check_plain(done.stdout)
            [line] = done.stdout.splitlines()
            if is_json:
                assert_published([line], words)
            else:
                assert stream.request_id in line
                assert said in line
        for _ in stream:
            pass
        assert stream.result.finish_reason == "cancelled"


# ---------------------------------------------------------------- colour, columns, speed


def test_status_holds_in_80_columns_on_a_terminal_and_colours_its_states(daemon: Daemon) -> None:
    arguments = ["status", "--endpoint", daemon.endpoint]
    shown = on_terminal(arguments)
    assert "\x1b[32mREADY" in shown
    lines = ESCAPE.sub("", shown).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    # State is never colour alone, and a cause is never cut.
    text = " ".join(line.strip() for line in lines)
    assert "FAILED" in text
    assert "a-long-path/" * 2 in text.replace(" ", "")
    for plain in (
        on_terminal(arguments, NO_COLOR="1"),
        on_terminal(arguments, TERM="dumb"),
        on_terminal([*arguments, "--no-color"]),
    ):
        assert "\x1b" not in plain
        assert [line.split()[:2] for line in plain.splitlines()[:2]] == [
            ["MODEL", "STATE"],
            ["alpha", "READY"],
        ]


def test_errors_on_a_terminal_are_coloured_unless_it_is_not_wanted(daemon: Daemon) -> None:
    arguments = ["load", "alpa", "--endpoint", daemon.endpoint]
    shown = on_terminal(arguments)
    assert "\x1b[31merror:\x1b[0m there is no model" in shown
    assert "\x1b[2mhint: did you mean alpha?\x1b[0m" in shown
    assert "\x1b" not in on_terminal(arguments, NO_COLOR="1")


# ---------------------------------------------------------------- errors


INTERRUPTED_IMPORT = """
import signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "mlxsup.cli.main":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from mlxsup.cli.__main__ import run
run()
"""


INTERRUPTED_COMPLETION = """
import signal
from mlxsup.cli import main
main._complete = lambda what: signal.raise_signal(signal.SIGINT)
from mlxsup.cli.__main__ import run
run()
"""


IGNORED_INTERRUPT = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from mlxsup.cli import main
main.main = lambda: signal.raise_signal(signal.SIGINT)
from mlxsup.cli.__main__ import run
run()
"""


def test_an_interrupt_that_a_shell_has_ignored_for_the_background_stays_ignored() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IGNORED_INTERRUPT],
        capture_output=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("code", [INTERRUPTED_IMPORT, INTERRUPTED_COMPLETION])
def test_an_interrupt_before_a_command_or_while_completing_ends_it_without_a_word(
    code: str,
) -> None:
    asked = {"_MLXSUP_COMPLETE": "bash_complete"} if code == INTERRUPTED_COMPLETION else {}
    done = subprocess.run(
        [sys.executable, "-c", code, "status"],
        capture_output=True,
        env=environment(**asked),
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


# ---------------------------------------------------------------- help


def levels(command: click.Command = root, path: Leaf = ()) -> Iterator[tuple[Leaf, click.Command]]:
    """Yield every group and command, with the words that name it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from levels(child, (*path, name))


def test_help_on_every_level_begins_with_its_usage_and_an_example(
    capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    shown = {}
    for path, command in levels():
        if not isinstance(command, click.Group):
            assert "is_json" in {parameter.name for parameter in command.params}, path
        texts = []
        for flag in ("-h", "--help"):
            with pytest.raises(SystemExit) as caught:
                main([*path, flag])
            assert caught.value.code == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1]
        usage, example, *_ = texts[0].split("\n\n")
        assert usage.startswith("Usage: ")
        assert example.strip().startswith("Example: ")
        assert "mlxsup" in example
        shown[" ".join(path)] = " ".join([*usage.split(), "-", *example.split()])
    assert shown == snapshot


def joined(peer: Peer, message: Message) -> None:
    """List two requests, and send an answer of two pieces to a client that joins one."""
    if isinstance(message, RequestsQuery):
        listed = {"model": "m", "state": "answering", "paused": None}
        numbered = [{"id": f"r-{n}", "number": f"#{n}"} for n in (12, 9)]
        answer(peer, message, requests=[listed | one for one in numbered], more=0)
    elif isinstance(message, Attach):
        send_pieces(peer, message.id, ["Par", "is"])
        finish(peer, message.id, 2)


def test_attach_prints_the_answer_plain_and_as_published(path: Path) -> None:
    with scripted_supervisor(path, joined) as supervisor:
        where = ("--endpoint", supervisor.endpoint)
        done = run_cli("attach", "r-1", *where)
        assert (done.returncode, done.stdout) == (0, "Paris\n"), done.stderr
        check_plain(done.stdout + done.stderr)
        done = run_cli("attach", "r-1", "--json", *where)
        assert (done.returncode, done.stderr) == (0, "")
        assert problems(done.stdout, ["attach"]) == []
        assert run_cli("attach", "last", *where).stdout == "Paris\n"
        joined_to = [str(message.request) for message in supervisor.got(Attach)]
        assert joined_to == ["r-1", "r-1", "r-12"], "another request may be the last one soon"
