"""`add`, `rm` and `config set`: changes of the file, with real daemons."""

from __future__ import annotations

import json
import shutil
import tempfile
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlxsup.client import ConnectionLost, RequestError

from support.cli.cli import Terminal, run_cli
from support.cli.scripted_daemon import ScriptedDaemon
from support.daemon.daemon import Daemon, fake, row
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "Tiny-Model-4bit")


def test_running_daemon_learns_a_model_and_forgets_it(folder: Path) -> None:
    with Daemon({"m": fake()}) as daemon:
        pid = daemon.run("status", "--json").stdout
        added = daemon.run("add", str(folder), "--no-load")
        assert (added.returncode, "added tiny to " in added.stdout) == (0, True)
        assert "mlxsup chat tiny" in added.stderr
        with daemon.client() as client:
            assert [row["name"] for row in client.status()["models"]] == ["m", "tiny"]
            assert client.status()["pid"] == json.loads(pid)["pid"]
        again = json.loads(
            daemon.run("add", str(folder), "--as", "other", "--no-load", "--json").stdout
        )
        assert (again["name"], again["alias"], again["added"]) == ("tiny", "other", False)
        with daemon.client() as client:
            assert row(client, "tiny")["aliases"] == ["other"]
        alias = daemon.run("rm", "other").stdout
        assert "removed other, another name of tiny, from " in alias
        removed = daemon.run("rm", "tiny")
        assert (removed.returncode, "removed tiny from " in removed.stdout) == (0, True)
        with daemon.client() as client:  # its process may still end
            eventually(lambda: [row["name"] for row in client.status()["models"]] == ["m"])
        last = daemon.run("rm", "m")
        assert (last.returncode, "removed m from " in last.stdout) == (0, True)
        with daemon.client() as client:
            eventually(lambda: client.status()["models"] == [])
            assert client.add(str(folder), name="again")["added"] == ["again"]
        assert (folder / "config.json").exists()


def test_key_is_set_in_a_daemon_that_runs_and_in_the_file_without_one() -> None:
    with Daemon({"m": fake(), "n.1": fake(preload=False)}) as daemon, daemon.client() as client:
        stream = client.generate("m", prompt="[[fault slow=0.1]]", max_tokens=40)
        next(stream)
        done = daemon.run("config", "set", "models.n.1.aliases", "a, b/c")
        assert (done.returncode, '= ["a", "b/c"] in ' in done.stdout) == (0, True)
        assert client.complete("b/c", prompt="a", max_tokens=1).finish_reason == "length"
        done = daemon.run("config", "set", "models.m.max_concurrency", "3")
        assert (done.returncode, "m restarts with it" in done.stderr) == (0, True)
        done = daemon.run("config", "set", "supervisor.log_format", "json", "--json")
        assert json.loads(done.stdout)["later"] == ["log_format"]
        assert "takes effect" in daemon.run("config", "set", "supervisor.log_format", "json").stderr
        assert "takes effect" not in daemon.run("config", "set", "clients.x.weight", "2").stderr
        assert daemon.run("config", "get", "models.n.1.aliases").stdout == "a, b/c\n"
        for key, value, code in (
            ("models.m.max_concurrency", "-1", 64), ("models.m.memory", "1MiB", 78),
            ("models.m.pined", "1", 64), ("models.zz.pinned", "1", 1),
        ):  # fmt: skip
            before = daemon.config.read_text()
            done = daemon.run("config", "set", key, value)
            assert (done.returncode, daemon.config.read_text()) == (code, before), done.stderr
        assert len([*stream]) > 0
        assert stream.result.finish_reason == "length", "running answers end first"
        eventually(lambda: row(client, "m")["generation"] == 2)
        shown = {one["key"]: one["value"] for one in client.settings("a")["settings"]}
        assert shown['models."n.1".aliases'] == "a, b/c"
        daemon.run("stop", "--now")
        file = ["--config", str(daemon.config)]
        done = run_cli("config", "unset", "models.m.max_concurrency", *file)
        said = f"models.m.max_concurrency has its default now, and is not in {daemon.config}\n"
        assert (done.returncode, done.stdout) == (0, said), done.stderr
        got = json.loads(run_cli("config", "get", "supervisor.log_format", "--json", *file).stdout)
        assert (got["value"], got["is_set"]) == ("json", True)
        got = run_cli("config", "get", "models.m.max_concurrency", *file)
        assert (got.stdout, "is not set in" in got.stderr) == ("8\n", True)
        got = run_cli("config", "get", "models.m", *file)
        assert (got.returncode, "is a table, not a key" in got.stderr) == (64, True)
        assert "max_concurrency" not in tomllib.loads(daemon.config.read_text())["models"]["m"]
        done = run_cli("config", "set", "defaults.preload", "never", "--json", *file)
        assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (64, "usage")


def cut_off(folder: Path) -> None:
    [weights] = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-9])


def garble(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def misshape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 12}))


@pytest.mark.parametrize("spoil", [cut_off, garble])
def test_folder_that_cannot_load_is_not_added(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    spoil(broken)
    with Daemon({"m": fake(preload=False)}) as daemon:
        before = daemon.config.read_text()
        done = daemon.run("add", str(broken))
        assert (done.returncode, daemon.config.read_text()) == (1, before), done.stderr
        assert "copy or download this file again" in done.stderr


def test_load_that_fails_after_the_model_was_added_names_the_way_back(
    folder: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    misshape(broken)
    with Daemon({"m": fake(preload=False)}) as daemon:
        done = daemon.run("add", str(broken))
        assert (done.returncode, "`mlxsup rm broken --endpoint" in done.stderr) == (1, True)
        done = daemon.run("add", str(broken))
        assert (done.returncode, "mlxsup rm" in done.stderr) == (1, False), "it was there before"


WRONG = {
    "an unknown name": ("nothing", "unknown_model", "unknown_model"),
    "a dataset": ("https://h.example/datasets/a/b", "invalid_request", "not_a_model"),
    "a relative folder": ("./models", "invalid_request", "usage"),
    "a folder that is none": ("/nowhere/at/all", "invalid_request", "not_found"),
    "a folder without a model": ("/etc", "invalid_request", "model_folder"),
}


def test_daemon_refuses_what_it_cannot_serve_and_changes_nothing(folder: Path) -> None:
    with Daemon({"m": fake(aliases=["other"])}) as daemon, daemon.client() as client:
        before = daemon.config.read_text()
        for model, code, problem in WRONG.values():
            with pytest.raises(RequestError) as caught:
                client.add(model)
            assert (caught.value.code, caught.value.detail["problem"]) == (code, problem)
        with pytest.raises(RequestError, match="other is another name of m"):
            client.add(str(folder), name="other")
        assert client.add("other")["model"] == "m"
        assert daemon.config.read_text() == before
        daemon.config.write_text("= nonsense")
        with pytest.raises(RequestError, match="is not TOML"):
            client.add(str(folder))
        assert daemon.config.read_text() == "= nonsense"
        daemon.config.write_text(before)


def test_many_changes_at_once_are_all_made_and_a_reload_between_them_loses_none(
    folder: Path,
) -> None:
    with Daemon({"m": fake(preload=False)}) as daemon:
        folders = [shutil.copytree(folder, daemon.folder / f"f{n}") for n in range(4)]

        def change(n: int) -> list[str]:
            with daemon.client() as client:
                client.reload()
                return list(client.add(str(folders[n]), name=f"n{n}")["added"])

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(change, range(4))) == [[f"n{n}"] for n in range(4)]
        with daemon.client() as client:
            names = {row["name"] for row in client.status()["models"]}
        assert names == {"m", "n0", "n1", "n2", "n3"}
        assert set(tomllib.loads(daemon.config.read_text())["models"]) == names


class FilelessDaemon(Daemon):
    """A daemon that was started with `--model`, and not with its file."""

    def start_command(self) -> list[str]:
        return self.command("start", "--model", f"m={self.folder / 'm'}")


def test_daemon_without_a_file_keeps_the_model_until_it_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(tempfile.mkdtemp(prefix="mlxsup-h-", dir="/tmp"))
    monkeypatch.setenv("HOME", str(home))
    daemon = FilelessDaemon({})
    shutil.copytree(folder, daemon.folder / "m")
    daemon.endpoint = f"ipc://{home}/.mlxsup/run/client.sock"
    (daemon.folder / "run").symlink_to(home / ".mlxsup/run")
    with daemon, daemon.client() as client:
        done = client.add(str(folder), name="n")
        assert (done["added"], done["config_path"]) == (["n"], None)
        assert [row["name"] for row in client.status()["models"]] == ["m", "n"]
        assert client.remove("m")["removed"] == ["m"]
        assert client.add(str(folder))["model"] == "n"
        eventually(lambda: [row["name"] for row in client.status()["models"]] == ["n"])
        assert client.add("n", name="also")["alias"] == "also"
        assert row(client, "n")["aliases"] == ["also"]
        said = daemon.run("rm", "n").stdout
        assert said == "removed n from the daemon, which has no file\n"
    shutil.rmtree(home)


def test_daemon_that_is_killed_as_it_writes_leaves_the_file_as_it_was(folder: Path) -> None:
    dies = "import os\nfrom mlxsup.supervisor.config import entries\n"
    dies += "entries.shutil.copymode = lambda *names: os.kill(os.getpid(), 9)"
    daemon = ScriptedDaemon({"m": fake(preload=False)}).scripted(dies)
    before = daemon.config.read_text()
    with daemon:
        with daemon.client() as client, pytest.raises(ConnectionLost):
            client.add(str(folder))
        assert daemon.process is not None
        assert daemon.process.wait(60) == -9
        assert daemon.config.read_text() == before
        left = daemon.config.with_name(f"{daemon.config.name}.new")
        assert left.exists()
        daemon.scripted()
        daemon.start()
        with daemon.client() as client:
            assert client.add(str(folder))["added"] == ["tiny"]
        assert not left.exists()


def test_load_of_a_model_that_is_not_served_asks_at_a_terminal_alone(folder: Path) -> None:
    with Daemon({"m": fake(preload=False, aliases=["other"])}) as daemon:
        for words in (("load", str(folder)), ("generate", str(folder), "hi")):
            done = daemon.run(*words)
            assert (done.returncode, done.stdout) == (1, "")
            assert f"is not served yet\nhint: `mlxsup add {folder} --endpoint" in done.stderr
        with Terminal("load", str(folder), "--endpoint", daemon.endpoint) as terminal:
            terminal.expect("is not served yet. Add it now? [Y/n]")
            terminal.type("n\n")
            terminal.expect("nothing was added")
        unknown = daemon.run("load", "nothing").stderr
        assert "there is no model 'nothing'; configured: m" in unknown
        assert daemon.run("load", "other").returncode == 0
        with daemon.client() as client:
            assert [row["name"] for row in client.status()["models"]] == ["m"]
