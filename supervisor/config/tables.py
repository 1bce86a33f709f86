"""The tables of the configuration file: their keys, what each takes, and the defaults.

The defaults are those of `core/settings.py` where the core knows the key. The description of a
field is what an error says was expected; its title says what the key does, for editors.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mlxsup.protocol.folders import DEFAULT_LOG_DIR, DEFAULT_RUNTIME_DIR
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.parameters import SAMPLING, NumberParameter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from ..core.settings import CoreSettings, ModelSettings, RestartSettings
from .values import (
    AUTO,
    DURATION_EXPECTED,
    OFF,
    SIZE_EXPECTED,
    check_duration,
    check_size_auto_or_off,
    check_size_or_auto,
    parse_size,
)

MAX_CONCURRENCY = 1024

LogLevel = Literal["debug", "info", "warning", "error"]

Duration = Annotated[float, BeforeValidator(check_duration)]
Folder = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
"""No system call takes a path with a NUL in it."""
Size = Annotated[int, BeforeValidator(parse_size)]
SizeOrAuto = Annotated[int | str, BeforeValidator(check_size_or_auto)]
SizeAutoOrOff = Annotated[int | str, BeforeValidator(check_size_auto_or_off)]
Number = Annotated[
    float, BeforeValidator(lambda value: float(value) if type(value) is int else value)
]


def _default(settings: type, name: str) -> Any:
    """The default that the core's settings give a field, so that no number stands twice."""
    value = next(f.default for f in fields(settings) if f.name == name)
    assert value is not MISSING
    return value


class Table(BaseModel):
    """What all tables share: no key but the named ones, no conversion behind the user's back."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _duration(settings: type, name: str, title: str, *, is_zero_allowed: bool = True) -> Any:
    limit: dict[str, Any] = {"ge": 0} if is_zero_allowed else {"gt": 0}
    least = "" if is_zero_allowed else ", above 0"
    description = DURATION_EXPECTED + least
    return Field(_default(settings, name), title=title, description=description, **limit)


def _integer(settings: type, name: str, title: str, low: int, high: int | None = None) -> Any:
    top = "" if high is None else f" to {high}"
    description = f"an integer from {low}{top}"
    return Field(_default(settings, name), ge=low, le=high, title=title, description=description)


class SupervisorTable(Table):
    """`[supervisor]`."""

    runtime_dir: Folder = Field(
        DEFAULT_RUNTIME_DIR,
        title="created with mode 0700; holds the sockets and the lock",
        description="a folder",
    )
    log_dir: Folder = Field(
        DEFAULT_LOG_DIR,
        title="one log for each model, and the daemon's own",
        description="a folder",
    )
    max_queue: int = _integer(CoreSettings, "max_queue", "requests that wait, over all models", 1)
    max_queue_per_client: int = _integer(
        CoreSettings, "max_queue_per_client", "requests that wait, of one client or connection", 1
    )
    max_queue_bytes: Size = Field(
        _default(CoreSettings, "max_queue_bytes"),
        ge=1,
        title="bodies of all open requests",
        description=SIZE_EXPECTED,
    )
    log_level: LogLevel = Field(
        "info",
        title="the least important lines that the logs hold",
        description='"debug", "info", "warning" or "error"',
    )
    drain_timeout_s: Duration = _duration(
        CoreSettings,
        "drain_timeout_s",
        "how long running requests may finish when a model shall go",
    )
    queue_timeout_s: Duration = _duration(
        CoreSettings, "queue_timeout_s", "how long a request may wait; a request may say otherwise"
    )
    first_token_timeout_s: Duration = _duration(
        CoreSettings,
        "first_token_timeout_s",
        "until the first token, 0: none; a request may say otherwise",
    )


class RestartTable(Table):
    """`[models.NAME.restart]`."""

    max_restarts: int = _integer(
        RestartSettings,
        "max_restarts",
        "restarts after crashes within window_s; one more crash makes it FAILED",
        0,
    )
    window_s: Duration = _duration(
        RestartSettings, "window_s", "the time in which restarts are counted", is_zero_allowed=False
    )
    stable_s: Duration = _duration(
        RestartSettings, "stable_s", "READY for this long: the delay starts afresh"
    )
    backoff_initial_s: Duration = _duration(
        RestartSettings, "backoff_initial_s", "the delay after the first, immediate restart"
    )
    backoff_max_s: Duration = _duration(
        RestartSettings, "backoff_max_s", "what the delay doubles up to"
    )


def _sampling(number: NumberParameter) -> tuple[Any, Any]:
    """A parameter of requests, with the range and the default that it has there."""
    limits: dict[str, Any] = {"gt" if number.is_low_open else "ge": number.low, "le": number.high}
    kind = int if number.is_integer else Number
    return kind, Field(number.default, title=number.says, description=number.expected, **limits)


_SAMPLING_FIELDS: Any = {name: _sampling(number) for name, number in SAMPLING.items()}
SamplingTable = create_model(
    "SamplingTable",
    __base__=Table,
    __doc__="`[models.NAME.sampling]`: what a request's parameters are if it leaves them out.",
    **_SAMPLING_FIELDS,
)


class ModelTable(Table):
    """`[models.NAME]`, and `[defaults]`."""

    path: Folder | None = Field(
        None, title="a folder in the format of mlx-lm", description="a folder"
    )
    preload: bool = Field(
        _default(ModelSettings, "preload"),
        title="load at the start; else on the first request",
        description="true or false",
    )
    max_concurrency: int = _integer(
        LaunchSettings,
        "max_concurrency",
        "requests that run at the same time, as rows of one batch",
        1,
        MAX_CONCURRENCY,
    )
    idle_unload_s: Duration = _duration(
        ModelSettings, "idle_unload_s", "unload after this long without a request; 0: never"
    )
    load_stall_timeout_s: Duration = _duration(
        ModelSettings,
        "load_stall_timeout_s",
        "a load without progress for this long is ended",
        is_zero_allowed=False,
    )
    step_timeout_s: Duration = _duration(
        LaunchSettings,
        "step_timeout_s",
        "the limit of one step; a piece of a prompt takes a tenth at most",
        is_zero_allowed=False,
    )
    decode_stall_target_ms: int = _integer(
        LaunchSettings,
        "decode_stall_target_ms",
        "how long a piece of a new prompt may hold up running answers",
        1,
    )
    context_length: int = _integer(
        LaunchSettings,
        "context_length",
        "tokens of prompt and answer together; 0: the model's own limit",
        0,
    )
    deterministic: bool = Field(
        _default(LaunchSettings, "deterministic"),
        title="prompts in pieces of a fixed size, and none taken from a cache",
        description="true or false",
    )
    memory: SizeOrAuto = Field(
        AUTO,
        title="above this MLX gives back what it keeps for reuse",
        description=f'"auto", or {SIZE_EXPECTED}',
    )
    cache_limit: SizeOrAuto = Field(
        AUTO, title="what MLX may keep for reuse", description=f'"auto", or {SIZE_EXPECTED}'
    )
    prefix_cache: SizeOrAuto = Field(
        AUTO,
        title="what is kept of prompts for later ones that begin alike; 0: nothing",
        description=f'"auto", or {SIZE_EXPECTED}',
    )
    wired: SizeAutoOrOff = Field(
        OFF,
        title='memory that cannot be paged out; "auto": as much as the weights take',
        description=f'"off", "auto", or {SIZE_EXPECTED}',
    )
    engine: Literal["mlx", "fake"] = Field(
        _default(LaunchSettings, "engine"),
        title='what answers: a model, or "fake", which does without, for tests',
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
            title="what a request's parameters are if it leaves them out",
            description="a table",
        )


class FileTable(Table):
    """The whole file; the entries of `models` are checked one by one beside it."""

    supervisor: SupervisorTable = Field(
        default_factory=SupervisorTable, title="the daemon itself", description="a table"
    )
    defaults: ModelTable = Field(
        default_factory=ModelTable,
        title="any key of [models.*], for the models that leave it out",
        description="a table",
    )
    models: dict[str, ModelTable] = Field(
        default_factory=dict,
        title="the models that are served, by name",
        description="a table for each model, [models.NAME]",
    )
