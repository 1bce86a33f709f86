"""`add` and `rm` of an entry, with a real daemon; the edits of the file in process."""

from __future__ import annotations

import json
import re
import tomllib
from functools import partial
from pathlib import Path

import pytest

from mlxsup.cli.commands import add
from mlxsup.cli.commands.rm import _pop
from mlxsup.cli.configuration import change_configuration
from mlxsup.cli.exit_status import CliError

from support.daemon.daemon import Daemon, fake
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "Tiny-Model-4bit")


def test_running_daemon_learns_a_model_and_forgets_it(folder: Path) -> None:
    with Daemon({"m": fake()}) as daemon:
        pid = daemon.run("status", "--json").stdout
        added = daemon.run("add", str(folder))
        assert (added.returncode, "added tiny to " in added.stdout) == (0, True)
        assert "mlxsup chat tiny" in added.stderr
        with daemon.client() as client:
            assert [row["name"] for row in client.status()["models"]] == ["m", "tiny"]
            assert client.status()["pid"] == json.loads(pid)["pid"]
        again = json.loads(daemon.run("add", str(folder), "--name", "other", "--json").stdout)
        assert (again["name"], again["added"], again["served"]) == ("tiny", False, True)
        removed = daemon.run("rm", "tiny")
        assert (removed.returncode, "removed tiny from " in removed.stdout) == (0, True)
        with daemon.client() as client:  # its process may still end
            eventually(lambda: [row["name"] for row in client.status()["models"]] == ["m"])
        last = daemon.run("rm", "m")
        assert (last.returncode, "m is the only model in " in last.stderr) == (1, True)
        assert (folder / "config.json").exists()


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("nothing", "there is no model 'nothing'"),
        ("", "there is no model ''"),
        ("./nothing", "nothing does not exist"),
        ("x.gguf", "/x.gguf does not exist"),
        ("https://h.example/datasets/a/b", "is the address of a dataset"),
        ("https://h.example/a/b/resolve/main/q.gguf", "is the address of one file"),
        ("https://h.example/a", "is not the address of a model"),
        ("h.example/../..", "is not the address of a model"),
    ],
)
def test_name_of_no_model_is_refused(named: str, says: str) -> None:
    with pytest.raises(CliError, match=re.escape(says)):
        add._find(named)


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("a/b", ("a/b", "main")),
        ("https://h.example/a/b", ("a/b", "main")),
        ("https://h.example/a/b/", ("a/b", "main")),
        ("h.example/a/b?x=1", ("a/b", "main")),
        ("https://h.example/a/b/tree/v2", ("a/b", "v2")),
        ("https://h.example/a/b/blob/v2/config.json", ("a/b", "v2")),
        ("b", ("", "")),
    ],
)
def test_repository_is_read_from_its_name_or_address(named: str, found: tuple[str, str]) -> None:
    assert add._repository(named) == found


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
]

# before clients
[clients.x]
weight = 2
"""


def test_all_other_lines_stay_when_a_table_comes_and_goes(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    file.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    change_configuration(link, lambda models: models.update({"n.w": {"repo": "o/n"}}))
    text = file.read_text()
    assert set(WRITTEN.splitlines()) < set(text.splitlines())
    assert tomllib.loads(text)["models"]["n.w"] == {"repo": "o/n"}
    assert (link.is_symlink(), file.stat().st_mode & 0o777) == (True, 0o640)
    change_configuration(link, partial(_pop, "n.w"))
    assert written(file) == written(None)


def written(file: Path | None) -> list[str]:
    """Return the lines of the file, or else of `WRITTEN`, that are not empty."""
    text = WRITTEN if file is None else file.read_text()
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize(("name", "lines"), [("a", slice(3, 5)), ("b.c", slice(6, 11))])
def test_comments_below_a_table_stay_when_it_goes(tmp_path: Path, name: str, lines: slice) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    change_configuration(file, partial(_pop, name))
    left = written(None)
    del left[lines]
    assert written(file) == left


def test_change_that_would_break_a_file_leaves_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(WRITTEN)
    with pytest.raises(CliError, match="not a valid configuration"):
        change_configuration(file, lambda models: models.update({"a": {"repo": 3}}))
    assert (file.read_text(), [path.name for path in tmp_path.iterdir()]) == (WRITTEN, ["c.toml"])
