"""P2, P12, P19, P20: the supervisor ends, is started twice, or has to read a bad file."""

from __future__ import annotations

import signal
import subprocess
import time

from mlxsup.client import Client, ConnectionLost, RequestError

from .bounds import at_most, equals
from .daemons import Daemon
from .measure import FAKE, Figure, Measure, Place, Values
from .watching import TimedReader
from support.daemon import fake, is_alive, row
from support.eventually import eventually

STREAMS = 8
SLOW = {"step_s": 0.02}
ENDLESS = 4000
"""Tokens: more than a round waits for."""

DRAIN_S = 2.0
EXIT_GRACE_S = 5.0
ALREADY_RUNNING = 75
BAD_CONFIGURATION = 78


def start_streams(
    client: Client, model: str, max_tokens: int, count: int = STREAMS
) -> list[TimedReader]:
    """Streams of the answers to `0`, `1` and so on, each with its first token."""
    readers = [TimedReader(client, model, f"{n}", max_tokens=max_tokens) for n in range(count)]
    for reader in readers:
        reader.started()
    return readers


def lost_connections(place: Place) -> Values:
    """P2: the supervisor is killed, or stopped, under its clients."""
    return {"killed": lost_after(signal.SIGKILL), "stopped": lost_after(signal.SIGSTOP)}


def lost_after(number: signal.Signals) -> float:
    """From before the signal until the last of the streams has ended."""
    daemon = Daemon({"m": fake(fake=SLOW)})
    try:
        daemon.start()
        assert daemon.process is not None
        with daemon.client() as client:
            readers = start_streams(client, "m", ENDLESS)
            start_s = time.monotonic()
            daemon.process.send_signal(number)
            for reader in readers:
                reader.join(60.0)
                assert isinstance(reader.error, ConnectionLost), reader.error
        return max(reader.ended_at for reader in readers) - start_s
    finally:
        daemon.kill()
        daemon.__exit__(None, None, None)


# ---------------------------------------------------------------- P12


def wait_for_exit(daemon: Daemon) -> float:
    """When the supervisor ended; it and all that it had must be gone."""
    assert daemon.process is not None
    processes = daemon.processes()
    daemon.process.wait(90.0)
    ended_at = time.monotonic()
    assert not any(is_alive(process) for process in processes), "children are left"
    return ended_at


def finishing_drain() -> Values:
    """SIGTERM while streams run that end in time."""
    with Daemon({"m": fake(fake=SLOW)}) as daemon, daemon.client() as client:
        readers = start_streams(client, "m", 50)
        assert daemon.process is not None
        start_s = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        eventually(lambda: is_refused(client), timeout_s=20.0)
        refused_s = time.monotonic() - start_s
        exit_s = wait_for_exit(daemon) - start_s
        for reader in readers:
            assert len(reader.finished().token_ids) == 50
    return {"refused": 1000 * refused_s, "drained": exit_s}


def is_refused(client: Client) -> bool:
    """Whether a new request is answered by `shutting_down`."""
    try:
        client.complete("m", prompt="late", max_tokens=1)
    except RequestError as error:
        code = error.code
    else:
        return False
    assert code == "shutting_down", code
    return True


def cut_drain() -> float:
    """SIGTERM while streams run that would not end; returns how long the exit took."""
    limit = {"drain_timeout_s": DRAIN_S}
    with Daemon({"m": fake(fake=SLOW)}, limit) as daemon, daemon.client() as client:
        readers = start_streams(client, "m", ENDLESS)
        assert daemon.process is not None
        start_s = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        exit_s = wait_for_exit(daemon) - start_s
        for reader in readers:
            assert reader.failed().code in ("shutting_down", "worker_crashed"), reader.error
    return exit_s


def second_signal() -> float:
    """A second SIGTERM in a long drain; returns how long the exit took from there."""
    limit = {"drain_timeout_s": 60.0}
    with Daemon({"m": fake(fake=SLOW)}, limit) as daemon, daemon.client() as client:
        readers = start_streams(client, "m", ENDLESS)
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGTERM)
        eventually(lambda: is_refused(client), timeout_s=20.0)
        start_s = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        exit_s = wait_for_exit(daemon) - start_s
        for reader in readers:
            reader.failed()
    return exit_s


def asked_to_end(place: Place) -> Values:
    """P12: SIGTERM, in three situations."""
    return {**finishing_drain(), "cut": cut_drain(), "second": second_signal()}


# ---------------------------------------------------------------- P19, P20


def start_again(daemon: Daemon, count: int) -> list[subprocess.Popen[bytes]]:
    """That many more starts on the same runtime folder, at once."""
    command = daemon.command("start", "--config", str(daemon.config))
    quiet = subprocess.DEVNULL
    return [subprocess.Popen(command, stdout=quiet, stderr=quiet) for _ in range(count)]


def starts_at_once(place: Place) -> Values:
    """P19: many starts where none runs, then as many while one serves."""
    count = place.sizes.starts
    daemon = Daemon({"m": fake(fake=SLOW)})
    start_s = time.monotonic()
    started = start_again(daemon, count)
    try:
        eventually(lambda: sum(p.poll() is not None for p in started) == count - 1, timeout_s=120.0)
        alone_s = time.monotonic() - start_s
        [survivor] = [p for p in started if p.poll() is None]
        daemon.process = survivor
        with daemon.client() as client:
            stream = TimedReader(client, "m", "kept", max_tokens=600).started()
            start_s = time.monotonic()
            refused = start_again(daemon, count)
            started += refused
            codes = [p.wait(120.0) for p in refused]
            refused_s = time.monotonic() - start_s
            assert len(stream.finished().token_ids) == 600
            assert row(client, "m")["generation"] == 1
        codes += [p.returncode for p in started[:count] if p is not survivor]
        assert survivor.poll() is None
        others = sum(code != ALREADY_RUNNING for code in codes)
    finally:
        for process in started:
            if process is not daemon.process and process.poll() is None:
                process.kill()
        daemon.__exit__(None, None, None)
    return {"others": others, "alone": alone_s, "refused": refused_s}


def bad_reload(place: Place) -> Values:
    """P20: the file is wrong; then it is right again."""
    models = {"m": fake(fake=SLOW)}
    with Daemon(models) as daemon, daemon.client() as client:
        stream = TimedReader(client, "m", "kept", max_tokens=200).started()
        daemon.write_config({"m": fake(fake=SLOW, max_concurrency=-1)})
        start_s = time.monotonic()
        refused = daemon.run("reload")
        refused_s = time.monotonic() - start_s
        assert refused.returncode == BAD_CONFIGURATION, refused
        daemon.write_config(models)
        start_s = time.monotonic()
        assert daemon.run("reload").returncode == 0
        good_s = time.monotonic() - start_s
        assert len(stream.finished().token_ids) == 200
        assert row(client, "m")["generation"] == 1
    return {"code": refused.returncode, "refused": refused_s, "good": good_s}


MEASURES = (
    Measure(
        promise="P2",
        name="lost",
        where=FAKE,
        round=lost_connections,
        figures=(
            Figure(
                key="killed",
                what="supervisor SIGKILL: until the last of 8 streams has `ConnectionLost`",
                bound=at_most(3.5),
            ),
            Figure(
                key="stopped",
                what="supervisor SIGSTOP: until the last of 8 streams has `ConnectionLost`",
                bound=at_most(3.5),
            ),
        ),
    ),
    Measure(
        promise="P12",
        name="exit",
        where=FAKE,
        round=asked_to_end,
        figures=(
            Figure(
                key="refused",
                what="SIGTERM: until a new request gets `shutting_down`",
                unit="ms",
                digits=0,
            ),
            Figure(
                key="drained",
                what="SIGTERM, limit 30 s: exit, 8 streams with 1 s to go complete, 0 children",
                bound=at_most(30.0),
            ),
            Figure(
                key="cut",
                what="SIGTERM, endless streams, limit 2 s: exit, 0 children",
                bound=at_most(DRAIN_S + EXIT_GRACE_S),
            ),
            Figure(
                key="second",
                what="second SIGTERM in a drain of 60 s: exit",
                bound=at_most(EXIT_GRACE_S),
            ),
        ),
    ),
    Measure(
        promise="P19",
        name="starts",
        where=FAKE,
        round=starts_at_once,
        figures=(
            Figure(
                key="others",
                what="20 starts at once, 20 more while it streams; the stream is whole: starts but"
                " the first that did not end with exit 75",
                unit="",
                digits=0,
                bound=equals(0),
            ),
            Figure(key="alone", what="20 starts at once: until 19 have ended"),
            Figure(key="refused", what="20 more while it streams: until all have ended"),
        ),
        most_repeats=3,
    ),
    Measure(
        promise="P20",
        name="reload",
        where=FAKE,
        round=bad_reload,
        figures=(
            Figure(
                key="code",
                what="bad reload: exit code; the stream is whole, the old process serves on",
                unit="",
                digits=0,
                bound=equals(BAD_CONFIGURATION),
            ),
            Figure(
                key="refused",
                what="bad reload: `mlxsup reload` ends (without: a good one)",
                without="good",
            ),
        ),
    ),
)
