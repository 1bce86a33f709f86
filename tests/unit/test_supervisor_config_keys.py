"""Keys of a configuration that change one by one, as `config set` and the page do it."""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxsup.store.sources import RefusedModelError
from mlxsup.supervisor.config.entries import change_file
from mlxsup.supervisor.config.keys import changing, getting, settings_of
from mlxsup.supervisor.config.load import (
    ConfigError,
    config_of_folders,
    read_config,
    read_text,
)

WRITTEN = """\
# mine
[defaults]
preload = false  # later
# idle_unload_s = "30m"

# the first
[models.a]  # here
path = "/a"
aliases = ["ay"]  # short
# the second
[models."a.c"]
path = "/b"
[models."a.c".sampling]
top_k = 4

[clients.x]
weight = 2
"""
BEFORE = tomllib.loads(WRITTEN)


def written(folder: Path) -> Path:
    file = folder / "c.toml"
    file.write_text(WRITTEN)
    return file


def change(file: Path, changes: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = change_file(file, partial(changing, changes=changes)).answer["values"]
    return values


def at(values: Any, *place: str) -> Any:
    """Return what stands at a place; None if nothing does."""
    for key in place:
        values = values.get(key, {}) if isinstance(values, dict) else {}
    return None if isinstance(values, dict) else values


WRONG: dict[str, tuple[str, str, str | None]] = {
    "a value": ("[models.a]\nmax_concurrency = 0\n", "models.a.max_concurrency", "2"),
    "a value of a table": (
        '[supervisor]\nmemory_budget = "lots"\n',
        "supervisor.memory_budget",
        None,
    ),
    "keys of which there are none": ('[gateway]\nkeys = "required"\n', "gateway.keys", "auto"),
    "an address": ('[gateway]\nlisten = "here"\n', "gateway.listen", "127.0.0.1:8485"),
    "a key that is taken out": ("[defaults]\npinned = 1\n", "defaults.pinned", None),
}


@pytest.mark.parametrize(("text", "key", "value"), WRONG.values(), ids=WRONG)
def test_change_repairs_a_file_that_is_wrong_or_leaves_it(
    tmp_path: Path, text: str, key: str, value: str | None
) -> None:
    file = tmp_path / "c.toml"
    before = f'{text}{"" if "models.a]" in text else "[models.a]"}\npath = "/a"\n'
    file.write_text(before)
    with pytest.raises(ConfigError) as still:
        change(file, {"models.a.preload": "false"})
    assert len(still.value.problems) == 1
    assert file.read_text() == before
    change(file, {key: value})
    assert [one.launch.path for one in read_config(file).models] == ["/a"]


NO_TABLE = {
    "an array of tables": ("[[models.a.restart]]\n", "models.a.restart.window_s", "60"),
    "a number": ("[models.a]\nsampling = 3\n", "models.a.sampling.top_k", "4"),
    "a number that is taken out": ("[models.a]\nsampling = 3\n", "models.a.sampling.top_k", None),
    "text": ('[defaults]\nrestart = "no"\n', "defaults.restart.window_s", "60"),
}


@pytest.mark.parametrize(("text", "key", "value"), NO_TABLE.values(), ids=NO_TABLE)
def test_change_within_what_is_no_table_says_what_is_wrong_with_the_file(
    tmp_path: Path, text: str, key: str, value: str | None
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'{text}[models.b]\npath = "/b"\n')
    with pytest.raises(ConfigError, match="must be a table, not"):
        change(file, {key: value})


SET = {
    "an integer": ("models.a.max_concurrency", "4", ("models", "a", "max_concurrency"), 4),
    "a duration": ("models.a.idle_unload_s", "5m", ("models", "a", "idle_unload_s"), "5m"),
    "a quoted duration": ("defaults.idle_unload_s", '"5m"', ("defaults", "idle_unload_s"), "5m"),
    "a flag": ("models.a.pinned", "true", ("models", "a", "pinned"), True),
    "a size": ("models.a.memory", "3GiB", ("models", "a", "memory"), "3GiB"),
    "names": ("models.a.aliases", "p, q/r", ("models", "a", "aliases"), ["p", "q/r"]),
    "names as TOML": ("models.a.aliases", '["p"]', ("models", "a", "aliases"), ["p"]),
    "a name of digits": ("models.a.aliases", "7", ("models", "a", "aliases"), ["7"]),
    "no names": ("models.a.aliases", "", ("models", "a", "aliases"), []),
    "text of digits": ("models.a.path", "7", ("models", "a", "path"), "7"),
    "a table within": (
        "models.a.restart.window_s",
        "60",
        ("models", "a", "restart", "window_s"),
        60,
    ),
    "a new table": ("models.a.sampling.top_p", ".5", ("models", "a", "sampling", "top_p"), 0.5),
    "a name with a dot": (
        "models.a.c.sampling.top_k",
        "9",
        ("models", "a.c", "sampling", "top_k"),
        9,
    ),
    "a quoted name": ('models."a.c".preload', "true", ("models", "a.c", "preload"), True),
    "a preset": ("models.a.presets.p.top_k", "1", ("models", "a", "presets", "p", "top_k"), 1),
    "a new client": ("clients.al@a.c.weight", "3", ("clients", "al@a.c", "weight"), 3),
    "everybody": ("clients.*.max_queue", "3", ("clients", "*", "max_queue"), 3),
    "a new section": ("supervisor.max_queue", "7", ("supervisor", "max_queue"), 7),
    "a foreign name": ("gateway.names.gpt-4.1", "a", ("gateway", "names", "gpt-4.1"), "a"),
    "a further argument of a template": (
        "models.a.presets.p.chat_template_kwargs.enable_thinking",
        "false",
        ("models", "a", "presets", "p", "chat_template_kwargs", "enable_thinking"),
        False,
    ),
}


@pytest.mark.parametrize(("key", "text", "place", "value"), SET.values(), ids=SET)
def test_key_is_set_among_lines_that_stay_and_taken_out_again(
    tmp_path: Path, key: str, text: str, place: tuple[str, ...], value: Any
) -> None:
    file = written(tmp_path)
    assert [*change(file, {key: text}).values()] == [value]
    after = file.read_text()
    assert at(tomllib.loads(after), *place) == value
    comments = [line for line in WRITTEN.splitlines() if "#" in line]
    assert [line for line in after.splitlines() if "#" in line and "aliases" not in line] == [
        line for line in comments if "aliases" not in line
    ]
    assert "  # short\n" in after
    assert after.index("# the second\n") + 13 == after.index('[models."a.c"]'), (
        "stays with its table"
    )
    before = at(BEFORE, *place)
    change(file, {key: None if key != "models.a.path" else "/a"})
    assert at(tomllib.loads(file.read_text()), *place) == (before if "path" in key else None)


REFUSED = {
    "a wrong value": ("models.a.max_concurrency", "many", "usage", "from 1 to 1024, not"),
    "other digits": ("models.a.sampling.top_p", "٣", "usage", 'up to 1, not "٣"'),
    "digits of a value that fits": ("models.a.step_timeout_s", "٣", "usage", 'not "٣"'),
    "more than a value": ("defaults.preload", "true\npinned = true", "usage", "true or false"),
    "nested without end": ("models.a.aliases", "[" * 4000, "usage", "must be an array of names"),
    "a value beyond the rules": ("models.a.revision", "v2", "usage", "needs repo"),
    "a name that is taken": ("models.a.aliases", "a.c", "usage", "already means"),
    "an unknown key": ("models.a.pined", "true", "usage", "did you mean pinned"),
    "a key of another table": ("models.a.weight", "1", "usage", r"belongs to \[clients.NAME\]"),
    "a bare key": ("pinned", "true", "usage", r"belongs to \[models.NAME\] or \[defaults\]"),
    "an unknown section": ("model.a.pinned", "true", "usage", "unknown key"),
    "nothing": ("", "1", "usage", "unknown key"),
    "a model": ("models.a", "1", "usage", "is a table"),
    "a table": ("models.a.restart", "1", "usage", "is a table"),
    "presets": ("models.a.presets", "1", "usage", "is a table"),
    "tables without names": ("models.a.hosts", "1", "usage", "models.a.hosts is an array of tab"),
    "a table without a name": ("models.a.hosts.0.ssh", "b", "usage", "models.a.hosts is an array"),
    "a client": ("clients.x", "1", "usage", "is a table"),
    "inside a value": ("models.a.pinned.x", "1", "usage", "is no table"),
    "no number": ("clients.y.weight", "nan", "usage", "must be a number from 0.001"),
    "no text": ("models.a.pinned", True, "usage", "must be text"),
    "too much text": ("models.a.path", "x" * 5000, "usage", "at most 4096"),
    "an empty name": ("clients..weight", "1", "usage", "names with one dot between them"),
    "an empty part": ("models.a..pinned", "1", "usage", "names with one dot between them"),
    "an alias": ("models.ay.pinned", "true", "is_alias", "another name of a"),
    "no such model": ("models.aa.pinned", "true", "unknown_model", "configured: a, a.c"),
}


@pytest.mark.parametrize(("key", "text", "code", "says"), REFUSED.values(), ids=REFUSED)
def test_refused_change_of_a_key_changes_no_other_either(
    tmp_path: Path, key: str, text: Any, code: str, says: str
) -> None:
    file = written(tmp_path)
    with pytest.raises(RefusedModelError, match=says) as caught:
        change(file, {"clients.x.weight": "3", key: text})
    assert (caught.value.code, file.read_text()) == (code, WRITTEN)
    assert str(tmp_path) not in str(caught.value), "the user has named no line"


GOT = {
    "its own": ("models.a.c.sampling.top_k", 4, True),
    "that of all models": ("models.a.preload", False, False),
    "a default": ("models.a.max_concurrency", 8, False),
    "a default of all": ("defaults.preload", False, True),
    "of a client": ("clients.x.weight", 2, True),
    "of a client that is not there": ("clients.y.weight", 1, False),
    "a list": ("models.a.aliases", ["ay"], True),
}


@pytest.mark.parametrize(("key", "value", "is_set"), GOT.values(), ids=GOT)
def test_value_of_a_key_is_its_own_or_its_default(
    tmp_path: Path, key: str, value: Any, is_set: bool
) -> None:
    file = written(tmp_path)
    found = getting(read_text(file), file, key)
    assert (found["value"], found["is_set"]) == (value, is_set)
    assert getting(read_text(file), file, found["key"]) == found


@pytest.mark.parametrize("changes", [{}, {f"defaults.k{n}": "1" for n in range(65)}])
def test_number_of_changes_is_limited(tmp_path: Path, changes: dict[str, str]) -> None:
    with pytest.raises(RefusedModelError, match="must be 1 to 64"):
        change(written(tmp_path), changes)


def test_daemon_without_a_file_keeps_no_setting() -> None:
    config = config_of_folders({"a": Path("/a")})
    with pytest.raises(RefusedModelError, match="no configuration file"):
        changing(config, {"models.a.pinned": "true"})


@pytest.mark.parametrize(
    "text",
    [
        'models = {a = {path = "/a"}}\n',
        '[models]\na = {path = "/a"}\n',
        '[models.a]\r\npath = "/a"',
    ],
    ids=["inline", "inline in a table", "no last line end"],
)
def test_each_form_of_a_file_takes_a_key(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    change(file, {"models.a.pinned": "true", "models.a.sampling.top_k": "3"})
    after = tomllib.loads(file.read_text())["models"]["a"]
    assert after == {"path": "/a", "pinned": True, "sampling": {"top_k": 3}}


def test_settings_of_a_model_can_be_given_back_as_they_are_shown(tmp_path: Path) -> None:
    file = written(tmp_path)
    given = {"idle_unload_s": "90s", "pinned": "true", "sampling.top_p": "0.5", "aliases": "p, q"}
    change(file, {f"models.a.c.{key}": text for key, text in given.items()})
    change(file, {"defaults.max_concurrency": "3", "defaults.sampling.min_p": "0.1"})
    shown = {
        one["key"].partition('"a.c".')[2]: one for one in settings_of(read_text(file), file, "a.c")
    }
    assert {key: shown[key]["value"] for key in (*given, "sampling.top_k", "memory")} == {
        **given, "sampling.top_k": "4", "memory": ""
    }  # fmt: skip
    assert (shown["max_concurrency"]["default"], shown["sampling.min_p"]["default"]) == ("3", "0.1")
    assert shown["pinned"]["choices"] == ["true", "false"]
    assert not {"path", "repo", "fake", "restart.window_s"} & shown.keys()
    before = tomllib.loads(file.read_text())
    change(file, {one["key"]: one["value"] or None for one in shown.values()})
    assert tomllib.loads(file.read_text()) == before
