"""`[gateway]` and `start --http`: what they take, and when they need a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.cli.commands.start import with_http
from mlxsup.cli.exit_status import CliError
from mlxsup.protocol.gateway import DEFAULT_LISTEN
from mlxsup.protocol.key_file import KeyPlace, add_key, revoke_key, turn_off
from mlxsup.supervisor.config import gateway_table
from mlxsup.supervisor.config.load import ConfigError, DaemonConfig, load_config

MODELS = '[models.m]\npath = "m"\n'


def config_of(folder: Path, text: str) -> DaemonConfig:
    """The configuration of a file with this text."""
    path = folder / "c.toml"
    path.write_text(text)
    return load_config(path)


def problems_of(folder: Path, text: str) -> list[str]:
    """What is wrong with it, without the name of the file."""
    with pytest.raises(ConfigError) as caught:
        config_of(folder, text)
    return [problem.removeprefix(f"{folder}/c.toml:") for problem in caught.value.problems]


def test_without_the_table_there_is_no_gateway(tmp_path: Path) -> None:
    assert config_of(tmp_path, MODELS).gateway is None


def test_an_empty_table_listens_at_the_default_address(tmp_path: Path) -> None:
    assert str(config_of(tmp_path, f"[gateway]\n{MODELS}").gateway) == DEFAULT_LISTEN
    given = config_of(tmp_path, f'[gateway]\nlisten = "[::1]:9"\n{MODELS}').gateway
    assert str(given) == "[::1]:9"


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extra were not installed."""
    monkeypatch.setattr(gateway_table, "find_spec", lambda name: None)


@pytest.mark.usefixtures("without_extra")
def test_without_the_extra_the_table_is_refused_with_the_command_that_helps(tmp_path: Path) -> None:
    (found,) = problems_of(tmp_path, f"[gateway]\n{MODELS}")
    assert found.endswith(
        "gateway.listen needs starlette, uvicorn, httptools, prometheus_client: pip install"
        " 'mlxsup[gateway]'"
    )
    assert config_of(tmp_path, MODELS).gateway is None, "nothing else is"


@pytest.mark.usefixtures("without_extra")
def test_without_the_extra_the_option_is_refused_as_well(tmp_path: Path) -> None:
    with pytest.raises(CliError) as caught:
        with_http(config_of(tmp_path, MODELS), DEFAULT_LISTEN)
    assert "--http needs starlette, uvicorn, httptools, prometheus_client" in caught.value.message
    assert "pip install 'mlxsup[gateway]'" in caught.value.message
    assert caught.value.status == 64


def test_the_option_takes_precedence_over_the_table(tmp_path: Path) -> None:
    configuration = config_of(tmp_path, f"[gateway]\n{MODELS}")
    given = with_http(configuration, "127.0.0.1:7")
    assert (str(given.http), str(given.gateway)) == ("127.0.0.1:7", DEFAULT_LISTEN)


# ---------------------------------------------------------------- keys

PUBLIC = "0.0.0.0:8484"


def keys_in(folder: Path) -> KeyPlace:
    """Where the keys of the file in this folder are."""
    return KeyPlace.beside(folder / "c.toml", folder / "run")


def with_run(folder: Path, listen: str) -> str:
    """A file whose runtime folder is in this folder."""
    return f'[supervisor]\nruntime_dir = "{folder}/run"\n[gateway]\nlisten = "{listen}"\n{MODELS}'


def test_an_address_that_others_reach_needs_a_key(tmp_path: Path) -> None:
    text, keys = with_run(tmp_path, PUBLIC), keys_in(tmp_path)
    expected = (
        "4: gateway.listen '0.0.0.0:8484' can be reached from other machines, and there is no key"
        " that would keep strangers out: `mlxsup key new NAME` makes one"
    )
    assert problems_of(tmp_path, text) == [expected]
    add_key(keys, name="a", account="a", is_operator=False, created="")
    assert str(config_of(tmp_path, text).gateway) == PUBLIC
    revoke_key(keys, "a")
    assert str(config_of(tmp_path, text).gateway) == PUBLIC, "it runs, and refuses every request"
    keys.file.unlink()
    assert str(config_of(tmp_path, text).gateway) == PUBLIC, "likewise"
    turn_off(keys)
    assert problems_of(tmp_path, text) == [expected]


def test_the_option_needs_a_key_as_well(tmp_path: Path) -> None:
    configuration = config_of(tmp_path, with_run(tmp_path, "127.0.0.1:0"))
    with pytest.raises(CliError) as caught:
        with_http(configuration, PUBLIC)
    assert "there is no key that would keep strangers out" in caught.value.message
    add_key(keys_in(tmp_path), name="a", account="a", is_operator=False, created="")
    assert str(with_http(configuration, PUBLIC).http) == PUBLIC


@pytest.mark.parametrize(
    ("table", "needed"),
    [
        ("", False),
        ('hosts = ["localhost", "127.0.0.7", "[::1]", "a.localhost", "LOCALHOST"]', False),
        ('origins = ["http://localhost:3000", "http://a.localhost"]', False),
        ('keys = "auto"', False),
        ('keys = "required"', True),
        ('hosts = ["localhost", "ai.example"]', True),
        ('hosts = ["localhost.example"]', True),
        ('hosts = ["0.0.0.0"]', True),
        ('hosts = ["10.0.0.1"]', True),
        ('origins = ["http://localhost", "https://chat.example"]', True),
    ],
)
def test_gateway_for_others_needs_a_key(tmp_path: Path, table: str, needed: bool) -> None:
    listen = 'listen = "127.0.0.1:8484"\n'
    text = with_run(tmp_path, "127.0.0.1:8484").replace(listen, f"{listen}{table}\n")
    without = with_run(tmp_path, "127.0.0.1:8484").replace(f"[gateway]\n{listen}", "")
    if not needed:
        assert config_of(tmp_path, text).gateway is not None
        return
    (found,) = problems_of(tmp_path, text)
    assert found.startswith(f"5: gateway.{table.split()[0]} ")
    assert found.endswith(
        "and there is no key that would keep strangers out: `mlxsup key new NAME` makes one"
    )
    assert config_of(tmp_path, without).gateway is None, "without a gateway no key is needed"
    add_key(keys_in(tmp_path), name="a", account="a", is_operator=False, created="")
    assert config_of(tmp_path, text).gateway is not None
    keys_in(tmp_path).file.write_text("{")
    assert config_of(tmp_path, text).gateway is not None, "it runs, and refuses every request"


# ---------------------------------------------------------------- hosts and origins


def test_hosts_and_origins_are_kept_as_browsers_send_them(tmp_path: Path) -> None:
    hosts = '["ai.example", "[2001:db8::1]", "10.0.0.1"]'
    origins = '["HTTP://LocalHost:3000", "https://127.0.0.1:443", "http://localhost:8080"]'
    text = with_run(tmp_path, "127.0.0.1:8484").replace(
        "[gateway]\n", f"[gateway]\nhosts = {hosts}\norigins = {origins}\n"
    )
    add_key(keys_in(tmp_path), name="a", account="a", is_operator=False, created="")
    rules = config_of(tmp_path, text).gateway_rules
    assert rules.hosts == ("ai.example", "[2001:db8::1]", "10.0.0.1")
    assert rules.origins == ("http://localhost:3000", "https://127.0.0.1", "http://localhost:8080")
