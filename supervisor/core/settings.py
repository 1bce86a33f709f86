"""What the core knows about the configuration: plain frozen values, already checked.

`supervisor/config/load.py` reads the file, has it checked, and makes these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import Priority

from .memory.budget import Budget

if TYPE_CHECKING:
    from mlxsup.protocol.download import Repository

ANYONE = "*"
"""The entry of `[clients]` for every client that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSettings:
    """How often and how soon a crashed worker is started again.

    Attributes:
        max_restarts: restarts after crashes within `window_s`; one more crash makes it FAILED.
        window_s: the time in which restarts are counted.
        stable_s: READY for this long counts as a successful start; the delay is reset.
        backoff_initial_s: the delay of the second restart (the first is immediate).
        backoff_max_s: the delay doubles up to this.
    """

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
        aliases: other names for it; none of them means another model.
        presets: parameters for requests over HTTP that name the preset, by its name.
        preload: load when the supervisor starts; otherwise on the first request.
        pinned: it is never evicted, and its memory is reserved even while it is not loaded.
        idle_unload_s: unload after this long without a request; 0 for never.
        load_stall_timeout_s: a load without progress for this long has stalled.
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
    """One `[clients.*]` entry.

    Attributes:
        weight: its share of the engines next to other clients; above 0.
        priority: the class of its requests that name none.
        max_priority: the highest class that its requests may name.
        max_queue: its waiting requests; 0 for `max_queue_per_client`.
        max_running: its requests that run at the same time, over all models; 0 for no limit.
    """

    weight: float = 1.0
    priority: Priority = Priority.NORMAL
    max_priority: Priority = Priority.INTERACTIVE
    max_queue: int = 0
    max_running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """The part of the `[supervisor]` table that decisions depend on, and the clients.

    Attributes:
        max_queue: waiting requests, over all models.
        max_queue_per_client: waiting requests of one client, unless its own entry says otherwise.
        max_queue_bytes: bodies and resume data of all open requests together.
        drain_timeout_s: how long running requests may take to finish when a worker is shut down.
        queue_timeout_s: how long a request may wait to be dispatched, unless it says otherwise.
        first_token_timeout_s: time limit for the first token, unless the request sets one; 0: none.
        aging_s: after each wait of this length a request moves up one class; 0 for never.
        min_run_s: a `batch` request is paused for an `interactive` one only after it has gained
            tokens for this long since it was dispatched.
        clients: what each client is granted, by name; `ANYONE` is for all others.
        max_parallel_prefills: how many models of one backend may read long prompts at the same
            time; None: one on a GPU, any number on a CPU.
        parallel_loads: how many models may load at the same time; as many again after a crash.
        warm_workers: how many prewarmed workers wait for a load; None: one if memory allows.
        prewarmed_bytes: what each of them takes of the memory that the budget is for, before one
            was measured; 0 if they take none of it.
        exit_grace_s: from asking a worker to exit to SIGTERM, and from there to SIGKILL.
        min_residency_s: a model that was just used is not evicted for a request for another model
            before it was READY for so long.
        swap: whether models that do not fit together take turns; otherwise what would need that is
            refused.
        swap_after_s: how long a model waits for memory before others are swapped out for it.
        budget: the memory that all models may take together; None for no limit.
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
