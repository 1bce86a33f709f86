"""Every line of the command line's conventions, for every command, on a daemon that runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mlxsup.client import Client
from mlxsup.client.client import Stream
from mlxsup.protocol.key_file import KeyPlace, add_key

from support.cli import COLUMNS, ESCAPE, Piped, check_plain, environment, on_terminal, run_cli
from support.command_tree import leaf_of
from support.daemon import Daemon, fake, wait_for_state
from support.hub_caches import write_folder
from support.json_schemas import problems
from support.tried_commands import FOLLOWING, ONCE

LONG = "a-model-with-a-very-long-name-that-no-column-of-a-table-can-hold"
MODELS = {
    "alpha": fake(),
    "beta": fake(preload=False),
    "brief": fake(preload=False, fake={"answer_tokens": 3}),
    LONG: fake(preload=False),
    "broken": {"path": "/nowhere/" + "a-long-path/" * 8, "preload": True},
}


LOCAL = {"config", "completion", "plan", "models", "ls", "show", "init"}
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


@pytest.mark.parametrize("arguments", ONCE, ids=" ".join)
def test_in_a_pipe_data_goes_to_stdout_plain_and_whole(
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


@pytest.mark.parametrize("arguments", ONCE, ids=" ".join)
def test_json_is_one_object_or_lines_of_objects(daemon: Daemon, arguments: list[str]) -> None:
    done = run(daemon, arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert all(json.loads(line)["schema_version"] == 1 for line in lines)
    if arguments[0] in ("chat", "run"):
        assert len(lines) == 2
    elif arguments[0] != "logs":
        assert len(lines) == 1
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
            assert "Ctrl-C ends" in piped.note()
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
        assert all(json.loads(line)["schema_version"] == 1 for line in lines)
        assert [found for line in lines for found in problems(line, leaf_of(arguments))] == []


def test_start_and_stop_in_a_pipe_speak_in_plain_lines() -> None:
    daemon = Daemon({"alpha": fake()})
    with Piped("start", "--config", str(daemon.config)) as started:
        assert started.line().startswith(f"listening at {daemon.endpoint} (pid ")
        while "READY" not in (line := started.line()):
            check_plain(line)
        # The second one learns who was first, on stderr, with a hint.
        second = run_cli("start", "--config", str(daemon.config))
        assert (second.returncode, second.stdout) == (75, "")
        assert f"pid {started.process.pid}" in second.stderr
        stopped = run_cli("stop", "--config", str(daemon.config), "--json")
        assert (stopped.returncode, stopped.stderr) == (0, "")
        assert json.loads(stopped.stdout)["stopped"] is True
        assert problems(stopped.stdout, ["stop"]) == []
        code, out, err = started.end()
        assert (code, err) == (0, "")
        check_plain(out)
    with daemon:
        assert run_cli("stop", "--endpoint", daemon.endpoint).stdout.startswith(
            "stopped the daemon"
        )


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
# ---------------------------------------------------------------- errors


def test_unknown_model_is_answered_with_close_and_configured_names_on_every_door_H10(
    daemon: Daemon, arguments: list[str]
) -> None:
    known = ", ".join(sorted(MODELS))
    message = f"no model is called 'alpa'; configured: {known}"
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
def test_pause_resume_and_cancel_in_a_pipe_say_in_one_line_what_has_become_of_the_request(
    daemon: Daemon, is_json: bool
) -> None:
    more = ["--json"] if is_json else []
    with daemon.client() as client:
        stream = client.generate("alpha", prompt="[[fault slow=0.02]]", max_tokens=4000)
        next(stream)
        expected = {
            "pause": ("pausing", "paused"),
            "resume": ("queued",),
            "cancel": ("cancelled",),
        }
        for command, stages in expected.items():
            done = run(daemon, [command, stream.request_id], *more)
            assert (done.returncode, done.stderr) == (0, "")
            check_plain(done.stdout)
            [line] = done.stdout.splitlines()
            assert not is_json or problems(line, [command]) == []
            said = json.loads(line).get("stage", "cancelled") if is_json else line.split(": ")[1]
            stage = said.split()[0]
            assert stage in stages
        for _ in stream:
            pass
        assert stream.result.finish_reason == "cancelled"


@pytest.mark.parametrize("is_json", [False, True])
def test_prioritize_in_a_pipe_says_what_has_become_of_the_request(
    daemon: Daemon, is_json: bool
) -> None:
    more = ["--json"] if is_json else []
    with daemon.client() as client:
        stream = client.generate("alpha", prompt="[[fault slow=0.02]]", max_tokens=4000)
        next(stream)
        done = run(daemon, ["prioritize", stream.request_id, "batch"], *more)
        assert (done.returncode, done.stderr) == (0, "")
        check_plain(done.stdout)
        assert not is_json or problems(done.stdout, ["prioritize"]) == []
        stream.cancel()


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
    assert "\x1b[31merror:\x1b[0m no model" in shown
    assert "\x1b[2mhint: did you mean alpha?\x1b[0m" in shown
    assert "\x1b" not in on_terminal(arguments, NO_COLOR="1")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["-h"],
        ["status"],
        ["load", "alpha"],
        ["logs", "alpha"],
        ["generate", "alpha", "x", "--max-tokens", "1"],
        ["chat", "alpha", "--max-tokens", "1"],
        ["completion", "bash"],
    ],
    ids=" ".join,
)
def test_first_output_does_not_wait_for_heavy_imports(daemon: Daemon, arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from mlxsup.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'mlx', 'mlx_lm', 'numpy', 'pydantic', 'rich', 'asyncio', 'psutil'}\n"
        "    print('\\nheavy:', sorted(heavy & set(sys.modules)), 'zmq' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input="hello\n",
        capture_output=True,
        text=True,
        env=environment(MLXSUP_ENDPOINT=daemon.endpoint),
        timeout=60,
        check=True,
    )
    asks_daemon = arguments[0] not in ("--version", "-h", "completion")
    assert done.stdout.splitlines()[-1] == f"heavy: [] {asks_daemon}"
