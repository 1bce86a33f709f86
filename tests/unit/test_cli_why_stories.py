"""What `mlxsup why` says of models, requests and daemons, from what a driven core records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli.flight.causes import explain
from mlxsup.cli.flight.of_daemon import of_daemon
from mlxsup.cli.flight.of_model import of_model
from mlxsup.cli.flight.of_request import of_request
from mlxsup.cli.flight.recording import Recording, read_recording
from mlxsup.protocol.client_messages import Reply, StatusQuery
from mlxsup.protocol.flight import MODELS_FILE_NAME, REQUESTS_FILE_NAME
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, State

from support.core_driver import Driver
from support.core_states import in_state
from support.flight import BEGAN, Recorder

NOW = BEGAN + 20_000.0


def crashed_and_resumed() -> tuple[Driver, Recorder]:
    """Two requests run, their worker is killed, one resumes; the other wants no continuation."""
    driver = Driver()
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    resumes, ends = [*driver.serve("resumes"), *driver.serve("ends", resume=False)]
    for key in (resumes, ends):
        driver.accept(key)
    driver.token(resumes, ends)
    driver.now += 10.0
    driver.exit(last_lines=())
    driver.now += 1.5
    driver.come_up()
    driver.now += 0.5
    driver.token(resumes)
    return driver, recorder


def told_of(recording: Recording, name: str = "m", row: dict[str, Any] | None = None) -> list[str]:
    return of_model(recording, name, row, NOW).sentences


def request_told(recorder: Recorder, folder: Path, name: str) -> list[str]:
    recording = recorder.read(folder)
    run, number = recording.runs_of_request(name)[-1]
    return of_request(recording, run, number, None, NOW).sentences


def test_a_model_says_what_ran_and_what_became_of_it(tmp_path: Path) -> None:
    driver, recorder = crashed_and_resumed()
    told = told_of(recorder.read(tmp_path, code=0), row=driver.row())
    assert told[0].startswith("m is READY")
    assert "  resumes (#1), after 1 token: resumed at token 1 after 2.0 s" in told
    assert "  ends (#2), after 1 token: failed with worker_crashed" in told
    then = (
        "  then: started again at once, READY after 1.5 s; crash 1 of the 3 allowed within 1m 40s"
    )
    assert then in told
    [before] = [line for line in told if line.startswith("  before:")]
    assert "generation 1 (pid 77), READY for 10.0 s, 1 step ended" in before


@pytest.mark.parametrize(("later", "options"), [(0, ""), (1, " --previous"), (2, " --since 335m")])
def test_the_log_of_the_process_that_died_is_named_wherever_it_is(
    tmp_path: Path, later: int, options: str
) -> None:
    driver = in_state(State.READY)
    recorder = Recorder(driver)
    driver.exit(signal="SIGSEGV")  # the next process begins at once
    driver.come_up()
    if later == 0:
        driver.exit(signal="SIGSEGV")
        assert driver.state() is State.BACKOFF
    if later == 2:
        driver.restart(now=True)
        driver.exit(signal="SIGKILL")
        driver.come_up()
    advice = of_model(recorder.read(tmp_path, code=0), "m", driver.row(), NOW).advice
    assert any(f"`mlxsup logs m{options}` has the stacks" in one for one in advice), advice


def test_a_healthy_model_says_so_and_since_when_that_is_known(tmp_path: Path) -> None:
    driver = Driver()
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    state, well = told_of(recorder.read(tmp_path, code=0), row=driver.row())
    assert state.startswith("m is READY")
    assert well.startswith("it has not died since 2023-11-14T22:13:20Z (")


def test_a_model_that_backs_off_says_when_it_is_started_and_why(tmp_path: Path) -> None:
    driver = in_state(State.READY)
    recorder = Recorder(driver)
    for _ in range(2):
        driver.exit()
        if driver.state() is State.LOADING:
            driver.come_up()
    told = told_of(recorder.read(tmp_path, code=0), row=driver.row())
    assert told[0].startswith("m is BACKOFF: it is started again in ")
    assert any(line.startswith("  then: the next start after ") for line in told)
    assert any(line.startswith("before that: 1 death") for line in told)


def test_a_poison_is_named_as_quarantined(tmp_path: Path) -> None:
    driver = Driver()
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    driver.serve("poison")
    for _ in range(3):
        driver.exit(signal="SIGSEGV")
        driver.pass_time(5.0)
        if driver.state() is State.LOADING:
            driver.come_up()
    story = of_model(recorder.read(tmp_path, code=0), "m", driver.row(), NOW)
    assert any("poison (#1), after 0 tokens: was quarantined" in one for one in story.sentences)
    assert "  1 request in quarantine" in story.sentences
    assert any("`mlxsup restart m`" in one for one in story.advice)


def test_a_request_says_where_its_time_went_and_what_interrupted_it(tmp_path: Path) -> None:
    driver, recorder = crashed_and_resumed()
    driver.token(1, finish=FinishReason.STOP)
    told = request_told(recorder, tmp_path, "resumes")
    assert told[0].startswith("resumes (#1) of m for ")
    assert "its answer is complete (stop)" in told[0]
    assert "  its prompt: 3 tokens, prepared in 0.1 s, read in 0.0 s" in told
    assert any(line.startswith("  its answer: 3 tokens") for line in told)
    [crash] = [line for line in told if "its worker died" in line]
    assert "(SIGKILL); the request resumed at token 1 after 2.0 s" in crash
    assert request_told(recorder, tmp_path, "#1") == told


def test_a_request_that_its_worker_s_death_has_ended_says_that(tmp_path: Path) -> None:
    _, recorder = crashed_and_resumed()
    recording = recorder.read(tmp_path)
    [(run, number)] = recording.runs_of_request("ends")
    story = of_request(recording, run, number, None, NOW)
    assert story.sentences[0].startswith("ends (#2) of m for ")
    assert story.sentences[0].endswith(", it failed with worker_crashed")
    assert "2023-11-14T22:13:30Z" in story.sentences[0]
    assert any("`mlxsup why m` says what its worker died of" in one for one in story.advice)


@pytest.mark.parametrize("state", ["READY", "FAILED"])
@pytest.mark.parametrize("days", [0, 2])
def test_an_old_death_needs_advice_only_while_the_model_is_not_well(
    tmp_path: Path, state: str, days: int
) -> None:
    driver, recorder = crashed_and_resumed()
    row = driver.row() | {"state": state, "cause": "it crashed"}
    now = recorder.recorded[-1].at + days * 86_400.0 + 60.0
    story = of_model(recorder.read(tmp_path, code=0), "m", row, now)
    of_death = set(explain(recorder.deaths[-1]).advice)
    assert bool(of_death & set(story.advice)) == (days == 0 or state == "FAILED")


def test_earlier_deaths_are_the_latest_ones_and_the_rest_is_counted(tmp_path: Path) -> None:
    driver = in_state(State.READY)
    recorder = Recorder(driver)
    for signal in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGKILL"):
        driver.now += 1000.0  # long enough for the restart window
        driver.exit(signal=signal, last_lines=())
        driver.come_up()
    told = told_of(recorder.read(tmp_path, code=0), row=driver.row())
    start = told.index("before that: 5 deaths, the latest first")
    shown = [line.partition("(")[2].rstrip(")") for line in told[start + 1 : start + 4]]
    assert shown == ["SIGFPE", "SIGILL", "SIGBUS"]
    assert told[start + 4] == "  and 2 more"


def test_what_ran_when_the_daemon_was_killed_is_named_as_lost(tmp_path: Path) -> None:
    _, recorder = crashed_and_resumed()
    recording = recorder.read(tmp_path)
    told = of_daemon(recording, NOW).sentences
    assert told[0].startswith("the daemon (pid 7) died without a word")
    assert "1 request had been started and ended with it:" in told
    assert "  resumes (#1) of m" in told
    assert told.index("what it did last:") < told.index("  resumes (#1) of m")
    assert "was lost with the daemon" in request_told(recorder, tmp_path, "resumes")[0]


def test_the_last_sign_of_life_is_that_of_the_file(tmp_path: Path) -> None:
    _, recorder = crashed_and_resumed()
    recorder.write(tmp_path)
    os.utime(tmp_path / MODELS_FILE_NAME, (BEGAN + 500.0, BEGAN + 500.0))
    recording = read_recording(tmp_path, None, NOW)
    assert recording.latest is not None
    assert recording.latest.alive_at == BEGAN + 500.0
    assert "2023-11-14T22:21:40Z" in of_daemon(recording, NOW).sentences[0]


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "because it was asked to"), (70, "it met a bug"), (71, "could not be ended")],
)
def test_a_daemon_that_ended_says_how(tmp_path: Path, code: int, words: str) -> None:
    _, recorder = crashed_and_resumed()
    [told] = of_daemon(recorder.read(tmp_path, code=code), NOW).sentences
    assert words in told


# ---------------------------------------------------------------- memory, several daemons, damage


def test_what_a_full_disk_has_swallowed_comes_from_the_daemon_s_memory(tmp_path: Path) -> None:
    driver, recorder = crashed_and_resumed()
    recorder.write(tmp_path, pid=1)
    lines = (tmp_path / MODELS_FILE_NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / MODELS_FILE_NAME).write_bytes(lines[0])
    driver.say(StatusQuery(id=RequestId("q"), debug=True))
    [reply] = driver.sent(Reply)
    recording = read_recording(tmp_path, reply.value, NOW)
    [run] = recording.runs
    assert run.is_alive
    assert [one.number for one in run.entries] == [one.number for one in recorder.recorded]
    assert [one.entry for one in run.entries] == recorder.entries


def test_a_daemon_after_another_says_how_the_one_before_it_ended(tmp_path: Path) -> None:
    _, recorder = crashed_and_resumed()
    recorder.write(tmp_path)
    before = (tmp_path / MODELS_FILE_NAME).read_bytes()
    (tmp_path / MODELS_FILE_NAME).write_bytes(
        before
        + b'{"n": 0, "at": 1700009000.0, "kind": "daemon_started", "pid": 8, "version": "1",'
        + b' "before_alive_at": 1700000300.0}\n'
    )
    status = {"pid": 8, "flight": []}
    recording = read_recording(tmp_path, status, NOW)
    told = of_daemon(recording, NOW).sentences
    assert told[0].startswith("the daemon (pid 8) is running since 2023-11-15T00:43:20Z")
    assert told[1].startswith("the daemon before it (pid 7) died without a word")
    assert "2023-11-14T22:18:20Z" in told[1]
    [death] = recording.deaths_of("m")
    assert death.run is recording.runs[0]


@pytest.mark.parametrize("is_cut", [False, True])
def test_of_a_damaged_file_the_rest_is_used_and_one_sentence_says_so(
    tmp_path: Path, is_cut: bool
) -> None:
    _, recorder = crashed_and_resumed()
    recorder.write(tmp_path)
    path = tmp_path / MODELS_FILE_NAME
    data = path.read_bytes()
    if is_cut:
        path.write_bytes(data[:-20])
    else:
        path.write_bytes(b"\x00\xff{{{ garbage\n" + data.replace(b'"before"', b'"befo\xfere"', 1))
    recording = read_recording(tmp_path, None, NOW)
    count = "1 line" if is_cut else "2 lines"
    assert recording.damage == (
        f"{count} of the flight recorder cannot be read, and the rest was used"
    )
    assert len(recording.deaths_of("m")) == 1
    assert told_of(recording)[-1] == recording.damage


def test_a_recorder_that_cannot_be_read_at_all_is_named(tmp_path: Path) -> None:
    (tmp_path / MODELS_FILE_NAME).mkdir()
    recording = read_recording(tmp_path, None, NOW)
    assert recording.runs == []
    assert f"{tmp_path / MODELS_FILE_NAME} cannot be read: Is a directory" in recording.damage


def test_requests_whose_start_is_gone_belong_to_the_daemon_before(tmp_path: Path) -> None:
    _, recorder = crashed_and_resumed()
    recorder.write(tmp_path)
    path = tmp_path / REQUESTS_FILE_NAME
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    recording = read_recording(tmp_path, None, NOW)
    [run] = recording.runs
    assert [one.number for one in run.entries] == [one.number for one in recorder.recorded]


def test_lines_fit_the_terminal(tmp_path: Path) -> None:
    _, recorder = crashed_and_resumed()
    story = of_model(recorder.read(tmp_path), "m", None, NOW)
    for width in (40, 80, 200):
        assert max(map(len, story.lines(width))) <= width
