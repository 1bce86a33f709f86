"""Clients that go, stop, flood, or come in thousands, and what it costs others (P1, P15, P16, P18).

Real: daemons with fake engines, client processes, raw sockets. In tests/integration: frames in
test_bad_input.py, ids in test_supervisor_clients.py, storms in test_supervisor_hostile_clients.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
import pytest

from mlxsup.client import Client, ConnectionLost, RequestError
from mlxsup.supervisor.runtime_folder import FILES_PER_MODEL, RESERVED_FILES
from mlxsup.supervisor.sockets.limits import MAX_OF_ONE_PROCESS

from campaign.watch import Crowd
from support.bad.input import generate, pack
from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

FLOOD = 2000


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    model = fake(fake={"step_s": 0.002}, max_concurrency=8)
    daemon = Daemon({"m": model, "other": fake(fake={"step_s": 0.005})})
    with daemon.config.open("a") as config:
        config.write("[clients.beside]\n")
    with daemon:
        with daemon.client() as client:
            for name in ("m", "other"):
                wait_for_state(client, name, "READY")
        yield daemon
        with daemon.client() as client:
            assert [row(client, name)["generation"] for name in ("m", "other")] == [1, 1]


def is_quiet(client: Client) -> bool:
    """True if nothing runs or waits on `m`."""
    seen = row(client, "m")
    return not seen["running"] and not seen["queued"]


def supervisor_of(daemon: Daemon) -> psutil.Process:
    assert daemon.process is not None
    return psutil.Process(daemon.process.pid)


def test_a_flood_of_requests_is_refused_or_served_and_others_are_served_P16(
    daemon: Daemon,
) -> None:
    body = pack({"prompt": "flood", "max_tokens": 2})
    with RawClient(daemon.endpoint) as flood, daemon.client() as client:
        ends: Counter[str] = Counter()
        ids: set[str] = set()

        def hear_until(count: int) -> None:
            while len(ids) < count:
                message = flood.hear(60.0)
                assert message["id"] not in ids, "two ends"
                ids.add(message["id"])
                is_done = message["type"] == "done"
                ends["done" if is_done else message["error"]["code"]] += 1

        for number in range(FLOOD):
            flood.say(generate(body, id=f"f{number}"))
            if number % 1000 == 999:
                # Where the flood takes long, a client that reads nothing meanwhile is given up.
                hear_until(number // 2)
        other = Reader(client, "other", "beside", max_tokens=50, client="beside")
        same = Reader(client, "m", "beside", max_tokens=50, client="beside")
        hear_until(FLOOD)
        assert set(ends) == {"done", "overloaded"}
        assert ends["done"] >= 64, ends
        assert other.finished().token_ids == undisturbed("beside", 50)
        assert same.finished().token_ids == undisturbed("beside", 50)
        eventually(lambda: is_quiet(client))


def test_clients_that_come_and_go_in_the_same_instant_leave_nothing_P18(daemon: Daemon) -> None:
    supervisor = supervisor_of(daemon)
    with daemon.client() as client:
        client.ping()
        before = supervisor.num_fds()
        for number in range(50):
            with RawClient(daemon.endpoint) as peer:
                peer.say(generate(pack({"prompt": f"n{number}"}), id="x"))
        eventually(lambda: is_quiet(client))
        eventually(lambda: supervisor.num_fds() <= before)


# ---------------------------------------------------------------- storms of connections


class LimitedDaemon(Daemon):
    """May open `open_files` files, and raises its soft limit no further."""

    open_files = 4096

    def start_command(self) -> list[str]:
        line = f'ulimit -n {self.open_files}; exec "$@"'
        return ["sh", "-c", line, "sh", *super().start_command()]


class FullDaemon(LimitedDaemon):
    """Lets in 200 connections: the last 64 are for processes that have none."""

    open_files = RESERVED_FILES + FILES_PER_MODEL + 200


@contextmanager
def most_files(process: psutil.Process) -> Iterator[list[int]]:
    """Yield a list whose last item is the most files that the process had open at any look."""
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


def test_storms_of_silent_connections_break_no_stream_and_no_command_P24() -> None:
    entry = fake(fake={"step_s": 0.005}, max_concurrency=4)
    with LimitedDaemon({"m": entry}) as daemon, daemon.client() as client, ExitStack() as crowds:
        wait_for_state(client, "m", "READY")
        path = daemon.endpoint.removeprefix("ipc://")
        with most_files(supervisor_of(daemon)) as files:
            readers = [Reader(client, "m", f"s {n}", max_tokens=400).started() for n in range(4)]
            storms = [crowds.enter_context(Crowd("storm", path, "1500", "2")) for _ in range(2)]
            done = daemon.run("status")
            assert done.returncode == 0, done.stderr
            for storm in storms:
                assert storm.result()["connected"] == 3000
            for number, reader in enumerate(readers):
                assert reader.finished().token_ids == undisturbed(f"s {number}", 400)
        assert files[-1] < daemon.open_files - 256
        assert row(client, "m")["generation"] == 1


def test_a_full_daemon_lets_commands_of_new_processes_in_P20_P24() -> None:
    more = fake(preload=False)
    with FullDaemon({"m": fake(fake={"step_s": 0.005})}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        daemon.write_config({f"m{number}": more for number in range(6)})
        refused = daemon.run("reload")
        assert refused.returncode == 78
        assert "models: 7 are too many for 472 open files" in refused.stderr
        assert [one["name"] for one in client.status()["models"]] == ["m"]
        reader = Reader(client, "m", "beside", max_tokens=1000).started()
        path = daemon.endpoint.removeprefix("ipc://")
        with ExitStack() as crowds:
            held = [crowds.enter_context(Crowd("hold", path, "150")) for _ in range(3)]
            assert is_refused(daemon)  # this process has a connection already
            for arguments in (("unload", "m"), ("load", "m")):
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


def is_refused(daemon: Daemon) -> bool:
    """True if a new connection of this process is refused, in words that say why."""
    with daemon.client() as beyond, pytest.raises((RequestError, ConnectionLost)) as caught:
        beyond.ping()
    error = caught.value
    if isinstance(error, RequestError):
        return error.code == "overloaded"
    assert isinstance(error, ConnectionLost)
    return error.is_turned_away
