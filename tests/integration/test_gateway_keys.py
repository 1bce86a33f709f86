"""Keys of a real gateway: made, used and revoked by the command line while it serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.protocol.key_file import KEYS_NAME
from mlxsup.supervisor.config.load import EXIT_CODE

from support.cli import run_cli
from support.daemon import Daemon, fake, row
from support.eventually import eventually
from support.http_daemon import HttpDaemon, everything, gateway_of

CHAT = "/v1/chat/completions"


class PublicDaemon(HttpDaemon):
    """One whose gateway other machines reach, too."""

    listen = "0.0.0.0:0"


@pytest.fixture
def daemon() -> Iterator[HttpDaemon]:
    running = HttpDaemon({"m": fake(fake={"step_s": 0.01})})
    accounts = '\n[clients.alice]\npriority = "interactive"\nmax_queue = 7\n'
    running.config.write_text(running.config.read_text() + accounts)
    with running:
        yield running


def new_key(daemon: Daemon, *arguments: str) -> str:
    """A key that the command line has made."""
    done = daemon.run("key", "new", *arguments)
    assert done.returncode == 0, done.stderr
    key: str = done.stdout.strip()
    return key


def body(**fields: object) -> bytes:
    """A chat."""
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 3, **fields}).encode()


def test_keys_count_from_the_moment_they_are_made_to_that_of_their_end(daemon: HttpDaemon) -> None:
    assert daemon.ask("POST", CHAT, body())[0] == 200
    key = new_key(daemon, "laptop")
    assert daemon.ask("POST", CHAT, body())[0] == 401
    assert daemon.ask("POST", CHAT, body(), key=key)[0] == 200
    assert daemon.ask("GET", "/health")[0] == 200
    listed = daemon.run("key", "list").stdout.splitlines()
    assert listed[0].split() == ["NAME", "ACCOUNT", "OPERATOR", "CREATED"]
    assert listed[1].split()[:3] == ["laptop", "laptop", "no"]
    assert key not in "".join(listed)
    assert daemon.run("key", "revoke", "laptop").stdout == "laptop is revoked\n"
    assert daemon.ask("POST", CHAT, body(), key=key)[0] == 401
    assert key not in daemon.log_text()
    with daemon.client() as client:
        assert client.complete("m", prompt="no key here", max_tokens=3).text
        assert gateway_of(client)["restarts"] == 0


def test_a_request_runs_in_the_class_of_its_keys_account(daemon: HttpDaemon) -> None:
    key = new_key(daemon, "laptop", "--account", "alice")
    data = body(max_tokens=3000, stream=True)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with daemon.client() as client, daemon.connect() as connection:
        connection.sendall(head.encode() + data)
        (running,) = eventually(lambda: row(client, "m")["rows"])
        assert (running["client"], running["priority"]) == ("alice", "interactive")


def test_a_long_body_with_a_wrong_key_gets_its_answer_and_nothing_behind_it(
    daemon: HttpDaemon,
) -> None:
    new_key(daemon, "laptop")
    data = body(user="x" * 4_000_000)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with daemon.connect() as connection:
        connection.sendall(head.encode() + data)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"invalid_api_key" in answer


def test_an_address_that_others_reach_is_served_with_a_key_and_refused_without_one() -> None:
    daemon = PublicDaemon({"m": fake()})
    refused = run_cli("start", "--config", str(daemon.config), "--http", daemon.listen)
    assert refused.returncode == 64
    assert "there is no key that would keep strangers out" in refused.stderr
    assert f"`mlxsup key new NAME --config {daemon.config}`" in refused.stderr
    key = new_key(daemon, "laptop")
    with daemon:
        assert daemon.url.startswith("http://0.0.0.0:")
        assert daemon.ask("GET", "/v1/models")[0] == 401
        assert daemon.ask("GET", "/v1/models", key=key)[0] == 200
        (daemon.folder / "run" / KEYS_NAME).unlink()
        assert daemon.ask("GET", "/v1/models")[0] == 401, "a lost file opens nothing"
        assert daemon.ask("GET", "/v1/models", key=key)[0] == 401


def test_a_configuration_that_needs_a_key_names_the_command_that_makes_it() -> None:
    daemon = HttpDaemon({"m": fake()})
    daemon.config.write_text(f'[gateway]\nlisten = "0.0.0.0:0"\n{daemon.config.read_text()}')
    command = ("key", "new", "NAME", "--config", str(daemon.config))
    for refused in (
        run_cli("start", "--config", str(daemon.config)),
        run_cli("config", "check", str(daemon.config)),
    ):
        assert refused.returncode == EXIT_CODE
        assert f"`mlxsup {' '.join(command)}`" in refused.stderr
    assert str(daemon.folder / "run" / KEYS_NAME) in run_cli(*command).stderr
    assert run_cli("config", "check", str(daemon.config)).returncode == 0


def test_the_first_key_says_that_all_need_one_now_and_no_keys_what_that_means() -> None:
    at = ("--config", str(HttpDaemon({"m": fake()}).config))
    assert "other machines reach refuses every request" in run_cli("key", "list", *at).stdout
    said = [run_cli("key", "new", name, *at).stderr for name in ("laptop", "phone")]
    assert ["every request over HTTP needs a key" in one for one in said] == [True, False]


def test_keys_that_others_can_read_keep_a_daemon_from_starting_and_a_gateway_from_serving() -> None:
    daemon = HttpDaemon({"m": fake()})
    daemon.config.write_text(f"[gateway]\n{daemon.config.read_text()}")
    key = new_key(daemon, "laptop")
    file = daemon.folder / "run" / KEYS_NAME
    file.chmod(0o644)
    refused = run_cli("start", "--config", str(daemon.config))
    assert refused.returncode == EXIT_CODE
    assert f"run: chmod 600 {file}" in refused.stderr
    listing = run_cli("key", "list", "--config", str(daemon.config))
    assert (listing.returncode, listing.stdout) == (73, "")
    assert f"run: chmod 600 {file}" in listing.stderr
    file.chmod(0o600)
    with daemon:
        assert daemon.ask("GET", "/v1/models", key=key)[0] == 200
        file.chmod(0o644)
        status, value = daemon.ask("GET", "/v1/models", key=key)
        assert (status, value["error"]["code"]) == (503, "keys_unusable")
        assert "keys cannot be used" in daemon.run("logs", "mlxsup-gateway").stdout
        file.chmod(0o600)
        assert daemon.ask("GET", "/v1/models", key=key)[0] == 200


class Follower:
    """Follows the models with a key.

    Args:
        daemon: whose.
        key: of anybody.
    """

    def __init__(self, daemon: HttpDaemon, key: str) -> None:
        self._connection = daemon.connect()
        head = f"GET /models/sse HTTP/1.1\r\nHost: localhost\r\nx-api-key: {key}\r\n\r\n"
        self._connection.sendall(head.encode())
        self._received = b""
        self.until("changes from now on")

    def until(self, words: str) -> None:
        """Returns when these have come; what came before them is forgotten."""
        while (found := self._received.find(words.encode())) < 0:
            piece = self._connection.recv(65536)
            assert piece, "it was cut off before"
            self._received += piece
        self._received = self._received[found + len(words) :]

    def rest(self) -> bytes:
        """What comes until it is cut off."""
        with self._connection:
            return self._received + everything(self._connection)


def test_an_operator_loads_restarts_and_unloads_and_others_follow() -> None:
    daemon = HttpDaemon({"m": fake(preload=False)})
    boss, laptop = new_key(daemon, "boss", "--operator"), new_key(daemon, "laptop")

    def act(action: str, key: str, model: str = "m") -> tuple[int, dict[str, Any]]:
        body = json.dumps({"model": model}).encode()
        return daemon.ask("POST", f"/models/{action}", body, key=key)

    with daemon:
        followers = [Follower(daemon, laptop) for _ in range(2)]

        def follow(status: str) -> None:
            for follower in followers:
                follower.until(f'"status": "{status}"')

        for action in ("load", "restart", "unload"):
            assert act(action, laptop)[0] == 403
        assert act("load", boss) == (200, {"success": True, "model": "m"})
        follow("loaded")
        (model,) = daemon.ask("GET", "/models", key=laptop)[1]["data"]
        assert model["status"] == {"value": "loaded"}
        assert act("restart", boss)[0] == 200
        follow("loaded")
        assert act("unload", boss)[0] == 200
        follow("unloaded")
        assert act("load", boss, "nobody")[0] == 404
        daemon.kill()
        for follower in followers:
            last = follower.rest()
            assert b'"code": "daemon_lost"' in last
            assert not last.endswith(b"0\r\n\r\n"), "it was cut off"
