"""`[gateway]` and `start --http`: what they take, and what they need."""

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


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ('listen = "here"', "2: gateway.listen 'here' is not an address of this machine"),
        ("listen = 8484", "2: gateway.listen takes an address of this machine and a port"),
        ('port = "8484"', "2: unknown key gateway.port"),
    ],
)
def test_what_is_wrong_with_the_table_is_said(tmp_path: Path, table: str, problem: str) -> None:
    (found,) = problems_of(tmp_path, f"[gateway]\n{table}\n{MODELS}")
    assert found.startswith(problem)


def test_something_else_than_a_table_is_refused(tmp_path: Path) -> None:
    assert problems_of(tmp_path, f"gateway = 3\n{MODELS}") == ["1: gateway takes a table, not 3"]


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


def test_a_key_of_the_gateway_in_another_table_is_shown_where_it_belongs(tmp_path: Path) -> None:
    (found,) = problems_of(tmp_path, f'[supervisor]\nlisten = "127.0.0.1:1"\n{MODELS}')
    assert found == "2: unknown key supervisor.listen; it belongs to [gateway]"


@pytest.mark.parametrize("name", ["mlxsup-gateway", "MLXSUP-gateway"])
def test_no_model_has_the_name_of_the_gateways_log(tmp_path: Path, name: str) -> None:
    (found,) = problems_of(tmp_path, f'[models.{name}]\npath = "m"\n')
    assert found == f"1: models.{name}: the name mlxsup-gateway is the daemon's own"


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
def test_what_others_may_reach_needs_a_key_by_one_rule(
    tmp_path: Path, table: str, needed: bool
) -> None:
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


HOST_WORDS = "2: gateway.hosts takes names without a scheme, a port or a path, such as"
ORIGIN_WORDS = "2: gateway.origins takes a scheme and a name, with a port if it is not the usual"


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ('hosts = "ai.example"', "2: gateway.hosts takes an array of names, without schemes"),
        ("hosts = [3]", "2: gateway.hosts takes an array of names, without schemes"),
        *(
            (f'hosts = ["{host}"]', HOST_WORDS)
            for host in ("", "a b", "https://a", "a:80", "a/b", "*", "*.a", "a\\r\\nb", "a" * 300)
        ),
        ("origins = 3", "2: gateway.origins takes an array of schemes and names"),
        *(
            (f'origins = ["{origin}"]', ORIGIN_WORDS)
            for origin in (
                "", "*", "null", "localhost", "http://a b", "http://localhost/", "http://a/b",
                "http://", "http://localhost:x", "http://*.example", "http://localhost\\n",
                "http://u:p@localhost",
            )
        ),
        ("hosts = [" + '"a",' * 33 + "]", "2: gateway.hosts takes at most 32, not 33"),
    ],
)  # fmt: skip
def test_what_is_no_host_or_origin_is_said_to_be_none(
    tmp_path: Path, table: str, problem: str
) -> None:
    (found,) = problems_of(tmp_path, f"[gateway]\n{table}\n{MODELS}")
    assert found.startswith(problem)
