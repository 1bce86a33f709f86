"""The tables of the configuration file: their keys, what each takes, and the defaults.

The defaults are those of `core/settings.py` where the core knows the key. The description of a
field is what an error says was expected.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal

from mlxsup.protocol.parameters import NUMBERS
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .config_values import (
    AUTO,
    DURATION_EXPECTED,
    OFF,
    SIZE_EXPECTED,
    check_size_auto_or_off,
    check_size_or_auto,
    parse_duration,
    parse_size,
)
from .core.settings import CoreSettings, LaunchSettings, ModelSettings, RestartSettings

DEFAULT_RUNTIME_DIR = "~/.mlxsup/run"
DEFAULT_LOG_DIR = "~/.mlxsup/logs"
MAX_CONCURRENCY = 1024

LogLevel = Literal["debug", "info", "warning", "error"]

Duration = Annotated[float, BeforeValidator(parse_duration)]
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


def _duration(settings: type, name: str, *, is_zero_allowed: bool = True) -> Any:
    limit: dict[str, Any] = {"ge": 0} if is_zero_allowed else {"gt": 0}
    least = "" if is_zero_allowed else ", above 0"
    return Field(_default(settings, name), description=DURATION_EXPECTED + least, **limit)


def _integer(settings: type, name: str, low: int, high: int | None = None) -> Any:
    top = "" if high is None else f" to {high}"
    return Field(
        _default(settings, name), ge=low, le=high, description=f"an integer from {low}{top}"
    )


def _sampling(name: str) -> Any:
    """A parameter of requests, with the range and the default that it has there."""
    number = NUMBERS[name]
    limits: dict[str, Any] = {"gt" if number.is_low_open else "ge": number.low, "le": number.high}
    return Field(number.default, description=number.expected, **limits)


class SupervisorTable(Table):
    """`[supervisor]`."""

    runtime_dir: str = Field(DEFAULT_RUNTIME_DIR, min_length=1, description="a folder")
    log_dir: str = Field(DEFAULT_LOG_DIR, min_length=1, description="a folder")
    max_queue: int = _integer(CoreSettings, "max_queue", 1)
    max_queue_per_client: int = _integer(CoreSettings, "max_queue_per_client", 1)
    max_queue_bytes: Size = Field(
        _default(CoreSettings, "max_queue_bytes"), ge=1, description=SIZE_EXPECTED
    )
    log_level: LogLevel = Field("info", description='"debug", "info", "warning" or "error"')
    drain_timeout_s: Duration = _duration(CoreSettings, "drain_timeout_s")
    queue_timeout_s: Duration = _duration(CoreSettings, "queue_timeout_s")
    first_token_timeout_s: Duration = _duration(CoreSettings, "first_token_timeout_s")


class RestartTable(Table):
    """`[models.NAME.restart]`."""

    max_restarts: int = _integer(RestartSettings, "max_restarts", 0)
    window_s: Duration = _duration(RestartSettings, "window_s", is_zero_allowed=False)
    stable_s: Duration = _duration(RestartSettings, "stable_s")
    backoff_initial_s: Duration = _duration(RestartSettings, "backoff_initial_s")
    backoff_max_s: Duration = _duration(RestartSettings, "backoff_max_s")


class SamplingTable(Table):
    """`[models.NAME.sampling]`: what a request's parameters are where it leaves them out."""

    temperature: Number = _sampling("temperature")
    top_p: Number = _sampling("top_p")
    top_k: int = _sampling("top_k")
    min_p: Number = _sampling("min_p")
    xtc_probability: Number = _sampling("xtc_probability")
    xtc_threshold: Number = _sampling("xtc_threshold")
    repetition_penalty: Number = _sampling("repetition_penalty")
    presence_penalty: Number = _sampling("presence_penalty")
    frequency_penalty: Number = _sampling("frequency_penalty")
    penalty_window: int = _sampling("penalty_window")


class ModelTable(Table):
    """`[models.NAME]`, and `[defaults]`."""

    path: str | None = Field(None, min_length=1, description="a folder")
    preload: bool = Field(_default(ModelSettings, "preload"), description="true or false")
    max_concurrency: int = _integer(LaunchSettings, "max_concurrency", 1, MAX_CONCURRENCY)
    idle_unload_s: Duration = _duration(ModelSettings, "idle_unload_s")
    load_stall_timeout_s: Duration = _duration(
        ModelSettings, "load_stall_timeout_s", is_zero_allowed=False
    )
    step_timeout_s: Duration = _duration(LaunchSettings, "step_timeout_s", is_zero_allowed=False)
    decode_stall_target_ms: int = _integer(LaunchSettings, "decode_stall_target_ms", 1)
    context_length: int = _integer(LaunchSettings, "context_length", 0)
    deterministic: bool = Field(
        _default(LaunchSettings, "deterministic"), description="true or false"
    )
    memory: SizeOrAuto = Field(AUTO, description=f'"auto", or {SIZE_EXPECTED}')
    cache_limit: SizeOrAuto = Field(AUTO, description=f'"auto", or {SIZE_EXPECTED}')
    prefix_cache: Size = Field(
        _default(LaunchSettings, "prefix_cache_bytes"), description=SIZE_EXPECTED
    )
    wired: SizeAutoOrOff = Field(OFF, description=f'"off", "auto", or {SIZE_EXPECTED}')
    engine: Literal["mlx", "fake"] = Field(
        _default(LaunchSettings, "engine"), description='"mlx" or "fake"'
    )
    fake: dict[str, Any] = Field(
        default_factory=dict, description="a table of the fake engine's options"
    )
    restart: RestartTable = Field(default_factory=RestartTable, description="a table")
    sampling: SamplingTable = Field(default_factory=SamplingTable, description="a table")


class FileTable(Table):
    """The whole file; the entries of `models` are checked one by one beside it."""

    supervisor: SupervisorTable = Field(default_factory=SupervisorTable, description="a table")
    defaults: ModelTable = Field(default_factory=ModelTable, description="a table")
    models: dict[str, ModelTable] = Field(
        default_factory=dict, description="a table for each model, [models.NAME]"
    )
