"""Storms of connections, and what a daemon that is full of them still does (P24)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgpack
import psutil
import pytest
import zmq

from mlxsup.client import ConnectionLost, RequestError
from mlxsup.supervisor.runtime_folder import FILES_PER_MODEL, RESERVED_FILES
from mlxsup.supervisor.sockets.clients import MAX_REFUSED
from mlxsup.supervisor.sockets.limits import MAX_OF_ONE_PROCESS

from campaign.watch import Crowd
from support.bad.input import generate, header, pack
from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually


class LimitedDaemon(Daemon):
    """May open that many files.

    Attributes:
        open_files: the limit.
        is_soft: whether the hard limit stays, up to which a daemon raises its own.
    """

    open_files = 4096
    is_soft = False

    def start_command(self) -> list[str]:
        """The command line, under the limit."""
        line = f'ulimit {"-Sn" if self.is_soft else "-n"} {self.open_files}; exec "$@"'
        return ["sh", "-c", line, "sh", *super().start_command()]


@contextmanager
def most_files(process: psutil.Process) -> Iterator[list[int]]:
    """The last item is the most files that the process had open at any look."""
    ended, seen = threading.Event(), [process.num_fds()]

    def look() -> None:
        while not ended.wait(0.01):
            seen.append(max(seen[-1], process.num_fds()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        ended.set()
        looking.join()


def socket_path(daemon: Daemon) -> str:
    return daemon.endpoint.removeprefix("ipc://")


def test_storms_of_silent_connections_break_no_stream_P24() -> None:
    names = ["m0", "m1", "m2"]
    entry = fake(fake={"step_s": 0.005}, max_concurrency=4)
    with LimitedDaemon(dict.fromkeys(names, entry)) as daemon, daemon.client() as client:
        for name in names:
            wait_for_state(client, name, "READY")
        assert daemon.process is not None
        process = psutil.Process(daemon.process.pid)
        with most_files(process) as files, ExitStack() as crowds:
            readers = [Reader(client, n, f"s {n}", max_tokens=400).started() for n in names]
            storms = [
                crowds.enter_context(Crowd("storm", socket_path(daemon), "3000", "2"))
                for _ in range(2)
            ]
            for storm in storms:
                assert storm.result()["connected"] == 6000
            for reader, name in zip(readers, names, strict=True):
                assert reader.finished().token_ids == undisturbed(f"s {name}", 400)
        assert files[-1] < daemon.open_files - 256
        assert [row(client, name)["generation"] for name in names] == [1, 1, 1]


def test_commands_get_in_while_connections_storm_P24() -> None:
    model = fake(fake={"step_s": 0.01}, max_concurrency=16)
    with LimitedDaemon({"m": model}) as daemon, daemon.client() as client, ExitStack() as crowds:
        wait_for_state(client, "m", "READY")
        readers = [Reader(client, "m", f"s {n}", max_tokens=300).started() for n in range(16)]
        storms = [
            crowds.enter_context(Crowd("storm", socket_path(daemon), "4000", "2")) for _ in range(2)
        ]
        for _ in range(4):
            done = daemon.run("status")
            assert done.returncode == 0, done.stderr
        for storm in storms:
            assert storm.result()["connected"] == 8000
        for number, reader in enumerate(readers):
            assert reader.finished().token_ids == undisturbed(f"s {number}", 300)


class FullDaemon(LimitedDaemon):
    """Lets in 200 connections: the last 64 are for processes that have none."""

    open_files = RESERVED_FILES + FILES_PER_MODEL + 200


def test_a_full_daemon_lets_commands_of_new_processes_in_P24() -> None:
    model = fake(fake={"step_s": 0.005})
    with FullDaemon({"m": model}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        reader = Reader(client, "m", "beside", max_tokens=1000).started()
        path = socket_path(daemon)
        with ExitStack() as crowds:
            held = [crowds.enter_context(Crowd("hold", path, "150")) for _ in range(3)]
            assert is_refused(daemon)  # this process has a connection already
            for arguments in (("status",), ("unload", "m"), ("load", "m")):
                done = daemon.run(*arguments)
                assert done.returncode == 0, done.stderr
            reader.join(60.0)
            assert reader.tokens == undisturbed("beside", 1000)
            said = [crowd.result() for crowd in held]
            assert sum(one["open"] for one in said) <= 200
            assert max(one["open"] for one in said) == MAX_OF_ONE_PROCESS
        eventually(lambda: daemon.run("status").returncode == 0)
        with Crowd("hold", path, "150"), Crowd("hold", path, "150"):
            assert daemon.run("stop", timeout_s=120.0).returncode == 0


def test_who_has_128_connections_is_told_that_there_are_no_more_P24() -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        with ExitStack() as clients:
            for _ in range(MAX_OF_ONE_PROCESS - 1):
                one = clients.enter_context(RawClient(daemon.endpoint))
                one.say([header("ping", id="p")])
                assert one.hear()["id"] == "p"
            with daemon.client() as beyond, pytest.raises(RequestError) as caught:
                beyond.complete("m", prompt="x", max_tokens=2)
            assert caught.value.code == "overloaded"
            assert f"process {os.getpid()} has 128 connections" in caught.value.message
            assert client.complete("m", prompt="x", max_tokens=2).finish_reason == "length"
            assert daemon.run("status").returncode == 0
        eventually(lambda: is_served(daemon))


def is_served(daemon: Daemon) -> bool:
    """Whether a new connection of this process is served."""
    try:
        with daemon.client() as client:
            client.ping()
    except (RequestError, ConnectionError):
        return False
    return True


def test_a_client_that_is_turned_away_says_so_at_once_P24() -> None:
    with Daemon({"m": fake()}) as daemon:
        path = socket_path(daemon)
        with Crowd("hold", path, str(MAX_OF_ONE_PROCESS + MAX_REFUSED)), ExitStack() as clients:
            # The places where refusals are explained are taken by others; and so are ours.
            for _ in range(MAX_OF_ONE_PROCESS):
                one = clients.enter_context(RawClient(daemon.endpoint))
                one.say([header("ping", id="p")])
                assert one.hear()["id"] == "p"
            assert is_refused(daemon)


def is_refused(daemon: Daemon) -> bool:
    """Whether a new connection of this process is refused, in words that say why."""
    with daemon.client() as beyond, pytest.raises((RequestError, ConnectionLost)) as caught:
        beyond.ping()
    error = caught.value
    if isinstance(error, RequestError):
        return error.code == "overloaded"
    assert isinstance(error, ConnectionLost)
    return error.is_turned_away


def test_a_reload_with_too_many_models_for_the_open_files_changes_nothing_P20_P24() -> None:
    entry = fake(preload=False)
    with FullDaemon({"m": fake()}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        daemon.write_config({f"m{number}": entry for number in range(6)})
        done = daemon.run("reload")
        assert done.returncode == 78
        assert "models: 7 are too many for 472 open files" in done.stderr
        assert [one["name"] for one in client.status()["models"]] == ["m"]
        daemon.write_config({"m": fake(), "more": entry})
        assert daemon.run("reload").returncode == 0
        assert [one["name"] for one in client.status()["models"]] == ["m", "more"]


def test_a_routing_id_of_a_client_s_own_gets_its_error_and_no_stream_P1(daemon: Daemon) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as named:
        named.setsockopt(zmq.LINGER, 0)
        named.setsockopt(zmq.ROUTING_ID, b"mine")
        named.connect(daemon.endpoint)
        named.send_multipart(generate(pack({"prompt": "x"}), id="n"))
        assert named.poll(30_000)
        failed = msgpack.unpackb(named.recv())
    assert (failed["id"], failed["error"]["code"]) == ("n", "invalid_request")
    assert "routing id" in failed["error"]["message"]
    with daemon.client() as client:
        assert not row(client, "m")["running"]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon({"m": fake(fake={"step_s": 0.005})}) as daemon:
        with daemon.client() as client:
            wait_for_state(client, "m", "READY")
        yield daemon
