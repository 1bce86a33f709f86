"""The core's part of the configuration: plain frozen values, already checked.

`supervisor/config/load.py` reads the file, has it checked, and makes these. A key has the name of
its field, and `supervisor/config/tables.py` says what it does; here is only what differs from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import Priority

from .budget import Budget

if TYPE_CHECKING:
    from mlxsup.protocol.download import Repository

ANYONE = "*"
"""The entry of `[clients]` for every client that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSettings:
    """The limits and delays of restarts after crashes: `[models.*.restart]`."""

    max_restarts: int = 8
    window_s: float = 1800.0
    stable_s: float = 60.0
    backoff_initial_s: float = 1.0
    backoff_max_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """One `[models.*]` entry.

    Attributes:
        launch: what its worker is started with.
        repo: whose snapshot the model folder is; empty if the entry names a folder.
        revision: of that repository; empty without one.
        download: what must be downloaded before a load, because the cache lacks files of it; None
            if the folder of `launch` is what there is to load.
    """

    name: ModelName
    launch: LaunchSettings
    repo: str = ""
    revision: str = ""
    download: Repository | None = None
    aliases: tuple[str, ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    preload: bool = True
    pinned: bool = False
    idle_unload_s: float = 0.0
    load_stall_timeout_s: float = 120.0
    restart: RestartSettings = field(default_factory=RestartSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """One `[clients.*]` entry."""

    weight: float = 1.0
    priority: Priority = Priority.NORMAL
    max_priority: Priority = Priority.INTERACTIVE
    max_queue: int = 0
    max_running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """The part of the `[supervisor]` table that decisions depend on, and the clients.

    Attributes:
        max_parallel_prefills: None: one on a GPU, any number on a CPU.
        warm_workers: None: one if memory allows.
        prewarmed_bytes: what each prewarmed worker takes of the memory that the budget is for,
            before one was measured; 0 if they take none of it.
        clients: what each client is granted, by name; `ANYONE` is for all others.
        budget: the memory that all models may take together; None for no limit.
        log_level: `debug`, `info`, `warning` or `error`, of the daemon and its workers.
    """

    max_queue: int = 1024
    max_queue_per_client: int = 64
    max_queue_bytes: int = 256 * 1024 * 1024
    drain_timeout_s: float = 30.0
    queue_timeout_s: float = 600.0
    first_token_timeout_s: float = 0.0
    max_parallel_prefills: int | None = None
    parallel_loads: int = 1
    warm_workers: int | None = None
    prewarmed_bytes: int = 0
    exit_grace_s: float = 2.0
    aging_s: float = 60.0
    min_run_s: float = 2.0
    clients: Mapping[str, ClientSettings] = field(default_factory=dict)
    min_residency_s: float = 30.0
    swap: bool = True
    swap_after_s: float = 20.0
    budget: Budget | None = None
    log_level: str = "info"
