"""What the shell finds out about memory for the core: the budget, and what each model needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mlxsup.protocol.download import Repository
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.text import size_text

from ..config.load import DaemonConfig
from ..core.memory.budget import Budget
from ..core.memory.need import Need
from ..core.settings import CoreSettings, ModelSettings
from ..logs import DaemonLog
from .appraiser import FIRST_GUESS_BYTES, Appraiser, raised_to
from .backend import find_backend
from .folder import FolderError
from .machine import NoDeviceMemoryError, find_budget
from .measurements import Measurements
from .problems import check_needs
from .watch import Watch, find_watch


class MemoryBriefing:
    """Reads the machine and the models' folders for the core, which does neither.

    Attributes:
        needs: what the models of the configuration need.

    Args:
        measurements: what workers measured, in this daemon and before.
        log: the daemon's log.
    """

    def __init__(self, measurements: Measurements, log: DaemonLog) -> None:
        self._backend = find_backend()
        self._measurements = measurements
        self._appraiser = Appraiser(self._backend, measurements)
        self._log = log
        # What it was when the daemon started: later, its own workers hold some of it.
        self._automatic: Budget | None = None
        # One entry at most for each model of the configuration, in all three.
        self._launches: dict[ModelName, LaunchSettings] = {}
        self._lacking: dict[ModelName, Repository] = {}
        self.needs: Mapping[ModelName, Need] = {}

    def watch(self, proc: Path) -> Watch:
        """What reads the memory that is available.

        Args:
            proc: where the system's files are.
        """

        def report(problem: str) -> None:
            self._log.write("warning", "available memory not read", cause=problem)

        return find_watch(self._backend, report, proc)

    def changed(self, budget: Budget) -> None:
        """Memory is short, or no longer: logs what is left of the budget."""
        size = size_text(budget.size_bytes)
        if budget.lowered_from_bytes is None:
            self._log.write("info", "memory budget whole again", size=size)
            return
        whole, cause = size_text(budget.whole_bytes), budget.shortage
        self._log.write("warning", "memory budget lowered", size=size, whole=whole, cause=cause)

    def settings_of(self, config: DaemonConfig, *, is_dry: bool = False) -> CoreSettings:
        """The settings of the core, with the budget; without one if the machine does not say it.

        Args:
            config: which.
            is_dry: whether nothing changes, so that nothing is logged.
        """
        budget = self._budget(config.memory_budget)
        if budget is not None and not is_dry:
            size = size_text(budget.size_bytes)
            self._log.write("info", "memory budget", size=size, reason=budget.reason)
        spare_bytes = 0 if self._backend == "cuda" else FIRST_GUESS_BYTES[self._backend]
        return replace(config.core, budget=budget, spare_bytes=spare_bytes)

    def needs_of(self, config: DaemonConfig) -> Mapping[ModelName, Need]:
        """What the models need; those that cannot be read are left out, because they cannot be
        loaded either, and those that have to be downloaded, because nothing is known of them yet.

        Raises:
            ConfigError: the pinned ones do not fit into the budget together, or a model cannot do
                with its `memory`.
        """
        needs = {}
        for model in config.models:
            need = self.appraise(model.launch) if model.download is None else None
            if need is not None:
                needs[model.name] = need
        check_needs(config, needs, self._budget(config.memory_budget))
        return needs

    def adopt(self, models: Sequence[ModelSettings], needs: Mapping[ModelName, Need]) -> None:
        """These are the models now."""
        self._launches = {model.name: model.launch for model in models}
        self._lacking = {model.name: model.download for model in models if model.download}
        self.needs = needs

    def appraise(self, launch: LaunchSettings) -> Need | None:
        """What a model needs with this launch; None: its files cannot be read."""
        try:
            return self._appraiser.appraise(launch)
        except (FolderError, OSError):
            return None

    def relaunched(self, name: ModelName, launch: LaunchSettings, need: Need | None) -> None:
        """A model has another launch than that of its entry from now on, with which it needs this;
        None: its files cannot be read."""
        others = {one: known for one, known in self.needs.items() if one != name}
        self.needs = others if need is None else {**others, name: need}
        self._launches[name] = launch

    def found(self, repository: Repository, folder: str) -> None:
        """A repository is complete, in that folder: the models that lacked it are read, each with
        the launch that it is loaded with, which a load may have asked for."""
        for name, lacking in self._lacking.items():
            if lacking == repository:
                launch = replace(self._launches[name], path=folder)
                self.relaunched(name, launch, self.appraise(launch))

    def measured(self, launch: LaunchSettings) -> None:
        """A worker with these settings has measured its model."""
        found = {name for name, own in self._launches.items() if own == launch}
        need = self.appraise(launch) if found else None
        if need is not None:
            self.needs = {**self.needs, **dict.fromkeys(found, need)}

    def raised(self, launch: LaunchSettings, raised_bytes: int) -> None:
        """A worker with these settings has run out of memory: so much more is reserved from now on.

        A full disk does not stop the serving.
        """
        kept = raised_to(launch, self._backend, raised_bytes)
        if kept is not None:
            try:
                self._measurements.learn_raised(kept)
            except OSError as error:
                self._log.write("warning", "measurements not written", error=error.strerror)
        found = {name for name, own in self._launches.items() if own == launch}
        raised = {
            name: replace(need, raised_bytes=raised_bytes)
            for name, need in self.needs.items()
            if name in found
        }
        self.needs = {**self.needs, **raised}

    # ------------------------------------------------------------ inside

    def _budget(self, given_bytes: int | None) -> Budget | None:
        if given_bytes is not None:
            return find_budget(given_bytes, self._backend)
        if self._automatic is None:
            try:
                self._automatic = find_budget(None, self._backend)
            except NoDeviceMemoryError as error:
                self._log.write("warning", "memory not budgeted", cause=error)
        return self._automatic
