"""What `mlxsup why` advises can be done: its keys, options, codes and commands exist."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mlxsup.cli.command_table import COMMANDS
from mlxsup.cli.flight.causes import KINDS
from mlxsup.cli.flight.of_daemon import LAST_SHOWN, MOST_LOST, of_daemon
from mlxsup.cli.flight.of_model import of_model
from mlxsup.cli.flight.of_request import ADVICE, of_request
from mlxsup.client import Client
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import LAUNCH, Driver, entry
from support.core_states import in_state
from support.flight import BEGAN, Recorder

NOW = BEGAN + 20_000.0
SCHEMA = json.loads((Path(__file__).parents[2] / "cli" / "mlxsup.schema.json").read_text())
SENTENCES = [*ADVICE.values(), *(one for kind in KINDS for one in kind.advice)]


def keys_of(value: object) -> set[str]:
    """Every key that a table of the configuration may have."""
    if isinstance(value, list):
        return {key for one in value for key in keys_of(one)}
    if not isinstance(value, dict):
        return set()
    own = set(value.get("properties", {}))
    return own | {key for one in value.values() for key in keys_of(one)}


@pytest.mark.parametrize("sentence", sorted(set(SENTENCES)))
def test_what_is_named_in_an_advice_exists(sentence: str) -> None:
    known = keys_of(SCHEMA) | set(inspect.signature(Client.generate).parameters)
    names = re.findall(r"`([a-z_]+)`", sentence)
    commands = re.findall(r"`mlxsup ([a-z-]+)", sentence)
    assert [one for one in names if one not in known] == []
    assert [one for one in commands if one not in COMMANDS] == []


def test_advice_is_for_errors_that_there_are() -> None:
    assert set(ADVICE) <= set(ErrorCode)


def test_a_pause_says_why_and_how_long_it_was(tmp_path: Path) -> None:
    driver = Driver()
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    [key] = driver.serve("r1")
    driver.accept(key)
    driver.token(key)
    driver.pause()
    driver.row_left(key)
    driver.now += 16.0
    driver.resume()
    driver.token(key)
    recording = recorder.read(tmp_path)
    [(run, number)] = recording.runs_of_request("r1")
    told = of_request(recording, run, number, None, NOW).sentences
    assert [line.partition("Z ")[2] for line in told if "Z " in line][1:] == [
        "started, in generation 1",
        "paused after 1 token: until `mlxsup resume`",
        "continued, after 16.0 s",
    ]


@pytest.mark.parametrize("is_out", [True, False])
def test_a_request_that_is_paused_when_its_worker_dies_stays_paused(
    tmp_path: Path, is_out: bool
) -> None:
    driver = in_state(State.READY)
    recorder = Recorder(driver)
    driver.accept(1)
    driver.token(1)
    driver.pause()
    if is_out:
        driver.row_left(1)
    driver.exit(last_lines=())
    fates = [row.fate for row in recorder.deaths[-1].rows]
    assert fates == ([] if is_out else ["paused"])
    told = of_model(recorder.read(tmp_path, code=0), "m", driver.row(), NOW).sentences
    says = any("is paused, until `mlxsup resume r1`" in line for line in told)
    assert says != is_out


def test_a_model_that_has_failed_says_so_and_when_it_is_not_started_again(tmp_path: Path) -> None:
    driver = in_state(State.LOADING)
    recorder = Recorder(driver)
    driver.exit(code=66, last_lines=("no folder /m",))
    told = of_model(recorder.read(tmp_path, code=0), "m", driver.row(), NOW).sentences
    assert told[0].startswith("m has FAILED and is not started again by itself: ")
    [then] = [line for line in told if line.startswith("  then: ")]
    assert then == f"  then: FAILED, {recorder.deaths[-1].failure}"
    assert "crash 1 of" not in then


def test_a_killed_daemon_names_some_of_many_requests_and_counts_the_others(tmp_path: Path) -> None:
    many = MOST_LOST + 4
    limits = CoreSettings(max_queue=many, max_queue_per_client=many)
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=many))], limits)
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    driver.serve(*(f"r{number}" for number in range(many)))
    told = of_daemon(recorder.read(tmp_path), NOW).sentences
    start = told.index(f"{many} requests had been started and ended with it:")
    assert told[start + 1 :] == [
        *(f"  r{number} (#{number + 1}) of m" for number in range(MOST_LOST)),
        "  and 4 more",
    ]
    latest = told[told.index("what it did last:") + 1 : start]
    assert [line.partition("request ")[2] for line in latest] == [
        f"r{number} (#{number + 1}) started" for number in range(many - LAST_SHOWN, many)
    ]
