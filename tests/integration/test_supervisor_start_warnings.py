"""What a daemon warns of at its start and serves all the same, and what it lets go at its end."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from mlxsup.protocol.client_messages import Ping, Reply
from mlxsup.protocol.ids import RequestId
from mlxsup.supervisor import app as app_module
from mlxsup.supervisor import sleep as sleep_module

from support.daemon import fake
from support.eventually_async import eventually_async
from support.notify_socket import NotifySocket
from support.played_daemon import Stage, generate, play, short_folder

LAZY = fake(preload=False)
LITTLE = {"memory_budget": "1GiB"}
"""So little that it need not be lowered, which is warned of, when the machine is busy."""
WATCHED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


def warnings_of(folder: Path) -> list[str]:
    """The warnings that a daemon logs which serves in this folder, without their times."""

    async def body(stage: Stage) -> None:
        assert (await stage.peer().ask(Ping(id=RequestId("p")), Reply)).id == "p"

    assert play(body, {"a": LAZY}, folder=folder, supervisor=LITTLE) == 0
    lines = (folder / "logs" / "mlxsup.log").read_text().splitlines()
    return [line.split(" ", 1)[1] for line in lines if " WARNING " in line]


@pytest.mark.parametrize(
    ("interval_us", "said"),
    [
        ("1500000", "WARNING watchdog fed late cause="),
        ("soon", "WARNING watchdog not fed cause="),
    ],
)
def test_a_watchdog_that_may_end_it_is_warned_of_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, interval_us: str, said: str
) -> None:
    with short_folder() as folder, NotifySocket(folder) as played:
        for name, value in played.variables(watchdog_s=2.0).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("WATCHDOG_USEC", interval_us)
        [warning] = warnings_of(folder)
    assert warning.startswith(said)
    assert " hint=" in warning


def test_a_watchdog_that_is_fed_is_no_reason_to_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_folder() as folder, NotifySocket(folder) as played:
        for name, value in played.variables(watchdog_s=60.0).items():
            monkeypatch.setenv(name, value)
        assert warnings_of(folder) == []
        assert not set(WATCHED) & set(os.environ), "its workers are not to speak for it"


def test_a_place_of_the_logs_that_cannot_be_noted_stops_no_start() -> None:
    with short_folder() as folder:
        (folder / "run" / "log_dir.new").mkdir(parents=True)
        (folder / "run").chmod(0o700)
        assert warnings_of(folder) == ['WARNING log folder not recorded error="Is a directory"']


def test_the_machine_may_sleep_when_the_daemon_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["/bin/sh", "-c", "exec sleep 600"]
    monkeypatch.setattr(sleep_module, "awake_argv", lambda *_: argv)
    monkeypatch.setattr(app_module, "PULSE_S", 0.01)

    def awake() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [one for one in children if one.cmdline() == ["sleep", "600"]]

    async def body(stage: Stage) -> None:
        worker = await stage.ready()
        await stage.peer().say(generate())
        await worker.accept()
        await eventually_async(awake)

    assert play(body, supervisor={"prevent_sleep": "busy"}, exit_grace_s=0.05) == 0
    assert awake() == []
