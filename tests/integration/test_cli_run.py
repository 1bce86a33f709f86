"""`run`: from nothing to a conversation, with the daemon that every other command looks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import Client

from support.cli import ESCAPE, Terminal
from support.daemon import fake, toml_of
from support.downloads import FILES, NEEDED, REPO, WEIGHTS_NAME, contents, snapshot
from support.hub_commands import home_folder, mlxsup, variables
from support.local_hub import LocalHub, local_hub
from support.tiny_model import make_tiny_model

OTHER = "org/other"


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as hub:
        hub.add(REPO, FILES)
        hub.add(OTHER, FILES)
        yield hub


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder, which is the current one, too."""
    with home_folder() as folder:
        monkeypatch.chdir(folder)
        yield folder


def write_config(home: Path, name: str = "mlxsup.toml", **more: Any) -> Path:
    """A configuration whose daemon is not at the default place, and has the model `m`."""
    places = {"runtime_dir": f"{home}/other", "log_dir": f"{home}/logs"}
    model = fake(repo=REPO, preload=False, aliases=["em"], **more)
    path = home / name
    path.write_text(toml_of({"supervisor": places, "models.m": model}))
    return path


def status_at(endpoint: str) -> dict[str, Any]:
    with Client(endpoint) as client:
        return client.status()


@pytest.mark.mlx
def test_run_goes_from_nothing_to_an_answer(home: Path, tmp_path: Path) -> None:
    with local_hub() as hub:
        hub.add(REPO, contents(make_tiny_model(tmp_path / "m", seed=3)))
        try:
            done = mlxsup(hub, home, "run", REPO, "--json", stdin="tell me\n")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["model"] == "tiny-model"
            assert hub.fetched(WEIGHTS_NAME) == [0]
            with Client(f"ipc://{home}/.mlxsup/run/client.sock") as client:
                assert [one["repo"] for one in client.status()["models"]] == [REPO]
                generation = client.status()["models"][0]["generation"]
            again = mlxsup(hub, home, "run", REPO, "--json", stdin="more\n")
            assert again.returncode == 0, again.stderr
            other = mlxsup(hub, home, "run", OTHER)
            assert other.returncode == 1
            assert "does not serve org/other; it serves tiny-model" in other.stderr
            assert "hint: `mlxsup stop`, then `mlxsup run org/other`; it was" in other.stderr
            with Client(f"ipc://{home}/.mlxsup/run/client.sock") as client:
                assert client.status()["models"][0]["generation"] == generation
        finally:
            assert mlxsup(hub, home, "stop").returncode == 0


@pytest.mark.mlx
def test_run_on_a_terminal_asks_answers_and_leaves(home: Path, tmp_path: Path) -> None:
    with local_hub() as hub:
        hub.add(REPO, contents(make_tiny_model(tmp_path / "m", seed=3)))
        try:
            with Terminal("run", REPO, **variables(hub, home)) as terminal:
                terminal.expect("> ")
                terminal.type("tell me\r")
                terminal.expect("> ")
                with Client(f"ipc://{home}/.mlxsup/run/client.sock") as client:
                    [served] = client.status()["models"]
                assert (served["state"], served["name"]) == ("READY", "tiny-model")
                terminal.type("/exit\r")
                said = ESCAPE.sub("", terminal.end())
                assert terminal.process.returncode == 0, said
                assert "Traceback" not in said
            assert mlxsup(hub, home, "status").returncode == 0, "the daemon stays"
        finally:
            assert mlxsup(hub, home, "stop").returncode == 0


def test_run_of_a_name_needs_a_daemon(hub: LocalHub, home: Path) -> None:
    done = mlxsup(hub, home, "run", "smollm2")
    assert done.returncode == 69
    assert re.search(r"no daemon runs that serves smollm2\nhint: .*`mlxsup start", done.stderr)
    assert hub.asked == []


@pytest.mark.parametrize("called", [REPO, "m", "em"])
def test_run_starts_the_daemon_of_the_configuration_that_counts(
    hub: LocalHub, home: Path, called: str
) -> None:
    config = write_config(home)
    endpoint = f"ipc://{home}/other/client.sock"
    try:
        done = mlxsup(hub, home, "run", called, stdin="tell me\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout != ""
        assert contents(snapshot(home)) == NEEDED
        assert f"{REPO}: 0% of" in done.stderr, "downloaded where the progress is seen"
        assert re.search(r"\(pid \d+\); end it with `mlxsup stop`\n", done.stderr)
        status = status_at(endpoint)
        assert status["config_path"] == str(config)
        assert not (home / ".mlxsup" / "run").exists()
        again = mlxsup(hub, home, "run", called, "--json", stdin="more\n")
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["model"] == "m"
        assert status_at(endpoint)["pid"] == status["pid"], "the same one serves"
    finally:
        assert mlxsup(hub, home, "stop").returncode == 0


def test_run_with_a_file_names_it_in_what_ends_the_daemon(hub: LocalHub, home: Path) -> None:
    given = ["--config", str(write_config(home, "given.toml"))]
    nowhere = f"ipc://{home}/nowhere/client.sock"
    try:
        done = mlxsup(hub, home, "run", "m", *given, stdin="tell me\n", MLXSUP_ENDPOINT=nowhere)
        assert done.returncode == 0, done.stderr
        assert f"end it with `mlxsup stop --config {home}/given.toml`" in done.stderr
    finally:
        assert mlxsup(hub, home, "stop", *given).returncode == 0


@pytest.mark.parametrize(
    ("called", "says"),
    [
        (
            OTHER,
            f"mlxsup.toml, which says what one serves, does not have {OTHER}\n"
            f'hint: add a table with repo = "{OTHER}" to it, then `mlxsup run {OTHER}`\n',
        ),
        ("n", "no model is called 'n'; configured: m\n"),
    ],
)
def test_run_of_what_the_configuration_does_not_have_begins_nothing(
    hub: LocalHub, home: Path, called: str, says: str
) -> None:
    write_config(home)
    done = mlxsup(hub, home, "run", called)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert hub.asked == []
    assert mlxsup(hub, home, "status").returncode == 69
    assert not (home / ".mlxsup").exists()


@pytest.mark.parametrize("source", ["MLXSUP_ENDPOINT", "--endpoint"])
def test_run_with_an_endpoint_where_nobody_answers_begins_nothing(
    hub: LocalHub, home: Path, source: str
) -> None:
    endpoint = f"ipc://{home}/nowhere/client.sock"
    options = ["--endpoint", endpoint] if source == "--endpoint" else []
    named = {} if options else {"MLXSUP_ENDPOINT": endpoint}
    done = mlxsup(hub, home, "run", REPO, *options, **named)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr == (
        f"error: no daemon runs at {endpoint}, which {source} names\n"
        f"hint: start one there, or leave {source} out: then one is started that serves {REPO}\n"
    )
    assert hub.asked == []
    assert not (home / ".mlxsup").exists()


def test_a_daemon_with_a_file_is_given_another_model_by_that_file(
    hub: LocalHub, home: Path
) -> None:
    config = write_config(home)
    try:
        assert mlxsup(hub, home, "run", "m", stdin="tell me\n").returncode == 0
        done = mlxsup(hub, home, "run", OTHER)
        assert done.returncode == 1
        way = f'add a table with repo = "{OTHER}" to {config}, then `mlxsup reload`'
        assert done.stderr.endswith(f"hint: {way}\n")
    finally:
        assert mlxsup(hub, home, "stop").returncode == 0
