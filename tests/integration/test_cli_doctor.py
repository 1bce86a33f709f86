"""`mlxsup doctor` names each planted defect, and what it says fixes it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from support import planted_defects as planted
from support.cli import ESCAPE, on_terminal
from support.doctor_ground import Ground
from support.json_schemas import problems
from support.local_hub import LocalHub, local_hub
from support.planted_defects import Defect, sound, supervisor

Found = dict[str, str]

DEFECTS = (
    Defect(name="others may enter the runtime folder", plant=planted.open_runtime_folder,
           subject="runtime folder", words="mode 0755"),
    Defect(name="the runtime folder is a file", plant=planted.file_as_runtime_dir,
           subject="runtime folder", words="is not a folder",
           edit=lambda ground: supervisor(runtime_dir=str(ground.folder / "new"))(ground),
           edited="set another runtime_dir"),
    Defect(name="paths of sockets are too long", plant=planted.long_runtime_dir,
           subject="runtime folder", words="at most 103", edit=sound,
           edited="set a shorter runtime_dir"),
    Defect(name="the log folder cannot be made", plant=planted.file_as_log_dir,
           subject="log folder", words="is not a folder", edit=sound, edited="set log_dir to"),
    Defect(name="the disk is full", plant=planted.full_disk, subject="log folder",
           words="1.0 MiB left", edit=planted.emptied_disk, edited="delete what you do not need"),
    Defect(name="a killed daemon has left its sockets", plant=planted.killed_daemon,
           subject="daemon", words="was killed and left", level="note"),
    Defect(name="the lock names another program", plant=planted.strange_lock,
           subject="daemon", words="another program (sleep)", level="note"),
    Defect(name="the daemon is stopped", plant=planted.stopped_daemon,
           subject="daemon", words="is stopped"),
    Defect(name="two daemons", plant=planted.other_daemon,
           subject="daemon", words="another daemon runs at ipc://{folder}/other/", level="note",
           runs=("mlxsup stop --endpoint ipc://{folder}/other/run/client.sock",)),
    Defect(name="a model has failed", plant=planted.broken_model, subject="daemon",
           words="m has FAILED: ", runs=("mlxsup logs m", "mlxsup restart m")),
    Defect(name="too few open files", plant=planted.few_files,
           subject="open files", words="only 64 files may be open"),
    Defect(name="too few open files, and prlimit or launchctl is played",
           plant=planted.few_files_of_user,
           subject="open files", words="only 64 files may be open",
           played=r"prlimit --pid \d+ --nofile=(\d+):\1|launchctl limit maxfiles (\d+) \2"),
    Defect(name="an unknown key", plant=planted.append("preloud = true\n"),
           subject="configuration", words="unknown key models.m.preloud; did you mean preload?",
           edit=planted.suggested_key, edited="change that line as it says", is_literal=True),
    Defect(name="no TOML", plant=planted.append("[\n"), subject="configuration",
           words="is not TOML", edit=sound, edited="change that line"),
    Defect(name="no configuration", plant=planted.no_config, subject="configuration",
           words="there is none of", level="note"),
    Defect(name="a named configuration is missing", plant=planted.named_config,
           subject="configuration", words="MLXSUP_CONFIG names it",
           runs=("mlxsup init {folder}/none.toml",)),
    Defect(name="a configuration is shadowed", plant=planted.shadow, subject="configuration",
           words="comes first (./mlxsup.toml)", level="note", edit=planted.unshadowed,
           edited="name the one you mean"),
    Defect(name="MLXSUP_ENDPOINT leads elsewhere", plant=planted.other_endpoint,
           subject="configuration", words="MLXSUP_ENDPOINT is set", level="note"),
    Defect(name="the budget exceeds the machine", plant=supervisor(memory_budget="900000GiB"),
           subject="configuration", words="takes at most what this machine has", edit=sound,
           edited="change that line"),
    Defect(name="a model exceeds the budget", plant=planted.too_large, subject="memory",
           words="m does not fit into 1.00 GiB", edit=sound, edited="`mlxsup plan"),
    Defect(name="a model folder is missing", plant=planted.no_model, subject="models",
           words="does not exist", edit=planted.model_back, edited="`mlxsup models`"),
    Defect(name="weights are cut short", plant=planted.cut_weights, subject="models",
           words="is cut short", edit=planted.whole_weights, edited="copy or download"),
    Defect(name="weights are a pointer of Git LFS", plant=planted.pointer, subject="models",
           words="Git LFS pointer"),
    Defect(name="a shard is missing", plant=planted.missing_shard, subject="models",
           words=f"{planted.SHARDS[1]} does not exist"),
    Defect(name="a download is needed and forbidden", plant=planted.forbidden_download,
           subject="downloads", words="HF_HUB_OFFLINE forbids to download it"),
    Defect(name="a download is still to come", plant=planted.later_download,
           subject="downloads", words="is not on this disk yet", level="note"),
    Defect(name="others may read the hub's token", plant=planted.open_token,
           subject="downloads", words="others may read the token", level="note"),
    Defect(name="the gateway's port is taken", plant=planted.taken_port, subject="gateway",
           words="is taken by ", edit=planted.free_listen, edited="set listen = ",
           is_literal=True),
    Defect(name="strangers reach the gateway", plant=planted.exposed, subject="gateway",
           words="there is no key"),
    Defect(name="others may read the API keys", plant=planted.open_keys, subject="API keys",
           words="mode 0644"),
    Defect(name="the gateway's extra is not installed", plant=planted.no_extra,
           subject="gateway", words="starlette is not installed"),
    Defect(name="another version of MLX", plant=planted.old_mlx, subject="software",
           words="mlx is 0.31.0; mlxsup needs mlx<0.33,>=0.32.2"),
    Defect(name="MLX has no back-end, and pip is played", plant=planted.no_back_end,
           subject="software", words="MLX has no back-end", is_linux_only=True),
    Defect(name="a service ends with the login, and loginctl is played",
           plant=planted.lost_login, subject="service", level="note",
           words="runs only while you are logged in", played="loginctl enable-linger",
           is_linux_only=True),
    Defect(name="a Mac falls asleep, and pmset is played", plant=planted.sleeping_mac,
           subject="sleep", level="note", words="sleeps after 10 minutes",
           played="pmset -c sleep 0"),
    Defect(name="a service starts a program that is gone", plant=planted.lost_program,
           subject="service", words="starts /nowhere/mlxsup, which is not there",
           edit=planted.found_program, edited="`command -v mlxsup`", is_literal=True),
    Defect(name="a service names a configuration that is gone", plant=planted.lost_config,
           subject="service", words="/none.toml, which does not exist",
           edit=planted.found_program, edited="name the right file"),
    Defect(name="the clock is wrong", plant=planted.wrong_clock, subject="clock",
           words="was written later"),
)  # fmt: skip


@pytest.fixture
def ground() -> Iterator[Ground]:
    with Ground() as ground:
        yield ground


@pytest.fixture
def hub(ground: Ground) -> Iterator[LocalHub]:
    with local_hub() as hub:
        planted.serve_shards(ground, hub)
        yield hub


def about(ground: Ground, defect: Defect, findings: list[Found]) -> list[Found]:
    """The findings that name the defect."""
    words = defect.words.replace("{folder}", str(ground.folder))
    return [
        one
        for one in findings
        if (one["subject"], one["level"]) == (defect.subject, defect.level) and words in one["what"]
    ]


def after_the_fix(ground: Ground, defect: Defect, finding: Found) -> tuple[int, list[Found]]:
    """Does what is printed, and lets the doctor look again."""
    if defect.edit is not None:
        assert defect.edited in finding["fix"], finding
        defect.edit(ground)
    for command in defect.runs:
        printed = command.replace("{folder}", str(ground.folder))
        assert f"`{printed}`" in finding["fix"], finding
        done = ground.shell(printed)
        assert done.returncode == 0, done.stderr
    if defect.edit is not None or defect.runs:
        return ground.doctor()
    assert finding["command"], finding
    if not defect.played:
        return ground.doctor(finding["command"])
    assert ground.shell(finding["command"]).returncode == 0
    assert [call for call in ground.played if re.fullmatch(defect.played, call)], ground.played
    return ground.doctor()


def of(defect: Defect) -> Any:
    """A case, unless this machine cannot show it."""
    needs_right = defect.plant is planted.few_files and not planted.may_raise_limits()
    is_elsewhere = defect.is_linux_only and sys.platform != "linux"
    marks = [
        pytest.mark.skipif(needs_right, reason="nobody here may raise a limit"),
        pytest.mark.skipif(is_elsewhere, reason="is said on Linux alone"),
    ]
    return pytest.param(defect, id=defect.name, marks=marks)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("defect", [of(defect) for defect in DEFECTS])
def test_a_planted_defect_is_named_and_the_fix_works(ground: Ground, defect: Defect) -> None:
    defect.plant(ground)
    code, findings = ground.doctor()
    found = about(ground, defect, findings)
    assert len(found) == 1, findings
    [finding] = found
    assert code == (1 if defect.level == "problem" else 0), findings
    assert finding["why"]
    code, findings = after_the_fix(ground, defect, finding)
    assert about(ground, defect, findings) == []
    assert [one for one in findings if one["level"] == "problem"] == []
    assert code == 0


def test_of_at_least_twenty_the_fix_is_run_as_it_is_printed() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    assert len([defect.name for defect in DEFECTS if defect.is_printed]) >= 20


def test_a_sound_machine_has_no_problem_and_is_left_as_it_is(ground: Ground) -> None:
    before = sorted(ground.folder.rglob("*"))
    done = ground.shell("mlxsup doctor")
    assert done.returncode == 0, done.stdout
    assert re.fullmatch("(still looking at: .*\n)?", done.stderr)
    assert "\x1b" not in done.stdout
    assert not re.search("^problem", done.stdout, re.M)
    assert done.stdout.splitlines()[-1].startswith("nothing is ")
    assert sorted(ground.folder.rglob("*")) == before
    done = ground.shell("mlxsup doctor --json")
    assert problems(done.stdout, ["doctor"]) == []
    value = json.loads(done.stdout)
    assert (value["config"], value["problems"]) == (str(ground.config), 0)
    assert {one["level"] for one in value["findings"]} <= {"ok", "note"}


def test_the_token_is_never_printed(ground: Ground) -> None:
    planted.open_token(ground)
    ground.variables["HF_TOKEN"] = "hf_ANOTHER"
    for options in ("", "--json"):
        done = ground.shell(f"mlxsup doctor {options}")
        assert "hf_SECRET" not in done.stdout + done.stderr
        assert "hf_ANOTHER" not in done.stdout + done.stderr
        assert "token" in done.stdout


def test_commands_repeat_the_options_that_were_given(ground: Ground) -> None:
    planted.exposed(ground)
    other = ground.config.rename(ground.folder / "other.toml")
    done = ground.shell(f"mlxsup doctor --json --config {other}")
    commands = [one["command"] for one in json.loads(done.stdout)["findings"]]
    assert f"mlxsup key new laptop --config {other}" in commands
    planted.too_large(ground)
    other = ground.config.rename(other)
    done = ground.shell(f"mlxsup doctor --json --config {other}")
    fixes = [one["fix"] for one in json.loads(done.stdout)["findings"]]
    assert any(f"`mlxsup plan --config {other}`" in fix for fix in fixes), fixes


@pytest.mark.parametrize("width", [40, 80, 200])
def test_on_a_terminal_sentences_fit_and_commands_are_whole(ground: Ground, width: int) -> None:
    planted.open_runtime_folder(ground)
    values = ground.variables | {"COLUMNS": str(width)}
    shown = on_terminal(["doctor", "--config", str(ground.config)], **values)
    assert "\x1b[31mproblem" in shown
    lines = ESCAPE.sub("", shown).splitlines()
    command = f"run: chmod 0700 {ground.folder / 'run'}"
    assert [line.strip() for line in lines if "run: chmod" in line] == [command]
    longest_word = max(len(word) for line in lines for word in line.split())
    for line in lines:
        assert len(line) <= max(width, longest_word + 9) or "run: " in line, line
    assert "1 problem" in lines[-1]


def test_what_belongs_to_a_proof_is_refused_without_one(ground: Ground) -> None:
    for words in ("m", "--output figures.json"):
        done = ground.shell(f"mlxsup doctor {words}")
        assert (done.returncode, done.stdout) == (64, "")
        assert "belongs to --prove" in done.stderr
