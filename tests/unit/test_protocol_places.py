"""Which daemon and which file count: one rule for every command and client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.client import Client
from mlxsup.protocol.discovery import (
    Place,
    UnreadableConfigError,
    find_config,
    find_place,
    log_dir_of,
    read_toml,
    runtime_dir_of,
)

from support.daemon.played_daemon import short_folder


class Home:
    """A home and a working folder, in which configuration files appear."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        for name in ("MLXSUP_ENDPOINT", "MLXSUP_CONFIG", "XDG_CONFIG_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(folder / "h"))
        (folder / "cwd").mkdir()
        monkeypatch.chdir(folder / "cwd")

    def write(self, name: str, path: str) -> Path:
        """A file whose daemon has a runtime folder of this name."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'[supervisor]\nruntime_dir = "/r/{name}"\n')
        return file

    def set(self, name: str, value: str) -> None:
        self._monkeypatch.setenv(name, value)

    def found(self, endpoint: str | None = None, config: Path | None = None) -> tuple[str, str]:
        """The runtime folder's name, and what it was found by."""
        place = find_place(endpoint, config)
        return Path(place.endpoint).parent.name, place.source


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    with short_folder() as folder:  # a socket of a place that is found must fit
        yield Home(folder, monkeypatch)


def test_each_place_beats_those_behind_it(home: Home) -> None:
    assert home.found() == ("run", "")
    home.write("home", "h/.mlxsup/config.toml")
    assert home.found() == ("home", "~/.mlxsup/config.toml")
    home.write("user", "h/.config/mlxsup/config.toml")
    assert home.found() == ("user", "~/.config/mlxsup/config.toml")
    home.set("XDG_CONFIG_HOME", "xdg")
    wrong = home.write("wrong", "cwd/xdg/mlxsup/config.toml")
    assert home.found() == ("user", "~/.config/mlxsup/config.toml"), "it is no absolute path"
    wrong.unlink()
    home.write("xdg", "xdg/mlxsup/config.toml")
    home.set("XDG_CONFIG_HOME", str(home.folder / "xdg"))
    assert home.found() == ("xdg", "$XDG_CONFIG_HOME")
    home.write("working", "cwd/mlxsup.toml")
    assert home.found() == ("working", "./mlxsup.toml")
    home.set("MLXSUP_CONFIG", str(home.write("variable", "variable.toml")))
    assert home.found() == ("variable", "MLXSUP_CONFIG")
    home.set("MLXSUP_ENDPOINT", "ipc:///r/endpoint/client.sock")
    assert home.found() == ("endpoint", "MLXSUP_ENDPOINT")
    config = find_config()
    assert config is not None
    assert config.source == "MLXSUP_CONFIG", "an endpoint is no file"
    option = home.write("option", "option.toml")
    assert home.found(config=option) == ("option", "--config")
    assert home.found("ipc:///r/named/client.sock", option) == ("named", "--endpoint")


def test_named_file_counts_even_if_missing(home: Home) -> None:
    home.write("working", "cwd/mlxsup.toml")
    given = find_config(Path("/x.toml"))
    assert given is not None
    assert (given.path, given.source, given.is_there) == (Path("/x.toml"), "--config", False)
    home.set("MLXSUP_CONFIG", "/nowhere.toml")
    with pytest.raises(UnreadableConfigError, match=r"^cannot read /nowhere\.toml: No such file"):
        find_place()


def test_broken_link_is_an_error(home: Home) -> None:
    (home.folder / "cwd" / "mlxsup.toml").symlink_to("nowhere")
    with pytest.raises(UnreadableConfigError, match=r"^cannot read mlxsup\.toml: "):
        find_place()


def test_client_finds_the_daemon_by_the_same_rule(home: Home) -> None:
    home.write("working", "cwd/mlxsup.toml")
    with Client() as client:
        assert client.endpoint == "ipc:///r/working/client.sock"


def test_relative_folders_are_relative_to_the_file(home: Home) -> None:
    real = home.folder / "real" / "some.toml"
    real.parent.mkdir()
    real.write_text('[supervisor]\nruntime_dir = "../run"\nlog_dir = "logs"\n')
    link = home.folder / "cwd" / "mlxsup.toml"
    link.symlink_to(real)
    endpoint = f"ipc://{home.folder.resolve()}/run/client.sock"
    assert find_place() == Place(endpoint, "./mlxsup.toml", Path("mlxsup.toml"))
    assert log_dir_of(link) == home.folder.resolve() / "real" / "logs"


def test_own_runtime_folder_has_own_logs(home: Home) -> None:
    file = home.write("some", "some.toml")
    assert log_dir_of(file) == Path("/r/some/logs")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r"))
    assert read_toml(file)["supervisor"], "as PowerShell or an old Mac writes it"
    assert log_dir_of(file) == Path("/r/some/logs")
    file.write_text("")
    assert log_dir_of(file) == home.folder / "h/.mlxsup/logs"
    file.write_text('[supervisor]\nruntime_dir = "~/.mlxsup/run"\n')
    assert log_dir_of(file) == home.folder / "h/.mlxsup/logs"


@pytest.mark.parametrize("key", ["runtime_dir", "log_dir"])
def test_folder_that_is_no_text_is_refused_by_its_key(home: Home, key: str) -> None:
    file = home.folder / "some.toml"
    file.write_text(f"[supervisor]\n{key} = 7\n")
    with pytest.raises(UnreadableConfigError, match=f"supervisor.{key} must be a string"):
        log_dir_of(file) if key == "log_dir" else find_place(config=file)


NO_TOML = {
    "an error": "a = = 3\n",
    "nested": "x = " + "[" * 100_000,
    "digits": f"x = {'9' * 5000}",
    "a comment": '# runtime_dir = "other"\n[\n',
    "two": 'runtime_dir = "a"\nruntime_dir = "b"\n',
    "half": '[models.f]\npath = "',
}


@pytest.mark.parametrize("path", ["h/.mlxsup/config.toml", "h/.config/mlxsup/config.toml"])
@pytest.mark.parametrize("text", NO_TOML.values(), ids=NO_TOML)
def test_default_daemon_is_found_while_the_users_file_is_no_toml(
    home: Home, path: str, text: str
) -> None:
    file = home.write("some", path)
    file.write_text(text)
    default = f"ipc://{home.folder}/h/.mlxsup/run/client.sock"
    assert [find_place().endpoint, find_place(config=file).endpoint] == [default, default]


@pytest.mark.parametrize("path", ["some.toml", "cwd/mlxsup.toml"])
@pytest.mark.parametrize("text", [*NO_TOML.values(), "supervisor = 3"], ids=[*NO_TOML, "no table"])
def test_file_that_does_not_say_where_its_daemon_is_means_no_other_daemon(
    home: Home, path: str, text: str
) -> None:
    file = home.write("some", path)
    file.write_text(text)
    words = "supervisor must be a table" if text == "supervisor = 3" else "is not TOML"
    with pytest.raises(UnreadableConfigError, match=words):
        find_place(config=file if path == "some.toml" else None)


@pytest.mark.parametrize(
    "text", ['[supervisor]\nruntime_dir = "run"  # short\na = = 3\n', "  runtime_dir='run'\n[\n"]
)
def test_daemon_is_found_by_its_line_while_its_file_is_no_toml(tmp_path: Path, text: str) -> None:
    (config := tmp_path / "c.toml").write_text(text)
    assert runtime_dir_of(config) == tmp_path / "run"
