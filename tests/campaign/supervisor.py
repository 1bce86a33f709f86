"""P2, P4, P13, P19: the supervisor or its gateway ends, or is started twice."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import psutil

from mlxsup.client import Client, ConnectionLost

from .oracle import must_be_whole
from .scenario import FAKE, Figure, Place, Scenario, Values, at_most, count
from .watch import (
    Daemon,
    ExitWatch,
    GatewayDaemon,
    TimedReader,
    doomed,
    ready,
)
from support.daemon.daemon import fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually
from support.gateway.http_daemon import STREAMED, SseReader, asked_at, gateway_of

STREAMS = 8
SLOW = {"step_s": 0.02}
ENDLESS = 4000
"""Tokens: more than a round waits for."""

ALREADY_RUNNING = 75


def streams_of(client: Client, tokens: int, streams: int = STREAMS) -> list[TimedReader]:
    """Return streams of the answers to `0`, `1` and so on, each with its first token."""
    readers = [TimedReader(client, "m", f"{n}", max_tokens=tokens) for n in range(streams)]
    return [reader.started() for reader in readers]


# ---------------------------------------------------------------- P2, P4


def lost_connections(place: Place) -> Values:
    """P2: the supervisor is killed, or stopped, under its clients."""
    values = {}
    for key, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        with doomed({"m": fake(fake=SLOW)}) as (daemon, client):
            readers = streams_of(client, ENDLESS)
            start_s = time.monotonic()
            daemon.main.send_signal(number)
            for reader in readers:
                reader.join(60.0)
                assert isinstance(reader.error, ConnectionLost), reader.error
            values[key] = max(reader.ended_at for reader in readers) - start_s
    return values


def http_streams(daemon: GatewayDaemon) -> list[SseReader]:
    """Return two streams of every path, each with its first text."""
    asked = [(path, f"{path} {n}") for path in STREAMED for n in range(2)]
    readers = [SseReader(daemon, asked_at(path, what, ENDLESS), path) for path, what in asked]
    return [reader.started() for reader in readers]


def http_daemon_dies(place: Place) -> Values:
    """P2: SIGKILL to the supervisor; then the next one is started at the same port."""
    with GatewayDaemon({"m": fake(fake=SLOW)}) as daemon:
        readers = http_streams(daemon)
        start_s = time.monotonic()
        daemon.kill()
        for reader in readers:
            reader.finished()
            assert "error" in reader.events[-1], reader.events[-1]
        lost_s = max(reader.last_at for reader in readers) - start_s
        whole = sum(reader.is_complete for reader in readers)
        daemon.listen = daemon.url.removeprefix("http://")
        start_s = time.monotonic()
        daemon.start()
        bound_s = time.monotonic() - start_s
        assert daemon.url.endswith(daemon.listen), "another port"
    return {"lost": lost_s, "whole": whole, "bound": bound_s}


def gateway_dies(place: Place) -> Values:
    """P4: SIGKILL to the gateway, next to streams over the socket of the daemon."""
    entry = fake(fake=SLOW, max_concurrency=16)
    with GatewayDaemon({"m": entry}) as daemon, daemon.client() as client:
        streams, readers = streams_of(client, 250, 4), http_streams(daemon)
        pid = gateway_of(client)["pid"]
        start_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        def is_healthy() -> bool:
            try:  # the one that dies may still accept a connection
                return daemon.get("/health")[0] == 200
            except ConnectionError:
                return False

        eventually(is_healthy, timeout_s=30.0)
        back_s = time.monotonic() - start_s
        assert gateway_of(client, after=pid)["restarts"] == 1
        whole = sum(reader.finished().is_complete for reader in readers)
        for n, stream in enumerate(streams):
            must_be_whole(stream, undisturbed(f"{n}", 250))
            assert stream.finished().resumed == 0
        assert row(client, "m")["generation"] == 1
    return {"back": back_s, "whole": whole}


# ---------------------------------------------------------------- P13

STEP_S = 0.05
WINDOWS = {"load": "loads", "prefill": "prefills", "decode": "decodes", "idle": "is idle",
           "stopped": "is stopped", "wedged": "is wedged, GIL held"}  # fmt: skip


def orphans(place: Place) -> Values:
    """P13: from the SIGKILL to the supervisor until the last of its processes has ended."""
    return {window: orphans_in(window) for window in WINDOWS}


def orphans_in(window: str) -> float:
    """Return how long the processes of a killed supervisor lived, by the kernel's own news."""
    options: dict[str, Any] = {"step_s": STEP_S, "prefill_tokens_per_step": 1}
    if window == "load":
        options["load_s"] = 30.0
    with doomed({"m": fake(fake=options)}) as (daemon, client):
        wait_for_state(client, "m", "LOADING" if window == "load" else "READY")
        eventually(lambda: row(client, "m")["pid"])
        readers = prepared(client, window)
        processes = daemon.processes()
        assert len(processes) == 2
        if window == "stopped":
            processes[1].suspend()
            eventually(lambda: processes[1].status() == psutil.STATUS_STOPPED)
        watches = [ExitWatch(process.pid) for process in processes]
        start_s = time.monotonic()
        daemon.main.kill()
        gone_s = max(watch.ended_at(window) for watch in watches) - start_s
        for reader in readers:
            reader.join(60.0)
    return gone_s


def prepared(client: Client, window: str) -> list[TimedReader]:
    """Bring the worker into the state."""
    prompts = {"prefill": "x" * 500, "decode": "x", "wedged": "[[fault stall=gil at=2]]"}
    if window not in prompts:
        return []
    reader = TimedReader(client, "m", prompts[window], max_tokens=1000)
    if window == "prefill":
        eventually(lambda: row(client, "m")["steps"] > 2)
    else:
        reader.started()

    def stands_still() -> bool:
        before = row(client, "m")["steps"]
        time.sleep(20 * STEP_S)  # the time in which twenty steps should end
        return bool(row(client, "m")["steps"] == before)

    if window == "wedged":
        eventually(stands_still, timeout_s=20.0)
    return [reader]


# ---------------------------------------------------------------- P19


def starts_at_once(place: Place) -> Values:
    """P19: many starts where none runs, then as many while one serves."""
    daemon, quiet = Daemon({"m": fake(fake=SLOW)}), subprocess.DEVNULL
    wanted = place.size(20, small=4)
    started: list[subprocess.Popen[bytes]] = []

    def start_all() -> list[subprocess.Popen[bytes]]:
        command = daemon.command("start", "--config", str(daemon.config))
        new = [subprocess.Popen(command, stdout=quiet, stderr=quiet) for _ in range(wanted)]
        started.extend(new)
        return new

    try:
        first = start_all()
        eventually(lambda: sum(p.poll() is not None for p in first) == wanted - 1, timeout_s=120.0)
        [daemon.process] = survivors = [p for p in first if p.poll() is None]
        with daemon.client() as client:
            ready(client, "m")
            stream = TimedReader(client, "m", "kept", max_tokens=600).started()
            codes = [p.wait(120.0) for p in start_all()]
            must_be_whole(stream, undisturbed("kept", 600))
            assert row(client, "m")["generation"] == 1
        codes += [p.returncode for p in first if p not in survivors]
        assert survivors[0].poll() is None
    finally:
        for process in started:
            if process is not daemon.process and process.poll() is None:
                process.kill()
        daemon.__exit__(None, None, None)
    return {"others": sum(code != ALREADY_RUNNING for code in codes)}


HTTP = "8 streams over HTTP, of all four kinds"
LOST = "until the last of 8 streams has `ConnectionLost`"

SCENARIOS = (
    Scenario(name="lost", promises="P2", where=FAKE, rounds=5, run=lost_connections, figures=(
        Figure("killed", f"supervisor SIGKILL: {LOST}", bound=at_most(3.5)),
        Figure("stopped", f"supervisor SIGSTOP: {LOST}", bound=at_most(3.5)))),
    Scenario(name="lost-http", promises="P2", where=FAKE, rounds=5, run=http_daemon_dies, figures=(
        Figure("lost", f"supervisor SIGKILL: until the last of {HTTP}, has its error event",
               bound=at_most(3.5)),
        count("whole", "the same: streams that a client would take for whole answers"),
        Figure("bound", "then from `mlxsup start` until the next gateway serves at the same port",
               bound=at_most(2.0)))),
    Scenario(name="gateway-dies", promises="P4", where=FAKE, rounds=5, run=gateway_dies, figures=(
        Figure("back", "gateway SIGKILL: until `/health` answers again; 4 streams over the socket"
               " do not notice", bound=at_most(2.0)),
        count("whole", f"the same: of {HTTP}, those that a client would take for whole"))),
    Scenario(name="orphans", promises="P13", where=FAKE, rounds=5, run=orphans, figures=tuple(
        Figure(window, f"supervisor SIGKILL, worker {state}: from the signal to the last exit",
               bound=at_most(1.0)) for window, state in WINDOWS.items())),
    Scenario(name="starts", promises="P19", where=FAKE, run=starts_at_once, figures=(
        count("others", "20 starts at once, 20 more while it streams, and the stream is whole:"
              " starts but the first that did not end with exit 75"),)),
)  # fmt: skip
