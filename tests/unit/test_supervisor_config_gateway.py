"""`[gateway]` and `start --http`: where it listens, and when it needs a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.cli.commands.start import with_http
from mlxsup.cli.exit_status import CliError
from mlxsup.protocol.discovery import parse_toml
from mlxsup.protocol.folders import DEFAULT_LISTEN
from mlxsup.protocol.gateway import key_need_in
from mlxsup.protocol.key_file import KeyPlace, add_key, revoke_key, turn_off
from mlxsup.supervisor.config.load import ConfigError, DaemonConfig, load_config

MODELS = '[models.m]\npath = "m"\n'
PUBLIC = "0.0.0.0:8484"
NO_KEY = " but no API key exists; `mlxsup key new NAME` creates one"


def config_of(folder: Path, table: str | None) -> DaemonConfig:
    """Return the configuration of a file with this table `[gateway]`, or with none."""
    path = folder / "c.toml"
    gateway = "" if table is None else f"[gateway]\n{table}\n"
    path.write_text(f'[supervisor]\nruntime_dir = "{folder}/run"\n{gateway}{MODELS}')
    return load_config(path)


def problem_of(folder: Path, table: str) -> str:
    """Return the one thing that is wrong with it, without the name of the file."""
    with pytest.raises(ConfigError) as caught:
        config_of(folder, table)
    (problem,) = caught.value.problems
    return problem.removeprefix(f"{folder}/c.toml:")


@pytest.fixture
def keys(tmp_path: Path) -> KeyPlace:
    """Where the keys of the file are."""
    return KeyPlace.beside(tmp_path / "c.toml", tmp_path / "run")


def test_the_address_is_that_of_the_option_then_of_the_table(tmp_path: Path) -> None:
    assert config_of(tmp_path, None).gateway is None
    assert str(config_of(tmp_path, "").gateway) == DEFAULT_LISTEN
    assert str(config_of(tmp_path, 'listen = "[::1]:9"').gateway) == "[::1]:9"
    given = with_http(config_of(tmp_path, ""), "127.0.0.1:7")
    assert (str(given.http), str(given.gateway)) == ("127.0.0.1:7", DEFAULT_LISTEN)


def test_an_address_that_is_none_is_named_and_cut(tmp_path: Path) -> None:
    found = problem_of(tmp_path, f'listen = "{"x" * 100_000}"')
    assert found.startswith(f'4: gateway.listen "{"x" * 60}" is not ')


def test_an_address_that_others_reach_needs_a_key(tmp_path: Path, keys: KeyPlace) -> None:
    table = f'listen = "{PUBLIC}"'
    expected = f"4: gateway.listen '{PUBLIC}' can be reached from other machines,{NO_KEY}"
    assert problem_of(tmp_path, table) == expected
    with pytest.raises(CliError) as caught:
        with_http(config_of(tmp_path, None), PUBLIC)
    assert "no API key exists" in caught.value.message
    add_key(keys, name="a", account="a", is_operator=False, created="")
    assert str(config_of(tmp_path, table).gateway) == PUBLIC
    assert str(with_http(config_of(tmp_path, None), PUBLIC).http) == PUBLIC
    revoke_key(keys, "a")
    assert str(config_of(tmp_path, table).gateway) == PUBLIC, "it runs, and refuses every request"
    keys.file.unlink()
    assert str(config_of(tmp_path, table).gateway) == PUBLIC, "likewise"
    turn_off(keys)
    assert problem_of(tmp_path, table) == expected


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
def test_gateway_for_others_needs_a_key(
    tmp_path: Path, keys: KeyPlace, table: str, needed: bool
) -> None:
    assert bool(key_need_in(parse_toml(table))) is needed, "as `mlxsup key off` tells"
    if not needed:
        assert config_of(tmp_path, table).gateway is not None
        return
    found = problem_of(tmp_path, table)
    assert found.startswith(f"4: gateway.{table.split()[0]} ")
    assert found.endswith(NO_KEY)
    add_key(keys, name="a", account="a", is_operator=False, created="")
    assert config_of(tmp_path, table).gateway is not None
    keys.file.write_text("{")
    assert config_of(tmp_path, table).gateway is not None, "it runs, and refuses every request"


def test_hosts_and_origins_are_kept_as_browsers_send_them(tmp_path: Path, keys: KeyPlace) -> None:
    hosts = '["ai.example", "[2001:db8::1]", "10.0.0.1"]'
    origins = '["HTTP://LocalHost:3000", "https://127.0.0.1:443", "http://localhost:8080"]'
    add_key(keys, name="a", account="a", is_operator=False, created="")
    rules = config_of(tmp_path, f"hosts = {hosts}\norigins = {origins}").gateway_rules
    assert rules.hosts == ("ai.example", "[2001:db8::1]", "10.0.0.1")
    assert rules.origins == ("http://localhost:3000", "https://127.0.0.1", "http://localhost:8080")
