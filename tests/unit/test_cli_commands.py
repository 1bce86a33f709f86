"""The table of commands, and options that several commands share."""

from __future__ import annotations

import calendar
import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import click
import psutil
import pytest

from mlxsup.cli import __main__ as cli_main
from mlxsup.cli import arguments, changes, connection, conversion
from mlxsup.cli import main as cli
from mlxsup.cli.arguments import completions, request_called
from mlxsup.cli.command_table import COMMANDS, ENDING_COMMANDS, FILES, GROUPS, expand, guess, load
from mlxsup.cli.commands import add as commands_add
from mlxsup.cli.commands import embed as commands_embed
from mlxsup.cli.commands import key as commands_key
from mlxsup.cli.commands import lifecycle
from mlxsup.cli.commands import logs as commands_logs
from mlxsup.cli.commands import rm as commands_rm
from mlxsup.cli.commands import search as commands_search
from mlxsup.cli.commands import stop as commands_stop
from mlxsup.cli.commands.completion import SHELLS
from mlxsup.cli.commands.init import _entries, init
from mlxsup.cli.commands.logs import previous_generation, selected, since
from mlxsup.cli.commands.search import fits
from mlxsup.cli.commands.settings import effect_of, note_consequences
from mlxsup.cli.commands.why import why
from mlxsup.cli.configuration import optional_configuration
from mlxsup.cli.connection import Target, explain_request_error
from mlxsup.cli.exit_status import CliError, Interrupted, interrupt_says
from mlxsup.cli.options import duration, keep_alive, keep_alive_of_load
from mlxsup.cli.terminal import keyboard
from mlxsup.cli.terminal.output import Output
from mlxsup.cli.terminal.reader_watch import check_reader
from mlxsup.cli.terminal.status import broken_parts
from mlxsup.client import RequestError
from mlxsup.client.vectors import Embeddings
from mlxsup.protocol.download import FoundRepository
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.keep_alive import SHORTEST_LOAD_S
from mlxsup.protocol.states import State

from support.eventually import eventually

HERE = Path(__file__).parents[2] / "cli" / "commands"


def test_every_file_of_commands_is_in_the_table_which_says_what_each_does() -> None:
    files = {file.stem for file in HERE.glob("*.py")} - {"__init__"}
    assert files == {FILES.get(name, name.replace("-", "_")) for name in COMMANDS}
    assert set(FILES) <= set(COMMANDS)
    assert all(load(name).name == name for name in COMMANDS)
    assert all(what.endswith(".") and len(what) <= 60 for what in COMMANDS.values())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["ps", "--json"], ["status", "--json"]),
        (["ls"], ["models"]),
        (["ls", "--json"], ["models", "--json"]),
        (["tail", "m"], ["logs", "--follow", "m"]),
        (["help"], ["--help"]),
        (["help", "ps"], ["status", "--help"]),
        (["help", "key", "new"], ["key", "new", "--help"]),
        (["logs", "ps"], ["logs", "ps"]),
        ([], []),
    ],
)
def test_other_names_are_what_they_stand_for(typed: list[str], meant: list[str]) -> None:
    assert expand(typed) == meant


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("staus", "status"),
        ("htop", "top"),
        ("stpo", "stop"),
        ("sing", None),
        ("reload_", "reload"),
        ("nload", "load"),
        ("frobnicate", None),
        ("delete", "rm MODEL"),
        ("delete smollm2", "rm smollm2"),
        ("delete 'a b'", "rm 'a b'"),
        ("cp smollm2 small", "add smollm2 --as small"),
        ("serve", "start --http"),
        ("serve --port 80", "start --http"),
        ("serve owner/name", "start --http --model owner/name"),
        ("version", "--version"),
        ("mv small tiny", "add small --as tiny"),
        ("set models.a.pinned true", "config set models.a.pinned true"),
        ("history", "events"),
        ("memory", "plan"),
    ],
)
def test_what_is_suggested_does_no_harm(typed: str, suggested: str | None) -> None:
    word, *rest = shlex.split(typed)
    assert guess(word, rest) == suggested


@pytest.mark.parametrize(
    ("word", "way"),
    [
        ("upgrade", "pip install --upgrade"),
        ("push", "`hf upl"),
        ("uninstall", "the folder ~/.mlxsup"),
    ],
)
def test_word_without_a_command_of_ours_names_the_other_way(
    capsys: pytest.CaptureFixture[str], word: str, way: str
) -> None:
    code, out, err = run(capsys, word)
    assert (code, out, way in err, "did you mean" in err) == (64, "", True, False)


def test_nothing_that_ends_something_is_suggested_for_a_word_that_begins_otherwise() -> None:
    for name in ENDING_COMMANDS:
        for letter in "abcdefghijklmnopqrstuvwxyz":
            if letter != name[0]:
                assert guess(letter + name[1:]) not in ENDING_COMMANDS
                assert guess(letter + name) not in ENDING_COMMANDS


TIMES = {"90s": 90.0, "10m": 600.0, "2h": 7200.0, "1.5": 1.5, "250ms": 0.25, "2000000000": 2e9}
NO_TIMES = ("", "soon", "-2", "-10m", "5 weeks", "m")


@pytest.mark.parametrize(
    ("read", "more", "refused"),
    [
        (duration, {"0": 0.0}, ["-1"]),
        (keep_alive, {"0": 0.0, "-1": -1.0}, []),
        (keep_alive_of_load, {"0.001": SHORTEST_LOAD_S, "-1": -1.0}, ["0", "0s", "0.0009"]),
    ],
    ids=["a duration", "--keep-alive", "--keep-alive of load"],
)
def test_a_time_is_seconds_and_anything_else_a_wrong_option(
    read: Callable[[str], float], more: dict[str, float], refused: list[str]
) -> None:
    for text, seconds in {**TIMES, **more}.items():
        assert read(text) == seconds
    for text in (*NO_TIMES, *refused):
        with pytest.raises(click.BadParameter):
            read(text)


NOON = calendar.timegm(time.strptime("2026-11-21 12:00", "%Y-%m-%d %H:%M"))
RULE_1 = "--- generation 1 pid 7 2026-11-21T11:00:00Z"
OLD = "2026-11-21T11:30:00.500Z INFO old"
DUMP = "Fatal Python error: Segmentation fault"
RULE_2 = "--- generation 2 pid 8 2026-11-21T12:00:01Z"
AS_JSON = '{"at": "2026-11-21T%s.000Z", "level": "info", "message": "m"}'
NEW = "2026-11-21T12:00:02.000Z INFO new"
BEFORE, AT_NOON = "2026-11-21T11:59:59.999Z INFO a", "2026-11-21T12:00:00.000Z INFO b"


@pytest.mark.parametrize(
    ("lines", "written", "expected"),
    [
        ([RULE_1, OLD, DUMP, RULE_2, NEW], NOON + 2, [DUMP, RULE_2, NEW]),
        ([RULE_1, OLD], NOON + 2, []),
        ([AS_JSON % "11:30:00", AS_JSON % "12:00:02"], NOON + 2, [AS_JSON % "12:00:02"]),
        ([RULE_1, OLD, DUMP], NOON + 2, [DUMP]),
        ([RULE_1, OLD, DUMP], NOON - 2, []),
        ([DUMP], NOON + 2, [DUMP]),
        ([DUMP], NOON - 2, []),
        ([RULE_2, NEW], NOON + 2, [RULE_2, NEW]),
        ([], NOON + 2, []),
        ([BEFORE, AT_NOON], NOON + 2, [AT_NOON]),
        (["2026-99-99T99:99:99Z x"], NOON + 2, ["2026-99-99T99:99:99Z x"]),
    ],
)
def test_since_shows_a_line_without_a_time_in_doubt(
    lines: list[str], written: float, expected: list[str]
) -> None:
    assert since(lines, NOON, written) == expected


@pytest.mark.parametrize(
    ("models", "aliases", "shown"),
    [([], {}, "mlxsup"), (["m"], {"daemon": "m"}, "m"), (["daemon"], {}, "daemon")],
)
def test_the_log_of_the_daemon_is_that_of_a_model_of_this_name_if_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    models: list[str], aliases: dict[str, str], shown: str,
) -> None:  # fmt: skip
    folder = commands_logs.LogFolder(tmp_path, models, aliases)
    monkeypatch.setattr(commands_logs, "_find_folder", lambda *_: folder)
    for name in ("mlxsup", "m", "daemon"):
        (tmp_path / f"{name}.log").write_text(f"of {name}\n")
    assert run(capsys, "logs", "daemon") == (0, f"of {shown}\n", "")


def test_previous_generation_is_what_stands_before_the_last_rule() -> None:
    assert previous_generation([RULE_1, OLD, DUMP, RULE_2, NEW]) == [RULE_1, OLD, DUMP]
    assert previous_generation([RULE_1, OLD, RULE_2, NEW, RULE_1]) == [RULE_2, NEW]
    assert previous_generation([OLD, DUMP, RULE_2, NEW]) == [OLD, DUMP]
    assert previous_generation([RULE_2, NEW]) is None
    assert previous_generation([NEW]) is None
    assert previous_generation([]) is None


@pytest.mark.parametrize(
    ("count", "expected"), [(None, [RULE_1, OLD]), (9, [RULE_1, OLD]), (1, [OLD]), (0, [])]
)
def test_as_many_lines_of_a_previous_process_are_shown_as_are_asked_for(
    tmp_path: Path, count: int | None, expected: list[str]
) -> None:
    path = tmp_path / "m.log"
    path.write_text("\n".join([RULE_1, OLD, RULE_2, NEW, ""]))
    assert selected(path, count, None, is_previous=True) == expected


def test_a_follower_begins_with_lines_that_it_does_not_show_again(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.write_text(f"{OLD}\n{NEW}\n")
    for since_s in (None, 1e12):
        assert selected(path, None, since_s, end=len(OLD) + 1) == [OLD]


TAKERS = [(why, "report"), (init, "file")]


def parameter_of(command: click.Command, name: str) -> click.Parameter:
    return next(one for one in command.params if one.name == name)


@pytest.mark.parametrize(("command", "name"), TAKERS, ids=[one.name for one, _ in TAKERS])
def test_standard_output_is_no_file(command: click.Command, name: str) -> None:
    parameter = parameter_of(command, name)
    context = click.Context(command)
    with pytest.raises(click.BadParameter, match="choose a file instead"):
        parameter.type_cast_value(context, "-")
    assert parameter.type_cast_value(context, "./-") == Path("./-")
    assert parameter.type_cast_value(context, "a.json") == Path("a.json")


def test_a_request_is_called_by_its_id_its_number_or_last() -> None:
    listed = [{"id": name, "number": f"#{number}"} for name, number in (("a", 9), ("3", 10))]
    called = {"a": "#9", "9": "#9", "#9": "#9", "3": "#10", "#10": "#10", "last": "#10"}
    for name, number in called.items():
        found = request_called(listed, name)
        assert found is not None, name
        assert found["number"] == number, name
    assert request_called(listed, "b") is None
    assert request_called([], "last") is None


def test_a_process_that_waits_to_be_reaped_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = commands_stop.find_processes([child.pid, child.pid])
        assert commands_stop.alive(found) == [child.pid]
        child.kill()
        eventually(lambda: found[0].status() == psutil.STATUS_ZOMBIE)
        assert commands_stop.alive(found) == []


DOWN = "the HTTP gateway is down"


@pytest.mark.parametrize(
    ("state", "gateway", "says"),
    [
        *((state, None, []) for state in sorted(set(State) - {State.FAILED, State.BACKOFF})),
        ("FAILED", None, ["m has FAILED"]),
        ("BACKOFF", {"state": "ready"}, ["m is in BACKOFF"]),
        ("READY", {"state": "starting"}, []),
        *(("READY", {"state": word}, [DOWN]) for word in ("frozen", "backoff", "crash loop")),
    ],
)
def test_what_has_failed_or_waits_for_its_next_attempt_is_broken(
    state: str, gateway: dict[str, str] | None, says: list[str]
) -> None:
    status = {"models": [{"name": "m", "state": state}], "gateway": gateway}
    assert broken_parts(status) == says


@pytest.mark.parametrize(
    ("size_bytes", "budget_bytes", "expected"),
    [(100, 109, False), (100, 111, True), (0, 100, None), (100, None, None)],
)
def test_a_found_model_fits_with_a_little_more_than_its_weights(
    size_bytes: int, budget_bytes: int | None, expected: bool | None
) -> None:
    found = FoundRepository(repo="o/n", size_bytes=size_bytes, downloads=1, is_gated=False)
    assert fits(found, budget_bytes) is expected


@pytest.mark.parametrize(
    ("change", "state", "becomes", "running", "says"),
    [
        ("added", None, "PENDING", 0, "is loaded"),
        ("added", None, "STOPPED", 0, "is loaded on request"),
        ("removed", "READY", None, 2, "finishes 2 running requests, then ends"),
        ("changed", "READY", "DRAINING", 1, "finishes 1 running request, then restarts"),
        ("changed", "LOADING", "STOPPING", 0, "restarts"),
        ("changed", "BACKOFF", "PENDING", 0, "is loaded again"),
        ("changed", "PENDING", "PENDING", 0, "takes effect when it is loaded"),
        ("changed", "READY", "READY", 1, "takes effect without a restart"),
        ("changed", "STOPPED", "STOPPED", 0, "takes effect when it is loaded"),
    ],
)
def test_a_dry_reload_says_what_would_happen_to_a_model(
    change: str, state: str | None, becomes: str | None, running: int, says: str
) -> None:
    row = {"change": change, "state": state, "becomes": becomes, "running": running}
    assert effect_of(row) == says


NOWHERE = "ipc:///nowhere/client.sock"


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/some/file")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """The exit code, and what was printed."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capsys.readouterr()
    return caught.value.code, out, err


DAEMON_COMMANDS = [
    "status", "status --watch", "events", "load m", "unload m", "restart m", "wait", "top",
    "prioritize x batch", "requests", "why", "why m",
    "why m --report /nowhere/r.tar.gz", "attach r", "cancel r", "pause r", "resume r",
    "generate m x", "chat m", "logs m", "connect zed", "reload",
]  # fmt: skip
WRONG_ENDPOINT = "check --endpoint: a daemon prints its endpoint when it starts"


@pytest.mark.parametrize("line", DAEMON_COMMANDS)
def test_without_a_daemon_every_command_exits_69(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    code, out, err = run(capsys, *line.split(), "--endpoint", NOWHERE)
    assert (code, out) == (69, "")
    assert err == f"error: no daemon answers at {NOWHERE}\nhint: {WRONG_ENDPOINT}\n"
    code, out, err = run(capsys, *line.split(), "--json", "--endpoint", NOWHERE)
    error = json.loads(out)["error"]
    assert (code, err, error["code"]) == (69, "", "connection_lost")
    assert error["hint"] == WRONG_ENDPOINT


USAGE = {
    "genrate": "No such command 'genrate'",
    "htop": "No such command 'htop'.\nhint: did you mean `mlxsup top`?",
    "service instal": "No such command 'instal'",
    "config nonsense": "No such command 'nonsense'",
    "status --wacht": "No such option",
    "run m --port 1": "No such option '--port'.\nhint: `mlxsup start --http HOST:PORT`",
    "start --ctx-size 9": "hint: `mlxsup config set models.NAME.context_length N`",
    "status one two": "unexpected extra argument",
    "doctor m": "unexpected extra argument",
    "why one two": "unexpected extra argument",
    "load": "Missing argument 'MODEL'",
    "convert": "Missing argument",
    "key new": "Missing argument 'NAME'",
    "connect": "Missing argument",
    "completion": "Missing argument",
    "generate": "Missing argument 'PROMPT'",
    "completion tcsh": "'tcsh' is not one of 'bash', 'zsh', 'fish'",
    "connect emacs": "'emacs' is not one of",
    "cancel ''": "that is not the id of a request\nhint: `mlxsup requests` lists their ids",
    "launch emacs": "'emacs' is not one of",
    "prioritize nobody urgent": "'urgent' is not one of 'interactive', 'normal', 'batch'",
    "convert x --bits 7": "--bits",
    "status --watch --check": "use either --watch or --check",
    "logs m -f --previous": "--follow cannot be combined with --previous",
    "logs -n -1": "-1 is not in the range",
    "logs --since soon": "'soon' is not a duration",
    "stop --timeout soon": "'soon' is not a duration",
    "load m --keep-alive 0": "use a longer time, or -1 to keep it loaded",
    "load m --context-length -1": "-1 is not in the range 0<=x<=2147483647",
    "key new 'not a name'": "a name must be 1 to 64 of the characters",
    "key new a --account '*'": "a name must be 1 to 64 of the characters",
    "start --model a --config b": "use either --model or --config",
    "start --model x/a --model y/a": "two models have the name a",
    "start --model 'not a name'": "not a name",
    "events --endpoint tcp://127.0.0.1:1": "tcp://127.0.0.1:1",
    "generate m hi --colour": "No such option",
    "generate m hi --max-tokens many": "'many' is not a valid integer",
    "generate m hi --max-tokens 0": "--max-tokens must be an integer from 1",
    "generate m hi --temperature 11": "--temperature must be a number from 0 to 10",
    "generate m hi --temperature nan": "--temperature must be a number from 0 to 10",
    "generate m hi --timeout -1": "'-1' is not a duration",
    "generate m hi --top-k -1": "--top-k must be an integer from 0",
    "generate m hi --min-p 2": "--min-p must be a number from 0 to 1",
    "generate m hi --schema /nowhere/s.json": "cannot read /nowhere/s.json: No such file",
    "generate m hi --schema /dev/null": "is not JSON",
    "generate m hi --raw --think": "--raw cannot be combined with --system or --think",
    "generate m hi --system ''": "--system must be text of at least one character",
    "generate m ''": "at least one character",
    "generate m hi\udcff": "encoded as UTF-8, not lone surrogates",
    "chat m --top-p 7": "--top-p must be a number above 0 and up to 1",
    "bench m --prompt-tokens 16,0": "'16,0' is not a list of positive numbers",
    "search ''": "WORDS must not be empty",
    "search '' ' '": "WORDS must not be empty",
}
WITHOUT_HINT = ("events",)


@pytest.mark.parametrize("line", USAGE, ids=ascii)
def test_usage_errors_exit_64_with_a_hint(capsys: pytest.CaptureFixture[str], line: str) -> None:
    arguments = shlex.split(line)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (64, "")
    assert USAGE[line] in err
    error, *hint = err.splitlines()
    assert error.startswith("error: ")
    assert [text[:6] for text in hint] == ["hint: "] or line.startswith(WITHOUT_HINT)
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (64, "")
    refused = json.loads(out)["error"]
    assert refused["message"] in error
    assert refused["code"] in ("usage", "invalid_request", "file", "bad_configuration")


@pytest.mark.parametrize("words", [(), ("-h",), ("help",)], ids=" ".join)
def test_without_a_command_all_are_listed_in_their_groups(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    parts = dict(part.split("\n", 1) for part in out.strip().split("\n\n") if ":\n" in part)
    for title, group in GROUPS.items():
        lines = parts[f"{title}:"].splitlines()
        assert [re.split(r",| ", line.strip())[0] for line in lines] == list(group)
    assert "\n  status, ps " in out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["generate", "m", "--max-tokens"], "see `mlxsup generate -h`"),
        (["generate", "m", "--json=1", "x"], "see `mlxsup generate -h`"),
        (["config", "check", "--json=1", "x"], "see `mlxsup config check -h`"),
        (["--help=1", "status"], "see `mlxsup -h`"),
        (["launch", "emacs", "--", "--json"], "see `mlxsup launch -h`"),
    ],
)
def test_hints_of_usage_errors_name_the_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert (code, err.splitlines()[1:]) == (64, [f"hint: {hint}"])


@pytest.mark.parametrize("option", ["--json", "--endpoint", "-f"])
def test_an_option_before_the_command_is_told_to_follow_it(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    code, out, err = run(capsys, option, "status", "--no-color")
    assert (code, out[:1]) == (64, "{" if option == "--json" else "")
    text = out + err
    assert "did you mean" not in text.lower()
    assert f"put the option after the command: `mlxsup COMMAND {option}`" in text


def test_a_file_that_is_refused_is_named_and_is_not_called_the_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.root, "invoke", refuse)
    code, out, err = run(capsys, "status")
    assert (code, out) == (1, "")
    assert err.startswith("error: /some/file: Permission denied\nhint: ")
    code, out, err = run(capsys, "status", "--json")
    assert (code, err) == (1, "")
    error = json.loads(out)["error"]
    assert (error["code"], error["message"]) == ("system", "/some/file: Permission denied")
    monkeypatch.setattr(cli.root, "invoke", Mock(side_effect=MemoryError))
    code, out, _ = run(capsys, "status", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (1, "system")


@pytest.mark.parametrize(
    "command", [("start", "--config"), ("plan", "--config"), ("config", "check")]
)
def test_a_configuration_that_the_system_does_not_open_is_a_bad_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / ("x" * 300)
    code, _, err = run(capsys, *command, str(path))
    assert code == 78
    assert os.strerror(errno.ENAMETOOLONG) in err


@pytest.mark.parametrize("command", ["models", "show m", "plan", "plan m"])
def test_a_configuration_that_is_named_and_missing_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    path = tmp_path / "none.toml"
    code, out, err = run(capsys, *command.split(), "--config", str(path))
    assert (code, f"{path} does not exist" in err) == (78, True), out


def test_a_file_that_the_environment_names_may_be_made_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`init` writes it, after `models` and `search` have been read."""
    monkeypatch.setenv("MLXSUP_CONFIG", str(tmp_path / "none.toml"))
    assert optional_configuration(None) is None
    (tmp_path / "none.toml").write_text('[models.m]\nengine = "fake"\n')
    configuration = optional_configuration(None)
    assert configuration is not None
    assert [one.name for one in configuration.models] == ["m"]


def test_another_name_of_a_model_is_no_new_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[models.m]\nengine = "fake"\n')
    code, out, _ = run(capsys, "add", "m", "--as", "n", "--config", str(path), "--json")
    added = json.loads(out)
    assert (code, added["name"], added["alias"]) == (0, "m", "n")
    assert (added["added"], added["served"]) == (False, False)


def test_models_whose_short_names_are_the_same_get_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = Mock(side_effect=CliError("the size of the memory is not known"))
    monkeypatch.setattr("mlxsup.cli.commands.plan.plan_of_folders", refused)
    titles = ("a/Qwen3-0.6B-4bit", "b/Qwen3-0.6B-8bit", "c/Qwen3-0.6B-8bit", "d/mlxsup")
    entries = _entries([{"title": title, "path": str(tmp_path)} for title in titles], Output())
    names = [one["name"] for one in entries]
    assert names == ["qwen3-0.6b", "qwen3-0.6b-8bit", "c-qwen3-0.6b-8bit", "d-mlxsup"]
    assert all(one["fits"] for one in entries)


def test_init_leaves_out_what_cannot_be_loaded_and_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needed = {"bytes": 2**30}
    models = [
        {"name": "bad", "problem": "it is odd"},
        {"name": "large", "problem": None, "needed": needed, "missing_bytes": 2**29},
        {"name": "right", "problem": None, "needed": needed, "missing_bytes": 0},
    ]
    monkeypatch.setattr("mlxsup.cli.commands.plan.plan_of_folders", lambda *_: {"models": models})
    rows = [{"title": name, "path": str(tmp_path)} for name in ("bad", "large", "right", "new")]
    entries = _entries(rows, Output())
    assert [one["needed_bytes"] for one in entries] == [None, 2**30, 2**30, None]
    assert [(one["name"], one["fits"], one["verdict"]) for one in entries] == [
        ("bad", False, "Cannot be loaded: it is odd"),
        ("large", False, "Does not fit: needs 512.0 MiB more memory"),
        ("right", True, "Fits into memory"),
        ("new", True, "Whether it fits is not known"),
    ]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_is_the_same_for_programs(
    capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    _, script, _ = run(capsys, "completion", shell)
    _, out, _ = run(capsys, "completion", shell, "--json")
    assert json.loads(out)["script"] == script.removesuffix("\n")
    assert f"{cli.COMPLETE_VARIABLE}={shell}_complete" in script, "what `main` looks for"


def test_load_of_an_adapter_loads_its_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    row = {"name": "m", "aliases": [], "adapters": {"sql": "/sql"}}
    daemon = SimpleNamespace(
        status=lambda: {"models": [row]}, load=lambda name, **_: loaded.append(name)
    )
    monkeypatch.setattr(lifecycle, "connect", lambda target: nullcontext(daemon))
    monkeypatch.setattr(lifecycle, "progress_shown", lambda *_: nullcontext())
    monkeypatch.setattr(lifecycle, "_show_changed", lambda *_: None)
    assert (run(capsys, "load", "m:sql")[0], loaded) == (0, ["m"])


def test_daemon_is_asked_to_add_the_revision_of_an_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    asked: list[tuple[str, str | None, str | None]] = []

    def add(reference: str, *, name: str | None, revision: str | None) -> dict[str, Any]:
        asked.append((reference, name, revision))
        return {"model": "n", "added": ["n"], "config_path": None}

    row = {"name": "m", "repo": None, "revision": None, "folder": "/elsewhere"}
    daemon = SimpleNamespace(status=lambda: {"models": [row]}, add=add)
    monkeypatch.setattr(commands_add, "connect", lambda target: nullcontext(daemon))
    monkeypatch.setattr(commands_add, "status_of_daemon", lambda target: daemon.status())
    monkeypatch.setattr(commands_add, "_made_ready", lambda source, *_, **__: source)
    monkeypatch.chdir(tmp_path)
    for model in ("https://h.example/o/n/tree/v2", str(tmp_path), "m"):
        assert run(capsys, "add", model, "--as", "n", "--no-load")[0] == 0
    (tmp_path / "m").mkdir()
    assert run(capsys, "add", "m", "--as", "n", "--no-load")[0] == 0
    folders = [(str(tmp_path), "n", None), ("m", "n", None), (str(tmp_path / "m"), "n", None)]
    assert asked == [("o/n", "n", "v2"), *folders], "a folder here comes before a name there"


@pytest.mark.parametrize(
    ("is_new", "more"), [(True, "; `mlxsup rm m` takes it out again"), (False, "")]
)
def test_a_model_whose_first_load_fails_says_what_helps_and_how_it_is_taken_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_new: bool, more: str
) -> None:
    """Nothing is said to take out a model that the user has had before."""
    error = RequestError(ErrorCode.QUEUE_TIMEOUT, "it waits", retryable=True)
    added = commands_add.Added(name="m", alias=None, path=None, is_new=is_new, is_served=True)
    daemon = Mock(**{"load.side_effect": error})
    monkeypatch.setattr(commands_add, "connect", lambda target: nullcontext(daemon))
    monkeypatch.setattr(commands_add, "serve_also", lambda *_, **__: added)
    monkeypatch.setattr(changes, "progress_shown", lambda *_: nullcontext())
    code, _, err = run(capsys, "add", "m")
    assert (code, err) == (
        1, f"error: it waits\nhint: see `mlxsup status`, or raise `queue_timeout_s`{more}\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bits", "free", "is_enough"),
    [(None, 1600, True), (None, 1599, False), (4, 800, True), (4, 399, False), (16, 1600, True)],
)
def test_a_conversion_needs_room_for_what_it_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bits: int | None, free: int, is_enough: bool
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1600))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    refused = nullcontext() if is_enough else pytest.raises(CliError, match="has only")
    with refused:
        conversion._check_room(tmp_path, tmp_path / "new", bits, "again")


@pytest.mark.parametrize("options", [[], ["--quantize"], ["--bits", "8"]])
def test_a_conversion_that_is_refused_is_repeated_with_its_options(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: list[str],
) -> None:
    monkeypatch.setattr(conversion, "_source", lambda given: tmp_path)
    code, _, err = run(capsys, "convert", "o/n", str(tmp_path), *options)
    repeated = " ".join(["mlxsup convert o/n TARGET", *options])
    assert (code, err.endswith(f"hint: choose another folder: `{repeated}`\n")) == (1, True)


def test_the_last_error_of_a_conversion_is_that_of_the_command() -> None:
    printed = "error: one tensor is odd\nerror: the file is damaged\nand more\n"
    assert conversion._failure(65, printed, Path("/m")).message == "the file is damaged"


def test_a_search_names_the_first_model_that_can_be_had(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(repo: str, size_bytes: int, *, is_gated: bool = False) -> FoundRepository:
        return FoundRepository(
            repo=repo, downloads=1, size_bytes=size_bytes, is_gated=is_gated, licence=""
        )

    listed = [found("o/large", 11), found("o/gated", 5, is_gated=True), found("o/fits", 5)]
    monkeypatch.setattr(commands_search, "_find", lambda words, output: listed)
    monkeypatch.setattr(commands_search, "_budget_bytes", lambda: 10)
    code, out, err = run(capsys, "search", "a")
    assert (code, err) == (0, "hint: `mlxsup run o/fits`\n")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["o/large", "o/gated", "o/fits"]


def test_what_the_system_takes_for_no_name_of_a_file_is_no_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "show", "x" * 300, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (1, "unknown_model")


def test_what_rm_could_not_remove_is_named_and_so_is_what_removes_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--o--n").mkdir()
    monkeypatch.setattr(shutil, "rmtree", refuse)
    code, out, _ = run(capsys, "rm", "--files", "o/n", "--yes", "--endpoint", NOWHERE, "--json")
    error = json.loads(out)["error"]
    assert (code, error["code"]) == (1, "not_removed")
    assert "part of it is left: /some/file: Permission denied" in error["message"]
    assert f"`mlxsup rm --files o/n --endpoint {NOWHERE}`" in error["hint"]


@pytest.mark.parametrize("state", list(State))
def test_rm_removes_no_files_of_a_model_that_may_read_them(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    state: State,
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--o--n"
    folder.mkdir()
    rows = [{"name": "m", "state": state, "folder": str(folder / "snapshots" / "c")}]
    monkeypatch.setattr(commands_rm, "status_of_daemon", lambda target: {"models": rows})
    code, out, err = run(capsys, "rm", "--files", "o/n", "--yes")
    if state in (State.STOPPED, State.FAILED):
        assert (code, folder.exists()) == (0, False)
        assert "m is still configured" in err
    else:
        assert (code, out, folder.exists()) == (1, "", True)
        assert "o/n is in use by m" in err


class Typed(io.StringIO):
    """What a person types at a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_first_key_and_the_end_of_the_last_one_are_asked_about_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\n[models.m]\nengine = "fake"\n')
    keys = tmp_path / "c.keys.json"

    def typed(text: str, *arguments: str) -> tuple[object, str]:
        monkeypatch.setattr("sys.stdin", Typed(text))
        code, _, err = run(capsys, "key", *arguments, "--config", str(config))
        return code, err

    code, err = typed("n\n", "new", "a")
    assert (code, "every request over HTTP needs one" in err, keys.exists()) == (1, True, False)
    assert typed("y\n", "new", "a", "--account", "alice")[0] == 0
    _, out, _ = run(capsys, "key", "list", "--json", "--config", str(config))
    assert [(one["name"], one["account"]) for one in json.loads(out)["keys"]] == [("a", "alice")]
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    made = run(capsys, "key", "new", "c", "--account", "carol", "--json", "--config", str(config))
    assert json.loads(made[1])["account"] == "carol"
    assert typed("", "revoke", "c")[0] == 0
    assert typed("", "new", "b")[0] == typed("", "revoke", "b")[0] == 0, "nothing is asked then"
    code, err = typed("n\n", "revoke", "a")
    assert (code, "error: no key was revoked" in err) == (1, True)
    code, err = typed("", "revoke", "a", "--yes")
    assert (code, f"`mlxsup key off --config {config}` opens it" in err) == (0, True)
    config.write_text(f'{config.read_text()}[gateway]\nkeys = "required"\n')
    keys.unlink()
    (tmp_path / "run" / "keys_in_force").unlink()
    assert typed("", "new", "c")[0] == 0, "nothing worked without a key before"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("0.0.0.0:8484", "keys stay necessary, because gateway.listen"),
        ("127.0.0.1:8484", "within a second, requests need none"),
        (None, "within a second, requests need none"),
    ],
)
def test_where_http_is_served_by_option_decides_whether_keys_stay_necessary(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    address: str | None,
    says: str,
) -> None:
    status = {"gateway": address and {"address": address}}
    monkeypatch.setattr(commands_key, "status_of_daemon", lambda target: status)
    config = tmp_path / "c.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\n')
    code, _, err = run(capsys, "key", "off", "--yes", "--config", str(config))
    assert (code, err.startswith(says)) == (0, True)


def test_the_file_of_a_daemon_that_is_named_by_its_endpoint_decides_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[gateway]\nlisten = "0.0.0.0:8484"\n')
    status = {"config_path": str(config), "gateway": None}
    monkeypatch.setattr(commands_key, "status_of_daemon", lambda target: status)
    need = commands_key._need(Target(endpoint=NOWHERE))
    assert need.startswith("keys stay necessary, because gateway.listen")


def test_stop_succeeds_if_no_daemon_runs_and_names_no_option_for_a_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ("--endpoint", NOWHERE)
    assert run(capsys, "stop", *where) == (0, f"no daemon runs at {NOWHERE}\n", "")
    code, out, _ = run(capsys, "stop", "--json", *where)
    assert (code, json.loads(out)) == (0, {"schema_version": 1, "stopped": False})
    assert run(capsys, "stop", "m", *where)[0] == 69
    code, _, err = run(capsys, "stop", "m", "--now", *where)
    assert (code, "--now and --timeout are for the whole daemon" in err) == (64, True)


def test_rm_and_key_off_ask_first_and_refuse_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    folder = tmp_path / "models--o--n"
    folder.mkdir()
    config = tmp_path / "c.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\n[models.m]\nengine = "fake"\n')
    where = ("--config", str(config))
    for words in (("rm", "--files", "o/n"), ("key", "off")):
        code, out, err = run(capsys, *words, *where)
        assert (code, out) == (64, ""), err
        assert err.endswith("hint: add --yes\n")
    assert folder.exists()


class Clock:
    """A clock that only moves when something waits."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


FOR_EVER = float("inf")
BOTH = "m (pid 8), the daemon (pid 7)"
WAITS, WAITS_FOR_M = f"waiting for {BOTH} to end (1s)", "waiting for m (pid 8) to end (2s)"
DRAINS = (
    "1 running request may take up to 29s to finish; run `mlxsup stop --now` to cut it off; Ctrl-C"
    " leaves"
)
GIVEN_UP = f"error: {BOTH} did not end within"
LEFT = "the daemon has ended, but SIGKILL has no effect on m (pid 8)"


@pytest.mark.parametrize(
    ("command", "drained_at_s", "daemon_until_s", "worker_until_s", "status", "says"),
    [
        ("stop", 0, 0, 0, 0, []),
        ("stop", 0, 1.5, 3.2, 0, [WAITS, WAITS_FOR_M]),
        ("stop", 0, 1.5, FOR_EVER, 71, [WAITS, WAITS_FOR_M, f"error: {LEFT}"]),
        ("stop", 0, FOR_EVER, FOR_EVER, 1, [WAITS, f"{GIVEN_UP} 55s"]),
        ("stop --timeout 6s", 0, FOR_EVER, FOR_EVER, 1, [WAITS, f"{GIVEN_UP} 31s"]),
        ("stop", 4, 4.5, 4.5, 0, [DRAINS, WAITS.replace("1s", "4s")]),
    ],
    ids=["gone at once", "gone later", "a worker is left", "both", "its timeout", "an answer ends"],
)
def test_stop_succeeds_only_when_every_process_has_ended(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    drained_at_s: float,
    daemon_until_s: float,
    worker_until_s: float,
    status: int,
    says: list[str],
) -> None:
    clock = Clock()
    until = {8: worker_until_s, 7: daemon_until_s}

    class Client:
        def status(self) -> dict[str, Any]:
            asked.append(clock.now_s)
            running = 1 if clock.now_s < drained_at_s else 0
            stopping = {"running": running, "limit_s": 29.0}
            return {"pid": 7, "models": [{"name": "m", "pid": 8}], "stopping": stopping}

        def stop(self, **_: object) -> dict[str, Any]:
            asked.clear()
            limits = {"drain_timeout_s": 30.0, "end_limit_s": 15.0}
            return {"pids": [8], "supervisor_pid": 7, **limits}

    def find(pids: list[int]) -> list[int]:
        assert pids == [8, 7]
        return pids

    asked: list[float] = []
    monkeypatch.setattr(commands_stop, "connect", lambda target: nullcontext(Client()))
    monkeypatch.setattr(commands_stop, "status_of_daemon", lambda target: Client().status())
    monkeypatch.setattr(commands_stop, "find_processes", find)
    monkeypatch.setattr(
        commands_stop, "alive", lambda pids: [pid for pid in pids if clock.now_s < until[pid]]
    )
    monkeypatch.setattr(commands_stop, "time", clock)
    code, out, err = run(capsys, *command.split())
    assert (code, [line for line in err.splitlines() if "hint: " not in line]) == (status, says)
    assert out == ("" if status else "stopped the daemon (pid 7) and 1 worker\n")
    assert len(asked) <= max(drained_at_s, 1), "it is not asked again once nothing runs"
    assert clock.now_s < (5 if daemon_until_s < FOR_EVER else 60)


def test_progress_is_that_of_the_model_alone_and_no_longer_heard_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "QUIET_S", 0.0)
    have_been_heard, is_closed = threading.Event(), threading.Event()

    class Changes:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for name in ("other", "m"):
                yield {"model": name, "from": "LOADING", "to": "READY"}
            have_been_heard.set()

        def close(self) -> None:
            is_closed.set()

    rows = [{"name": name, "aliases": [f"{name}2"], "state": "LOADING"} for name in ("other", "m")]
    daemon: Any = SimpleNamespace(events=Changes, status=lambda: {"models": rows})
    with changes.progress_shown(daemon, "m2", Output()):
        eventually(have_been_heard.is_set)
    said = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert (said, is_closed.is_set()) == (["m: LOADING", "m: LOADING → READY"], True)


def test_a_shell_is_given_no_word_that_it_would_take_for_more() -> None:
    ids = ["r1", "r-2/x:y", "r;rm -r ~", "r$(id)", "r 1", "-r", "r\n1", ""]
    assert [item.value for item in completions(((id, "") for id in ids), "")] == ids[:2]
    assert [item.value for item in completions(((id, "") for id in ids), "r-")] == ids[1:2]


def test_a_shell_is_offered_what_a_command_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = {"rows": [{"id": "r-1"}], "line": [{"id": "r-2"}], "paused_rows": [{"id": "r-3"}]}
    nothing: dict[str, Any] = {key: [] for key in requests}
    rows = [
        {"name": "gen", "state": "READY", "task": "generate", **requests},
        {"name": "vec", "state": "STOPPED", "task": "embed", **nothing},
        {"name": "new", "state": "STOPPED", **nothing},
    ]
    monkeypatch.setattr(arguments, "ask_status", lambda target: rows)

    def offered(name: str, typed: str = "") -> list[tuple[str, str | None]]:
        command = load(name)
        items = command.params[0].shell_complete(click.Context(command), typed)
        return [(item.value, item.help) for item in items]

    gen, vec, new = ("gen", "READY"), ("vec", "STOPPED"), ("new", "STOPPED")
    assert offered("unload") == [gen, vec, new]
    assert (offered("chat"), offered("embed")) == ([gen, new], [vec])
    listed = [("r-1", "gen, running"), ("r-2", "gen, waiting"), ("r-3", "gen, paused")]
    assert (offered("attach"), offered("why")) == (listed, [gen, vec, new, *listed])
    assert offered("attach", "r-2") == listed[1:2]


def test_attach_follows_the_request_that_was_the_last_one_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its id: `last` may be another one soon."""
    request = {"id": "r-9", "number": "#12", "model": "m", "state": "answering"}
    attach = Mock(side_effect=KeyboardInterrupt)
    daemon = SimpleNamespace(
        requests=lambda: {"requests": [request]}, attach=attach, close=lambda: None
    )
    monkeypatch.setattr(connection, "connect", lambda target: nullcontext(daemon))
    code, _, err = run(capsys, "attach", "last")
    assert (code, attach.call_args.args) == (130, ("r-9",))
    assert "`mlxsup attach r-9` shows it again" in err


def test_embed_passes_on_what_it_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Embeddings(vectors=[[1.0, 2.0]])
    daemon = SimpleNamespace(embed=Mock(return_value=found))
    monkeypatch.setattr(commands_embed, "connect", lambda target: nullcontext(daemon))
    monkeypatch.setattr(commands_embed, "served_name", lambda model, *_, **__: (model, {}))
    options = ("--dimensions", "2", "--input-type", "query", "--truncate", "--timeout", "5m")
    more = ("--priority", "batch", "--client", "ci", "--keep-alive", "-1")
    assert run(capsys, "embed", "m", "tide", *options, *more)[:2] == (0, "[1, 2]\n")
    daemon.embed.assert_called_once_with(
        "m", ["tide"], dimensions=2, input_type="query", truncate=True, timeout_s=300.0,
        priority="batch", client="ci", keep_alive=-1.0,
    )  # fmt: skip


def test_a_model_whose_entry_pools_makes_embeddings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    for pooling, makes in (("", ["text"]), ('pooling = "mean"\n', ["embeddings"])):
        config = tmp_path / "c.toml"
        config.write_text(f'[models.m]\npath = "m"\n{pooling}')
        code, out, _ = run(capsys, "models", "--json", "--config", str(config))
        [row] = json.loads(out)["models"]
        assert (code, row["capabilities"]) == (0, makes)


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"evicts": ["a"]}, "a would be unloaded"),
        ({"still_over_bytes": 1}, "busy models would be unloaded after their turn"),
        ({}, "workers would release memory they do not need"),
    ],
)
def test_a_dry_run_says_how_a_smaller_budget_would_be_kept(
    capsys: pytest.CaptureFixture[str], about: dict[str, Any], says: str
) -> None:
    value = {"later": [], "over_budget_bytes": 2**30, "evicts": [], "still_over_bytes": 0, **about}
    note_consequences(value, Output(), is_dry=True)
    said = capsys.readouterr().err
    assert f"1.00 GiB more than the new memory budget: {says}" in said
    assert said.count("would") == 1


def test_the_sentence_of_the_innermost_work_says_what_an_interrupt_has_ended() -> None:
    found = pytest.raises(Interrupted, match="the download")
    with found, interrupt_says("the command"), interrupt_says("the download"):
        raise KeyboardInterrupt


def test_what_follows_a_word_of_another_tool_is_in_the_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(capsys, "serve", "owner/name")
    hint = "hint: did you mean `mlxsup start --http --model owner/name`?\n"
    assert (code, err.endswith(hint)) == (64, True)


@pytest.mark.parametrize("ends", [os.pipe, lambda: map(socket.socket.detach, socket.socketpair())])
def test_a_reader_that_has_gone_is_noticed_at_a_pipe_and_at_a_socket(
    monkeypatch: pytest.MonkeyPatch, ends: Callable[[], Iterable[int]]
) -> None:
    reader, writer = ends()
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        check_reader()
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            check_reader()


def test_a_signal_that_the_shell_has_switched_off_stays_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `nohup` does."""
    monkeypatch.setattr(keyboard, "_is_ours", lambda: True)
    monkeypatch.setattr("termios.tcgetattr", lambda _: [])
    monkeypatch.setattr("termios.tcsetattr", lambda *_: None)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hidden = keyboard.Keyboard()
    try:
        hidden.save()
        ends = [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGQUIT)]
        assert [one is signal.SIG_IGN for one in ends] == [True, False]
    finally:
        hidden.give_back()
        signal.signal(signal.SIGHUP, before)


def test_what_is_missing_of_an_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setitem(sys.modules, "mlxsup.cli.main", None)
    with pytest.raises(
        SystemExit, match=r"missing \(mlxsup.cli.main\)\nhint: install mlxsup again"
    ):
        cli_main.run()


def test_a_failed_load_that_is_repeated_is_explained_by_why() -> None:
    """The cause may be another host, of which the log of this one has no line."""
    for is_repeated, hint in (
        (True, "`mlxsup why m` says what helps"),
        (False, "see `mlxsup logs"),
    ):
        error = RequestError(
            ErrorCode.LOAD_FAILED, "m is lost", retryable=is_repeated, detail={"model": "m"}
        )
        assert explain_request_error(error).hint.startswith(hint)
