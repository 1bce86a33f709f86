"""What `connect` writes into the settings of other programs, and how it is taken back."""

from __future__ import annotations

import copy
import json
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from mlxsup.cli.connecting import files
from mlxsup.cli.connecting.commented_json import Named, NotJson, NotThere, value_of, with_value
from mlxsup.cli.connecting.tools import ANY_KEY, TOOLS, Model, Settings, Site
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


def site(name: str = "m", context: int | None = 40_000, key: str = ANY_KEY) -> Site:
    models = [Model(name=name, context=context), Model(name="other", context=None)]
    return Site(url=URL, model=models[0], models=models, key=key)


def settings(tool: str, **given: Any) -> Settings:
    return TOOLS[tool](site(**given))


def written(tool: str, before: str = "", **given: Any) -> tuple[Path, str]:
    """The file of a program, and its text."""
    change = settings(tool, **given).change
    assert change is not None
    return change.path, change.apply(before)


def read(tool: str, **given: Any) -> Any:
    """What the file of a program means."""
    path_of_settings, text = written(tool, **given)
    match path_of_settings.suffix:
        case ".toml":
            return tomllib.loads(text)
        case ".yaml":
            return yaml.safe_load(text)
    return value_of(text)


# ---------------------------------------------------------------- what is in them


@pytest.mark.parametrize("tool", TOOLS)
def test_the_settings_of_each_program(tool: str, home: Path, snapshot: SnapshotAssertion) -> None:
    found = settings(tool)
    file = None
    if found.change is not None:
        file = (str(found.change.path.relative_to(home)), read(tool))
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

    assert STRANGE in texts(read(tool, name=STRANGE))


@pytest.mark.parametrize("tool", TOOLS)
def test_every_program_sends_the_key_of_the_gateway(tool: str) -> None:
    found = settings(tool, key="sk-1")
    text = "" if found.change is None else found.change.apply("")
    assert "sk-1" in text or "sk-1" in found.variables.values()


@pytest.mark.parametrize("tool", ["claude-code", "opencode", "zed"])
def test_what_people_have_written_stays(tool: str) -> None:
    before = '{\n    // mine\n    "theme": "dark",\n    "env": {"A": "1"}, // too\n}\n'
    _, text = written(tool, before)
    assert "// mine\n" in text
    assert "// too\n" in text
    assert (value_of(text)["theme"], value_of(text)["env"]["A"]) == ("dark", "1")
    assert written(tool, text)[1] == text, "a second time changes nothing"


def test_other_providers_of_vscode_stay_and_ours_is_there_once() -> None:
    _, text = written("vscode", '[{"name": "mine", "vendor": "x"}]')
    _, again = written("vscode", text, context=1000)
    mine, ours = value_of(again)
    assert mine == {"name": "mine", "vendor": "x"}
    assert ours["models"][0]["maxInputTokens"] == 500


# ---------------------------------------------------------------- files


@pytest.fixture
def path_of_settings(home: Path) -> Path:
    return home / "folder" / "settings.json"


def test_a_file_is_copied_written_and_brought_back(path_of_settings: Path) -> None:
    path_of_settings.parent.mkdir()
    path_of_settings.write_text("before\n")
    path_of_settings.chmod(0o640)
    done = files.write("zed", path_of_settings, "before\n", "after\n")
    assert (path_of_settings.read_text(), stat.S_IMODE(path_of_settings.stat().st_mode)) == (
        "after\n",
        0o640,
    )
    assert done.backup is not None
    assert done.backup.read_text() == "before\n"
    assert stat.S_IMODE(done.backup.stat().st_mode) == 0o640
    assert files.undo("zed") == (path_of_settings, "after\n", "before\n")
    assert path_of_settings.read_text() == "before\n"
    assert list(path_of_settings.parent.iterdir()) == [path_of_settings]
    with pytest.raises(CliError, match="nothing was written"):
        files.undo("zed")


def test_a_file_that_was_not_there_is_removed_again(path_of_settings: Path) -> None:
    assert files.write("zed", path_of_settings, None, "after\n").backup is None
    assert stat.S_IMODE(path_of_settings.stat().st_mode) == 0o600
    files.undo("zed")
    assert list(path_of_settings.parent.iterdir()) == []


def test_two_writes_are_undone_as_one(path_of_settings: Path) -> None:
    path_of_settings.parent.mkdir()
    path_of_settings.write_text("before")
    first = files.write("zed", path_of_settings, "before", "one")
    assert files.write("zed", path_of_settings, "one", "two").backup == first.backup
    files.undo("zed")
    assert path_of_settings.read_text() == "before"


def test_what_was_changed_in_between_is_copied_too_and_no_copy_is_lost(
    path_of_settings: Path,
) -> None:
    path_of_settings.parent.mkdir()
    path_of_settings.write_text("before")
    first = files.write("zed", path_of_settings, "before", "one")
    path_of_settings.write_text("mine")
    second = files.write("zed", path_of_settings, "mine", "two")
    files.undo("zed")
    assert path_of_settings.read_text() == "mine"
    assert first.backup is not None
    assert (first.backup.read_text(), first.backup != second.backup) == ("before", True)


def test_an_undo_does_not_destroy_what_somebody_has_changed_since(path_of_settings: Path) -> None:
    path_of_settings.parent.mkdir()
    path_of_settings.write_text("before")
    done = files.write("zed", path_of_settings, "before", "after")
    path_of_settings.write_text("after, and mine")
    with pytest.raises(CliError, match="was changed since") as error:
        files.undo("zed")
    assert str(done.backup) in str(error.value)
    assert path_of_settings.read_text() == "after, and mine"


def test_two_programs_do_not_undo_each_other(path_of_settings: Path) -> None:
    other = path_of_settings.with_name("other.json")
    files.write("zed", path_of_settings, None, "a")
    files.write("codex", other, None, "b")
    files.undo("zed")
    assert (path_of_settings.exists(), other.read_text()) == (False, "b")


def test_a_link_stays_a_link(path_of_settings: Path, home: Path) -> None:
    path_of_settings.parent.mkdir()
    real = home / "dotfiles.json"
    real.write_text("before")
    path_of_settings.symlink_to(real)
    files.write("zed", path_of_settings, "before", "after")
    assert (path_of_settings.is_symlink(), real.read_text()) == (True, "after")
    files.undo("zed")
    assert (path_of_settings.is_symlink(), real.read_text()) == (True, "before")


def test_line_ends_stay(path_of_settings: Path) -> None:
    path_of_settings.parent.mkdir()
    path_of_settings.write_bytes(b"a\r\nb")
    text = files.read(path_of_settings)
    assert text == "a\r\nb"
    files.write("zed", path_of_settings, text, text + "\r\n")
    assert path_of_settings.read_bytes() == b"a\r\nb\r\n"


def test_what_cannot_be_read_or_written_is_said(path_of_settings: Path, home: Path) -> None:
    assert files.read(path_of_settings) is None
    path_of_settings.parent.mkdir()
    path_of_settings.write_bytes(b"a\xff")
    blocked = home / "a file"
    blocked.write_text("")
    cases: list[tuple[str, Callable[[], object]]] = [
        ("not UTF-8", lambda: files.read(path_of_settings)),
        ("cannot read", lambda: files.read(path_of_settings.parent)),
        ("cannot write", lambda: files.write("zed", blocked / "settings.json", None, "x")),
    ]
    for message, call in cases:
        with pytest.raises(CliError, match=message) as caught:
            call()
        assert caught.value.hint == files.BY_HAND


@pytest.mark.parametrize("text", ["", "{", "[]", '{"path": 1}', "[" * 5000])
def test_a_record_that_nobody_can_read_is_none(home: Path, text: str) -> None:
    record = home / ".mlxsup" / "connected" / "zed.json"
    record.parent.mkdir(parents=True)
    record.write_text(text)
    with pytest.raises(CliError, match="nothing was written"):
        files.undo("zed")


COMMENTED = """\
// My settings
{
    "theme": "dark", // as it must be
    /* fonts { */
    "font": {"size": 12},
    "servers": [
        {"name": "a", "url": "x"}, // the first
    ],
    // the end
}
"""


def test_a_new_key_comes_last_and_every_comment_stays() -> None:
    new = with_value(COMMENTED, ("mlx", "url"), "http://x")
    assert new == COMMENTED.replace(
        "    // the end\n}", '    // the end\n    "mlx": {\n        "url": "http://x"\n    }\n}'
    )
    assert value_of(new) == value_of(COMMENTED) | {"mlx": {"url": "http://x"}}


def test_a_comma_is_added_behind_the_value_and_not_behind_its_comment() -> None:
    text = '{\n  "a": 1 // one\n}\n'
    assert with_value(text, ("b",), 2) == '{\n  "a": 1, // one\n  "b": 2\n}\n'


def test_a_value_that_is_there_is_replaced_in_its_place() -> None:
    new = with_value(COMMENTED, ("theme",), "light")
    assert new == COMMENTED.replace('"dark"', '"light"')
    assert with_value(COMMENTED, ("font", "size"), 14) == COMMENTED.replace("12", "14")


def test_an_object_of_a_list_is_found_by_its_name_or_appended() -> None:
    new = with_value(COMMENTED, ("servers", Named("a"), "url"), "y")
    assert new == COMMENTED.replace('"x"', '"y"')
    new = with_value(COMMENTED, ("servers", Named("b")), {"name": "b"})
    assert value_of(new)["servers"] == [{"name": "a", "url": "x"}, {"name": "b"}]
    assert "// the first\n" in new


@pytest.mark.parametrize("text", ["", "\n", "// nothing yet\n", "{}", "{ }\n", "\ufeff{}"])
def test_an_empty_file_gets_an_object(text: str) -> None:
    new = with_value(text, ("a", "b"), [1])
    assert value_of(new) == {"a": {"b": [1]}}
    assert "// nothing yet" in new or "//" not in text
    assert value_of(with_value("", (Named("a"),), {"name": "a"})) == [{"name": "a"}]


@pytest.mark.parametrize("quoted", ['"// no comment"', '"/* none */"', '"}"', '"\\""', '"\\\\"'])
def test_what_looks_like_a_comment_or_an_end_within_a_text_is_none(quoted: str) -> None:
    text = f'{{"a": {quoted}, "b": 1}}'
    assert value_of(text) == json.loads(text)
    assert value_of(with_value(text, ("b",), 2)) == json.loads(text) | {"b": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1, column 2"),
        ('{\n "a" 1}', "a colon is missing (line 2, column 6)"),
        ('{"a": 1 "b": 2}', "a comma or } is missing (line 1, column 9)"),
        ('{"a": nope}', "nope is no value"),
        ('{"a": "x}', "line 1, column 7"),
        ("{} {}", "nothing should follow"),
        ("{,}", "line 1, column 2"),
        ("/* {}", "line 1, column 1"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_is_said_with_its_place(text: str, words: str) -> None:
    with pytest.raises(NotJson) as error:
        with_value(text, ("a",), 1)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ('{"a": 1}', ("a", "b"), "a is not an object"),
        ("[]", ("a",), "the whole file is not an object"),
        ('{"a": {}}', ("a", Named("b")), "a is not a list"),
    ],
)
def test_a_path_through_another_type_is_refused(text: str, path: Any, words: str) -> None:
    with pytest.raises(NotThere, match=words):
        with_value(text, path, 1)


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
KEYS = st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)
COMMENTS = st.sampled_from(["", " ", "\n", "\t", "// it's {\n", '/* " */', "\r\n"])


@st.composite
def commented(draw: st.DrawFn, value: Any) -> str:
    """The value as JSON, with comments anywhere and commas before closing brackets."""

    def text_of(one: Any) -> str:
        def gap() -> str:
            blank: str = draw(COMMENTS)
            return blank

        if isinstance(one, dict):
            parts = [
                f"{gap()}{json.dumps(key)}{gap()}:{gap()}{text_of(inner)}{gap()}"
                for key, inner in one.items()
            ]
        elif isinstance(one, list):
            parts = [f"{gap()}{text_of(inner)}{gap()}" for inner in one]
        else:
            return json.dumps(one)
        is_trailing: bool = draw(st.booleans())
        comma = "," + gap() if parts and is_trailing else ""
        brackets = "{}" if isinstance(one, dict) else "[]"
        return f"{brackets[0]}{gap()}{','.join(parts)}{comma}{brackets[1]}"

    return f"{draw(COMMENTS)}{text_of(value)}{draw(COMMENTS)}"


@hypothesis.settings(max_examples=25)
@given(st.data())
def test_exactly_the_value_at_the_path_changes(data: st.DataObject) -> None:
    before = data.draw(st.dictionaries(KEYS, VALUES, max_size=4))
    text = data.draw(commented(before))
    assert value_of(text) == before
    path: list[str] = data.draw(st.lists(KEYS, min_size=1, max_size=3))
    value = data.draw(VALUES)
    expected: dict[str, Any] = copy.deepcopy(before)
    inner: Any = expected
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            with pytest.raises(NotThere):
                with_value(text, path, value)
            return
    inner[path[-1]] = value
    new = with_value(text, path, value)
    assert value_of(new) == expected
    assert value_of(with_value(new, path, value)) == expected
    if path[0] not in before:
        for comment in ("// it's {\n", '/* " */'):
            assert new.count(comment) >= text.count(comment)
