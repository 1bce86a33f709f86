"""What `connect` writes into the settings of other programs, and how it is taken back."""

from __future__ import annotations

import json
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from syrupy.assertion import SnapshotAssertion

from mlxsup.cli.commands import connect
from mlxsup.cli.connecting import ANY_KEY, TOOLS, Model, Settings, Site, site_of
from mlxsup.cli.exit_status import CliError

URL = "http://127.0.0.1:8484"
STRANGE = 'a "model"\n\\ü: [x]'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME", "CONTINUE_GLOBAL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    return tmp_path


def settings(
    tool: str, *, name: str = "m", context: int | None = 40_000, key: str = ANY_KEY
) -> Settings:
    return TOOLS[tool](Site(url=URL, models=[Model(name, context), Model("other", None)], key=key))


def written(tool: str, before: str | None = None, **given: Any) -> tuple[Path, str]:
    """The file of a program, and its text."""
    found = settings(tool, **given)
    assert found.path is not None
    return found.path, connect.applied(found, before)


def meaning(tool: str, **given: Any) -> Any:
    """What the file of a program means."""
    path, text = written(tool, **given)
    read = {".toml": tomllib.loads, ".yaml": yaml.safe_load, ".json": json.loads}
    return read[path.suffix](text)


# ---------------------------------------------------------------- what is in them


@pytest.mark.parametrize("tool", TOOLS)
def test_the_settings_of_each_program(tool: str, home: Path, snapshot: SnapshotAssertion) -> None:
    found = settings(tool)
    file = None
    if found.path is not None:
        file = (str(found.path.relative_to(home)), meaning(tool))
    assert (file, found.variables, found.usage) == snapshot


def test_vscode_has_another_folder_on_a_mac(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert written("vscode")[0].is_relative_to(home / "Library")


def test_opencode_uses_the_file_that_is_there(home: Path) -> None:
    path_of_settings = home / ".config" / "opencode" / "opencode.jsonc"
    path_of_settings.parent.mkdir(parents=True)
    path_of_settings.write_text("{}")
    assert written("opencode")[0] == path_of_settings


def test_folders_that_the_programs_are_told_of_are_used(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool, variable in (
        ("claude-code", "CLAUDE_CONFIG_DIR"), ("codex", "CODEX_HOME"), ("zed", "XDG_CONFIG_HOME"),
        ("continue", "CONTINUE_GLOBAL_DIR"), ("opencode", "XDG_CONFIG_HOME"),
    ):  # fmt: skip
        monkeypatch.setenv(variable, str(home / "elsewhere"))
        assert written(tool)[0].is_relative_to(home / "elsewhere"), tool


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool != "open-webui"])
def test_any_name_of_a_model_stays_that_name(tool: str) -> None:
    def texts(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [one for pair in value.items() for part in pair for one in texts(part)]
        return (
            [one for part in value for one in texts(part)] if isinstance(value, list) else [value]
        )

    assert STRANGE in texts(meaning(tool, name=STRANGE))


@pytest.mark.parametrize("tool", TOOLS)
def test_every_program_sends_the_key_of_the_gateway(tool: str) -> None:
    found = settings(tool, key="sk-1")
    text = "" if found.path is None else connect.applied(found, None)
    assert "sk-1" in text or "sk-1" in found.variables.values()


@pytest.mark.parametrize("tool", ["claude-code", "opencode", "zed"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_people_have_written_stays(tool: str, end: str) -> None:
    lines = ["{", '    "thème": "dark",', '    "env": {"A": "1"}', "}", ""]
    _, text = written(tool, end.join(lines))
    assert text.split(end)[:2] == lines[:2]
    assert text.count("\r") == (text.count("\n") if end == "\r\n" else 0)
    assert json.loads(text)["env"]["A"] == "1"
    assert written(tool, text)[1] == text, "a second time changes nothing"


@pytest.mark.parametrize("before", ["", "\n", "{}", "{ }\n"])
def test_an_empty_file_is_as_good_as_none(before: str) -> None:
    assert written("zed", before)[1] == written("zed")[1]


def test_other_providers_of_vscode_stay_and_ours_is_there_once() -> None:
    _, text = written("vscode", '[{"name": "mine", "vendor": "x"}, 3, {"name": "mlxsup"}, {}]')
    _, again = written("vscode", text, context=1000)
    mine, three, ours, empty = json.loads(again)
    assert (mine, three, empty) == ({"name": "mine", "vendor": "x"}, 3, {})
    assert ours["models"][0]["maxInputTokens"] == 500
    assert [one["name"] for one in json.loads(written("vscode", '[{"name": "mine"}]')[1])] == [
        "mine",
        "mlxsup",
    ]


@pytest.mark.parametrize(
    ("tool", "before", "words"),
    [
        ("zed", '{\n "a": 1, // mine\n}', r"not plain JSON, without comments (line 2, column 10)"),
        ("zed", '{"a": nope}', "(line 1, column 7)"),
        ("zed", "{} {}", "(line 1, column 4)"),
        ("zed", "[" * 100_000, "nested too deeply"),
        ("zed", '{"a": "\\ud800"}', "surrogates not allowed"),
        ("zed", "[]", "the whole file is not an object"),
        ("zed", '{"language_models": {"openai_compatible": 3}}',
         "language_models.openai_compatible is not an object"),
        ("claude-code", '{"env": []}', "env is not an object"),
        ("vscode", "{}", "the whole file is not a list"),
    ],
)  # fmt: skip
def test_what_cannot_be_changed_without_loss_is_refused(tool: str, before: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        written(tool, before)


# ---------------------------------------------------------------- the daemon


def status(**changes: Any) -> dict[str, Any]:
    rows = [
        {"name": name, "aliases": aliases, "presets": presets, "state": state,
         "context_length": context}
        for name, aliases, presets, state, context in (
            ("cold", ["frozen"], ["high"], "STOPPED", 77_000), ("m", [], [], "READY", 200_000),
            ("gone", [], [], "FAILED", None),
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
def test_the_model_that_was_asked_for_or_is_ready_comes_first(
    name: str | None, names: list[str], context: int | None
) -> None:
    found = site_of(status(), name, None)
    assert [one.name for one in found.models] == names
    assert (found.model.context, found.key) == (context, ANY_KEY)


@pytest.mark.parametrize("name", ["cold:low", ":high", "cold:", "nobody:high", "m:high"])
def test_a_model_that_there_is_not_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(CliError, match="cold, cold:high, gone, m"):
        site_of(status(), name, None)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"gateway": None}, "serves no HTTP, which other programs need", "mlxsup start --http"),
        ({"gateway": {"url": None, "state": "BACKOFF"}}, "HTTP is BACKOFF", "`mlxsup status`"),
        ({"models": []}, "has no models", "add one to the configuration"),
    ],
)
def test_what_a_daemon_lacks_is_said_with_the_way_to_it(
    changes: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(CliError, match=message) as refused:
        site_of(status(**changes), None, None)
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("listens", "reached"),
    [("http://0.0.0.0:1", "http://127.0.0.1:1"), ("http://[::]:1", "http://[::1]:1")],
)
def test_a_gateway_that_listens_everywhere_is_reached_at_loopback(
    listens: str, reached: str
) -> None:
    site = site_of(status(gateway={"url": listens}), None, "sk-1")
    assert (site.url, site.base, site.key) == (reached, f"{reached}/v1", "sk-1")


# ---------------------------------------------------------------- files


@pytest.fixture
def path_of_settings(home: Path) -> Path:
    return home / "folder" / "settings.json"


def test_a_file_is_copied_written_and_brought_back(path_of_settings: Path) -> None:
    path_of_settings.parent.mkdir()
    path_of_settings.write_text("before\n")
    path_of_settings.chmod(0o640)
    done = connect.write("zed", path_of_settings, "before\n", "after\n")
    assert (path_of_settings.read_text(), stat.S_IMODE(path_of_settings.stat().st_mode)) == (
        "after\n",
        0o640,
    )
    assert done is not None
    assert done.read_text() == "before\n"
    assert stat.S_IMODE(done.stat().st_mode) == 0o640
    assert connect.undo("zed") == (path_of_settings, "after\n", "before\n")
    assert path_of_settings.read_text() == "before\n"
    assert list(path_of_settings.parent.iterdir()) == [path_of_settings]
    with pytest.raises(CliError, match="nothing was written"):
        connect.undo("zed")


def test_a_file_that_was_not_there_is_removed_again(path_of_settings: Path) -> None:
    assert connect.write("zed", path_of_settings, None, "after\n") is None
    assert stat.S_IMODE(path_of_settings.stat().st_mode) == 0o600
    connect.undo("zed")
    assert list(path_of_settings.parent.iterdir()) == []


def test_two_writes_are_undone_as_one(path_of_settings: Path) -> None:
    path_of_settings.parent.mkdir()
    path_of_settings.write_text("before")
    first = connect.write("zed", path_of_settings, "before", "one")
    assert connect.write("zed", path_of_settings, "one", "two") == first
    connect.undo("zed")
    assert path_of_settings.read_text() == "before"


def test_what_was_changed_in_between_is_copied_too_and_no_copy_is_lost(
    path_of_settings: Path,
) -> None:
    path_of_settings.parent.mkdir()
    path_of_settings.write_text("before")
    first = connect.write("zed", path_of_settings, "before", "one")
    path_of_settings.write_text("mine")
    second = connect.write("zed", path_of_settings, "mine", "two")
    connect.undo("zed")
    assert path_of_settings.read_text() == "mine"
    assert first is not None
    assert (first.read_text(), first != second) == ("before", True)


def test_an_undo_does_not_destroy_what_somebody_has_changed_since(path_of_settings: Path) -> None:
    path_of_settings.parent.mkdir()
    path_of_settings.write_text("before")
    done = connect.write("zed", path_of_settings, "before", "after")
    path_of_settings.write_text("after, and mine")
    with pytest.raises(CliError, match="was changed since") as error:
        connect.undo("zed")
    assert str(done) in str(error.value)
    assert path_of_settings.read_text() == "after, and mine"


def test_two_programs_do_not_undo_each_other(path_of_settings: Path) -> None:
    other = path_of_settings.with_name("other.json")
    connect.write("zed", path_of_settings, None, "a")
    connect.write("codex", other, None, "b")
    connect.undo("zed")
    assert (path_of_settings.exists(), other.read_text()) == (False, "b")


def test_a_link_stays_a_link(path_of_settings: Path, home: Path) -> None:
    path_of_settings.parent.mkdir()
    real = home / "dotconnect.json"
    real.write_text("before")
    path_of_settings.symlink_to(real)
    connect.write("zed", path_of_settings, "before", "after")
    assert (path_of_settings.is_symlink(), real.read_text()) == (True, "after")
    connect.undo("zed")
    assert (path_of_settings.is_symlink(), real.read_text()) == (True, "before")


def test_what_cannot_be_read_or_written_is_said(path_of_settings: Path, home: Path) -> None:
    assert connect.read(path_of_settings) is None
    path_of_settings.parent.mkdir()
    path_of_settings.write_bytes(b"a\xff")
    blocked = home / "a file"
    blocked.write_text("")
    cases: list[tuple[str, Callable[[], object]]] = [
        ("not UTF-8", lambda: connect.read(path_of_settings)),
        ("cannot read", lambda: connect.read(path_of_settings.parent)),
        ("cannot write", lambda: connect.write("zed", blocked / "settings.json", None, "x")),
    ]
    for message, call in cases:
        with pytest.raises(CliError, match=message) as caught:
            call()
        assert caught.value.hint == connect.BY_HAND


@pytest.mark.parametrize("text", ["", "{", "[]", '{"path": 1}', "[" * 5000])
def test_a_record_that_nobody_can_read_is_none(home: Path, text: str) -> None:
    record = home / ".mlxsup" / "connected" / "zed.json"
    record.parent.mkdir(parents=True)
    record.write_text(text)
    with pytest.raises(CliError, match="nothing was written"):
        connect.undo("zed")
