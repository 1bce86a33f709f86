"""The tables of the configuration file: their keys, what each takes, and the defaults.

The defaults come from `core/settings.py` if the core knows the key. A field's description is what
an error says was expected; its title says what the key does, for editors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mlxsup.protocol.folders import DEFAULT_LOG_DIR, DEFAULT_RUNTIME_DIR
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.store.hub_cache import DEFAULT_REVISION, REPOSITORY_EXPECTED, REVISION_EXPECTED

from ..core.settings import CoreSettings, ModelSettings, RestartSettings
from .fields import default_of, documented, duration, integer
from .kinds import (
    CountOrAuto,
    Duration,
    Folder,
    LogFormat,
    LogLevel,
    Names,
    PreventSleep,
    Repository,
    Revision,
    Size,
    SizeAutoOrOff,
    SizeOrAuto,
    Table,
)
from .preset_table import PresetTable
from .sampling_table import SamplingTable
from .values import (
    AUTO,
    COUNT_OR_AUTO_EXPECTED,
    NAMES_EXPECTED,
    OFF,
    SIZE_EXPECTED,
)

MAX_CONCURRENCY = 1024
MAX_SPARE_WORKERS = 16


class SupervisorTable(Table):
    """`[supervisor]`."""

    runtime_dir: Folder = Field(
        DEFAULT_RUNTIME_DIR,
        title="created with mode 0700; holds the sockets and the lock",
        description="a folder",
        json_schema_extra=documented("; refused with any other mode"),
    )
    log_dir: Folder = Field(
        DEFAULT_LOG_DIR,
        title="one log for each model, and the daemon's own",
        description="a folder",
        json_schema_extra=documented(
            "; used by one daemon only. Without this key: `logs` in `runtime_dir`, if"
            " `runtime_dir` is not the default"
        ),
    )
    memory_budget: SizeOrAuto = Field(
        AUTO,
        title="what `mlxsup plan` fits all models into",
        description=f'"auto", or {SIZE_EXPECTED}',
        json_schema_extra=documented(
            '; not more than the machine has. `"auto"`: see [memory](#what-fits-into-memory)'
        ),
    )
    max_queue: int = integer(
        CoreSettings,
        "max_queue",
        "waiting requests, over all models",
        1,
        unit="requests",
        more="; beyond that they are answered `overloaded`. When the queue is full, each model may"
        " still have its equal share of it waiting",
    )
    max_queue_per_client: int = integer(
        CoreSettings,
        "max_queue_per_client",
        "waiting requests of one client",
        1,
        unit="requests",
        more=", unless its own entry says otherwise; beyond that they are answered `overloaded`",
    )
    max_queue_bytes: Size = Field(
        default_of(CoreSettings, "max_queue_bytes"),
        ge=1,
        title="the bodies of all open requests together",
        description=SIZE_EXPECTED,
        json_schema_extra=documented("; beyond it, requests are answered `overloaded`"),
    )
    log_level: LogLevel = Field(
        "info",
        title="the lowest level that is logged",
        description='"debug", "info", "warning" or "error"',
        json_schema_extra=documented(
            ": `debug`, `info`, `warning` or `error`; applies to workers, too. `mlxsup log-level`"
            " changes it at once"
        ),
    )
    log_format: LogFormat = Field(
        "text",
        title='how mlxsup.log is written; "json": an object on each line',
        description='"text" or "json"',
        json_schema_extra=documented("; what workers print stays as it is"),
    )
    prevent_sleep: PreventSleep = Field(
        "off",
        title='"busy": a Mac stays awake while something runs or loads',
        description='"off" or "busy"',
        json_schema_extra=documented(
            ": requests that nobody has paused, loads and downloads. It sleeps again after its own"
            " idle time. Elsewhere it has no effect, and a line of `mlxsup.log` says so",
            "word",
        ),
    )
    drain_timeout_s: Duration = duration(
        CoreSettings,
        "drain_timeout_s",
        "how long an unload, a restart or `stop` waits for running requests",
    )
    queue_timeout_s: Duration = duration(
        CoreSettings,
        "queue_timeout_s",
        "how long a request may wait; requests can override it",
        more="; 0: no limit. An interrupted answer counts as started",
    )
    first_token_timeout_s: Duration = duration(
        CoreSettings,
        "first_token_timeout_s",
        "time limit for the first token; 0: none; requests can override it",
    )
    aging_s: Duration = duration(
        CoreSettings,
        "aging_s",
        "a request moves up one class each time it has waited this long",
        more="; 0: never",
    )
    min_run_s: Duration = duration(
        CoreSettings,
        "min_run_s",
        "a batch answer runs this long before it may lose its row",
        more=" to an interactive request, from its first new token on",
    )
    max_parallel_prefills: CountOrAuto = Field(
        AUTO,
        title="models on one backend that read long prompts at the same time",
        description=COUNT_OR_AUTO_EXPECTED,
        json_schema_extra=documented(
            "; more of them take turns, chunk by chunk."
            ' `"auto"`: one on a GPU, any number on a CPU',
            "models",
        ),
    )
    parallel_loads: int = integer(
        CoreSettings,
        "parallel_loads",
        "models that load at the same time",
        1,
        unit="models",
        more=", each with its memory reserved before. A restart after a crash only waits for other"
        " such restarts, of which there may be as many again",
    )
    spare_workers: int = integer(
        CoreSettings,
        "spare_workers",
        "processes that have imported MLX and wait for a load",
        0,
        MAX_SPARE_WORKERS,
        unit="processes",
        more=f", up to {MAX_SPARE_WORKERS}. A load or restart takes one over and so skips the"
        " imports; see [spare workers](#spare-workers)",
    )
    min_residency_s: Duration = duration(
        CoreSettings,
        "min_residency_s",
        "how long a model that has loaded stays, unless it is idle",
        more="; three times as long as its load took if that is longer. One that has been idle for"
        " as long as its load took may be evicted before",
    )
    swap: bool = Field(
        default_of(CoreSettings, "swap"),
        title="models that do not fit together take turns; false: refuse instead",
        description="true or false",
        json_schema_extra=documented(
            ". A busy model whose turn is over makes room; its requests wait, and continue where"
            " they stood"
        ),
    )
    swap_after_s: Duration = duration(
        CoreSettings,
        "swap_after_s",
        "how long a model waits for memory before a busy one makes room",
        more=", or, with `swap` off, before what waits for it is refused",
    )


class RestartTable(Table):
    """`[models.NAME.restart]`."""

    max_restarts: int = integer(
        RestartSettings,
        "max_restarts",
        "restarts within window_s; one more crash makes the model FAILED",
        0,
        unit="restarts",
    )
    window_s: Duration = duration(
        RestartSettings, "window_s", "the time in which restarts are counted", is_zero_allowed=False
    )
    stable_s: Duration = duration(
        RestartSettings, "stable_s", "once READY for this long, the delay is reset"
    )
    backoff_initial_s: Duration = duration(
        RestartSettings, "backoff_initial_s", "the delay after the first, immediate restart"
    )
    backoff_max_s: Duration = duration(
        RestartSettings, "backoff_max_s", "the delay doubles up to this"
    )


class ModelTable(Table):
    """`[models.NAME]`, and `[defaults]`."""

    path: Folder | None = Field(
        None,
        title="a model folder in mlx-lm's format",
        description="a folder",
        json_schema_extra=documented("; this or `repo` is required"),
    )
    repo: Repository | None = Field(
        None,
        title="instead of path: in the Hugging Face cache",
        description=REPOSITORY_EXPECTED,
        json_schema_extra=documented(
            ", the repository `OWNER/NAME`. Its files are used where they are, and those that are"
            " missing are [downloaded](#downloads) when it is loaded; the cache is where"
            " `HF_HUB_CACHE`, `HF_HOME` or `XDG_CACHE_HOME` says, or `~/.cache/huggingface/hub`",
            "name",
        ),
    )
    revision: Revision = Field(
        DEFAULT_REVISION,
        title="with repo: its branch, tag or commit",
        description=REVISION_EXPECTED,
        json_schema_extra=documented(
            "; which commit a branch means is looked up at the start and at a reload", "name"
        ),
    )
    aliases: Names = Field(
        [],
        title="other names for it, in requests and commands",
        description=NAMES_EXPECTED,
        json_schema_extra=documented("; the status shows it under its name", "names"),
    )
    preload: bool = Field(
        default_of(ModelSettings, "preload"),
        title="load at startup; otherwise on the first request",
        description="true or false",
        json_schema_extra=documented(
            ". At startup nothing is evicted: what does not fit into `memory_budget` stays PENDING"
        ),
    )
    pinned: bool = Field(
        default_of(ModelSettings, "pinned"),
        title="never evicted; its memory is reserved even while it is not loaded",
        description="true or false",
    )
    max_concurrency: int = integer(
        LaunchSettings,
        "max_concurrency",
        "requests that run at the same time, as rows of one batch",
        1,
        MAX_CONCURRENCY,
        unit="requests",
        more=f"; up to {MAX_CONCURRENCY}",
    )
    idle_unload_s: Duration = duration(
        ModelSettings, "idle_unload_s", "unload after this long without a request; 0: never"
    )
    load_stall_timeout_s: Duration = duration(
        ModelSettings,
        "load_stall_timeout_s",
        "a load is ended after this long without progress",
        is_zero_allowed=False,
        more=", which counts as a crash",
    )
    step_timeout_s: Duration = duration(
        LaunchSettings,
        "step_timeout_s",
        "time limit for one step; a chunk of a prompt takes at most a tenth",
        is_zero_allowed=False,
        more=", and preparing one prompt may take ten times as long",
    )
    decode_stall_target_ms: int = integer(
        LaunchSettings,
        "decode_stall_target_ms",
        "how long a chunk of a new prompt may hold up running answers",
        1,
        unit="milliseconds",
    )
    context_length: int = integer(
        LaunchSettings,
        "context_length",
        "tokens of prompt and answer together; 0: the model's own limit",
        0,
        unit="tokens",
        more=", or 4,096 with a warning if config.json declares none. It is capped at what the"
        " model declares, with a warning",
    )
    deterministic: bool = Field(
        default_of(LaunchSettings, "deterministic"),
        title="read prompts in chunks of a fixed size, and never from a cache",
        description="true or false",
    )
    memory: SizeOrAuto = Field(
        AUTO,
        title="above this, MLX frees memory that it keeps for reuse",
        description=f'"auto", or {SIZE_EXPECTED}',
        json_schema_extra=documented(
            ", `mlxsup plan` counts this much, and what the weights and the process leave of it is"
            ' the limit of its rows; `"auto"`: MLX\'s own limit, and what the model'
            " needs. Less than the weights, the process and a request of 256 tokens take: exit code"
            " 78 if the files show it, otherwise FAILED after the load; more than 0.8 of it in"
            " use before the first request: a warning"
        ),
    )
    cache_limit: SizeOrAuto = Field(
        AUTO,
        title="how much memory MLX may keep for reuse",
        description=f'"auto", or {SIZE_EXPECTED}',
        json_schema_extra=documented(
            '; `"auto"`: on a GPU 8 GiB, or an eighth of its memory if that is less; on a CPU'
            " MLX's own limit. An idle worker frees this memory after three seconds in any case"
        ),
    )
    prefix_cache: SizeOrAuto = Field(
        AUTO,
        title="memory for the prefixes of earlier prompts, to be reused; 0: none",
        description=f'"auto", or {SIZE_EXPECTED}',
        json_schema_extra=documented(
            '; `"auto"`: a tenth of the memory that is free after the load, or as much as a prompt'
            " of the whole context takes if that is more, but never more than half of what is free"
        ),
    )
    wired: SizeAutoOrOff = Field(
        OFF,
        title='memory that cannot be paged out; "auto": the size of the weights',
        description=f'"off", "auto", or {SIZE_EXPECTED}',
    )
    engine: Literal["mlx", "fake"] = Field(
        default_of(LaunchSettings, "engine"),
        title='"mlx", or "fake", which answers without a model, for tests',
        description='"mlx" or "fake"',
    )
    fake: dict[str, Any] = Field(
        default_factory=dict,
        title='options of the fake engine; only with engine = "fake"',
        description="a table of the fake engine's options",
    )
    restart: RestartTable = Field(
        default_factory=RestartTable,
        title="how often and how soon a crashed worker is started again",
        description="a table",
    )
    if TYPE_CHECKING:
        sampling: Table = Table()
    else:
        sampling: SamplingTable = Field(
            default_factory=SamplingTable,
            title="the parameters of requests that leave them out",
            description="a table",
        )
    if TYPE_CHECKING:
        presets: dict[str, Table] = {}
    else:
        presets: dict[str, PresetTable] = Field(
            default_factory=dict,
            title="over HTTP, NAME:PRESET is the model with these parameters",
            description="a table for each preset, [models.NAME.presets.PRESET]",
        )
