"""What `connect` puts into the files of other programs, and how it gets out again."""

from __future__ import annotations

import json
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlxsup.cli.connecting import files
from mlxsup.cli.connecting.commented_json import value_of
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
    path, text = written(tool, **given)
    match path.suffix:
        case ".toml":
            return tomllib.loads(text)
        case ".yaml":
            return yaml.safe_load(text)
    return value_of(text)


# ---------------------------------------------------------------- what is in them


def test_claude_code_has_one_model_for_everything_and_no_line_that_changes(home: Path) -> None:
    env = read("claude-code")["env"]
    assert written("claude-code")[0] == home / ".claude" / "settings.json"
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_AUTH_TOKEN"]) == (URL, "mlxsup")
    assert {value for key, value in env.items() if key.endswith("MODEL")} == {"m"}
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"


def test_codex_has_a_profile_of_its_own(home: Path) -> None:
    value = read("codex")
    assert written("codex")[0] == home / ".codex" / "mlxsup.config.toml"
    assert (value["model"], value["model_context_window"]) == ("m", 40_000)
    provider = value["model_providers"][value["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == (f"{URL}/v1", "responses")
    assert settings("codex").usage == ["codex --profile mlxsup"]
    assert (value["web_search"], value["agents"]) == ("disabled", {"enabled": False})


def test_opencode_lists_every_model_with_its_context(home: Path) -> None:
    provider = read("opencode")["provider"]["mlxsup"]
    assert written("opencode")[0] == home / ".config" / "opencode" / "opencode.json"
    assert provider["options"] == {"baseURL": f"{URL}/v1", "apiKey": "mlxsup"}
    assert provider["models"]["m"]["limit"] == {"context": 40_000, "output": 8192}
    assert provider["models"]["other"]["limit"] == {"context": 8192, "output": 4096}


def test_opencode_uses_the_file_that_is_there(home: Path) -> None:
    path = home / ".config" / "opencode" / "opencode.jsonc"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert written("opencode")[0] == path


def test_continue_has_an_agent_of_its_own(home: Path) -> None:
    value = read("continue")
    assert written("continue")[0] == home / ".continue" / "agents" / "mlxsup.yaml"
    assert value["schema"] == "v1"
    first, second = value["models"]
    assert (first["model"], first["apiBase"], first["provider"]) == ("m", f"{URL}/v1", "openai")
    assert first["defaultCompletionOptions"] == {"contextLength": 40_000, "maxTokens": 8192}
    assert second["model"] == "other"


def test_vscode_counts_prompt_and_answer_as_the_context(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = read("vscode")
    assert (entry["vendor"], entry["apiType"]) == ("customendpoint", "chat-completions")
    model = entry["models"][0]
    assert model["url"] == f"{URL}/v1/chat/completions"
    assert model["maxInputTokens"] + model["maxOutputTokens"] == 40_000
    assert written("vscode")[0].is_relative_to(home / ".config" / "Code")
    monkeypatch.setattr("sys.platform", "darwin")
    assert written("vscode")[0].is_relative_to(home / "Library")


def test_zed_has_a_provider_and_needs_a_variable(home: Path) -> None:
    provider = read("zed")["language_models"]["openai_compatible"]["mlxsup"]
    assert written("zed")[0] == home / ".config" / "zed" / "settings.json"
    assert provider["api_url"] == f"{URL}/v1"
    assert provider["available_models"][0]["max_tokens"] == 40_000
    assert settings("zed").variables == {"MLXSUP_API_KEY": "mlxsup"}


def test_open_webui_has_variables_and_no_file() -> None:
    found = settings("open-webui")
    assert found.change is None
    assert found.variables["OPENAI_API_BASE_URL"] == f"{URL}/v1"


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
def path(home: Path) -> Path:
    return home / "folder" / "settings.json"


def test_a_file_is_copied_written_and_brought_back(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("before\n")
    path.chmod(0o640)
    done = files.write("zed", path, "before\n", "after\n")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("after\n", 0o640)
    assert done.backup is not None
    assert done.backup.read_text() == "before\n"
    assert stat.S_IMODE(done.backup.stat().st_mode) == 0o640
    assert files.undo("zed") == (path, "after\n", "before\n")
    assert path.read_text() == "before\n"
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(CliError, match="nothing was written"):
        files.undo("zed")


def test_a_file_that_was_not_there_is_removed_again(path: Path) -> None:
    assert files.write("zed", path, None, "after\n").backup is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    files.undo("zed")
    assert list(path.parent.iterdir()) == []


def test_two_writes_are_undone_as_one(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("before")
    first = files.write("zed", path, "before", "one")
    assert files.write("zed", path, "one", "two").backup == first.backup
    files.undo("zed")
    assert path.read_text() == "before"


def test_what_was_changed_in_between_is_copied_too_and_no_copy_is_lost(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("before")
    first = files.write("zed", path, "before", "one")
    path.write_text("mine")
    second = files.write("zed", path, "mine", "two")
    files.undo("zed")
    assert path.read_text() == "mine"
    assert first.backup is not None
    assert (first.backup.read_text(), first.backup != second.backup) == ("before", True)


def test_an_undo_does_not_destroy_what_somebody_has_changed_since(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("before")
    done = files.write("zed", path, "before", "after")
    path.write_text("after, and mine")
    with pytest.raises(CliError, match="was changed since") as error:
        files.undo("zed")
    assert str(done.backup) in str(error.value)
    assert path.read_text() == "after, and mine"


def test_two_programs_do_not_undo_each_other(path: Path) -> None:
    other = path.with_name("other.json")
    files.write("zed", path, None, "a")
    files.write("codex", other, None, "b")
    files.undo("zed")
    assert (path.exists(), other.read_text()) == (False, "b")


def test_a_link_stays_a_link(path: Path, home: Path) -> None:
    path.parent.mkdir()
    real = home / "dotfiles.json"
    real.write_text("before")
    path.symlink_to(real)
    files.write("zed", path, "before", "after")
    assert (path.is_symlink(), real.read_text()) == (True, "after")
    files.undo("zed")
    assert (path.is_symlink(), real.read_text()) == (True, "before")


def test_line_ends_stay(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"a\r\nb")
    text = files.read(path)
    assert text == "a\r\nb"
    files.write("zed", path, text, text + "\r\n")
    assert path.read_bytes() == b"a\r\nb\r\n"


def test_what_cannot_be_read_or_written_is_said(path: Path, home: Path) -> None:
    assert files.read(path) is None
    path.parent.mkdir()
    path.write_bytes(b"a\xff")
    blocked = home / "a file"
    blocked.write_text("")
    cases: list[tuple[str, Callable[[], object]]] = [
        ("not UTF-8", lambda: files.read(path)),
        ("cannot read", lambda: files.read(path.parent)),
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


def test_a_difference_is_shown_as_diff_shows_it(path: Path) -> None:
    shown = files.diff(path, None, json.dumps({"a": 1}) + "\n").splitlines()
    assert shown[:2] == ["--- /dev/null", f"+++ {path}"]
    assert shown[-1] == '+{"a": 1}'
