"""`connect` prints settings for other programs, and `launch` starts agents with them."""

from __future__ import annotations

import json
import pprint
import re
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import click
import pytest
from syrupy.assertion import SnapshotAssertion

from mlxsup.cli import detach, keys
from mlxsup.cli.commands import connect, launch
from mlxsup.cli.commands.connect import ANY_KEY, TOOLS, Model, Site, site_of
from mlxsup.cli.commands.launch import AGENTS, Start
from mlxsup.cli.connection import Target
from mlxsup.cli.exit_status import CliError
from mlxsup.cli.keys import LAUNCH_KEY, LAUNCH_SUFFIX, find_keys, launch_key
from mlxsup.cli.main import main
from mlxsup.cli.terminal.output import Output
from mlxsup.protocol.folders import DEFAULT_LISTEN
from mlxsup.protocol.key_file import KEYS_SUFFIX, KeyPlace, add_key, digest_of, read_keys

URL = "http://127.0.0.1:8484"
STRANGE = 'a "model"\n\\ü: [x]'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    return tmp_path


def site(*, name: str = "m", context: int | None = 40_000, key: str = ANY_KEY) -> Site:
    return Site(url=URL, models=[Model(name, context), Model("other", None)], key=key)


def lines_of(value: object) -> list[str]:
    """A value in lines for a snapshot, which are fewer than syrupy's own."""
    return pprint.pformat(value, width=100, compact=True, sort_dicts=False).splitlines()


# ---------------------------------------------------------------- what is in them


@pytest.mark.parametrize("tool", TOOLS)
def test_settings_of_each_program(tool: str, home: Path, snapshot: SnapshotAssertion) -> None:
    found = TOOLS[tool](site(key="sk-1"))
    path = str(found.path.relative_to(home))
    assert lines_of((path, json.loads(found.text), found.variables, found.usage)) == snapshot


def test_files_are_where_the_programs_look(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "elsewhere"))
    assert all(one(site()).path.is_relative_to(home / "elsewhere") for one in TOOLS.values())
    monkeypatch.setattr("sys.platform", "darwin")
    assert TOOLS["vscode"](site()).path.is_relative_to(home / "Library")


@pytest.mark.parametrize("tool", TOOLS)
def test_any_name_of_a_model_stays_that_name(tool: str) -> None:
    def texts(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [one for pair in value.items() for part in pair for one in texts(part)]
        return (
            [one for part in value for one in texts(part)] if isinstance(value, list) else [value]
        )

    assert STRANGE in texts(json.loads(TOOLS[tool](site(name=STRANGE)).text))


# ---------------------------------------------------------------- the daemon


def status(**changes: Any) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {"name": name, "aliases": aliases, "presets": presets, "adapters": {}, "state": state,
         "context_length": context}
        for name, aliases, presets, state, context in (
            ("cold", ["frozen"], {"high": {}}, "STOPPED", 77_000), ("m", [], {}, "READY", 200_000),
            ("gone", [], {}, "FAILED", None),
        )
    ]  # fmt: skip
    return {"models": rows, "gateway": {"url": URL, "state": "RUNNING"}, **changes}


@pytest.mark.parametrize(
    ("name", "names", "context"),
    [
        (None, ["m", "cold", "gone"], 200_000),
        ("cold", ["cold", "m", "gone"], 77_000),
        ("frozen", ["frozen", "cold", "m", "gone"], 77_000),
        ("cold:high", ["cold:high", "cold", "m", "gone"], 77_000),
        ("frozen:high", ["frozen:high", "cold", "m", "gone"], 77_000),
        ("gone", ["gone", "cold", "m"], None),
    ],
)
def test_first_model_is_the_one_asked_for_or_the_first_ready(
    name: str | None, names: list[str], context: int | None
) -> None:
    found = site_of(status(), name, None)
    assert [one.name for one in found.models] == names
    assert (found.model.context, found.key) == (context, ANY_KEY)


@pytest.mark.parametrize("name", ["cold:low", ":high", "cold:", "nobody:high", "m:high"])
def test_unknown_model_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(CliError, match="cold, cold:high, gone, m"):
        site_of(status(), name, None)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"gateway": None}, "runs without HTTP, which other programs need", "mlxsup stop"),
        ({"gateway": {"url": None, "state": "BACKOFF"}}, "HTTP is BACKOFF", "`mlxsup status`"),
        ({"models": []}, "has no model", "mlxsup add MODEL"),
    ],
)
def test_daemon_without_http_or_models_is_refused_with_the_way_to_them(
    changes: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(CliError, match=message) as refused:
        site_of(status(**changes), None, None)
    assert hint in refused.value.hint


# ---------------------------------------------------------------- launch


@pytest.mark.parametrize("agent", AGENTS)
def test_start_of_each_agent(agent: str, snapshot: SnapshotAssertion) -> None:
    start = AGENTS[agent].start(site(key="sk-1"))
    assert lines_of((list(start.arguments), dict(start.variables), start.file)) == snapshot
    assert not any("sk-1" in word for word in start.arguments), "other users see arguments"


def test_codex_reads_any_name_in_its_arguments() -> None:
    words = AGENTS["codex"].start(site(name=STRANGE)).arguments
    assert set(words[::2]) == {"-c"}
    assert tomllib.loads("\n".join(words[1::2]))["model"] == STRANGE


@pytest.mark.parametrize(
    ("text", "options"), [("", ("--http", DEFAULT_LISTEN)), ("[gateway]\n", ())]
)
def test_a_daemon_for_an_agent_serves_http_where_its_file_says_or_at_the_usual_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, options: tuple[str, ...]
) -> None:
    path = tmp_path / "mlxsup.toml"
    path.write_text(text)
    for name in ("start_configured", "note_started"):
        monkeypatch.setattr(detach, name, Mock())
    launch._start_daemon(path, Target(), Output())
    assert cast(Mock, detach.start_configured).mock_calls == [call(path, *options)]


@pytest.mark.parametrize(
    ("command", "names"), [(launch.launch, AGENTS), (connect.connect, TOOLS)],
    ids=["launch", "connect"],
)  # fmt: skip
def test_help_names_every_program(command: click.Command, names: Collection[str]) -> None:
    assert all(re.search(rf"\b{name}\b", command.help or "") for name in names)


@pytest.mark.parametrize(
    ("state", "chosen"), [("READY", "m"), ("STOPPED", "m"), ("FAILED", "cold")]
)
def test_agent_uses_the_longest_context_of_models_that_have_not_failed(
    state: str, chosen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = status()
    next(one for one in said["models"] if one["name"] == "m")["state"] = state
    client = SimpleNamespace(status=lambda: said)
    monkeypatch.setattr(launch, "connect", lambda target: nullcontext(client))
    monkeypatch.setattr(launch, "launch_key", lambda target, is_made: (None, False))
    with pytest.raises(SystemExit):
        main(["launch", "aider", "--print", "--json"])
    assert json.loads(capsys.readouterr().out)["model"] == chosen


@pytest.mark.parametrize(
    ("given", "direct"),
    [
        ({"NO_PROXY": "a.example"}, {}),
        ({"https_proxy": "http://p"}, {"NO_PROXY": "", "no_proxy": ""}),
        (
            {"HTTP_PROXY": "http://p", "no_proxy": "a.example"},
            {"NO_PROXY": "", "no_proxy": "a.example,"},
        ),
    ],
    ids=["no proxy", "a proxy", "a proxy but for some"],
)
def test_agent_asks_this_machine_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], direct: dict[str, str]
) -> None:
    for name in (*launch.PROXIES, "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    here = "127.0.0.1,localhost,::1"
    assert launch._direct() == {name: kept + here for name, kept in direct.items()}


@pytest.mark.parametrize(
    ("is_new", "model", "expected"),
    [
        (True, "m", ["the key counts"]),
        (False, "m", []),
        (True, "frozen", ["the key counts", "load cold"]),
        (False, "gone", ["load gone"]),
    ],
)
def test_agent_starts_once_its_key_counts_and_its_model_is_loaded(
    is_new: bool, model: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    client = SimpleNamespace(status=status, load=lambda name: steps.append(f"load {name}"))
    for name, played in {
        "connect": lambda target: nullcontext(client),
        "status_of_daemon": lambda target, limit_s: status(),
        "launch_key": lambda target, is_made: ("a key", is_new),
        "_wait_for_key": lambda url, key: steps.append("the key counts"),
        "progress_shown": lambda client, model, output: nullcontext(),
        "_run": lambda executable, agent, start, arguments: steps.append(agent),
    }.items():
        monkeypatch.setattr(launch, name, played)
    monkeypatch.setattr(shutil, "which", lambda agent: f"/bin/{agent}")
    with pytest.raises(SystemExit):
        main(["launch", "aider", "--model", model])
    assert steps == [*expected, "aider"]


def test_signal_that_comes_while_the_agent_is_started_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = Mock()
    agent.wait.return_value = -signal.SIGTERM

    def popen(*_: object, **__: object) -> Mock:
        signal.raise_signal(signal.SIGTERM)
        return agent

    monkeypatch.setattr(subprocess, "Popen", popen)
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.getsignal(number)) for number in numbers]
    try:
        code = launch._run("/bin/agent", "agent", Start(), ())
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert (code, agent.send_signal.mock_calls) == (128 + signal.SIGTERM, [call(signal.SIGTERM)])


# ---------------------------------------------------------------- keys


@pytest.fixture
def config(home: Path) -> Path:
    path = home / "new.toml"
    path.write_text('[supervisor]\nruntime_dir = "run"\n')
    (home / "run").mkdir(mode=0o700)
    return path


def test_keys_are_those_of_the_daemon_that_runs_or_of_the_file_that_was_named(
    home: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = KeyPlace.beside(home / "old.toml", home / "run")
    recorded.record()
    assert find_keys(Target(endpoint=f"ipc://{home}/run/client.sock")) == recorded
    assert find_keys(Target(config=config)).file == home / f"new{KEYS_SUFFIX}"
    monkeypatch.setattr(keys, "lock_holder", lambda endpoint: "a daemon")
    assert find_keys(Target(config=config)) == recorded
    usual = Target(endpoint=f"ipc://{home}/.mlxsup/run/client.sock")
    assert find_keys(usual).file == home / ".mlxsup" / f"config{KEYS_SUFFIX}"
    with pytest.raises(CliError, match="no daemon has run at"):
        find_keys(Target(endpoint=f"ipc://{home}/other/client.sock"))


def test_key_of_agents_whose_file_is_lost_is_replaced(home: Path, config: Path) -> None:
    target = Target(config=config)
    assert launch_key(target, is_made=True) == (None, False), "none is needed yet"
    place = find_keys(target)
    add_key(place, name="laptop", account="laptop", is_operator=False, created="now")
    first, is_new = launch_key(target, is_made=True)
    assert is_new
    assert launch_key(target, is_made=False) == (first, False)
    (home / f"new{LAUNCH_SUFFIX}").unlink()
    assert launch_key(target, is_made=False) == (None, True)
    second, is_new = launch_key(target, is_made=True)
    assert is_new
    assert second is not None
    made = {one.name: one.digest for one in read_keys(place.file) or ()}
    assert list(made) == ["laptop", LAUNCH_KEY]
    assert made[LAUNCH_KEY] == digest_of(second)
