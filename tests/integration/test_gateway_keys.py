"""Keys of a real gateway: made, used and revoked by the command line while it serves."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil

from mlxsup.protocol.key_file import MARK_NAME, digest_of
from mlxsup.supervisor.config.load import EXIT_CODE

from support.cli.cli import run_cli
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, is_alive, row
from support.eventually import eventually
from support.gateway.http_daemon import CHAT, HttpDaemon, chat, everything, gateway_of

LOCAL = "http://localhost:3000"


def new_key(daemon: Daemon, *arguments: str) -> str:
    done = run_cli("key", "new", *arguments, "--config", str(daemon.config))
    assert done.returncode == 0, done.stderr
    return str(done.stdout.strip())


def key_file_of(daemon: Daemon) -> Path:
    return daemon.config.with_name("config.keys.json")


def configured(head: str, **model: Any) -> HttpDaemon:
    """Return a daemon that is not started, with these lines before its configuration."""
    daemon = HttpDaemon({"m": fake(**model)})
    daemon.config.write_text(f"{head}\n{daemon.config.read_text()}")
    return daemon


def status_of(daemon: HttpDaemon, key: str = "") -> int:
    return daemon.ask("GET", "/v1/models", key=key)[0]


def is_closed(daemon: HttpDaemon, key: str) -> bool:
    """True if all are kept out, with a sentence that names both ways out."""
    answers = [daemon.ask("GET", "/v1/models", key=key), daemon.ask("GET", "/v1/models")]
    return all(
        (status, value["error"]["code"]) == (503, "keys_unusable")
        and "`mlxsup key new NAME`" in value["error"]["message"]
        and "`mlxsup key off`" in value["error"]["message"]
        for status, value in answers
    )


def test_keys_count_from_their_making_until_they_are_turned_off(tmp_path: Path) -> None:
    head = '[clients.alice]\npriority = "interactive"\nmax_queue = 7'
    with configured(head, fake={"step_s": 0.01}) as daemon:
        assert status_of(daemon) == 200
        key = new_key(daemon, "laptop", "--account", "alice")
        eventually(lambda: status_of(daemon) == 401)
        data = json.dumps(chat("hi", max_tokens=3000, stream=True)).encode()
        asked = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        with daemon.client() as client, daemon.connect() as connection:
            connection.sendall(asked.encode() + data)
            (running,) = eventually(lambda: row(client, "m")["rows"])
            assert (running["client"], running["priority"]) == ("alice", "interactive")
            assert client.complete("m", prompt="the socket needs no key", max_tokens=3).text
        assert daemon.get("/health")[0] == 200
        listed = daemon.run("key", "list").stdout.splitlines()
        assert listed[0].split() == ["NAME", "ACCOUNT", "OPERATOR", "CREATED"]
        assert listed[1].split()[:3] == ["laptop", "alice", "no"]
        assert key not in "".join(listed)
        revoked = daemon.run("key", "revoke", "laptop")
        assert revoked.stdout == "revoked laptop\n"
        assert "Every request is refused until `mlxsup key new NAME" in revoked.stderr
        eventually(lambda: status_of(daemon, key) == 401)
        assert status_of(daemon) == 401, "revoking the last key opens nothing"
        other = tmp_path / "other.toml"
        other.write_text(daemon.config.read_text())
        for option, value in (("--endpoint", daemon.endpoint), ("--config", str(other))):
            made = run_cli("key", "new", option.strip("-"), option, value)
            assert str(key_file_of(daemon)) in made.stderr, "the file that this daemon reads"
        unsure = daemon.run("key", "off")
        assert (unsure.returncode, "add --yes" in unsure.stderr) == (64, True)
        assert status_of(daemon) == 401
        off = daemon.run("key", "off", "--yes")
        assert off.stdout == "all keys are removed\n"
        assert "within a second, requests need none" in off.stderr
        eventually(lambda: status_of(daemon) == 200)
        with daemon.client() as client:
            pid = gateway_of(client)["pid"]
            os.kill(pid, signal.SIGKILL)
            gateway_of(client, after=pid)
        assert status_of(daemon) == 200, "nor does the next process need any"
        assert key not in daemon.log_text()
        assert digest_of(key) not in daemon.log_text()


def test_public_address_needs_keys_and_stays_closed_without() -> None:
    daemon = configured("", preload=False)
    daemon.listen = "0.0.0.0:0"
    config = ("--config", str(daemon.config))
    by_option = run_cli("start", *config, "--http", daemon.listen)
    assert (by_option.returncode, "no API key exists" in by_option.stderr) == (64, True)
    daemon.config.write_text(f'[gateway]\nlisten = "0.0.0.0:0"\n{daemon.config.read_text()}')
    for refused in (run_cli("start", *config), run_cli("config", "check", str(daemon.config))):
        assert refused.returncode == EXIT_CODE
        assert f"`mlxsup key new NAME {' '.join(config)}`" in refused.stderr
    unknown = daemon.run("key", "new", "laptop")
    assert (unknown.returncode, unknown.stdout) == (64, "")
    assert "no daemon has run at" in unknown.stderr
    key = new_key(daemon, "laptop")
    assert run_cli("config", "check", str(daemon.config)).returncode == 0
    with daemon:
        assert daemon.url.startswith("http://127.0.0.1:")
        assert (status_of(daemon), status_of(daemon, key)) == (401, 200)
        off = daemon.run("key", "off", "--yes")
        assert "keys stay necessary, because gateway.listen" in off.stderr
        eventually(lambda: status_of(daemon, key) == 503)
        assert status_of(daemon) == 503
        again = new_key(daemon, "laptop")
        eventually(lambda: status_of(daemon, again) == 200)


def head_of(daemon: HttpDaemon, method: str, key: str, *lines: str) -> str:
    """Return the head of the answer to a request with these headers, in small letters."""
    with daemon.connect() as connection:
        given = [f"{method} /v1/models HTTP/1.1", f"x-api-key: {key}", *lines]
        connection.sendall("\r\n".join([*given, "Connection: close", "", ""]).encode())
        return everything(connection).partition(b"\r\n\r\n")[0].decode().lower()


def test_damaged_or_lost_file_of_keys_closes_the_gateway_until_it_is_back_P30() -> None:
    head = f'[gateway]\nhosts = ["ai.example"]\norigins = ["{LOCAL}"]'
    daemon = configured(head, fake={"step_s": 0.01})
    config = str(daemon.config)
    refused = run_cli("start", "--config", config)
    assert refused.returncode == EXIT_CODE
    assert "gateway.hosts has 'ai.example', a name that other machines use" in refused.stderr
    key, file = new_key(daemon, "laptop"), key_file_of(daemon)
    mark, moved = daemon.folder / "run" / MARK_NAME, file.with_suffix(".moved")

    def through_proxy(key: str = "") -> int:
        return daemon.ask("GET", "/v1/models", headers={"Host": "ai.example"}, key=key)[0]

    file.chmod(0o644)
    for command in (("config", "check", config), ("key", "list", "--config", config)):
        checked = run_cli(*command)
        assert checked.returncode == (73 if command[0] == "key" else 0)
        assert f"run: chmod 600 {file}" in checked.stderr
    with daemon:
        assert "the HTTP gateway refuses every request" in daemon.output
        assert is_closed(daemon, key)
        assert "keys cannot be used" in daemon.run("logs", "mlxsup-gateway").stdout
        file.chmod(0o600)
        eventually(lambda: (through_proxy(), through_proxy(key)) == (401, 200))
        assert head_of(daemon, "GET", key, "Host: evil.example").startswith("http/1.1 403 ")
        wanted = ("Host: ai.example", "Access-Control-Request-Method: GET")
        for origin, status, is_shared in ((LOCAL, 204, True), ("https://evil.example", 405, False)):
            answer = head_of(daemon, "OPTIONS", key, *wanted, f"Origin: {origin}")
            assert answer.startswith(f"http/1.1 {status} ")
            assert (f"access-control-allow-origin: {origin}\r\n" in answer) is is_shared
        with daemon.client() as client:
            stream = Reader(client, "m", "goes on", max_tokens=1500).started()
            file.rename(moved)
            eventually(lambda: through_proxy() == 503)
            assert is_closed(daemon, key)
            gateway = psutil.Process(gateway_of(client)["pid"])
            gateway.suspend()  # it has no time to write the mark again
            mark.unlink()
            gateway.kill()
            eventually(lambda: not is_alive(gateway))
            assert gateway_of(client, after=gateway.pid)["restarts"] == 1
            assert is_closed(daemon, key), "also by the next process"
            eventually(mark.exists, what="the mark of the next process")
            assert stream.finished().text
        for command in (("config", "check", config), ("doctor", "--config", config)):
            checked = run_cli(*command)
            said = f"{file} is gone, and keys were in force"
            assert said in checked.stdout + checked.stderr
        daemon.kill()
        daemon.start()
        assert through_proxy() == 503, "also by the next daemon"
        assert is_closed(daemon, key)
        moved.rename(file)
        eventually(lambda: through_proxy(key) == 200)
        assert through_proxy() == 401


class Follower:
    """A client that follows the models with a key."""

    def __init__(self, daemon: HttpDaemon, key: str) -> None:
        self._connection = daemon.connect()
        head = f"GET /models/sse HTTP/1.1\r\nHost: localhost\r\nx-api-key: {key}\r\n\r\n"
        self._connection.sendall(head.encode())
        self._received = b""
        self.until("changes from now on")

    def until(self, words: str) -> None:
        """Return when these have come; what came before them is forgotten."""
        while (found := self._received.find(words.encode())) < 0:
            piece = self._connection.recv(65536)
            assert piece, "it was cut off before"
            self._received += piece
        self._received = self._received[found + len(words) :]

    def rest(self) -> bytes:
        """Return what comes until it is cut off."""
        with self._connection:
            return self._received + everything(self._connection)


def test_operator_acts_and_others_follow() -> None:
    daemon = HttpDaemon({"m": fake(preload=False)})
    boss, laptop = new_key(daemon, "boss", "--operator"), new_key(daemon, "laptop")

    def act(action: str, key: str, model: str = "m") -> int:
        body = json.dumps({"model": model}).encode()
        return daemon.ask("POST", f"/models/{action}", body, key=key)[0]

    with daemon:
        followers = [Follower(daemon, laptop) for _ in range(2)]
        for action, status in (("load", "loaded"), ("restart", "loaded"), ("unload", "unloaded")):
            assert (act(action, laptop), act(action, boss)) == (403, 200)
            for follower in followers:
                follower.until(f'"status": "{status}"')
        assert act("load", boss, "nobody") == 404
        daemon.kill()
        for follower in followers:
            last = follower.rest()
            assert b'"code": "daemon_lost"' in last
            assert not last.endswith(b"0\r\n\r\n"), "it was cut off"
