"""The budget that commands find while a daemon's workers hold a part of the GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mlxsup.cli.commands.plan import plan_of
from mlxsup.cli.doctor.facts import Configuration
from mlxsup.cli.doctor.gathering.machine import gather_memory
from mlxsup.cli.doctor.gathering.setting import Setting
from mlxsup.supervisor.config.load import load_config
from mlxsup.supervisor.memory import backend
from mlxsup.supervisor.memory import problems as problems_module
from mlxsup.supervisor.memory.command_budget import command_budget
from mlxsup.supervisor.memory.machine import held_on_device
from mlxsup.supervisor.workers.leftovers import WorkerRecord, live_workers

from support.safetensors_files import llama_arrays, llama_config, write_folder

GIB = 2**30
MINE = os.getpid()


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that says that the GPU has 80 GiB, of which 30 are used; the file that it reads
    says by whom."""
    folder = tmp_path / "programs"
    folder.mkdir()
    program, holders = folder / "nvidia-smi", folder / "holders"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '"--query-gpu=memory.total,memory.used --format=csv,noheader,nounits --id=0")\n'
        '    echo "81920, 30720" ;;\n'
        '"--query-compute-apps=pid,used_gpu_memory --format=csv,noheader,nounits --id=0")\n'
        f'    while read -r line; do echo "$line"; done < {holders} ;;\n'
        "*) exit 9 ;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return holders


def recorded(folder: Path) -> Path:
    """A runtime folder whose record has this process as a worker."""
    folder.mkdir()
    WorkerRecord(folder).add("m", MINE)
    return folder


def test_what_the_daemon_s_own_workers_hold_is_not_others(tmp_path: Path, smi: Path) -> None:
    smi.write_text(f"{MINE}, 20480\n1, 10240\n")
    found = command_budget(None, "cuda", recorded(tmp_path / "run"))
    assert found.size_bytes == 70 * GIB
    assert found.reason == "80.00 GiB of GPU memory less 10.00 GiB that others hold"


@pytest.mark.parametrize("record", ["", "[]", '[{"model": "m", "pid": %d, "identity": "x"}]'])
def test_who_is_no_worker_of_this_folder_is_another(record: str, tmp_path: Path, smi: Path) -> None:
    smi.write_text(f"{MINE}, 20480\n")
    if record:
        (tmp_path / "workers.json").write_text(record.replace("%d", str(MINE)))
    assert live_workers(tmp_path) == []
    assert command_budget(None, "cuda", tmp_path).size_bytes == 50 * GIB


@pytest.mark.parametrize(
    ("said", "held"),
    [
        ("", 0),
        ("1234, [N/A]\n", 0),
        ("1234\n", 0),
        ("12345, 5\n123, 5\n", 0),
        ("1234, 5\n1, 7\n1234, 6\n", 11),
    ],
)
def test_only_sizes_of_these_processes_count(said: str, held: int, smi: Path) -> None:
    smi.write_text(said)
    assert held_on_device([1234]) == held * 2**20


def test_a_program_that_fails_knows_of_nobody(smi: Path) -> None:
    smi.with_name("nvidia-smi").write_text("#!/bin/sh\necho 1, 5; exit 9\n")
    assert held_on_device([1]) == 0


def test_nobody_is_asked_for_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert held_on_device([]) == 0


def test_a_given_budget_and_another_backend_need_no_record(tmp_path: Path) -> None:
    assert command_budget(5 * GIB, "cuda", tmp_path / "none").size_bytes == 5 * GIB
    assert command_budget(None, "cpu", tmp_path / "none").size_bytes > 0


def test_plan_doctor_and_config_check_leave_out_what_the_own_workers_hold(
    tmp_path: Path, smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say what the daemon plans with, which found its budget before it had workers."""
    smi.write_text(f"{MINE}, 30720\n")
    for module in (backend, problems_module):
        monkeypatch.setattr(module, "find_backend", lambda: "cuda")
    write_folder(tmp_path / "model", llama_config(), llama_arrays())
    path = tmp_path / "mlxsup.toml"
    path.write_text(
        f'[supervisor]\nruntime_dir = "{recorded(tmp_path / "run")}"\n'
        '[models.m]\npath = "model"\npinned = true\n'
    )
    configuration = load_config(path)
    setting = Setting(
        endpoint="", listen="", loaded=configuration, runtime_dir=configuration.runtime_dir,
        log_dir=configuration.log_dir, key_need="", keys=configuration.keys,
        configuration=Configuration(looked_at=(), endpoint_variable="", problems=(), models=1),
    )  # fmt: skip
    assert plan_of(configuration)["budget"]["bytes"] == 80 * GIB
    assert gather_memory(setting).budget_bytes == 80 * GIB
    program = smi.with_name("nvidia-smi")
    program.write_text(program.read_text().replace("30720", "81920"))
    smi.write_text(f"{MINE}, 81920\n")
    problems_module.check_memory(configuration)  # the pinned model fits


def test_a_record_that_cannot_be_read_is_somebody_else_s(tmp_path: Path, smi: Path) -> None:
    smi.write_text(f"{MINE}, 20480\n")
    (tmp_path / "workers.json").mkdir()
    assert command_budget(None, "cuda", tmp_path).size_bytes == 50 * GIB
