"""What `mlxsup why` makes of several daemons, of one that lives, and of their signs of life."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli.flight.of_daemon import of_daemon
from mlxsup.cli.flight.of_model import of_model
from mlxsup.cli.flight.recording import Recording, read_recording
from mlxsup.protocol.client_messages import Reply, StatusQuery
from mlxsup.protocol.flight import MODELS_FILE_NAME, REQUESTS_FILE_NAME, ModelChanged
from mlxsup.protocol.ids import RequestId

from support.core_driver import Driver
from support.flight import BEGAN, Recorder

NOW = BEGAN + 20_000.0


def interrupted() -> tuple[Driver, Recorder]:
    """A request has a token when its worker is killed; the model changes its state last."""
    driver = Driver()
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    driver.serve("r1")
    driver.accept(1)
    driver.token(1)
    driver.now += 10.0
    driver.exit(last_lines=())
    driver.now += 1.5
    driver.come_up()
    return driver, recorder


def status_of(driver: Driver) -> dict[str, Any]:
    """What a daemon with this core answers; its pid is 1."""
    driver.say(StatusQuery(id=RequestId("q"), debug=True))
    [reply] = driver.sent(Reply)
    value: dict[str, Any] = reply.value
    return value


def what_became(recording: Recording) -> str:
    """What `why` says of the request that ran."""
    told = of_model(recording, "m", None, NOW).sentences
    [line] = [one for one in told if one.startswith("  r1 (#1), after ")]
    return line.partition(": ")[2]


def test_the_latest_entry_is_a_sign_of_life_too(tmp_path: Path) -> None:
    _, recorder = interrupted()
    recorder.write(tmp_path)
    os.utime(tmp_path / MODELS_FILE_NAME, (BEGAN, BEGAN))  # as a backup may bring it back
    assert isinstance(recorder.entries[-1], ModelChanged)
    assert recorder.recorded[-1].at > recorder.recorded[0].at > 0
    latest = read_recording(tmp_path, None, NOW).latest
    assert latest is not None
    assert latest.alive_at == recorder.recorded[-1].at


def test_an_interrupted_request_waits_for_a_daemon_that_lives_and_is_lost_with_one_that_died(
    tmp_path: Path,
) -> None:
    driver, recorder = interrupted()
    recorder.write(tmp_path, pid=1)
    assert what_became(read_recording(tmp_path, status_of(driver), NOW)) == "waits to be resumed"
    lost = read_recording(tmp_path, None, NOW)
    assert what_became(lost) == "was lost with the daemon"


@pytest.mark.parametrize("has_recorded", [True, False])
def test_a_daemon_with_the_pid_of_the_one_before_it_is_another_one(
    tmp_path: Path, has_recorded: bool
) -> None:
    """As in a container, where each daemon has the same; the disk has not taken its start."""
    driver, recorder = interrupted()
    recorder.write(tmp_path, pid=1, code=0)
    status = status_of(driver) if has_recorded else {"pid": 1, "flight": []}
    before, latest = read_recording(tmp_path, status, NOW).runs
    assert (before.is_alive, before.ended is None) == (False, False)
    assert (latest.is_alive, latest.ended, bool(latest.entries)) == (True, None, has_recorded)
    told = of_daemon(read_recording(tmp_path, status, NOW), NOW).sentences
    assert told == ["the daemon is running"]


def test_requests_of_two_daemons_with_one_name_are_two(tmp_path: Path) -> None:
    _, recorder = interrupted()
    parts = []
    for pid in (7, 8):
        recorder.write(tmp_path, pid=pid)
        parts.append([(tmp_path / name).read_bytes()
                      for name in (MODELS_FILE_NAME, REQUESTS_FILE_NAME)])  # fmt: skip
    for name, first, second in zip((MODELS_FILE_NAME, REQUESTS_FILE_NAME), *parts, strict=True):
        (tmp_path / name).write_bytes(first + second)
    recording = read_recording(tmp_path, None, NOW)
    for name in ("r1", "#1"):
        found = recording.runs_of_request(name)
        assert [(run.pid, number) for run, number in found] == [(7, 1), (8, 1)]
