"""What the core learns about memory at the start, at a reload and after a download."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli.commands.plan import plan_of
from mlxsup.protocol.download import Repository
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.supervisor.config.load import ConfigError, DaemonConfig, load_config
from mlxsup.supervisor.core.budget import Budget, Need
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings
from mlxsup.supervisor.log_files import LogWriter
from mlxsup.supervisor.logs import DaemonLog
from mlxsup.supervisor.memory import machine
from mlxsup.supervisor.memory import needs as needs_module
from mlxsup.supervisor.memory import snapshot as snapshot_module
from mlxsup.supervisor.memory.estimates import Estimates
from mlxsup.supervisor.memory.folder import fingerprint, stamp
from mlxsup.supervisor.memory.folder_reader import Place
from mlxsup.supervisor.memory.machine import command_budget, held_on_device
from mlxsup.supervisor.memory.measurements import FILE_NAME, Measured, Measurements
from mlxsup.supervisor.memory.needs import check_memory as check_needs
from mlxsup.supervisor.memory.needs import measured_place, need_of
from mlxsup.supervisor.memory.snapshot import ConfigSnapshot, MemorySnapshot
from mlxsup.supervisor.workers.orphans import WorkerRecord, live_workers

from support.core.driver import entry
from support.daemon.estimates_here import estimated, estimates_here
from support.gateway.key_place import place_in
from support.models.safetensors_files import llama_arrays, llama_config, write_folder, write_weights

__all__ = ["estimates_here"]

GIB = 2**30
MODEL, OTHER = ModelName("m"), ModelName("other")
ONE, TWO = Repository(repo="someone/one"), Repository(repo="someone/two")
WHOLE = Budget(size_bytes=14 * GIB, machine_bytes=16 * GIB, reason="r")


class Desk:
    """A snapshot on a machine of 16 GiB whose `nvidia-smi` says nothing, and its log."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str = "cpu") -> None:
        self.folder = folder
        self.ram_bytes = 16 * GIB
        monkeypatch.setattr(snapshot_module, "find_backend", lambda: backend)
        monkeypatch.setattr(machine, "ram_bytes", lambda: self.ram_bytes)
        monkeypatch.setattr(machine, "control_group_limit", lambda: None)
        monkeypatch.setattr(subprocess, "run", self._ask)
        self._writer = LogWriter(lambda text: None)
        self._log = DaemonLog(folder, "info", self._writer, is_json=True)
        self.measurements = Measurements(folder)
        self.estimates = Estimates()
        self.memory = MemorySnapshot(self.measurements, self._log, self.estimates)

    def _ask(self, *_: Any, **__: Any) -> None:
        raise FileNotFoundError("nvidia-smi")

    def model_folder(self, name: str = "model") -> str:
        write_folder(self.folder / name, llama_config(), llama_arrays())
        return str(self.folder / name)

    def config(self, *models: ModelSettings, budget: int | None = None) -> DaemonConfig:
        return DaemonConfig(
            config_path=None,
            runtime_dir=self.folder,
            keys=place_in(self.folder),
            log_dir=self.folder,
            memory_budget=budget,
            core=CoreSettings(max_queue=3),
            models=models,
        )

    def read(self, *models: ModelSettings, budget: int | None = None) -> ConfigSnapshot:
        return asyncio.run(self.memory.read(self.config(*models, budget=budget)))

    def adopt(self, *models: ModelSettings) -> None:
        """As a reload with these entries does."""
        reading = self.read(*models)
        self.memory.adopt(reading, self.memory.needs_of(reading))

    def need(self, launch: LaunchSettings) -> Need:
        """What a model with this launch needs."""
        (need,) = self.memory.needs_of(self.read(entry("x", launch=launch))).values()
        return need

    def logged(self) -> list[dict[str, Any]]:
        """The lines without their time."""
        self._log.close()
        assert self._writer.close(60.0)
        path = self.folder / "mlxsup.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [{k: v for k, v in json.loads(line).items() if k != "at"} for line in lines]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimates_here: None) -> Desk:
    return Desk(tmp_path, monkeypatch)


# ---------------------------------------------------------------- the budget


def test_settings_of_adds_the_budget_to_the_other_settings(desk: Desk) -> None:
    settings = desk.memory.settings_of(desk.config())
    assert settings.budget is not None
    assert (settings.max_queue, settings.budget.size_bytes) == (3, 14 * GIB)
    assert desk.logged() == [
        {"level": "info", "message": "memory budget", "size": "14.00 GiB",
         "reason": "16.00 GiB of RAM less a reserve of 2.00 GiB"},
    ]  # fmt: skip


def test_a_given_budget_goes_before_that_of_the_machine(desk: Desk) -> None:
    desk.memory.settings_of(desk.config(), is_dry=True)
    desk.memory.settings_of(desk.config())
    given = desk.memory.settings_of(desk.config(budget=5 * GIB)).budget
    assert given is not None
    assert (given.size_bytes, given.automatic_bytes) == (5 * GIB, 14 * GIB)
    desk.ram_bytes = 8 * GIB  # workers hold some of it later
    again = desk.memory.settings_of(desk.config()).budget
    assert again is not None
    assert again.size_bytes == 14 * GIB, "the machine was asked once"
    assert [line["size"] for line in desk.logged()] == ["14.00 GiB", "5.00 GiB", "14.00 GiB"]


@pytest.mark.parametrize(
    ("backend", "own_bytes"), [("cpu", 256 * 2**20), ("metal", 256 * 2**20), ("cuda", 0)]
)
def test_a_prewarmed_worker_takes_memory_unless_that_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, own_bytes: int
) -> None:
    desk = Desk(tmp_path, monkeypatch, backend)
    assert desk.memory.settings_of(desk.config(budget=GIB)).prewarmed_bytes == own_bytes
    desk.logged()


def test_a_gpu_that_does_not_say_its_memory_leaves_models_without_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path, monkeypatch, "cuda")
    assert desk.memory.settings_of(desk.config()).budget is None
    (line,) = desk.logged()
    assert (line["level"], line["message"]) == ("warning", "memory not budgeted")
    assert line["cause"].startswith("MLX would use CUDA here, but nvidia-smi does not report")


def test_a_shortage_and_its_end_are_in_the_log(desk: Desk) -> None:
    lowered = replace(WHOLE, size_bytes=3 * GIB, lowered_from_bytes=14 * GIB, shortage="others")
    desk.memory.changed(lowered)
    desk.memory.changed(replace(lowered, is_short=True))
    desk.memory.changed(WHOLE)
    assert desk.logged() == [
        *({"level": level, "message": "memory budget lowered", "size": "3.00 GiB",
           "whole": "14.00 GiB", "cause": "others"} for level in ("info", "warning")),
        {"level": "info", "message": "memory budget restored", "size": "14.00 GiB"},
    ]  # fmt: skip


# ---------------------------------------------------------------- the needs


def test_models_that_cannot_be_read_or_are_not_here_yet_have_no_needs(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(desk.folder / "hub"))
    here = LaunchSettings(path=desk.model_folder())
    models = (
        entry("here", launch=here),
        entry("gone", launch=LaunchSettings(path=str(desk.folder / "gone"))),
        entry("lacking", launch=here, repo=ONE.repo, revision=ONE.revision, download=ONE),
    )
    reading = desk.read(*models)
    assert desk.memory.needs_of(reading) == {ModelName("here"): desk.need(here)}
    assert reading.unread == {}, "all have answered"
    assert desk.logged() == []


def test_folders_of_models_that_a_reload_removes_are_forgotten(desk: Desk) -> None:
    path = desk.model_folder()
    desk.adopt(entry(MODEL, launch=LaunchSettings(path=path)))
    assert desk.estimates.of(Place(path)) is not None
    desk.adopt()
    assert desk.estimates.of(Place(path)) is None


def test_pinned_models_that_do_not_fit_are_a_mistake_of_the_configuration(desk: Desk) -> None:
    launch = LaunchSettings(path=desk.model_folder())
    models = [entry(name, launch=launch, pinned=True) for name in "abc"]
    desk.memory.needs_of(desk.read(*models, budget=GIB))
    with pytest.raises(ConfigError, match=r"the pinned models a .* together"):
        desk.memory.needs_of(desk.read(*models, budget=2**29))
    # Without a budget of the user, that of the machine counts.
    desk.ram_bytes = 2**30
    with pytest.raises(ConfigError, match=r"the pinned models a .* together"):
        desk.memory.needs_of(desk.read(*models))
    desk.logged()


def lacking(name: str, launch: LaunchSettings, repository: Repository) -> ModelSettings:
    source = {"repo": repository.repo, "revision": repository.revision}
    return entry(name, launch=launch, download=repository, **source)


def test_a_download_is_read_for_the_models_that_lacked_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(desk.folder / "hub"))
    launch = LaunchSettings(path=str(desk.folder / "nowhere"), context_length=700)
    third = entry("third", launch=launch)
    desk.adopt(lacking(MODEL, launch, ONE), lacking(OTHER, launch, TWO), third)
    folder = desk.model_folder()
    asyncio.run(desk.memory.found(replace(ONE, revision="v2"), folder))
    assert desk.memory.needs == {}
    asyncio.run(desk.memory.found(ONE, folder))
    need = desk.memory.needs[MODEL]
    assert (list(desk.memory.needs), need.context_tokens) == ([MODEL], 700)
    # From now on that is its launch.
    desk.memory.raised(replace(launch, path=folder), 50)
    assert desk.memory.needs == {MODEL: replace(need, raised_bytes=50)}
    asyncio.run(desk.memory.found(TWO, str(desk.folder / "damaged")))
    assert desk.memory.needs == {MODEL: replace(need, raised_bytes=50)}
    Path(folder).rename(desk.folder / "gone")
    desk.memory.measured(replace(launch, path=folder))
    assert desk.memory.needs == {MODEL: replace(need, raised_bytes=50)}
    desk.logged()


def test_adapters_count_with_a_download(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(desk.folder / "hub"))
    (desk.folder / "poet").mkdir()
    write_weights(desk.folder / "poet" / "adapters.safetensors", llama_arrays())
    plain = LaunchSettings(path=str(desk.folder / "nowhere"))
    adapted = replace(plain, adapters={"poet": str(desk.folder / "poet")})
    desk.adopt(lacking(MODEL, plain, ONE), lacking(OTHER, adapted, ONE))
    folder = desk.model_folder()
    asyncio.run(desk.memory.found(ONE, folder))
    needs = desk.memory.needs
    assert needs[OTHER].weights.size_bytes > needs[MODEL].weights.size_bytes
    loaded = fingerprint(stamp(Path(folder), adapted.adapters.values()))
    assert desk.memory.outdated(replace(adapted, path=folder), loaded) == []
    desk.logged()


def test_a_measurement_counts_for_all_models_with_the_same_launch(desk: Desk) -> None:
    launch = LaunchSettings(path=desk.model_folder())
    longer = replace(launch, context_length=700)
    names = [MODEL, OTHER, ModelName("longer")]
    launches = [launch, launch, longer]
    desk.adopt(*(entry(n, launch=one) for n, one in zip(names, launches, strict=True)))
    before = desk.memory.needs
    files = fingerprint(stamp(Path(launch.path)))
    desk.measurements.learn(
        Measured(
            path=launch.path, backend="cpu", fingerprint=files, weight_bytes=7, own_bytes=1,
            layers=(),
        )
    )  # fmt: skip
    desk.memory.measured(replace(launch, context_length=5))
    assert desk.memory.needs == before
    desk.memory.measured(launch)
    measured = {name for name, need in desk.memory.needs.items() if need.weights.size_bytes == 7}
    assert measured == {MODEL, OTHER}
    assert desk.memory.outdated(launch, files) == []
    desk.logged()


def test_files_that_were_changed_before_a_load_are_read_once_a_worker_has_measured_them(
    desk: Desk,
) -> None:
    launch = LaunchSettings(path=desk.model_folder())
    desk.adopt(entry(MODEL, launch=launch))
    before = desk.memory.needs[MODEL]
    write_folder(Path(launch.path), llama_config(), llama_arrays(layers=3))
    desk.memory.measured(launch)
    assert desk.memory.needs[MODEL] == before
    outdated = desk.memory.outdated(launch, fingerprint(stamp(Path(launch.path))))
    asyncio.run(desk.memory.read_again(outdated))
    assert desk.memory.needs[MODEL].weights.size_bytes > before.weights.size_bytes
    desk.logged()


def test_a_full_disk_is_named_in_the_log(desk: Desk) -> None:
    launch = LaunchSettings(path=desk.model_folder())
    desk.adopt(entry(MODEL, launch=launch))
    (desk.folder / "measured.json.new").mkdir()
    desk.memory.raised(launch, 50)
    assert desk.logged() == [
        {"level": "warning", "message": "measurements not written", "error": "Is a directory"},
    ]


def test_raised_bytes_survive_a_measurement_and_the_daemon(desk: Desk) -> None:
    launch, fake = LaunchSettings(path=desk.model_folder()), LaunchSettings(engine="fake")
    desk.adopt(entry(MODEL, launch=launch), entry(OTHER, launch=fake))
    desk.memory.raised(fake, 700)
    assert not (desk.folder / FILE_NAME).exists(), "it has no files that could change"
    assert desk.memory.needs[OTHER].raised_bytes == 700
    desk.memory.raised(launch, 900)
    desk.memory.measured(launch)
    kept = need_of(launch, estimated(launch), Measurements(desk.folder), "cpu")
    assert desk.memory.needs[MODEL].raised_bytes == kept.raised_bytes == 900
    assert desk.memory.needs[OTHER].raised_bytes == 700, "another launch"
    assert desk.logged() == []


def test_a_draft_model_counts_with_the_model_that_it_guesses_for(desk: Desk) -> None:
    launch = LaunchSettings(path=desk.model_folder())
    drafting = replace(launch, drafts=desk.model_folder("draft"))
    lacking = replace(launch, drafts=str(desk.folder / "none"))
    names, launches = (MODEL, OTHER, ModelName("lacking")), (launch, drafting, lacking)
    desk.adopt(*(entry(n, launch=one) for n, one in zip(names, launches, strict=True)))
    plain, both, alone = (desk.memory.needs[name] for name in names)
    assert both.weights.size_bytes == 2 * plain.weights.size_bytes
    assert both.layers == plain.layers * 2
    assert alone.weights == plain.weights, "its load says that the folder is missing"
    desk.memory.measured(drafting)
    assert desk.memory.needs[OTHER] == both, "what its draft takes is still known"
    assert asyncio.run(desk.memory.appraise(OTHER, drafting)) == both
    other_draft = replace(launch, drafts=desk.model_folder("other_draft"))
    assert asyncio.run(desk.memory.appraise(OTHER, other_draft)) == both, "it is read, too"
    desk.measurements.learn(
        Measured(
            path=measured_place(drafting),
            backend="cpu",
            fingerprint=fingerprint(stamp(Path(drafting.path))),
            weight_bytes=12345,
            own_bytes=1,
            layers=both.layers,
        )
    )
    desk.memory.measured(launch)
    desk.memory.measured(drafting)
    assert desk.memory.needs[MODEL].weights == plain.weights, "it was measured with the draft"
    assert desk.memory.needs[OTHER].weights.size_bytes == 12345
    desk.logged()


def test_another_launch_counts_once_it_is_adopted_and_not_because_it_was_appraised(
    desk: Desk,
) -> None:
    """A load with it may be refused."""
    launch = LaunchSettings(path=desk.model_folder())
    desk.adopt(entry(MODEL, launch=launch))
    before = desk.memory.needs[MODEL]
    longer = replace(launch, context_length=before.context_tokens // 2)
    need = asyncio.run(desk.memory.appraise(MODEL, longer))
    assert need is not None
    desk.memory.measured(launch)
    assert desk.memory.needs[MODEL] == before
    desk.memory.relaunched(MODEL, longer, need)
    desk.memory.measured(longer)
    assert desk.memory.needs[MODEL] == need != before
    desk.logged()


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


@pytest.mark.parametrize("record", ["", None, "[]", '[{"model": "m", "pid": %d, "identity": "x"}]'])
def test_command_budget_counts_processes_without_a_record(
    record: str | None, tmp_path: Path, smi: Path
) -> None:
    smi.write_text(f"{MINE}, 20480\n")
    if record is None:
        (tmp_path / "workers.json").mkdir()
    elif record:
        (tmp_path / "workers.json").write_text(record.replace("%d", str(MINE)))
    if record is not None:
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
    smi.with_name("nvidia-smi").write_text("#!/bin/sh\necho 1234, 5; exit 9\n")
    assert held_on_device([1234]) == 0, "the program has failed"


def test_a_given_budget_and_another_backend_need_no_record(tmp_path: Path) -> None:
    assert command_budget(5 * GIB, "cuda", tmp_path / "none").size_bytes == 5 * GIB
    assert command_budget(None, "cpu", tmp_path / "none").size_bytes > 0


def test_plan_and_config_check_leave_out_what_the_own_workers_hold(
    tmp_path: Path, smi: Path, monkeypatch: pytest.MonkeyPatch, estimates_here: None
) -> None:
    """They say what the daemon plans with, which found its budget before it had workers."""
    smi.write_text(f"{MINE}, 30720\n")
    for module in (machine, needs_module):
        monkeypatch.setattr(module, "find_backend", lambda: "cuda")
    write_folder(tmp_path / "model", llama_config(), llama_arrays())
    path = tmp_path / "mlxsup.toml"
    path.write_text(
        f'[supervisor]\nruntime_dir = "{recorded(tmp_path / "run")}"\n'
        '[models.m]\npath = "model"\npinned = true\n'
    )
    configuration = load_config(path)
    assert plan_of(configuration)["budget"]["bytes"] == 80 * GIB
    smi.write_text(f"{MINE}, 20480\n1, 10240\n")
    found = command_budget(None, "cuda", configuration.runtime_dir)
    assert found.reason == "80.00 GiB of GPU memory less 10.00 GiB that others hold"
    smi.write_text(f"{MINE}, 30720\n")
    program = smi.with_name("nvidia-smi")
    program.write_text(program.read_text().replace("30720", "81920"))
    smi.write_text(f"{MINE}, 81920\n")
    check_needs(configuration)  # the pinned model fits
