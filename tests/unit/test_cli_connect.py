"""What `connect` writes into the settings of other programs."""

from __future__ import annotations

import json
import pprint
import re
import stat
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click
import pytest
from syrupy.assertion import SnapshotAssertion

from mlxsup.cli.commands import connect, launch
from mlxsup.cli.connecting import ANY_KEY, PROGRAMS, Model, Settings, Site, site_of
from mlxsup.cli.exit_status import CliError

URL = "http://127.0.0.1:8484"
STRANGE = 'a "model"\n\\ü: [x]'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    return tmp_path


def settings(
    tool: str, *, name: str = "m", context: int | None = 40_000, key: str = ANY_KEY
) -> Settings:
    return PROGRAMS[tool].settings(
        Site(url=URL, models=[Model(name, context), Model("other", None)], key=key)
    )


def written(tool: str, before: str | None = None, **given: Any) -> tuple[Path, str]:
    """The file of a program, and its text."""
    found = settings(tool, **given)
    assert found.path is not None
    return found.path, connect.applied(found, before)


def meaning(tool: str, **given: Any) -> Any:
    """What the file of a program means."""
    path, text = written(tool, **given)
    read = {".toml": tomllib.loads, ".json": json.loads}
    return read[path.suffix](text)


def lines_of(value: object) -> list[str]:
    """A value in lines for a snapshot, which are fewer than syrupy's own."""
    return pprint.pformat(value, width=100, compact=True, sort_dicts=False).splitlines()


# ---------------------------------------------------------------- what is in them


@pytest.mark.parametrize("tool", PROGRAMS)
def test_settings_of_each_program(tool: str, home: Path, snapshot: SnapshotAssertion) -> None:
    found = settings(tool)
    file = None
    if found.path is not None:
        file = (str(found.path.relative_to(home)), meaning(tool))
    assert lines_of((file, found.variables, found.usage)) == snapshot


def test_files_are_where_the_programs_look(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commented = home / ".config" / "opencode" / "opencode.jsonc"
    commented.parent.mkdir(parents=True)
    commented.write_text("{}")
    assert written("opencode")[0] == commented
    for tool, variable in (
        ("claude", "CLAUDE_CONFIG_DIR"), ("codex", "CODEX_HOME"), ("zed", "XDG_CONFIG_HOME"),
        ("opencode", "XDG_CONFIG_HOME"),
    ):  # fmt: skip
        monkeypatch.setenv(variable, str(home / "elsewhere"))
        assert written(tool)[0].is_relative_to(home / "elsewhere"), tool
    monkeypatch.setattr("sys.platform", "darwin")
    assert written("vscode")[0].is_relative_to(home / "Library")


@pytest.mark.parametrize("tool", [tool for tool in PROGRAMS if settings(tool).path])
def test_any_name_of_a_model_stays_that_name(tool: str) -> None:
    def texts(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [one for pair in value.items() for part in pair for one in texts(part)]
        return (
            [one for part in value for one in texts(part)] if isinstance(value, list) else [value]
        )

    assert STRANGE in texts(meaning(tool, name=STRANGE))


@pytest.mark.parametrize("tool", PROGRAMS)
def test_every_program_sends_the_key_of_the_gateway(tool: str) -> None:
    found = settings(tool, key="sk-1")
    text = "" if found.path is None else connect.applied(found, None)
    assert "sk-1" in text or "sk-1" in found.variables.values()


@pytest.mark.parametrize("tool", ["claude", "opencode", "pi"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rest_of_a_file_stays_as_it_was_written(tool: str, end: str) -> None:
    lines = ["{", '    "thème": "dark",', '    "env": {"A": "1"}', "}", ""]
    _, text = written(tool, end.join(lines))
    assert text.split(end)[:2] == lines[:2]
    assert text.count("\r") == (text.count("\n") if end == "\r\n" else 0)
    assert json.loads(text)["env"]["A"] == "1"
    assert written(tool, text)[1] == text, "a second time changes nothing"


@pytest.mark.parametrize("before", ["", "\n", "{}", "{ }\n"])
def test_empty_file_counts_as_none(before: str) -> None:
    assert written("pi", before)[1] == written("pi")[1]


@pytest.mark.parametrize(
    ("tool", "before", "words"),
    [
        ("pi", '{\n "a": 1, // mine\n}', r"not plain JSON (line 2, column 10)"),
        ("pi", '{"a": nope}', "(line 1, column 7)"),
        ("pi", "{} {}", "(line 1, column 4)"),
        ("pi", "[" * 100_000, "nested too deeply"),
        ("pi", '{"a": "\\ud800"}', "surrogates not allowed"),
        ("pi", "[]", "the whole file is not an object"),
        ("pi", '{"providers": 3}', "providers is not an object"),
        ("claude", '{"env": []}', "env is not an object"),
    ],
)  # fmt: skip
def test_file_that_would_lose_something_is_refused(tool: str, before: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        written(tool, before)


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


# ---------------------------------------------------------------- files


@pytest.fixture
def path(home: Path) -> Path:
    """A file of settings with the text `before`."""
    path = home / "folder" / "settings.json"
    path.parent.mkdir()
    path.write_text("before")
    path.chmod(0o640)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_file_is_written_and_its_text_of_before_stays_beside_it(path: Path) -> None:
    copy = connect.write(path, "after")
    assert (path.read_text(), mode(path)) == ("after", 0o640)
    assert copy is not None
    assert (copy.read_text(), mode(copy)) == ("before", 0o640)
    assert sorted(path.parent.iterdir()) == [path, copy]
    new = path.with_name("new.json")
    assert connect.write(new, "after") is None
    assert (new.read_text(), mode(new)) == ("after", 0o600)


def test_link_stays_a_link(path: Path) -> None:
    link = path.with_name("link.json")
    link.symlink_to(path)
    connect.write(link, "after")
    assert (link.is_symlink(), path.read_text()) == (True, "after")


def test_file_that_cannot_be_read_or_written_is_named(path: Path) -> None:
    assert connect.read(path.with_name("none.json")) is None
    below = path / "settings.json"
    path.write_bytes(b"a\xff")
    cases: list[tuple[str, Callable[[], object]]] = [
        ("not UTF-8", lambda: connect.read(path)),
        ("cannot read", lambda: connect.read(path.parent)),
        ("cannot write", lambda: connect.write(below, "x")),
    ]
    for message, call in cases:
        with pytest.raises(CliError, match=message) as caught:
            call()
        assert caught.value.hint == connect.BY_HAND


# ---------------------------------------------------------------- launch


AGENTS = {tool: one.start for tool, one in PROGRAMS.items() if one.start is not None}


@pytest.mark.parametrize("agent", AGENTS)
def test_start_of_each_agent(agent: str, snapshot: SnapshotAssertion) -> None:
    models = [Model("m", 40_000), Model("other", None)]
    start = AGENTS[agent](Site(url=URL, models=models, key="sk-1"))
    assert lines_of((list(start.arguments), dict(start.variables), start.file)) == snapshot
    assert not any("sk-1" in word for word in start.arguments), "other users see arguments"


def test_codex_reads_its_arguments_as_it_reads_its_file() -> None:
    words = AGENTS["codex"](Site(url=URL, models=[Model(STRANGE, 1)])).arguments
    assert set(words[::2]) == {"-c"}
    given = tomllib.loads("\n".join(words[1::2]))
    wanted = meaning("codex", name=STRANGE, context=1)
    del wanted["model_providers"]["mlxsup"]["experimental_bearer_token"]
    del given["model_providers"]["mlxsup"]["env_key"]
    assert given == wanted


@pytest.mark.parametrize(
    ("command", "names"), [(launch.launch, AGENTS), (connect.connect, PROGRAMS)],
    ids=["launch", "connect"],
)  # fmt: skip
def test_help_names_every_program(command: click.Command, names: Collection[str]) -> None:
    assert all(re.search(rf"\b{name}\b", command.help or "") for name in names)
