"""Keys of a real gateway: made, used and revoked by the command line while it serves."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.protocol.key_file import MARK_NAME, digest_of
from mlxsup.supervisor.config.load import EXIT_CODE

from support.cli.cli import run_cli
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, is_alive, row
from support.eventually import eventually
from support.gateway.http_daemon import HttpDaemon, everything, gateway_of

CHAT = "/v1/chat/completions"
LOCAL = "http://localhost:3000"


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
    done = run_cli("key", "new", *arguments, "--config", str(daemon.config))
    assert done.returncode == 0, done.stderr
    key: str = done.stdout.strip()
    return key


def body(**fields: object) -> bytes:
    """A chat."""
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 3, **fields}).encode()


def test_keys_count_from_their_making_to_their_end(daemon: HttpDaemon, tmp_path: Path) -> None:
    assert daemon.ask("POST", CHAT, body())[0] == 200
    key = new_key(daemon, "laptop", "--account", "alice")
    eventually(lambda: daemon.ask("POST", CHAT, body())[0] == 401)
    assert daemon.ask("POST", CHAT, body(), key=key)[0] == 200
    data = body(max_tokens=3000, stream=True)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with daemon.client() as client, daemon.connect() as connection:
        connection.sendall(head.encode() + data)
        (running,) = eventually(lambda: row(client, "m")["rows"])
        assert (running["client"], running["priority"]) == ("alice", "interactive")
    assert daemon.ask("GET", "/health")[0] == 200
    listed = daemon.run("key", "list").stdout.splitlines()
    assert listed[0].split() == ["NAME", "ACCOUNT", "OPERATOR", "CREATED"]
    assert listed[1].split()[:3] == ["laptop", "alice", "no"]
    assert key not in "".join(listed)
    assert daemon.run("key", "revoke", "laptop").stdout == "laptop is revoked\n"
    eventually(lambda: daemon.ask("POST", CHAT, body(), key=key)[0] == 401)
    assert key not in daemon.log_text()
    assert digest_of(key) not in daemon.log_text()
    with daemon.client() as client:
        assert client.complete("m", prompt="no key here", max_tokens=3).text
        assert gateway_of(client)["restarts"] == 0
    other = tmp_path / "other.toml"
    other.write_text(daemon.config.read_text())
    for option, value in (("--endpoint", daemon.endpoint), ("--config", str(other))):
        made = run_cli("key", "new", option.strip("-"), option, value)
        assert str(key_file_of(daemon)) in made.stderr, "the file that this daemon reads"


def test_public_address_needs_a_key() -> None:
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
        key_file_of(daemon).unlink()
        eventually(lambda: is_closed(daemon, key), what="a gateway that is closed")


def test_configuration_that_needs_a_key_names_the_command() -> None:
    daemon = HttpDaemon({"m": fake()})
    daemon.config.write_text(f'[gateway]\nlisten = "0.0.0.0:0"\n{daemon.config.read_text()}')
    command = ("key", "new", "NAME", "--config", str(daemon.config))
    for refused in (
        run_cli("start", "--config", str(daemon.config)),
        run_cli("config", "check", str(daemon.config)),
    ):
        assert refused.returncode == EXIT_CODE
        assert f"`mlxsup {' '.join(command)}`" in refused.stderr
    assert str(key_file_of(daemon)) in run_cli(*command).stderr
    assert run_cli("config", "check", str(daemon.config)).returncode == 0


def test_keys_that_others_can_read_close_the_gateway() -> None:
    daemon = HttpDaemon({"m": fake()})
    daemon.config.write_text(f"[gateway]\n{daemon.config.read_text()}")
    key = new_key(daemon, "laptop")
    file = key_file_of(daemon)
    file.chmod(0o644)
    checked = run_cli("config", "check", str(daemon.config))
    assert checked.returncode == 0
    assert "warning: the HTTP gateway refuses every request: " in checked.stderr
    assert f"run: chmod 600 {file}" in checked.stderr
    listing = run_cli("key", "list", "--config", str(daemon.config))
    assert (listing.returncode, listing.stdout) == (73, "")
    assert f"run: chmod 600 {file}" in listing.stderr
    with daemon:
        assert "the HTTP gateway refuses every request" in daemon.output
        assert is_closed(daemon, key)
        assert "keys cannot be used" in daemon.run("logs", "mlxsup-gateway").stdout
        with daemon.client() as client:
            assert client.complete("m", prompt="the socket needs no key", max_tokens=3).text
        file.chmod(0o600)
        eventually(lambda: daemon.ask("GET", "/v1/models", key=key)[0] == 200)


def key_file_of(daemon: Daemon) -> Path:
    return daemon.config.with_name("config.keys.json")


def is_closed(daemon: HttpDaemon, key: str) -> bool:
    """Whether nobody is let in, with a sentence that names both ways out."""
    answers = [daemon.ask("GET", "/v1/models", key=key), daemon.ask("GET", "/v1/models")]
    return all(
        status == 503
        and value["error"]["code"] == "keys_unusable"
        and "`mlxsup key new NAME`" in value["error"]["message"]
        and "`mlxsup key off`" in value["error"]["message"]
        for status, value in answers
    )


class ProxiedDaemon(HttpDaemon):
    """One behind a proxy that the world reaches."""

    def __init__(self) -> None:
        super().__init__({"m": fake(fake={"step_s": 0.01})})
        hosts = f'[gateway]\nhosts = ["ai.example"]\norigins = ["{LOCAL}"]\n'
        self.config.write_text(hosts + self.config.read_text())

    def head_of(self, method: str, key: str, *lines: str) -> str:
        """Return the head of the answer to a request with these headers, in small letters."""
        with self.connect() as connection:
            given = [f"{method} /v1/models HTTP/1.1", f"x-api-key: {key}", *lines]
            connection.sendall("\r\n".join([*given, "Connection: close", "", ""]).encode())
            return everything(connection).partition(b"\r\n\r\n")[0].decode().lower()

    def ask_through_proxy(self, key: str = "") -> int:
        """The status for a client of the world."""
        return self.ask("GET", "/v1/models", headers={"Host": "ai.example"}, key=key)[0]


def test_lost_file_of_keys_closes_the_gateway_until_it_is_back() -> None:
    daemon = ProxiedDaemon()
    refused = run_cli("start", "--config", str(daemon.config))
    assert refused.returncode == EXIT_CODE
    assert "gateway.hosts has 'ai.example', a name that other machines use" in refused.stderr
    key = new_key(daemon, "laptop")
    file = key_file_of(daemon)
    with daemon:
        assert (daemon.ask_through_proxy(), daemon.ask_through_proxy(key)) == (401, 200)
        assert daemon.head_of("GET", key, "Host: evil.example").startswith("http/1.1 403 ")
        wanted = ("Host: ai.example", "Access-Control-Request-Method: GET")
        for origin, status, is_shared in ((LOCAL, 204, True), ("https://evil.example", 405, False)):
            head = daemon.head_of("OPTIONS", key, *wanted, f"Origin: {origin}")
            assert head.startswith(f"http/1.1 {status} ")
            assert (f"access-control-allow-origin: {origin}\r\n" in head) is is_shared
        with daemon.client() as client:
            stream = Reader(client, "m", "goes on", max_tokens=1500)
            stream.started()
            file.rename(file.with_suffix(".moved"))
            eventually(lambda: daemon.ask_through_proxy() == 503)
            assert is_closed(daemon, key)
            pid = gateway_of(client)["pid"]
            os.kill(pid, signal.SIGKILL)
            assert gateway_of(client, after=pid)["restarts"] == 1
            assert is_closed(daemon, key), "also by the next process"
            assert stream.finished().text
        checked = run_cli("config", "check", str(daemon.config))
        assert f"{file} is gone, and keys were in force" in checked.stderr
        found = run_cli("doctor", "--config", str(daemon.config)).stdout
        assert f"{file} is gone, and keys were in force" in found
        daemon.kill()
        daemon.start()
        assert daemon.ask_through_proxy() == 503, "also by the next daemon"
        assert is_closed(daemon, key)
        file.with_suffix(".moved").rename(file)
        eventually(lambda: daemon.ask_through_proxy(key) == 200)
        assert daemon.ask_through_proxy() == 401


def test_keys_outlive_a_replaced_runtime_folder() -> None:
    daemon = HttpDaemon({"m": fake()})
    key = new_key(daemon, "laptop")
    with daemon:
        with daemon.client() as client:
            gateway = psutil.Process(gateway_of(client)["pid"])
            run = daemon.folder / "run"
            gateway.suspend()  # it has no time to write the mark again
            run.rename(daemon.folder / "away")
            run.mkdir(mode=0o700)
            key_file_of(daemon).unlink()
            gateway.kill()
            eventually(lambda: not is_alive(gateway))
            assert gateway_of(client, after=gateway.pid)["restarts"] == 1
            assert is_closed(daemon, key)
            eventually(lambda: (run / MARK_NAME).exists(), what="the mark in the new folder")
        (daemon.folder / "away" / "client.sock").rename(run / "client.sock")


def test_key_off_opens_the_gateway_and_revoke_does_not(
    daemon: HttpDaemon,
) -> None:
    key = new_key(daemon, "laptop")
    revoked = daemon.run("key", "revoke", "laptop")
    assert "every request is refused until `mlxsup key new NAME" in revoked.stderr
    assert "`mlxsup key off" in revoked.stderr
    eventually(lambda: daemon.ask("GET", "/v1/models", key=key)[0] == 401)
    assert daemon.ask("GET", "/v1/models")[0] == 401
    listed = daemon.run("key", "list")
    assert "every request is refused" in listed.stdout
    unsure = daemon.run("key", "off")
    assert (unsure.returncode, "add --yes" in unsure.stderr) == (64, True)
    assert daemon.ask("GET", "/v1/models")[0] == 401
    off = daemon.run("key", "off", "--yes")
    assert off.stdout == "all keys are removed\n"
    assert "within a second, requests need none" in off.stderr
    eventually(lambda: daemon.ask("GET", "/v1/models")[0] == 200)
    with daemon.client() as client:
        pid = gateway_of(client)["pid"]
        os.kill(pid, signal.SIGKILL)
        gateway_of(client, after=pid)
    assert daemon.ask("GET", "/v1/models")[0] == 200, "nor does the next process need any"


def test_key_off_opens_nothing_where_keys_are_required() -> None:
    daemon = HttpDaemon({"m": fake()})
    daemon.config.write_text(f'[gateway]\nkeys = "required"\n{daemon.config.read_text()}')
    refused = run_cli("start", "--config", str(daemon.config))
    assert (refused.returncode, "gateway.keys is" in refused.stderr) == (EXIT_CODE, True)
    key = new_key(daemon, "laptop")
    with daemon:
        assert daemon.ask("GET", "/v1/models", key=key)[0] == 200
        off = daemon.run("key", "off", "--yes")
        assert 'keys stay necessary, because gateway.keys is "required"' in off.stderr
        eventually(lambda: daemon.ask("GET", "/v1/models", key=key)[0] == 503)
        assert daemon.ask("GET", "/v1/models")[0] == 503
        again = new_key(daemon, "laptop")
        eventually(lambda: daemon.ask("GET", "/v1/models", key=again)[0] == 200)


def test_key_for_an_unknown_endpoint_is_refused() -> None:
    refused = HttpDaemon({"m": fake()}).run("key", "new", "laptop")
    assert (refused.returncode, refused.stdout) == (64, "")
    assert "no daemon has run at" in refused.stderr
    assert "--config FILE" in refused.stderr


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


def test_operator_acts_and_others_follow() -> None:
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
