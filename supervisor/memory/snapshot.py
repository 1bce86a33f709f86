"""The budget and the needs of all models, as the shell finds them out for the core."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from mlxsup.protocol.download import Repository
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.text import size_text

from ..config.load import DaemonConfig, located
from ..core.budget import Budget, Need
from ..core.settings import CoreSettings, ModelSettings
from ..logs import DaemonLog
from .estimates import Estimates
from .folder_reader import Look, Place, place_of
from .machine import NoDeviceMemoryError, find_backend, find_budget
from .measurements import Measurements
from .needs import FIRST_GUESS_BYTES, check_needs, measured_place, need_of
from .watch import Watch, find_watch


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSnapshot:
    """A configuration, and the places of its models.

    Attributes:
        config: with the folders that the cache has for its repositories.
        places: where the models are that have a folder, by name.
        unread: of the models whose folders did not answer, a sentence each.
    """

    config: DaemonConfig
    places: Mapping[ModelName, Place]
    unread: Mapping[ModelName, str]


class MemorySnapshot:
    """The budget and the needs of the models, kept current for the core, which reads neither.

    Attributes:
        needs: of the models of the configuration.

    Args:
        measurements: what workers measured, in this daemon and before.
        log: the daemon's log.
        estimates: looks at folders.
    """

    def __init__(
        self, measurements: Measurements, log: DaemonLog, estimates: Estimates | None = None
    ) -> None:
        self._estimates = estimates or Estimates()
        self._backend = find_backend()
        self._measurements = measurements
        self._log = log
        # What it was when the daemon started: later, its own workers hold some of it.
        self._automatic: Budget | None = None
        # One entry at most for each model of the configuration, in all four.
        self._launches: dict[ModelName, LaunchSettings] = {}
        self._places: dict[ModelName, Place] = {}
        self._lacking: dict[ModelName, Repository] = {}
        self.needs: Mapping[ModelName, Need] = {}

    def watch(self) -> Watch:
        """Return what reads the memory that is available."""
        return find_watch(self._backend)

    def changed(self, budget: Budget) -> None:
        """Log what is left of the budget: memory is short, or no longer."""
        size = size_text(budget.size_bytes)
        if budget.lowered_from_bytes is None:
            self._log.write("info", "memory budget restored", size=size)
            return
        whole, cause = size_text(budget.whole_bytes), budget.shortage
        # Any desktop's programs lower it; only models that have to give some back lose by it.
        level = "warning" if budget.is_short else "info"
        self._log.write(level, "memory budget lowered", size=size, whole=whole, cause=cause)

    def settings_of(self, config: DaemonConfig, *, is_dry: bool = False) -> CoreSettings:
        """Return the settings of the core, with the budget if the machine says it.

        Args:
            config: which.
            is_dry: whether nothing changes, so that nothing is logged.
        """
        budget = self._budget(config.memory_budget)
        if budget is not None and not is_dry:
            size = size_text(budget.size_bytes)
            self._log.write("info", "memory budget", size=size, reason=budget.reason)
        prewarmed_bytes = 0 if self._backend == "cuda" else FIRST_GUESS_BYTES[self._backend]
        return replace(config.core, budget=budget, prewarmed_bytes=prewarmed_bytes)

    async def read(self, config: DaemonConfig) -> ConfigSnapshot:
        """Look at the folders of a configuration's models, and up their repositories in the cache.

        How long it takes: see `Estimates.look_at`.
        """
        places = {
            model.name: place
            for model in config.models
            if (place := place_of(model.launch, model.repo, model.revision)) is not None
        }
        drafts = _draft_places(model.launch for model in config.models)
        self._estimates.keep({*self._known_places(), *places.values(), *drafts})
        looks = await self._estimates.look_at([*places.values(), *drafts])
        models = tuple(
            _located(model, looks[places[model.name]]) if model.name in places else model
            for model in config.models
        )
        silent = {n: looks[at].problem for n, at in places.items() if not looks[at].is_read}
        return ConfigSnapshot(config=replace(config, models=models), places=places, unread=silent)

    def needs_of(self, reading: ConfigSnapshot) -> Mapping[ModelName, Need]:
        """Return what the models need; those that cannot be read are left out, because they cannot
        be loaded either, and those that have to be downloaded: nothing is known of them yet.

        Raises:
            ConfigError: the pinned ones do not fit into the budget together, or a model cannot do
                with its `memory`.
        """
        config = reading.config
        needs = {}
        for model in config.models:
            need = self._need_of(model.launch, reading.places.get(model.name))
            if need is not None:
                needs[model.name] = need
        check_needs(config, needs, self._budget(config.memory_budget))
        return needs

    def adopt(self, reading: ConfigSnapshot, needs: Mapping[ModelName, Need]) -> None:
        """Take the models of a configuration for those that there are."""
        models = reading.config.models
        self._launches = {model.name: model.launch for model in models}
        self._lacking = {model.name: model.download for model in models if model.download}
        self._places = dict(reading.places)
        self._estimates.keep(self._known_places())
        self.needs = needs
        for name, cause in reading.unread.items():
            self._log.write("warning", "model folder not read", model=name, cause=cause)

    async def appraise(self, name: ModelName, launch: LaunchSettings) -> Need | None:
        """Return what a model needs with this launch; None if its files cannot be read.

        Args:
            name: its name; nothing is known of one that a reload has removed.
            launch: that of its entry, but for the length of its context.
        """
        place = self._places.get(name)
        if place is not None:
            await self._estimates.look_at([place, *_draft_places([launch])])
        return self._need_of(launch, place)

    def relaunched(self, name: ModelName, launch: LaunchSettings, need: Need | None) -> None:
        """Note that a model has another launch than that of its entry from now on, with which it
        needs this; None: its files cannot be read."""
        others = {one: known for one, known in self.needs.items() if one != name}
        self.needs = others if need is None else {**others, name: need}
        self._launches[name] = launch

    async def found(self, repository: Repository, folder: str) -> None:
        """Read a repository that is complete for the models that lacked it, each with the launch
        that it is loaded with, which a load may have asked for.

        Args:
            repository: which.
            folder: where it is now.
        """
        # With the adapters of each model, which count with it.
        here = {
            place: Place(folder, adapters=place.adapters)
            for name, place in self._places.items()
            if self._lacking.get(name) == repository
        }
        looks = await self._estimates.look_at(here.values())
        for place, own in here.items():
            self._estimates.know(place, looks[own])
        for name, lacking in self._lacking.items():
            if lacking == repository:
                launch = replace(self._launches[name], path=folder)
                self.relaunched(name, launch, self._need_of(launch, self._places[name]))

    def measured(self, launch: LaunchSettings) -> None:
        """Plan with what a worker with these settings has measured of its model."""
        found = [name for name, own in self._launches.items() if own == launch]
        needs = {name: self._need_of(launch, self._places.get(name)) for name in found}
        self.needs = {**self.needs, **{n: need for n, need in needs.items() if need is not None}}

    def outdated(self, launch: LaunchSettings, loaded: str) -> list[Place]:
        """Return the folders of models with this launch that have changed since they were read.

        Args:
            launch: which.
            loaded: the fingerprint of the files that a worker has loaded since.
        """
        places = [self._places[n] for n, own in self._launches.items() if own == launch]
        return [place for place in places if self._fingerprint(place) != loaded]

    async def read_again(self, places: Collection[Place]) -> None:
        """Look at folders that have changed, and plan with what is there now."""
        await self._estimates.look_at(places)
        for name, place in self._places.items():
            need = self._need_of(self._launches[name], place) if place in places else None
            if need is not None:
                self.needs = {**self.needs, name: need}

    def raised(self, launch: LaunchSettings, raised_bytes: int) -> None:
        """Reserve so much more from now on for models with these settings: a worker with them has
        run out of memory.

        A full disk does not stop the serving.
        """
        found = [name for name, own in self._launches.items() if own == launch]
        prints = {self._fingerprint(self._places[n]) for n in found if n in self._places} - {""}
        for known in prints:
            try:
                self._measurements.learn_raised(
                    measured_place(launch), self._backend, known, raised_bytes
                )
            except OSError as error:
                self._log.write("warning", "measurements not written", error=error.strerror)
        raised = {
            name: replace(self.needs[name], raised_bytes=raised_bytes)
            for name in found
            if name in self.needs
        }
        self.needs = {**self.needs, **raised}

    # ------------------------------------------------------------ inside

    def _need_of(self, launch: LaunchSettings, place: Place | None) -> Need | None:
        """Return what is known of a model without looking at its folder; None if nothing is."""
        if launch.engine == "fake":
            return need_of(launch, None, self._measurements, self._backend)
        look = self._estimates.of(place) if place is not None else None
        if look is None or look.estimate is None:
            return None
        drafts = [self._estimates.of(one) for one in _draft_places([launch])]
        draft = drafts[0].estimate if drafts and drafts[0] is not None else None
        return need_of(launch, look.estimate, self._measurements, self._backend, draft)

    def _known_places(self) -> list[Place]:
        return [*self._places.values(), *_draft_places(self._launches.values())]

    def _fingerprint(self, place: Place) -> str:
        look = self._estimates.of(place)
        return look.estimate.fingerprint if look is not None and look.estimate else ""

    def _budget(self, given_bytes: int | None) -> Budget | None:
        if given_bytes is not None:
            return find_budget(given_bytes, self._backend)
        if self._automatic is None:
            try:
                self._automatic = find_budget(None, self._backend)
            except NoDeviceMemoryError as error:
                self._log.write("warning", "memory not budgeted", cause=error)
        return self._automatic


def _draft_places(launches: Iterable[LaunchSettings]) -> list[Place]:
    """Return where the draft models of these models are, of those that have one."""
    return [Place(one.draft_folder) for one in launches if one.draft_folder]


def _located(model: ModelSettings, look: Look) -> ModelSettings:
    """Return the entry with what the cache has of its repository; as it is if that is not known."""
    if not model.repo or not look.path:
        return model
    return located(model, look.path, is_lacking=look.is_lacking)
