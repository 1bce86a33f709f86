"""The supervisor is signalled in every window of its life (P2, P12, P13, P20)."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

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
    """A daemon brought into a window of its life, with its client and its processes.

    Args:
        window: which.
        drain_timeout_s: what a shutdown gives to running requests.
    """

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
        """Starts the daemon, and returns in the window."""
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
        """As early as a runtime folder shows that it has begun, before anybody can connect."""
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
        """To the supervisor alone."""
        assert self.daemon.process is not None
        self.daemon.process.send_signal(number)

    def has_heard_or_ended(self) -> bool:
        """Whether the supervisor has noted a SIGINT, or has gone."""
        assert self.daemon.process is not None
        log = self.daemon.logs / "mlxsup.log"
        has_heard = log.exists() and "signal=SIGINT" in log.read_text()
        return has_heard or self.daemon.process.poll() is not None

    def has_reloaded(self) -> bool:
        """Whether the supervisor has read its file again."""
        log = self.daemon.logs / "mlxsup.log"
        return log.exists() and "configuration reloaded" in log.read_text()

    def code(self) -> int:
        """Its exit code; every process of it is gone then."""
        assert self.daemon.process is not None
        code = self.daemon.process.wait(LIMIT_S)
        gone_within(self.processes, LIMIT_S)
        return code

    def end_of_stream(self) -> str:
        """How the stream that ran has ended: exactly once."""
        if self.running is None:
            return ""
        self.running.join(LIMIT_S)
        assert not self.running.is_alive(), "the stream did not end"
        if isinstance(self.running.error, ConnectionLost):
            return "connection_lost"
        return str(self.running.failed().code)

    def start_again(self) -> None:
        """Nothing needs a human: what was left behind is no obstacle."""
        self.daemon.write_config({"m": fake()})
        self.daemon.start()
        with self.daemon.client() as client:
            assert client.complete("m", prompt="again", max_tokens=2).finish_reason == "length"

    def close(self) -> None:
        """Looks into the logs, too."""
        self.client.close()
        self.daemon.__exit__(None, None, None)
        assert "Traceback" not in self.daemon.output


def play(window: str, strike: Callable[[Scene], None], drain_timeout_s: float = DRAIN_S) -> None:
    """Brings a daemon into a window, lets a fault strike in it."""
    scene = Scene(window, drain_timeout_s)
    try:
        scene.enter()
        strike(scene)
        scene.close()
    except BaseException as error:
        scene.daemon.__exit__(type(error), error, None)
        raise


@pytest.mark.parametrize("window", ["starting", "loading", "serving", "stopping"])
def test_sigkill_in_every_window_leaves_no_process_and_no_doubt_P2_P13(window: str) -> None:
    def strike(scene: Scene) -> None:
        scene.signal(signal.SIGKILL)
        assert scene.code() == -signal.SIGKILL
        if window == "stopping":  # its streams had been answered before
            assert scene.end_of_stream() == "shutting_down"
        else:
            assert scene.end_of_stream() in ("connection_lost", "")
        scene.start_again()

    play(window, strike, LONG_DRAIN_S)


@pytest.mark.parametrize("window", ["starting", "loading", "serving"])
def test_sigterm_in_every_window_ends_in_order_P12(window: str) -> None:
    def strike(scene: Scene) -> None:
        scene.signal(signal.SIGTERM)
        assert scene.code() == 0
        assert scene.end_of_stream() in ("shutting_down", "")

    play(window, strike)


@pytest.mark.parametrize("window", ["loading", "serving", "stopping"])
def test_a_second_sigint_in_every_window_ends_at_once_P12(window: str) -> None:
    def strike(scene: Scene) -> None:
        scene.signal(signal.SIGINT)
        eventually(scene.has_heard_or_ended)  # two at once are one to the kernel
        scene.signal(signal.SIGINT)
        assert scene.code() == 0, scene.daemon.output
        assert scene.end_of_stream() in ("shutting_down", "")

    play(window, strike, LONG_DRAIN_S)


@pytest.mark.parametrize("window", ["starting", "serving", "draining"])
def test_sighup_in_every_window_reloads_and_ends_nothing_P20(window: str) -> None:
    def strike(scene: Scene) -> None:
        scene.signal(signal.SIGHUP)
        if window in ("starting", "loading", "serving"):
            eventually(scene.has_reloaded)
            assert window == "starting" or row(scene.client, "m")["generation"] == 1
            if scene.running is not None:
                assert scene.running.is_alive()
        if window != "draining":
            scene.signal(signal.SIGTERM)
        assert scene.code() == 0
        assert scene.end_of_stream() in ("shutting_down", "")

    play(window, strike, 3.0 if window == "draining" else DRAIN_S)


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
