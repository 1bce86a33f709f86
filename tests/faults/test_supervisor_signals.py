"""The supervisor is signalled in every window of its life (P2, P12, P13, P20)."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from mlxsup.client import Client, ConnectionLost

from support.cli.cli import Terminal
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, gone_within, row, wait_for_state
from support.eventually import eventually

SLOW = {"step_s": 0.02}
DRAIN_S = 0.5
LONG_DRAIN_S = 300.0
"""For windows that a fault ends."""

LIMIT_S = 60.0


class Scene:
    """A daemon brought into a window of its life, with its client and its processes."""

    def __init__(self, window: str, drain_timeout_s: float) -> None:
        options = {"loading": {"load_s": 60.0, "load_steps": 600}}.get(window, SLOW)
        self.window = window
        self.daemon = Daemon(
            {"m": fake(fake=options), "cold": fake(preload=False)},
            {"drain_timeout_s": drain_timeout_s},
        )
        self.client = Client(self.daemon.endpoint)
        self.running: Reader | None = None
        self.processes: list[psutil.Process] = []

    def enter(self) -> None:
        """Start the daemon, and return in the window."""
        daemon, client = self.daemon, self.client
        if self.window == "starting":
            self._begin()
            return
        daemon.start()
        wait_for_state(client, "m", "LOADING" if self.window == "loading" else "READY")
        eventually(lambda: row(client, "m")["pid"])
        if self.window in ("serving", "draining"):
            self.running = Reader(client, "m", "runs", max_tokens=3000).started()
        elif self.window == "stopping":
            # Held by a step that holds the interpreter, it hears neither Exit nor SIGTERM.
            self.running = Reader(client, "m", "[[fault stall=gil at=3]]", max_tokens=9).started()
        self.processes = daemon.processes()
        if self.window == "draining":
            self.signal(signal.SIGTERM)
            wait_for_state(client, "m", "DRAINING")
        elif self.window == "stopping":
            client.stop(now=True)
            wait_for_state(client, "m", "STOPPING")

    def _begin(self) -> None:
        """Return as early as a runtime folder shows that it has begun, before it is connected."""
        daemon = self.daemon
        with (daemon.folder / "output.txt").open("a") as output:
            daemon.process = subprocess.Popen(
                daemon.command("start", "--config", str(daemon.config)),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        eventually((daemon.folder / "run" / "lock").exists, timeout_s=LIMIT_S)
        self.processes = daemon.processes()

    def signal(self, number: signal.Signals) -> None:
        """Send it to the supervisor alone."""
        assert self.daemon.process is not None
        self.daemon.process.send_signal(number)

    def has_logged(self, words: str) -> bool:
        log = self.daemon.logs / "mlxsup.log"
        return log.exists() and words in log.read_text()

    def code(self) -> int:
        """Return its exit code; every process of it is gone then."""
        assert self.daemon.process is not None
        code = self.daemon.process.wait(LIMIT_S)
        gone_within(self.processes, LIMIT_S)
        return code

    def end_of_stream(self) -> str:
        """Return how the stream that ran has ended: exactly once."""
        if self.running is None:
            return ""
        self.running.join(LIMIT_S)
        assert not self.running.is_alive(), "the stream did not end"
        if isinstance(self.running.error, ConnectionLost):
            return "connection_lost"
        return str(self.running.failed().code)


@contextmanager
def scene(window: str, drain_timeout_s: float = DRAIN_S) -> Iterator[Scene]:
    """Yield a daemon in a window of its life; its logs are read at the end."""
    it = Scene(window, drain_timeout_s)
    try:
        it.enter()
        yield it
        it.client.close()
        it.daemon.__exit__(None, None, None)
        assert "Traceback" not in it.daemon.output
    except BaseException as error:
        it.daemon.__exit__(type(error), error, None)
        raise


@pytest.mark.parametrize("window", ["starting", "serving", "stopping"])
def test_sigkill_in_every_window_leaves_no_process_and_no_doubt_P2_P13(window: str) -> None:
    with scene(window, LONG_DRAIN_S) as it:
        it.signal(signal.SIGKILL)
        assert it.code() == -signal.SIGKILL
        if window == "stopping":  # its streams had been answered before
            assert it.end_of_stream() == "shutting_down"
        else:
            assert it.end_of_stream() in ("connection_lost", "")
        # What was left behind is no obstacle to the next start.
        it.daemon.write_config({"m": fake()})
        it.daemon.start()
        with it.daemon.client() as client:
            assert client.complete("m", prompt="again", max_tokens=2).finish_reason == "length"


@pytest.mark.parametrize("window", ["starting", "serving"])
def test_sigterm_in_every_window_ends_in_order_P12(window: str) -> None:
    with scene(window) as it:
        it.signal(signal.SIGTERM)
        assert it.code() == 0
        assert it.end_of_stream() in ("shutting_down", "")


@pytest.mark.parametrize("window", ["serving", "stopping"])
def test_a_second_sigint_in_every_window_ends_at_once_P12(window: str) -> None:
    with scene(window, LONG_DRAIN_S) as it:
        it.signal(signal.SIGINT)
        process = it.daemon.process
        assert process is not None
        # Two at once are one to the kernel.
        eventually(lambda: it.has_logged("signal=SIGINT") or process.poll() is not None)
        it.signal(signal.SIGINT)
        assert it.code() == 0, it.daemon.output
        assert it.end_of_stream() in ("shutting_down", "")


@pytest.mark.parametrize("window", ["serving", "draining"])
def test_sighup_in_every_window_reloads_and_ends_nothing_P20(window: str) -> None:
    with scene(window, 3.0 if window == "draining" else DRAIN_S) as it:
        it.signal(signal.SIGHUP)
        if window == "serving":
            eventually(lambda: it.has_logged("configuration reloaded"))
            assert row(it.client, "m")["generation"] == 1
            assert it.running is not None
            assert it.running.is_alive()
            it.signal(signal.SIGTERM)
        assert it.code() == 0
        assert it.end_of_stream() == "shutting_down"


def test_sighup_of_a_lost_terminal_is_the_end_P12() -> None:
    daemon = Daemon({"m": fake(fake=SLOW)}, {"drain_timeout_s": DRAIN_S})
    with (
        Terminal("start", "--config", str(daemon.config)) as terminal,
        daemon.client() as client,
    ):
        terminal.expect("READY")
        supervisor = psutil.Process(terminal.process.pid)
        processes = [supervisor, *supervisor.children(recursive=True)]
        assert len(processes) == 2
        running = Reader(client, "m", "runs", max_tokens=3000).started()
        terminal.hang_up()
        assert running.failed().code == "shutting_down"
        assert terminal.process.wait(LIMIT_S) == 0
        gone_within(processes, LIMIT_S)
    assert "signal=SIGHUP" in (daemon.logs / "mlxsup.log").read_text()
    daemon.__exit__(None, None, None)


def test_a_stopped_supervisor_is_named_and_goes_on_where_it_was_P2_P7() -> None:
    with Daemon({"m": fake(fake=SLOW)}) as daemon:
        with daemon.client() as client:
            wait_for_state(client, "m", "READY")
            assert daemon.process is not None
            pid = daemon.process.pid
            running = Reader(client, "m", "runs", max_tokens=3000).started()
            supervisor = psutil.Process(pid)
            supervisor.suspend()
            told = daemon.run("status")
            assert told.returncode == 69
            assert told.stderr.splitlines() == [
                f"error: the daemon with pid {pid} does not answer at {daemon.endpoint}:"
                " it is stopped",
                f"hint: resume it with `kill -CONT {pid}`, or end it with `kill -KILL {pid}`",
            ]
            running.join(LIMIT_S)
            assert isinstance(running.error, ConnectionLost)
            supervisor.resume()
        with daemon.client() as client:
            assert client.complete("m", prompt="x", max_tokens=2).finish_reason == "length"
            eventually(lambda: not row(client, "m")["running"])
            assert row(client, "m")["generation"] == 1
