"""A report holds nothing that could be a prompt, an answer or a key, wherever it was written."""

from __future__ import annotations

import json
import re
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli.exit_status import CliError
from mlxsup.cli.flight.archive import FOLDER, MOST_ENTRIES, write_report
from mlxsup.cli.flight.recording import Recording, Run, read_recording
from mlxsup.cli.flight.redaction import (
    CAUSES,
    LEFT_OUT,
    WORKER_MESSAGES,
    redacted,
    redacted_line,
)
from mlxsup.protocol.flight import ModelChanged, Recorded
from mlxsup.protocol.key_file import PREFIX
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.health.death_cause import Cause

from support.core_states import in_state
from support.flight import Recorder
from support.full_disk import full_disk

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
    names = write_report(path, recording, folder=folder, config=config, status=status)
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
    assert "worker dies code=70 cause=(left out)" in found["logs/m.log"]
    assert '  File "/opt/mlx.py", line 3, in step' in found["logs/m.log"]
    assert "Fatal Python error: Segmentation fault" in found["logs/m.log"]
    assert "ValueError: (left out)" in found["logs/m.log"]
    assert "model state model=m from=READY to=PENDING note=(left out)" in found["logs/mlxsup.log"]
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
    path = tmp_path / "r.tar.gz"
    write_report(
        path, read_recording(tmp_path, None, 2e9), folder=tmp_path, config=None, status=None
    )
    with tarfile.open(path) as archive:
        file = archive.extractfile(f"{FOLDER}/flight.json")
        assert file is not None
        assert b"config.json has no model_type" in file.read()


def test_a_file_that_is_there_is_not_written_over_nor_a_link_followed(tmp_path: Path) -> None:
    folder, config, status = planted(tmp_path)
    recording = read_recording(folder, None, 2e9)
    there, link = tmp_path / "there", tmp_path / "link"
    there.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere")
    for path in (there, link):
        with pytest.raises(CliError, match="there is a file at"):
            write_report(path, recording, folder=folder, config=config, status=status)
    assert there.read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(CliError, match="cannot write"):
        write_report(tmp_path / "no" / "r", recording, folder=folder, config=None, status=None)


def test_of_a_report_that_the_disk_does_not_take_nothing_is_left(tmp_path: Path) -> None:
    folder, config, status = planted(tmp_path)
    recording = read_recording(folder, None, 2e9)
    path = tmp_path / "r.tar.gz"
    with full_disk(500), pytest.raises(CliError, match=r"cannot write .*: File too large"):
        write_report(path, recording, folder=folder, config=config, status=status)
    assert not path.exists()
    write_report(path, recording, folder=folder, config=config, status=status)
    assert path.stat().st_size > 500


def test_of_very_many_entries_the_latest_are_in_the_report(tmp_path: Path) -> None:
    change = ModelChanged(model="m", generation=1, before="READY", after="STOPPED")
    run = Run(entries=[Recorded(number=n, at=1.0, entry=change) for n in range(MOST_ENTRIES + 7)])
    path = tmp_path / "r.tar.gz"
    write_report(path, Recording(runs=[run]), folder=tmp_path, config=None, status=None)
    with tarfile.open(path) as archive:
        file = archive.extractfile(f"{FOLDER}/flight.json")
        assert file is not None
        [told] = json.loads(file.read())["runs"]
    assert [one["n"] for one in told["entries"]] == list(range(7, MOST_ENTRIES + 7))


def test_what_is_no_toml_is_left_out_and_said(tmp_path: Path) -> None:
    folder, config, _ = planted(tmp_path)
    config.write_text(f"= {PROMPT}")
    path = tmp_path / "r.tar.gz"
    recording = read_recording(folder, None, 2e9)
    write_report(path, recording, folder=folder, config=config, status=None)
    with tarfile.open(path) as archive:
        file = archive.extractfile(f"{FOLDER}/configuration.json")
        assert file is not None
        assert json.loads(file.read()) == {"file": "cannot be read, or is not TOML"}


def test_the_words_that_may_stay_are_those_of_the_code() -> None:
    assert set(Cause) == CAUSES
    sources = (file.read_text() for file in (Path(__file__).parents[2] / "worker").rglob("*.py"))
    logged = re.compile(r"logger\.\w+\(\s*\w*line\(\s*\"([^\"]+)\"")
    assert {text for source in sources for text in logged.findall(source)} == WORKER_MESSAGES


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("", ""),
        ("hello", "(left out): 5 characters"),
        (f"{STAMP} INFO worker exits code=0", f"{STAMP} INFO worker exits code=0"),
        (f"{STAMP} INFO hello", f"{STAMP} INFO (left out)"),
        ("--- 512 bytes lost here", "--- 512 bytes lost here"),
        ("mlx.core.MetalError: hi", "mlx.core.MetalError: (left out)"),
    ],
)
def test_a_line_of_a_worker_s_log(line: str, shown: str) -> None:
    assert redacted_line(line, is_daemon=False) == shown


def test_names_of_models_stay_and_what_looks_like_a_key_does_not() -> None:
    name = "mlx-community/Meta-Llama-3-8B-Instruct-4bit"
    assert redacted({"model": name, "n": 3, "is": True, "none": None, "text": "x"}) == {
        "model": name, "n": 3, "is": True, "none": None, "text": LEFT_OUT,
    }  # fmt: skip
    for key in (KEY, HUB_TOKEN, "sk-proj-abcdefgh", "a1" * 20):
        assert key not in json.dumps(redacted({"model": f"x {key} y", key: 1}))
