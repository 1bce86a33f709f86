"""What the core raises is remembered by the shell, on the disk if there is room for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.supervisor.config.load import DaemonConfig
from mlxsup.supervisor.core.settings import CoreSettings
from mlxsup.supervisor.log_files import LogWriter
from mlxsup.supervisor.logs import DaemonLog
from mlxsup.supervisor.memory.appraiser import Appraiser
from mlxsup.supervisor.memory.backend import find_backend
from mlxsup.supervisor.memory.briefing import MemoryBriefing
from mlxsup.supervisor.memory.estimator import estimate_launch
from mlxsup.supervisor.memory.measurements import FILE_NAME, Measurements

from support.core_driver import entry
from support.key_place import place_in
from support.safetensors_files import llama_arrays, llama_config, write_folder

MODEL, FAKE = ModelName("m"), ModelName("fake")


class Bench:
    """A briefing about a model with a folder and one of the fake engine.

    Args:
        folder: for everything.
        run: the runtime folder.
    """

    def __init__(self, folder: Path, run: Path) -> None:
        write_folder(folder / "model", llama_config(), llama_arrays())
        self.launch = LaunchSettings(path=str(folder / "model"))
        self.fake = LaunchSettings(engine="fake")
        self.folder, self.run = folder, run
        self.writer = LogWriter(lambda text: None)
        self.log = DaemonLog(folder, "info", self.writer)
        self.briefing = MemoryBriefing(Measurements(run), self.log)
        models = (entry(MODEL, launch=self.launch), entry(FAKE, launch=self.fake))
        config = DaemonConfig(
            config_path=None,
            runtime_dir=run,
            log_dir=folder,
            log_level="info",
            memory_budget=None,
            keys=place_in(folder),
            core=CoreSettings(),
            models=models,
        )
        reading = asyncio.run(self.briefing.read(config))
        self.briefing.adopt(reading, self.briefing.needs_of(reading))

    def raised(self, name: ModelName = MODEL) -> int:
        return self.briefing.needs[name].raised_bytes

    def appraised_anew(self) -> int:
        """What the next daemon will say."""
        appraiser = Appraiser(find_backend(), Measurements(self.run))
        return appraiser.appraise(self.launch, estimate_launch(self.launch)).raised_bytes

    def logged(self) -> str:
        self.log.close()
        assert self.writer.close(60.0)
        path = self.folder / "mlxsup.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, tmp_path)


def test_it_is_remembered_and_a_measurement_does_not_take_it_away(bench: Bench) -> None:
    bench.briefing.raised(bench.launch, 700)
    assert (bench.raised(), bench.appraised_anew()) == (700, 700)
    bench.briefing.measured(bench.launch)
    assert bench.raised() == 700
    assert (bench.raised(FAKE), bench.logged()) == (0, "")


def test_without_files_it_is_known_until_the_daemon_ends(bench: Bench) -> None:
    bench.briefing.raised(bench.fake, 700)
    assert bench.raised(FAKE) == 700
    assert not (bench.run / FILE_NAME).exists()
    bench.log.close()
    bench.writer.close(60.0)


def test_a_file_that_cannot_be_written_is_a_line_in_the_log(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tmp_path / "missing")
    bench.briefing.raised(bench.launch, 700)
    assert bench.raised() == 700
    bench.briefing.measured(bench.launch)
    assert bench.raised() == 700
    assert "measurements not written" in bench.logged()


def test_another_launch_counts_once_it_is_adopted_and_not_because_it_was_appraised(
    bench: Bench,
) -> None:
    """A load with it may be refused."""
    before = bench.briefing.needs[MODEL]
    longer = replace(bench.launch, context_length=before.context_tokens // 2)
    need = asyncio.run(bench.briefing.appraise(MODEL, longer))
    assert need is not None
    bench.briefing.measured(bench.launch)
    assert bench.briefing.needs[MODEL] == before
    bench.briefing.relaunched(MODEL, longer, need)
    bench.briefing.measured(longer)
    assert bench.briefing.needs[MODEL] == need != before
