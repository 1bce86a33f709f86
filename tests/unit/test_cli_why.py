"""The causes that `why` names, and a report without prompts, answers and keys."""

from __future__ import annotations

import json
import os
import re
import stat
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from mlxsup.cli.commands.why import Known, stories_of
from mlxsup.cli.exit_status import CliError
from mlxsup.cli.why.recording import Recording, Run, read_recording
from mlxsup.cli.why.report import FOLDER, LEFT_OUT, redacted, redacted_line, write_report
from mlxsup.cli.why.stories import lines_of, of_model, of_request
from mlxsup.protocol.death_causes import CAUSES, QUARANTINE, explain
from mlxsup.protocol.flight import (
    MODELS_FILE_NAME,
    REQUESTS_FILE_NAME,
    DaemonStarted,
    Entry,
    ModelChanged,
    Recorded,
    RequestEnded,
    WorkerDied,
)
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.key_file import PREFIX
from mlxsup.protocol.states import FinishReason, State, WorkerPhase
from mlxsup.protocol.worker_messages import Dying, RowDelta, Step

from support.core.driver import LAUNCH, Driver
from support.core.flight import BEGAN, Recorder
from support.core.states import in_state

NOW = BEGAN + 20_000.0

LIMITED = replace(LAUNCH, memory_limit_bytes=2**30)

Fault = Callable[[Driver], object]


def exits(code: int, *lines: str) -> Fault:
    return lambda driver: driver.exit(code=code, last_lines=lines)


def is_killed(signal: str) -> Fault:
    return lambda driver: driver.exit(signal=signal, last_lines=())


def is_stopped_from_outside(driver: Driver) -> None:
    driver.pass_time(2.5)
    driver.seen(is_stopped=True)
    driver.pass_time(1.0)
    driver.seen(is_stopped=True)
    driver.exit()


def hangs_in_a_step(driver: Driver) -> None:
    for half_seconds in range(64):
        driver.now += 0.5
        driver.beat(WorkerPhase.DECODE, step=0, phase_s=half_seconds / 2)
    driver.seen(is_stopped=False)
    driver.exit()


def holds_the_interpreter(driver: Driver) -> None:
    driver.pass_time(31.0)
    driver.seen(is_stopped=False)
    driver.exit()


def load_hangs(driver: Driver) -> None:
    driver.pass_time(20.0)
    driver.exit()


def load_raises(driver: Driver) -> None:
    driver.worker(Dying(code=70, message="RuntimeError: no such layer"))
    driver.exit(code=70, last_lines=("RuntimeError: no such layer",))
    assert driver.state() in (State.PENDING, State.BACKOFF, State.LOADING), "it is tried again"


def fails_twice_alike(driver: Driver) -> None:
    for _ in range(2):
        driver.worker(Dying(code=70, message="no such layer"))
        driver.exit(code=70, last_lines=("no such layer",))
        if driver.state() is State.LOADING:
            driver.spawned()
            driver.hello()


def loses_its_connection(driver: Driver) -> None:
    driver.unlinked()
    driver.pass_time(2.0)
    driver.exit()


def speaks_garbage(driver: Driver) -> None:
    driver.broke()
    driver.exit()


def is_another_version(driver: Driver) -> None:
    driver.hello(version="9.9.9")
    driver.exit(signal="SIGTERM")


def is_killed_over_its_limit(driver: Driver) -> None:
    driver.sample(2**31, machine_bytes=2**36)
    driver.exit(last_lines=())


METAL = "[METAL] Command buffer execution failed: Caused GPU Timeout Error"
STREAM = "RuntimeError: There is no Stream(gpu, 1) in current thread."

DEATHS: dict[str, tuple[State, Fault, str, str]] = {
    "SIGKILL while it serves": (
        State.READY, is_killed("SIGKILL"), "killed_from_outside", "another program killed its"),
    "SIGKILL while it loads": (
        State.LOADING, is_killed("SIGKILL"), "killed_from_outside", "while it was being loaded"),
    "SIGSEGV": (State.READY, is_killed("SIGSEGV"), "native_crash", "native code (SIGSEGV)"),
    **{
        name: (State.READY, is_killed(name), "native_crash", f"native code ({name})")
        for name in ("SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")
    },
    "SIGABRT while it loads": (
        State.LOADING, is_killed("SIGABRT"), "native_crash", "native code (SIGABRT)"),
    "SIGTERM": (
        State.READY, is_killed("SIGTERM"), "terminated_from_outside", "another program ended its"),
    "SIGTERM that it handles": (
        State.READY, exits(143), "terminated_from_outside", "another program ended its process"),
    "another signal": (State.READY, is_killed("SIGHUP"), "signal", "(SIGHUP)"),
    "a kill over its limit": (
        State.READY, is_killed_over_its_limit, "killed_over_memory",
        "when it used 2.00 GiB, with a limit of 1.00 GiB"),
    "out of memory": (
        State.READY, exits(75, "MemoryError"), "out_of_memory", "ran out of memory (exit code 75)"),
    "out of memory while it loads": (
        State.LOADING, exits(75, "MemoryError"), "out_of_memory", "while it was being loaded"),
    "a missing model folder": (
        State.LOADING, exits(66, "no folder /m"), "model_missing", "missing: no folder /m"),
    "a bad config.json, or a truncated shard": (
        State.LOADING, exits(65, "config.json is no JSON"), "bad_model", "config.json is no JSON"),
    "no device": (State.LOADING, exits(69, "no GPU"), "no_device", "no GPU"),
    "a bad entry": (State.LOADING, exits(64, "no option x"), "bad_launch", "no option x"),
    "a load that raises": (
        State.LOADING, load_raises, "load_error",
        "while it was being loaded: its load failed (exit code 70): RuntimeError: no such layer"),
    "the same error in two loads": (
        State.LOADING, fails_twice_alike, "load_error", "no such layer"),
    "a load that hangs": (
        State.LOADING, load_hangs, "load_stalled", "the load made no progress for 20 s"),
    "a process that cannot be started": (
        State.LOADING, lambda d: (d.exit(), d.spawn_failed()), "not_started", "no memory"),
    "SIGSTOP": (State.READY, is_stopped_from_outside, "stopped_from_outside", "SIGSTOP"),
    "an endless loop in a step": (State.READY, hangs_in_a_step, "stuck", "step 1 (decode) did not"),
    "the GIL held": (
        State.READY, holds_the_interpreter, "silent", "something blocked the interpreter"),
    "a lost connection": (
        State.READY, loses_its_connection, "broken", "its connection has ended"),
    "garbage": (State.READY, speaks_garbage, "broken", "garbage"),
    "a step that raises": (State.READY, exits(70, "boom"), "step_error", "failed: boom"),
    "an endless template": (
        State.READY, exits(73, "preparing the prompt of request 1 took more than 300 s"),
        "stuck_prompt", "or too much memory: preparing the prompt of request 1"),
    "a lost rank": (
        State.READY, exits(74, "rank 1 (studio-2) was lost"), "rank_lost",
        "was lost: rank 1 (studio-2) was lost"),
    "a rank that is lost while they connect": (
        State.LOADING,
        exits(1, "Timeout (0:00:20)!", 'File "ranks.py", line 9 in join', 'File "x", line 1 in y'),
        "rank_lost", "was lost: Timeout (0:00:20)!"),
    "a broken link": (
        State.READY, exits(76, "the daemon sent no message"), "broken_link",
        "an unexpected message: the daemon sent no message"),
    "a broken link while it loads": (
        State.LOADING, exits(76, "load came before READY"), "broken_link", "before READY"),
    "a lost thread": (State.READY, exits(71, "gone"), "lost_thread", "gone"),
    "the GPU takes too long": (State.READY, exits(70, METAL), "gpu_timeout", METAL),
    "the GPU fails elsewhere": (
        State.READY, exits(72, "InnocentVictim"), "gpu_fault_elsewhere", "another process"),
    "a stream of another thread": (State.READY, exits(70, STREAM), "stream_error", STREAM),
    "it thinks that it is an orphan": (State.READY, exits(1), "orphaned", "code 1"),
    "its files are away, as during an upgrade": (
        State.LOADING, exits(1, "No module named 'mlxsup'"), "not_begun",
        "could not begin: No module named 'mlxsup'"),
    "it just exits": (State.READY, exits(0), "exited", "exited unexpectedly"),
    "an unknown exit code": (State.READY, exits(99), "unknown", "exit code 99"),
    "another version": (State.LOADING, is_another_version, "other_version", "upgraded to 9.9.9"),
    "SIGKILL has no effect": (
        State.STOPPING, lambda d: d.pass_time(60.0), "cannot_be_ended", "SIGKILL did not end"),
}  # fmt: skip

BY_HAND = {
    "bug": WorkerDied(
        model="m", generation=1, reason="internal", after="FAILED", ended_by="internal",
        detail="internal error: no rule",
    ),
    "too_large": WorkerDied(
        model="m", generation=1, reason="load_error", after="FAILED", ended_by="too_large",
        detail="needs 9 GiB of 8 GiB",
    ),
    "asked": WorkerDied(model="m", generation=1, reason="asked", after="PENDING", code=0),
}  # fmt: skip


@pytest.mark.parametrize("fault", DEATHS)
def test_each_class_of_death_has_its_cause_and_what_to_do_after_the_daemon_was_killed(
    fault: str, tmp_path: Path
) -> None:
    state, happens, name, words = DEATHS[fault]
    changes = {"launch": LIMITED} if name == "killed_over_memory" else {}
    driver = in_state(state, **changes)
    recorder = Recorder(driver)
    happens(driver)
    death = recorder.deaths[-1]
    assert explain(death).name == name
    story = of_model(recorder.read(tmp_path), "m", None, NOW)
    text = "\n".join(story.lines(None))
    assert "was killed (SIGKILL)" in text, "the daemon itself"
    [told] = [line for line in story.sentences if line.startswith("it last died")]
    assert words in told
    assert "MODEL" not in text
    advice = {re.sub(r" --since \d+m", "", one) for one in story.advice}
    assert set(explain(death).advice) <= advice
    failed = of_model(recorder.read(tmp_path), "m", {"name": "m", "state": "FAILED"}, NOW).advice
    ways_back = [one for one in failed if re.search("mlxsup (restart|reload|start)\\b", one)]
    # One that outlives its SIGKILL is loaded again once it has ended.
    assert len(ways_back) == (fault != "SIGKILL has no effect")


@pytest.mark.parametrize("name", BY_HAND)
def test_what_no_played_worker_does_has_its_cause_too(name: str) -> None:
    explanation = explain(BY_HAND[name])
    assert explanation.name == name
    assert BY_HAND[name].detail in explanation.what


def test_every_cause_is_tried() -> None:
    tried = {name for _, _, name, _ in DEATHS.values()} | set(BY_HAND)
    assert tried == {cause.name for cause in CAUSES}


def up() -> tuple[Driver, Recorder]:
    """A model that is READY and idle, of which everything is recorded."""
    driver = Driver()
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    return driver, recorder


def resumed_after_a_crash(folder: Path) -> Recording:
    """A request that met SIGSEGV, continued in the next worker, was paused and ended; as a daemon
    that lives has it, in its files and in memory."""
    driver, recorder = up()
    [key] = driver.serve("r1")
    driver.accept(key)
    driver.token(key)
    driver.now += 2.0
    driver.exit(signal="SIGSEGV", last_lines=())
    driver.come_up()
    driver.now += 3.0
    driver.token(key)
    driver.pause()
    driver.row_left(key)
    driver.resume()
    driver.token(key, finish=FinishReason.STOP)
    recorder.write(folder)
    kept = [{**one.to_map(), "ago_s": NOW - one.at} for one in recorder.recorded]
    return read_recording(folder, {"pid": 7, "flight": kept}, NOW)


def test_last_is_the_request_that_came_last(tmp_path: Path) -> None:
    driver, recorder = up()
    for key in driver.serve("b", "a"):
        driver.accept(key)
    recorder.write(tmp_path)
    recording = read_recording(tmp_path, None, NOW)
    assert recording.runs_of_request("last") == recording.runs_of_request("a") != []


def test_the_latest_of_requests_with_one_id_is_told_and_the_others_are_named(
    tmp_path: Path,
) -> None:
    driver, recorder = up()
    for _ in range(3):
        [key] = driver.serve("a")
        driver.accept(key)
        driver.token(key, finish=FinishReason.STOP)
    recording = recorder.read(tmp_path)
    [told] = stories_of(Known(recording=recording, folder=tmp_path, config=None), "a", NOW)
    assert told.sentences[0].startswith("a (#3) of m for ")
    assert told.sentences[-1] == (
        "this is the latest of 3 requests with the id a; the others: #1, #2"
    )


def test_what_a_daemon_has_in_memory_belongs_to_no_daemon_before_it(tmp_path: Path) -> None:
    """As on a full disk, on which it has written nothing."""
    _, recorder = up()
    recorder.write(tmp_path)
    [before] = read_recording(tmp_path, None, NOW).runs
    kept = [{**one.to_map(), "ago_s": 1.0} for one in recorder.recorded[1:]]
    runs = read_recording(tmp_path, {"pid": before.pid, "flight": kept}, NOW).runs
    assert [run.is_alive for run in runs] == [True]
    runs = read_recording(tmp_path, {"pid": 4711, "flight": kept}, NOW).runs
    assert [run.is_alive for run in runs] == [False, True]
    assert runs[0].entries == before.entries
    assert [one.number for one in runs[1].entries] == [one.number for one in recorder.recorded[1:]]


def test_a_resumed_request_is_told_once_though_files_and_memory_have_it(tmp_path: Path) -> None:
    recording = resumed_after_a_crash(tmp_path)
    [run] = recording.runs
    numbers = [one.number for one in run.entries]
    assert numbers == list(range(1, len(numbers) + 1))
    row = {"name": "m", "state": "READY", "loaded_for_s": 5.0}
    told = of_model(recording, "m", row, NOW)
    assert "  r1 (#1, a suspect), after 1 token: continues in the next process" in told.sentences
    place = told.sentences.index(next(one for one in told.sentences if "  then: " in one))
    assert told.sentences[place].startswith("  then: restarted immediately; crash 1 of the ")
    followed = [line.split("Z ")[1] for line in told.sentences[place + 1 : place + 7]]
    assert followed[1:4] == [
        "m: LOADING → READY",
        "m: r1 (#1) continued at token 1, after a crash",
        "m: r1 (#1) paused after 2 tokens: `mlxsup resume` continues it",
    ]
    assert QUARANTINE in told.advice
    [(_, number)] = recording.runs_of_request("r1")
    for other in ("#1", "1", "last"):
        assert recording.runs_of_request(other) == [(run, number)]
    assert recording.runs_of_request("#r1") == []
    about = of_request(recording, run, number, None, NOW).sentences
    assert about[0].startswith("r1 (#1) of m for ")
    assert "its answer is complete (stop)" in about[0]
    events = [line.split(" ", 3)[3] for line in about if line.startswith("  20")]
    assert events == [
        "started, in generation 1",
        "its worker died: it crashed in native code (SIGSEGV)",
        "continued at token 1, after a crash",
        "paused after 2 tokens: `mlxsup resume` continues it",
        "continued at token 2, after a pause",
    ]
    lines = lines_of(run.entries)
    assert sum("m: r1 (#1) continued at token 1, after a crash" in line for line in lines) == 1


def test_changes_after_a_death_do_not_repeat_why_the_model_was_wanted() -> None:
    lines = [
        lines_of([Recorded(number=1, at=NOW, entry=entry)])[0].split(" ", 1)[1]
        for entry in (
            changed("STOPPED", "PENDING", "user"),
            changed("READY", "PENDING", "user", "SIGKILL"),
            changed("PENDING", "LOADING", "user"),
            changed("LOADING", "READY", "user"),
            changed("READY", "DRAINING", "idle"),
        )
    ]
    assert lines == [
        "m: STOPPED → PENDING (by command)",
        "m: READY → PENDING (SIGKILL)",
        "m: PENDING → LOADING",
        "m: LOADING → READY",
        "m: READY → DRAINING (idle)",
    ]


def changed(before: str, after: str, why: str, note: str = "") -> ModelChanged:
    return ModelChanged(model="m", generation=1, before=before, after=after, why=why, note=note)


def test_a_request_whose_daemon_s_start_was_rotated_away_belongs_to_the_daemon_of_its_time(
    tmp_path: Path,
) -> None:
    def line(at: float, entry: Entry) -> bytes:
        return Recorded(number=1, at=at, entry=entry).to_line()

    starts = [line(at, DaemonStarted(pid=int(at), version="1")) for at in (10.0, 20.0, 30.0)]
    ended = RequestEnded(id="r", number=1, model="m", outcome="stop")
    (tmp_path / MODELS_FILE_NAME).write_bytes(b"".join(starts))
    requests = [line(5.0, ended), line(25.0, ended), starts[-1], line(35.0, ended)]
    (tmp_path / REQUESTS_FILE_NAME).write_bytes(b"".join(requests))
    found = read_recording(tmp_path, None, 0.0).runs
    assert [(run.pid, len(run.entries)) for run in found] == [(None, 1), (10, 0), (20, 1), (30, 1)]


def test_the_last_sign_of_life_is_the_touch_of_the_file_or_what_the_next_daemon_has_seen(
    tmp_path: Path,
) -> None:
    _, recorder = up()
    recorder.write(tmp_path)
    models = tmp_path / MODELS_FILE_NAME
    os.utime(models, (NOW - 50.0, NOW - 50.0))
    assert [run.alive_at for run in read_recording(tmp_path, None, NOW).runs] == [NOW - 50.0]
    again = DaemonStarted(pid=8, version="1", before_alive_at=NOW - 60.0)
    models.write_bytes(models.read_bytes() + Recorded(number=0, at=NOW, entry=again).to_line())
    assert read_recording(tmp_path, None, NOW).runs[0].alive_at == NOW - 60.0


def test_a_number_of_a_daemon_that_has_gone_is_no_open_request_of_another(tmp_path: Path) -> None:
    recording = resumed_after_a_crash(tmp_path)
    open_now = {"id": "x", "number": "#1", "model": "m", "state": "answering", "tokens_sent": 1}
    open_now |= {"prefill": None, "expected_s": None}
    known = Known(recording=recording, folder=tmp_path, config=None, requests=[open_now])
    [run] = recording.runs
    run.entries = [one for one in run.entries if not isinstance(one.entry, RequestEnded)]
    for is_alive, says in ((True, "is open: answering"), (False, "was lost with the daemon")):
        run.is_alive = is_alive
        [told] = stories_of(known, "1", NOW)
        assert says in told.sentences[0]
    run.is_alive, open_now["id"], open_now["number"] = True, told.name, "#9"
    [told] = stories_of(known, told.name, NOW)
    assert told.sentences[0].endswith(" is open"), "the open one is another of this id"


def test_the_advice_about_an_error_names_the_model() -> None:
    ended = RequestEnded(id="r", number=1, model="qwen", outcome="unloaded")
    run = Run(entries=[Recorded(number=1, at=NOW, entry=ended)])
    [advice] = of_request(Recording(runs=[run]), run, 1, None, NOW).advice
    assert "`mlxsup load qwen`" in advice


def test_a_warning_about_an_answer_is_told(tmp_path: Path) -> None:
    driver, recorder = up()
    [key] = driver.serve("r1")
    driver.accept(key)
    end = RowDelta(key=RequestKey(key), warning="mind it", finish=FinishReason.STOP)
    driver.worker(Step(step=1, rows=[end]))
    recording = recorder.read(tmp_path)
    [(run, number)] = recording.runs_of_request("r1")
    told = of_request(recording, run, number, None, NOW).sentences
    assert "  warning: mind it" in told


READY: dict[str, Any] = {"name": "m", "state": "READY", "loaded_for_s": 5.0}
WAITS = {"memory_wait": {"reason": "needs 3 GiB more"}, "progress": None}
STANDING: dict[str, dict[str, Any]] = {
    "healthy": READY,
    "suspected": READY | {"suspects": 2, "alone": "r1"},
    "quarantined": READY | {"quarantined": 1},
    "in back-off": {"name": "m", "state": "BACKOFF", "retry_in_s": 8.0},
    "failed": {"name": "m", "state": "FAILED", "cause": "no folder"},
    "stopped": {"name": "m", "state": "STOPPED"},
    "pending": {"name": "m", "state": "PENDING", **WAITS},
    "draining": {"name": "m", "state": "DRAINING"},
}


def test_whole_stories(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Each fact that is told, and none that is not so."""
    fresh = up()[1].read(tmp_path)
    stories = {name: of_model(fresh, "m", row, NOW) for name, row in STANDING.items()}
    stories["of damaged records"] = of_model(
        replace(fresh, damage="2 lines cannot be read"), "m", READY, NOW
    )
    crashed = resumed_after_a_crash(tmp_path)
    [(run, number)] = crashed.runs_of_request("r1")
    stories["its worker crashed"] = of_model(crashed, "m", READY, NOW)
    stories["a request that went on"] = of_request(crashed, run, number, None, NOW)
    driver, recorder = up()
    for key in driver.serve("r1", "r2"):
        driver.accept(key)
        driver.token(key)
    recorder.write(tmp_path)
    for name in (MODELS_FILE_NAME, REQUESTS_FILE_NAME):
        os.utime(tmp_path / name, (BEGAN, BEGAN + 60.0))
    killed = read_recording(tmp_path, None, NOW)
    [(run, number)] = killed.runs_of_request("r2")
    stories["its daemon was killed"] = of_model(killed, "m", None, NOW)
    stories["a request that was lost"] = of_request(killed, run, number, None, NOW)
    assert {name: story.lines(None) for name, story in stories.items()} == snapshot


def test_an_idle_worker_s_death_threatens_no_request_with_quarantine(tmp_path: Path) -> None:
    driver, recorder = up()
    driver.exit(signal="SIGSEGV", last_lines=())
    told = of_model(recorder.read(tmp_path), "m", None, NOW)
    assert "  no request ran" in told.sentences
    assert QUARANTINE not in told.advice


PROMPT = "please keep my secret diary"
KEY = f"{PREFIX}Qm9vIGJhciBiYXogcXV4IDEyMzQ1"
HUB_TOKEN = "hf_abcdefGHIJKL0123456789"
STAMP = "2026-11-23T03:12:05.123Z"

PLANTED = (PROMPT, "secret diary", KEY, KEY.removeprefix(PREFIX), HUB_TOKEN, "hunter2 is it")

LOGS = {
    "mlxsup.log": [
        f'{STAMP} INFO model state model=m from=READY to=PENDING note="SIGKILL: {PROMPT}"',
        f"{STAMP} INFO request ended id={HUB_TOKEN} outcome=stop prompt_tokens=3",
        f"  {PROMPT}",
        json.dumps({"at": STAMP, "level": "info", "message": "model state", "note": PROMPT}),
    ],
    "m.log": [
        "--- generation 3 pid 4711 2026-11-23T03:12:05Z",
        f'{STAMP} ERROR worker dies code=70 cause="{PROMPT}"',
        f"{STAMP} WARNING {PROMPT}",
        f"{STAMP} WARNING worker exits {PROMPT} code=1",
        f"{STAMP} INFO model ready name={KEY} seconds=2.5",
        f"ValueError: {PROMPT}",
        f"{PROMPT}Error: {PROMPT}",
        PROMPT,
        f"Authorization: Bearer {KEY}",
        '  File "/opt/mlx.py", line 3, in step',
        "Fatal Python error: Segmentation fault",
    ],
    "mlxsup-gateway.log": [f"{STAMP} ERROR request failed path=/v1/{PROMPT} id=x", HUB_TOKEN],
}

CONFIG = f"""
# {PROMPT}
[supervisor]
runtime_dir = "/run/{HUB_TOKEN}"
log_level = "info"
hub_token = "{HUB_TOKEN}"
[models.m]
path = "/models/m"
max_concurrency = 7
system = "{PROMPT}"
password = "hunter2 is it"
message = "{PROMPT}"
[models.m.sampling]
stop = ["{PROMPT}"]
[models.m.presets.high]
prompt = "{PROMPT}"
"""


def planted(tmp_path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Logs, a configuration, a recorder and a status with all of it; folder, file and status."""
    folder = tmp_path / "logs"
    folder.mkdir()
    for name, lines in LOGS.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    driver = in_state(State.READY)
    recorder = Recorder(driver)
    driver.ask(f"id {PROMPT}", body=PROMPT.encode())
    driver.exit(code=70, last_lines=(PROMPT,))
    recorder.write(folder)
    config = tmp_path / "c.toml"
    config.write_text(CONFIG)
    status = driver.core.status(driver.now)
    status |= {"flight": [{"detail": PROMPT}], "endpoint": f"ipc:///{KEY}/client.sock"}
    return folder, config, status


def report(tmp_path: Path) -> dict[str, str]:
    """The texts of a report about all of that."""
    folder, config, status = planted(tmp_path)
    recording = read_recording(folder, None, 2e9)
    path = tmp_path / "report.tar.gz"
    return unpacked(path, recording, folder=folder, config=config, status=status)


def unpacked(path: Path, recording: Recording, **about: Any) -> dict[str, str]:
    """Write a report; the texts of its files."""
    names = write_report(path, recording, **about)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found: dict[str, str] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            assert (member.mode, member.uname) == (0o600, "")
            found[member.name.removeprefix(f"{FOLDER}/")] = file.read().decode()
    assert list(found) == names
    return found


def test_nothing_that_was_planted_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
    monkeypatch.setenv("MLXSUP_ENDPOINT", PROMPT)
    found = report(tmp_path)
    assert set(found) == {
        "README.txt", "versions.json", "configuration.json", "status.json", "flight.json",
        *(f"logs/{name}" for name in LOGS),
    }  # fmt: skip
    leaks = [(name, word) for name, text in found.items() for word in PLANTED if word in text]
    assert leaks == []
    assert {"HF_TOKEN", "MLXSUP_ENDPOINT"} <= set(json.loads(found["versions.json"])["variables"])


def test_what_helps_to_find_a_fault_is_in_the_report(tmp_path: Path) -> None:
    found = report(tmp_path)
    configuration = json.loads(found["configuration.json"])
    assert configuration["supervisor"]["log_level"] == "info"
    model = configuration["models"]["m"]
    assert (model["path"], model["max_concurrency"]) == ("/models/m", 7)
    [run] = json.loads(found["flight.json"])["runs"]
    [death] = [one for one in run["entries"] if one["kind"] == "worker_died"]
    assert (death["code"], death["detail"], death["reason"]) == (70, LEFT_OUT, "crash")
    assert "ERROR (left out)" in found["logs/m.log"]
    assert '  File "/opt/mlx.py", line 3, in step' in found["logs/m.log"]
    assert "Fatal Python error: Segmentation fault" in found["logs/m.log"]
    assert "ValueError (left out)" in found["logs/m.log"]
    assert f"{STAMP} INFO (left out)\n" in found["logs/mlxsup.log"]
    status = json.loads(found["status.json"])
    assert status["models"][0]["state"] == "LOADING"
    assert "flight" not in status
    assert json.loads(found["versions.json"])["python"]


def test_the_cause_of_a_load_that_failed_stays_because_it_has_seen_no_prompt(
    tmp_path: Path,
) -> None:
    driver = in_state(State.LOADING)
    recorder = Recorder(driver)
    driver.exit(code=65, last_lines=("config.json has no model_type",))
    recorder.write(tmp_path)
    config = tmp_path / "c.toml"
    config.write_text(f"= {PROMPT}")
    recording = read_recording(tmp_path, None, 2e9)
    found = unpacked(tmp_path / "r.tar.gz", recording, folder=tmp_path, config=config, status=None)
    assert "config.json has no model_type" in found["flight.json"]
    assert "is not TOML" in found["configuration.json"]


def test_a_file_that_is_there_is_not_written_over_nor_a_link_followed(tmp_path: Path) -> None:
    folder, config, status = planted(tmp_path)
    recording = read_recording(folder, None, 2e9)
    there, link = tmp_path / "there", tmp_path / "link"
    there.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere")
    for path in (there, link):
        with pytest.raises(CliError, match="already exists"):
            write_report(path, recording, folder=folder, config=config, status=status)
    assert there.read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(CliError, match="cannot write"):
        write_report(tmp_path / "no" / "r", recording, folder=folder, config=None, status=None)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("", ""),
        ("hello", " (left out)"),
        (f"{STAMP} INFO hello code=0", f"{STAMP} INFO (left out)"),
        ("--- 512 bytes lost here", "--- 512 bytes lost here"),
        ("mlx.core.MetalError: hi", "mlx.core.MetalError (left out)"),
    ],
)
def test_a_line_of_a_log(line: str, shown: str) -> None:
    assert redacted_line(line) == shown


def test_names_of_models_stay_and_what_looks_like_a_key_does_not() -> None:
    name = "mlx-community/Meta-Llama-3-8B-Instruct-4bit"
    assert redacted({"model": name, "n": 3, "is": True, "none": None, "text": "x"}) == {
        "model": name, "n": 3, "is": True, "none": None, "text": LEFT_OUT,
    }  # fmt: skip
    short = [f"{kind}_abcdefgh" for kind in ("sk", "hf", "ghp", "gho", "xoxb", "pk", "rk")]
    for key in (KEY, HUB_TOKEN, "sk-proj-abcdefgh", "a1" * 20, "Bearer abc", *short):
        assert key not in json.dumps(redacted({"model": f"x {key} y", key: 1}))
