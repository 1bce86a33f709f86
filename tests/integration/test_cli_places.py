"""Which daemon commands find, as users meet it: whole daemons, pipes and terminals."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli import ESCAPE, on_terminal, run_cli
from support.daemon import Daemon, fake, wait_for_state
from support.hub_caches import write_folder

WIDTHS = (40, 80, 200)


class Home:
    """An empty home, and an empty folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"HOME": str(folder), "XDG_CONFIG_HOME": ""}

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        done = run_cli(*arguments, **{**self.variables, **variables})
        return done.returncode, done.stdout, done.stderr

    def shown(self, columns: int, *arguments: str, **variables: str) -> list[str]:
        """The lines that a terminal of that many columns shows."""
        values = {"COLUMNS": str(columns), **self.variables, **variables}
        text = on_terminal(arguments, **values)
        return ESCAPE.sub("", text).splitlines()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    folder = Path("/tmp", f"mlxsup-h{os.getpid()}")  # a socket's path must be short
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    monkeypatch.chdir(folder)
    yield Home(folder)
    shutil.rmtree(folder, ignore_errors=True)


def test_the_variable_that_steers_start_steers_stop_and_no_other_daemon_ends(home: Home) -> None:
    mine, other = Daemon({"m": fake()}), Daemon({"m": fake()})
    (home.folder / "mlxsup.toml").write_text(other.config.read_text())
    with mine, other:
        code, out, _ = home.run("status", "--json", MLXSUP_CONFIG=str(mine.config))
        assert (code, json.loads(out)["endpoint"]) == (0, mine.endpoint)
        code, out, _ = home.run("stop", MLXSUP_CONFIG=str(mine.config))
        assert code == 0
        assert mine.process is not None
        assert f"(pid {mine.process.pid})" in out
        code, out, _ = home.run("status", "--json")
        assert (code, json.loads(out)["endpoint"]) == (0, other.endpoint)


def test_a_runtime_folder_of_the_default_file_leads_in_no_circle(home: Home) -> None:
    daemon = Daemon({"m": fake()})
    default = home.folder / ".mlxsup" / "config.toml"
    default.parent.mkdir()
    default.write_text(daemon.config.read_text())
    code, _, err = home.run("status")
    assert code == 69
    assert (
        err.splitlines()[1]
        == "hint: start one with `mlxsup start`, which reads ~/.mlxsup/config.toml"
    )
    with daemon:
        assert home.run("status")[0] == 0
        code, _, err = home.run("start")
        assert code == 75
        assert err.splitlines()[1] == (
            "hint: see it with `mlxsup status`, end it with `mlxsup stop`"
        )


@pytest.mark.parametrize("columns", WIDTHS)
def test_without_anything_a_newcomer_is_told_what_works(home: Home, columns: int) -> None:
    assert home.shown(columns, "status") == [
        f"error: no daemon answers at ipc://{home.folder}/.mlxsup/run/client.sock",
        "hint: start one with `mlxsup start --model FOLDER`",
    ]
    assert home.shown(columns, "htop") == [
        "error: No such command 'htop'.",
        "hint: did you mean `mlxsup top`?",
    ]
    lines = home.shown(columns, "start")
    assert lines[0].startswith("error: no configuration file: there is none of mlxsup.toml, ")
    assert "`mlxsup start --model FOLDER`" in lines[1]


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_runtime_folder_that_others_use_is_left_as_it_is(home: Home, columns: int) -> None:
    shared = home.folder / "shared"
    shared.mkdir(mode=0o755)
    (shared / "of-somebody").touch()
    file = home.folder / "mlxsup.toml"
    file.write_text('[supervisor]\nruntime_dir = "shared"\n[models.m]\nengine = "fake"\n')
    said = " ".join(home.shown(columns, "start"))
    assert f"{shared} has mode 0755, so others may reach its sockets" in said
    assert "chmod" not in said
    assert "set runtime_dir to a folder that is not there yet" in said


def test_config_path_prints_the_winner_on_stdout_and_why_on_stderr(home: Home) -> None:
    code, out, err = home.run("config", "path")
    assert (code, out) == (0, "")
    assert err.startswith("no configuration file: there is none of mlxsup.toml, ~/.config/")
    file = home.folder / "mlxsup.toml"
    file.write_text('[supervisor]\nruntime_dir = "run"\n')
    code, out, err = home.run("config", "path")
    assert (code, out) == (0, f"{file}\n")
    assert err.splitlines() == [
        "the first that exists of the usual places: ./mlxsup.toml",
        f"commands look for the daemon at ipc://{home.folder}/run/client.sock,"
        " because of ./mlxsup.toml",
    ]
    code, out, err = home.run("config", "path", "--json", MLXSUP_ENDPOINT="ipc:///x/y")
    value = json.loads(out)
    assert (code, err, value["path"]) == (0, "", str(file))
    assert value["daemon"] == {"endpoint": "ipc:///x/y", "source": "MLXSUP_ENDPOINT"}
    looked = {one["path"]: one["exists"] for one in value["looked_at"]}
    assert looked == {
        "mlxsup.toml": True,
        "~/.config/mlxsup/config.toml": False,
        "~/.mlxsup/config.toml": False,
    }


def test_start_without_a_file_says_which_option_commands_need(home: Home) -> None:
    (home.folder / "mlxsup.toml").write_text('[supervisor]\nruntime_dir = "/r"\n')
    write_folder(home.folder / "m")
    endpoint = f"ipc://{home.folder}/.mlxsup/run/client.sock"
    code, _, err = home.run("start", "--model", "m", "--detach")
    try:
        assert code == 0
        assert f"end it with `mlxsup stop --endpoint {endpoint}`" in err
        code, _, err = home.run("start", "--model", "m")
        assert code == 75
        assert f"`mlxsup status --endpoint {endpoint}`" in err
    finally:
        assert home.run("stop", "--endpoint", endpoint)[0] == 0


# ---------------------------------------------------------------- logs


@pytest.mark.parametrize("option", ["--endpoint", "--config"])
def test_logs_are_shown_when_nobody_is_left_to_ask(home: Home, option: str) -> None:
    daemon = Daemon({"m": fake()}, {"log_dir": f"{home.folder}/elsewhere"})
    value = daemon.endpoint if option == "--endpoint" else str(daemon.config)
    with daemon:
        with daemon.client() as client:
            wait_for_state(client, "m", "READY")
        daemon.kill()
        # The file has been edited since: what the daemon wrote down counts.
        daemon.write_config({"m": fake()}, {"log_dir": "/nowhere"})
        code, out, err = home.run("logs", "m", option, value)
        assert code == 0
        assert "--- generation 1 pid " in out
        assert err == (
            f"no daemon answers at {daemon.endpoint}; these are the logs in"
            f" {home.folder}/elsewhere\n"
        )


def test_two_daemons_do_not_share_a_folder_for_logs(home: Home) -> None:
    with Daemon({"m": fake()}) as first:
        second = Daemon({"m": fake()}, {"log_dir": str(first.logs)})
        code, out, err = home.run("start", "--config", str(second.config))
        assert (code, out) == (73, "")
        assert err.splitlines()[0] == f"error: another daemon writes its logs to {first.logs}"
        assert "set log_dir to another folder" in err
        shutil.rmtree(second.folder)
