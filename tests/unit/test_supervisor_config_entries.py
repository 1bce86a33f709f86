"""Entries that come and go: every other line of the file stays, and a failure leaves it whole."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from mlxsup.store.sources import RefusedModelError, Source
from mlxsup.supervisor.config.entries import Edit, adding, change_file, removing
from mlxsup.supervisor.config.keys import changing
from mlxsup.supervisor.config.load import ConfigError, DaemonConfig, read_config

from support.daemon.full_disk import full_disk

WRITTEN = """\
# mine
[defaults]
preload = false  # later

[models.a]  # first
path = "/a"
# before b
[models."b.c"]
path = "/b"
aliases = [
    "bee",  # [models.x]
    "Cee",
]

# before clients
[clients.x]
weight = 2
"""


NEW = {"repo": "o/n", "preload": False}
"""The entry for a file whose `[defaults]` load every model at the start."""


def with_one(config: DaemonConfig, name: str | None = "n.w", model: str = "o/n") -> Edit:
    """The change that adds a repository, ready as it is."""
    source = Source(title=model, folder=None, repo=model)
    return adding(config, model, name, find=lambda: source, ready=lambda one: one)


def test_a_link_to_the_folder_of_a_model_is_that_model(tmp_path: Path) -> None:
    folder, link, file = tmp_path / "m", tmp_path / "link", tmp_path / "c.toml"
    folder.mkdir()
    link.symlink_to(folder)
    file.write_text(f'[models.a]\npath = "{folder}"\n')
    source = Source(title="link", folder=link)
    added = adding(read_config(file), str(link), None, find=lambda: source, ready=lambda one: one)
    assert (added.name, added.change) == ("a", None)


def test_all_other_lines_stay_when_a_table_comes_and_goes(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    file.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    change_file(link, with_one)
    text = file.read_text()
    assert set(WRITTEN.splitlines()) < set(text.splitlines())
    assert tomllib.loads(text)["models"]["n.w"] == {"repo": "o/n"}
    assert (link.is_symlink(), file.stat().st_mode & 0o777) == (True, 0o640)
    change_file(link, partial(removing, name="n.w"))
    assert written(file) == written(None)


def written(file: Path | None) -> list[str]:
    """Return the lines of the file, or else of `WRITTEN`, that are not empty."""
    text = WRITTEN if file is None else file.read_text()
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize(("name", "lines"), [("a", slice(3, 5)), ("b.c", slice(6, 12))])
def test_comments_below_a_table_stay_when_it_goes(tmp_path: Path, name: str, lines: slice) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    change_file(file, partial(removing, name=name))
    left = written(None)
    del left[lines]
    assert written(file) == left


def test_change_that_would_break_a_file_leaves_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    wrong = Edit(name="a", change=lambda t: t["models"].update({"a": {"repo": 3}}), answer={})
    with pytest.raises(RefusedModelError, match=r"^models\.a\.repo must be"):
        change_file(file, lambda _: wrong)
    assert (file.read_text(), [path.name for path in tmp_path.iterdir()]) == (WRITTEN, ["c.toml"])


@pytest.mark.parametrize(
    ("text", "model", "name"),
    [
        ('[models.a]\npath = "/a"\naliases = 3\n', "a", "other"),
        ("models = 3\n", "o/n", None),
        ("defaults = 3\n", "o/n", None),
        ("[[defaults]]\n", "o/n", None),
    ],
)
def test_model_that_comes_into_a_wrong_file_is_told_what_is_wrong(
    tmp_path: Path, text: str, model: str, name: str | None
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="must be a"):
        change_file(file, partial(with_one, model=model, name=name))
    assert file.read_text() == text


def test_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('\ufeff[models.a]\npath = "/a"\n')
    assert [model.name for model in read_config(file).models] == ["a"]
    change_file(file, partial(with_one, name=None))
    assert tomllib.loads(file.read_text()) == {"models": {"a": {"path": "/a"}, "n": NEW}}


def test_last_model_goes_and_one_comes_into_an_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('# mine\r\n[models.a]\r\npath = "/a"\r\n')
    assert change_file(file, partial(removing, name="a")).answer["files"] == "/a"
    assert tomllib.loads(file.read_text()) == {}
    assert change_file(file, partial(with_one, name=None)).name == "n"
    assert tomllib.loads(file.read_text()) == {"models": {"n": NEW}}
    assert file.read_bytes().startswith(b"# mine\r\n")
    assert file.read_bytes().count(b"\n") == file.read_bytes().count(b"\r\n"), "Windows' ends stay"


A, B = '[models.a]\npath = "/a"\n', '[models.b]\npath = "/b"'
FORMS = {
    "tables among others": f"{A}[clients.x]\nweight = 2\n{B}\n",
    "one inline table": 'models = {a = {path = "/a"}, b = {path = "/b"}}\n',
    "inline tables": '[models]\na = {path = "/a"}\nb = {path = "/b"}\n',
    "no line end after the last line": A + B,
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_each_form_of_a_file_gets_the_change_and_nothing_else(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    before = tomllib.loads(text)
    change_file(file, with_one)
    after = tomllib.loads(file.read_text())
    assert after == {**before, "models": {**before["models"], "n.w": NEW}}
    change_file(file, partial(removing, name="n.w"))
    assert tomllib.loads(file.read_text()) == before
    change_file(file, partial(removing, name="a"))
    del before["models"]["a"]
    assert tomllib.loads(file.read_text()) == before


@pytest.mark.parametrize("name", ["a", "b"])
def test_table_that_goes_takes_its_empty_line_with_it(tmp_path: Path, name: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text := f"[gateway]\n\n{A}\n{B}\n")
    change_file(file, with_one)
    change_file(file, partial(removing, name="n.w"))
    assert file.read_text() == text
    change_file(file, partial(removing, name=name))
    assert file.read_text().count("\n\n") == 1


def test_new_key_stands_above_the_comments_on_the_next_table(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"{A}\n# one\n# two\n{B}\n")
    change_file(file, partial(with_one, model="a", name="z"))
    assert file.read_text() == f'{A}aliases = ["z"]\n\n# one\n# two\n{B}\n'


def test_new_table_stands_behind_those_around_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"{A}[models.a.restart]\nstable_s = 1\n# mine\n{B}\n# last\n")
    change_file(file, partial(changing, changes={"models.a.presets.p.top_k": "1"}))
    change_file(file, with_one)
    preset, new = "[models.a.presets.p]\ntop_k = 1\n", '[models."n.w"]\nrepo = "o/n"\n'
    more = "preload = false\n"
    restart = "[models.a.restart]\nstable_s = 1\n"
    assert file.read_text() == f"{A}{restart}\n{preset}# mine\n{B}\n\n{new}{more}# last\n"


@pytest.mark.parametrize("text", ["", A, "# mine"])
def test_folder_of_any_name_comes_into_a_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    source = Source(title="odd", folder=Path('/\u2028\x85"\\\t\x7f📦'))
    plan = partial(adding, model="odd", name=None, find=lambda: source, ready=lambda one: one)
    change_file(file, plan)
    added = read_config(file).models[-1]
    assert (added.name, Path(added.launch.path)) == ("odd", source.folder)
    assert file.read_text().startswith(text)


def test_table_goes_that_follows_an_empty_one(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"{A}[models.a.restart]\n{B}\n")
    change_file(file, partial(removing, name="b"))
    assert file.read_text() == f"{A}[models.a.restart]\n"


def test_form_that_cannot_be_edited_safely_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text := 'models.a.path = "/a"\nmodels.b.path = "/b"\n')
    with pytest.raises(RefusedModelError, match="leaves no place"):
        change_file(file, with_one)
    assert file.read_text() == text


REFUSED = {
    "a name that is taken": (partial(with_one, name="A"), "name_taken"),
    "a name that is an alias": (partial(with_one, name="Bee"), "name_taken"),
    "a name of an alias in small letters": (partial(with_one, name="cee"), "name_taken"),
    "a name that none can have": (partial(with_one, name="x y"), "usage"),
    "a name of the daemon's log": (partial(with_one, name="mlxsup"), "usage"),
    "removal of nothing": (partial(removing, name="zzz"), "unknown_model"),
}


@pytest.mark.parametrize(("plan", "code"), REFUSED.values(), ids=REFUSED)
def test_refused_change_leaves_the_file(
    tmp_path: Path, plan: Callable[[DaemonConfig], Edit], code: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    with pytest.raises(RefusedModelError) as caught:
        change_file(file, plan)
    assert (caught.value.code, file.read_text()) == (code, WRITTEN)


@pytest.mark.parametrize(
    ("model", "name"), [("o/A", "o-a"), ("o/Bee", "o-bee"), ("o/mlxsup", "o-mlxsup"), ("o/n", "n")]
)
def test_model_is_called_by_a_name_that_nothing_has(tmp_path: Path, model: str, name: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    edit = change_file(file, partial(with_one, name=None, model=model))
    assert edit.name == name
    added = read_config(file).models[-1]
    assert (added.name, added.preload) == (name, False), "who adds it says whether it is loaded"


KNOWN = {"its name": ("a", ""), "an alias": ("bee", ""), "its folder": ("", "/b")}


@pytest.mark.parametrize(("called", "folder"), KNOWN.values(), ids=KNOWN)
def test_model_that_is_configured_keeps_its_entry_and_takes_another_name(
    tmp_path: Path, called: str, folder: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    source = Source(title="x", folder=Path(folder or "/x"))

    name: str | None = None

    def plan(config: DaemonConfig) -> Edit:
        return adding(config, called, name, find=lambda: source, ready=lambda one: one)

    owner = "a" if called == "a" else "b.c"
    edit = change_file(file, plan)
    assert (edit.change, edit.name, file.read_text()) == (None, owner, WRITTEN)
    name = "other"
    assert change_file(file, plan).answer["alias"] == "other"
    assert "other" in tomllib.loads(file.read_text())["models"][owner]["aliases"]
    assert set(WRITTEN.splitlines()) <= set(file.read_text().splitlines())
    gone = change_file(file, partial(removing, name="other"))
    assert (gone.answer["alias"], gone.name, file.read_text()) == ("other", owner, WRITTEN)


def test_read_only_file_is_refused_and_named(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    file.chmod(0o400)
    with pytest.raises(RefusedModelError, match=r"cannot write .*read-only"):
        change_file(file, with_one)
    assert (file.read_text(), os.listdir(tmp_path)) == (WRITTEN, ["c.toml"])


def test_full_disk_leaves_the_file_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    with full_disk(0), pytest.raises(RefusedModelError, match="cannot write") as caught:
        change_file(file, with_one)
    assert caught.value.hint.startswith("free some space, or ")
    assert (file.read_text(), os.listdir(tmp_path)) == (WRITTEN, ["c.toml"])


def test_change_is_planned_anew_if_an_editor_has_saved_meanwhile(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    tries: list[int] = []

    def plan(config: DaemonConfig) -> Edit:
        tries.append(len(config.models))
        if len(tries) == 1:
            file.write_text(f'{WRITTEN}[models.mine]\npath = "/mine"\n')
        return with_one(config)

    change_file(file, plan)
    assert tries == [2, 3]
    assert set(tomllib.loads(file.read_text())["models"]) == {"a", "b.c", "mine", "n.w"}


def test_edits_at_once_wait_for_each_other(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    names = [f"n{n}" for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        plans = [partial(with_one, name=name, model=f"o/{name}") for name in names]
        done = list(pool.map(partial(change_file, file), plans))
    assert [edit.name for edit in done] == names
    assert set(tomllib.loads(file.read_text())["models"]) == {"a", "b.c", *names}
    assert os.listdir(tmp_path) == ["c.toml"]
