"""Hosts and origins of the configuration, at a real gateway: let in, refused, reloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.supervisor.config.load import EXIT_CODE

from support.cli import run_cli
from support.daemon import fake
from support.http_daemon import HttpDaemon, everything, gateway_of

LOCAL = "http://localhost:3000"
EVIL = "https://evil.example"
TABLE = f'[gateway]\nhosts = ["ai.example"]\norigins = ["{LOCAL}"]\n'


def with_table(daemon: HttpDaemon, table: str) -> None:
    """Writes the daemon's file with this table, instead of the one that it has."""
    rest = re.sub(r"\[gateway\]\n(.*\n)*?\n", "", daemon.config.read_text())
    daemon.config.write_text(f"{table}\n{rest}")


class KeyedDaemon(HttpDaemon):
    """One with a key, which a name that other machines use makes necessary."""

    key = ""


@pytest.fixture(scope="module")
def daemon() -> Iterator[KeyedDaemon]:
    running = KeyedDaemon({"m": fake()})
    with_table(running, TABLE)
    made = run_cli("key", "new", "proxy", "--config", str(running.config))
    running.key = made.stdout.strip()
    with running:
        yield running


def head_of(daemon: KeyedDaemon, method: str, *lines: str) -> str:
    """The head of the answer to a request with a key and these headers, in small letters."""
    with daemon.connect() as connection:
        key = f"x-api-key: {daemon.key}"
        request = [f"{method} /v1/models HTTP/1.1", key, *lines, "Connection: close", "", ""]
        connection.sendall("\r\n".join(request).encode())
        return everything(connection).partition(b"\r\n\r\n")[0].decode().lower()


@pytest.mark.parametrize(
    ("host", "status"), [("ai.example", 200), ("localhost", 200), ("evil.example", 403)]
)
def test_the_names_that_are_listed_are_let_in_and_no_others(
    daemon: KeyedDaemon, host: str, status: int
) -> None:
    assert head_of(daemon, "GET", f"Host: {host}").startswith(f"http/1.1 {status} ")


def test_a_page_that_is_listed_gets_what_its_browser_needs(daemon: KeyedDaemon) -> None:
    host = "Host: ai.example"
    wanted = "Access-Control-Request-Method: GET"
    question = head_of(daemon, "OPTIONS", host, f"Origin: {LOCAL}", wanted)
    assert question.startswith("http/1.1 204 ")
    assert f"access-control-allow-origin: {LOCAL}\r\n" in question
    answer = head_of(daemon, "GET", host, f"Origin: {LOCAL}")
    assert answer.startswith("http/1.1 200 ")
    assert f"access-control-allow-origin: {LOCAL}\r\n" in answer
    for origin in (EVIL, "null"):
        assert "access-control" not in head_of(daemon, "GET", host, f"Origin: {origin}")
        refused = head_of(daemon, "OPTIONS", host, f"Origin: {origin}", wanted)
        assert refused.startswith("http/1.1 405 ")
        assert "access-control" not in refused


def test_a_reload_says_that_a_change_takes_effect_at_the_next_start(daemon: KeyedDaemon) -> None:
    with daemon.client() as client:
        with_table(daemon, TABLE.replace("ai.example", "other.example"))
        assert client.reload()["later"] == ["gateway"]
        assert gateway_of(client)["restarts"] == 0
    assert head_of(daemon, "GET", "Host: ai.example").startswith("http/1.1 200 ")


def test_a_wrong_value_is_a_configuration_error_that_says_what_is_expected(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    table = '[gateway]\norigins = ["https://chat.example/app"]\n'
    file.write_text(f'{table}[models.m]\nengine = "fake"\n')
    done = run_cli("config", "check", str(file))
    assert done.returncode == EXIT_CODE
    assert f"{file}:2: gateway.origins takes a scheme and a name" in done.stdout + done.stderr
    assert "not 'https://chat.example/app'" in done.stdout + done.stderr
