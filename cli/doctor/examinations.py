"""What is looked at, in the order of the report: which facts, and which check judges them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from .checks.configuration import check_configuration, check_hub, check_models
from .checks.daemon import check_daemon
from .checks.gateway import check_gateway
from .checks.machine import check_machine
from .checks.memory import check_memory
from .checks.places import check_open_files, check_places
from .checks.service import check_services
from .checks.software import check_software
from .finding import Finding
from .gathering.daemons import gather_daemon, gather_gateway
from .gathering.folders import gather_open_files, gather_places
from .gathering.machine import gather_machine, gather_memory, gather_software
from .gathering.services import gather_services
from .gathering.setting import (
    Setting,
    gather_configuration,
    gather_hub,
    gather_models,
    offline_variable,
)


def examinations(setting: Setting) -> Mapping[str, Callable[[], Iterable[Finding]]]:
    """Every examination, by what it looks at; each may be done in its own thread."""
    return {
        "software": lambda: check_software(gather_software()),
        "configuration": lambda: check_configuration(gather_configuration(setting)),
        "models": lambda: check_models(gather_models(setting), offline_variable()),
        "downloads": lambda: check_hub(gather_hub(setting)),
        "folders": lambda: check_places(gather_places(setting)),
        "open files": lambda: check_open_files(gather_open_files(setting)),
        "memory": lambda: check_memory(gather_memory(setting)),
        "daemon": lambda: _daemon(setting),
        "service": lambda: _services(setting),
        "machine": lambda: check_machine(gather_machine(setting)),
    }


def _services(setting: Setting) -> Iterable[Finding]:
    counting = setting.configuration.counting
    config = counting.path if counting is not None and counting.is_there else None
    return check_services(gather_services(), config)


def _daemon(setting: Setting) -> Iterator[Finding]:
    facts = gather_daemon(setting)
    yield from check_daemon(facts)
    yield from check_gateway(gather_gateway(setting, facts))
